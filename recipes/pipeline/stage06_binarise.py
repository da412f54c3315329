"""Stage 6: one joined dictionary, and fairseq's binary data (fairseq-preprocess).

If the text has documents, their sentences are joined to segments before (``recipes.text.segments``).
"""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from fairseq_rope.launch import available_cores
from fairseq_rope.lines import count_lines, lines_of
from fairseq_rope.text import segments
from recipes.pipeline.experiment import LEARNT, TEST, Experiment
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.shell import Shell, named, quoted


class Binarise(TranslationStage):
    number = 6
    title = "binarise"
    settings = ("source_lang", "target_lang", "segment_tokens", "segment_share")

    def inputs(self, experiment: Experiment) -> list[Path]:
        subwords = experiment.work / "bpe" / experiment.subwords
        return [subwords, *experiment.texts("bpe", LEARNT), *experiment.start_dictionaries]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return [*experiment.binary_data, *experiment.unit.of_documents(*experiment.texts("segments", LEARNT))]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        join(experiment, shell, LEARNT)
        final, part = experiment.data_bin, experiment.work / "data-bin.tmp"
        shell.command(f"rm -rf {quoted(part)}")
        prefixes = " ".join(f"--{n}pref {quoted(experiment.work / experiment.in_subwords / n)}" for n in LEARNT)
        dictionaries = "--joined-dictionary"
        if experiment.start_data:
            dictionaries = self._copy_dictionaries(experiment, shell, part)
        shell.command(
            f"fairseq-preprocess --user-dir fairseq_rope {experiment.languages} {prefixes} "
            f"{dictionaries} --workers {available_cores()} --destdir {quoted(part)}"
        )
        # The subword model is kept beside the dictionaries, because translating needs both.
        shell.command(f"cp {quoted(self.inputs(experiment)[0], part / experiment.subwords)}")
        if experiment.unit.has_documents:
            described = {"tokens": experiment.settings.segment_tokens, "separator": segments.SEPARATOR}
            shell.command(f"printf '%s\\n' {quoted(json.dumps(described))} > {quoted(part / segments.FILE)}")
        if not experiment.dry_run:
            check_counts(self, experiment, LEARNT, part / "preprocess.log")
        shell.command(f"rm -rf {quoted(final)} && mv {quoted(part, final)}")

    def _copy_dictionaries(self, experiment: Experiment, shell: Shell, folder: Path) -> str:
        """Copy the dictionaries of the old model to *folder*, and return the flags for fairseq-preprocess.

        If the text has documents, the separator gets an entry.
        """
        shell.command(f"mkdir -p {quoted(folder)}")
        copies = [folder / path.name for path in experiment.start_dictionaries]
        for path, copy in zip(experiment.start_dictionaries, copies, strict=True):
            if experiment.unit.has_documents:
                tool = "python -m recipes.text.old_model dictionary"
                shell.tool(f"{tool} --input {quoted(path)} --output {quoted(copy)}")
            else:
                shell.command(f"cp {quoted(path, copy)}")
        return f"--srcdict {quoted(copies[0])} --tgtdict {quoted(copies[1])}"


class BinariseTest(TranslationStage):
    number = 6
    title = "binarise the test set"
    label = ".test"
    settings = ("source_lang", "target_lang", "segment_tokens")
    of_test_set = True

    def inputs(self, experiment: Experiment) -> list[Path]:
        dictionaries = [experiment.data_bin / f"dict.{lang}.txt" for lang in (experiment.source, experiment.target)]
        return [*dictionaries, *experiment.texts("bpe", TEST)]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return [*experiment.binary_sets(TEST), *experiment.unit.of_documents(*experiment.texts("segments", TEST))]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        join(experiment, shell, TEST)
        if experiment.unit.has_documents and not experiment.dry_run:
            self.check_subwords(experiment)
        source, target, *_ = self.inputs(experiment)
        part = experiment.work / "data-bin.test.tmp"
        shell.command(f"rm -rf {quoted(part)}")
        shell.command(
            f"fairseq-preprocess {experiment.languages} "
            f"--testpref {quoted(experiment.work / experiment.in_subwords / 'test')} "
            f"--srcdict {quoted(source)} --tgtdict {quoted(target)} --workers {available_cores()} "
            f"--destdir {quoted(part)}"
        )
        if not experiment.dry_run:
            check_counts(self, experiment, TEST, part / "preprocess.log")
        files = [part / path.name for path in experiment.binary_sets(TEST)]
        shell.command(f"mv {quoted(*files, experiment.data_bin)} && rm -rf {quoted(part)}")

    def check_subwords(self, experiment: Experiment) -> None:
        """Raise a StageError if a sentence has no subwords, since stage 2 counts it among those of its document."""
        for raw, subwords in zip(experiment.texts("raw", TEST), experiment.texts("bpe", TEST), strict=True):
            pairs = zip(lines_of(str(raw)), lines_of(str(subwords)), strict=True)
            for number, (line, tokens) in enumerate(pairs, 1):
                if line and not tokens.strip():
                    raise self.error(f"{raw}, line {number}: has only characters that the tokenisation removes")


def join(experiment: Experiment, shell: Shell, sets: Sequence[str]) -> None:
    """Write the segments of *sets*, if the text has documents."""
    if not experiment.unit.has_documents:
        return
    settings, folder = experiment.settings, experiment.work / "segments"
    shell.command(f"mkdir -p {quoted(folder)}")
    for name in sets:
        share = f" --share {settings.segment_share}" if name == "train" else ""
        shell.tool(
            f"python -m recipes.text.segments join {experiment.languages} "
            f"--input {quoted(experiment.work / 'bpe' / name)} "
            f"--output {quoted(folder / name)} --tokens {settings.segment_tokens}{share}"
        )


def check_counts(stage: TranslationStage, experiment: Experiment, sets: Sequence[str], log: Path) -> None:
    """Raise a StageError unless fairseq-preprocess counted one sentence for each line of *sets*."""
    counted = dict(re.findall(r"\] (.+): (\d+) sents,", log.read_text(encoding="utf-8")))
    for path in experiment.texts(experiment.in_subwords, sets):
        lines = count_lines(str(path))
        if counted.get(named(path)) != str(lines):
            raise stage.error(f"{path} has {lines} lines, but {log} has another count")
