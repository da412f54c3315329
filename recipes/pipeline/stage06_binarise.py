"""Stage 6: one joined dictionary, and fairseq's binary data (fairseq-preprocess)."""

import os
import re
from pathlib import Path

from fairseq_rope.lines import count_lines
from recipes.pipeline.commands import Shell, named, quoted
from recipes.pipeline.experiment import SETS, Experiment
from recipes.pipeline.stage import Stage


class Binarise(Stage):
    number = 6
    title = "binarise"
    settings = ("source_lang", "target_lang")

    def inputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.work / "bpe" / experiment.subwords, *experiment.texts("bpe")]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return experiment.binary_data

    def run(self, experiment: Experiment, shell: Shell) -> None:
        final, part = experiment.data_bin, experiment.work / "data-bin.tmp"
        shell.command(f"rm -rf {quoted(part)}")
        prefixes = " ".join(f"--{n}pref {quoted(experiment.work / 'bpe' / n)}" for n in SETS)
        shell.command(
            f"fairseq-preprocess --source-lang {experiment.source} --target-lang {experiment.target} "
            f"{prefixes} --joined-dictionary --workers {os.cpu_count()} --destdir {quoted(part)}"
        )
        # The subword model is kept beside the dictionaries, because translating needs both.
        shell.command(f"cp {quoted(self.inputs(experiment)[0], part / experiment.subwords)}")
        if not experiment.dry_run:
            self.check_counts(experiment, part / "preprocess.log")
        shell.command(f"rm -rf {quoted(final)} && mv {quoted(part, final)}")

    def check_counts(self, experiment: Experiment, log: Path) -> None:
        """Raise a StageError unless fairseq-preprocess counted one sentence for each line."""
        counts = re.findall(r"\] (.+): (\d+) sents,", log.read_text(encoding="utf-8"))
        counted = {name: int(count) for name, count in counts}
        for path in experiment.texts("bpe"):
            lines = count_lines(str(path))
            if counted.get(named(path)) != lines:
                raise self.error(f"{path} has {lines} lines, but {log} has another count")
