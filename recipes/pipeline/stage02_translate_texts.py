"""Stage 2, part 2: translate texts for the training set with an exported model (``fairseq-rope translate``).

Back-translation makes sources for monolingual texts of the target language (Sennrich et al. 2016, arXiv:1511.06709),
distillation makes targets for the sources of the training set (Kim and Rush 2016, arXiv:1606.07947).
"""

import os
import shlex
from pathlib import Path

from fairseq_rope.lines import lines_of
from fairseq_rope.serving.exported_folder import SETTINGS
from recipes.pipeline.experiment import TRANSLATED, Experiment
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.shell import Shell, quoted


class TranslateTexts(TranslationStage):
    number = 2
    title = "translate texts for the training set"
    label = ".translated"
    settings = ("back_translation_files", "back_translation_model", "distillation_model", "source_lang", "target_lang")
    of_translated = True

    def inputs(self, experiment: Experiment) -> list[Path]:
        model = Path(experiment.translator) / SETTINGS  # it has checksums of the model's other files
        if experiment.settings.distillation_model:
            return [model, experiment.text("raw", "train", experiment.source)]
        held_out = [experiment.text("raw", "valid", experiment.target)] * bool(experiment.given(["valid"]))
        return [model, *monolingual(experiment), *held_out]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return experiment.texts("raw", [TRANSLATED])

    def run(self, experiment: Experiment, shell: Shell) -> None:
        source, target = self.outputs(experiment)
        if experiment.settings.distillation_model:
            texts, given, made = [experiment.text("raw", "train", experiment.source)], source, target
        else:
            texts, given, made = monolingual(experiment), target, source
        shards, part = experiment.work / "raw" / "translations", Path(f"{given}.tmp")
        # A text that is written again, because it has changed, needs new shards.
        copy = f"rm -rf {quoted(shards)} && gzip -cdf {quoted(*texts)} > {quoted(part)} && mv {quoted(part, given)}"
        shell.command(copy, makes=[given])
        self._refuse_held_out(experiment, given)
        model, out = quoted(Path(experiment.translator)), f"--output-dir {quoted(shards)} --jobs {os.cpu_count()}"
        shell.tool(f"fairseq-rope translate --model {model} --input {quoted(given)} {out}")
        shell.write(f"cat {quoted(shards / given.name)}", made, makes=[made])
        shell.command(f"rm -rf {quoted(shards)}")

    def _refuse_held_out(self, experiment: Experiment, texts: Path) -> None:
        of_monolingual = bool(experiment.settings.back_translation_model)
        if of_monolingual and not experiment.dry_run and experiment.given(["valid"]):
            refuse_held_out(self, texts, experiment.text("raw", "valid", experiment.target))


def monolingual(experiment: Experiment) -> list[Path]:
    """The texts of back_translation_files."""
    return [Path(file) for file in shlex.split(experiment.settings.back_translation_files)]


def refuse_held_out(stage: TranslationStage, texts: Path, held_out: Path) -> None:
    """Raise a StageError if lines of *held_out*, with which a model is validated or tested, are in *texts*."""
    known = {line for line in map(str.strip, lines_of(str(held_out))) if line}
    count = sum(line.strip() in known for line in lines_of(str(texts)))
    if count:
        problem = f"has {count} lines that are also in {held_out}: remove them from the monolingual text"
        raise stage.error(f"back_translation_files: {texts} {problem}")
