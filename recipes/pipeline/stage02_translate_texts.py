"""Stage 2, part 2: translate texts for the training set with an exported model (``fairseq-rope translate``).

Back-translation makes sources for monolingual texts of the target language (Sennrich et al. 2016, arXiv:1511.06709),
distillation makes targets for the sources of the training set (Kim and Rush 2016, arXiv:1606.07947).
"""

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
            shell.write(f"cat {quoted(experiment.text('raw', 'train', experiment.source))}", source)
            given, made = source, target
        else:
            shell.write(f"gzip -cdf {quoted(*monolingual(experiment))}", target)
            self._refuse_held_out(experiment, target)
            given, made = target, source
        files = f"--input {quoted(given)} --output {quoted(made)}"
        shell.tool(f"fairseq-rope translate --model {quoted(Path(experiment.translator))} {files}", makes=[made])

    def _refuse_held_out(self, experiment: Experiment, texts: Path) -> None:
        if not experiment.dry_run and experiment.given(["valid"]):
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
