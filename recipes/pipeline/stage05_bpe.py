"""Stage 5: learn one byte-pair encoding over both languages, and apply it (subword-nmt or sentencepiece).

If the training starts from an old model, its subwords are applied, and none are learned.
"""

from pathlib import Path
from typing import Any

from fairseq_rope.launch import available_cores
from recipes.pipeline.experiment import LEARNT, TEST, TRANSLATED, Experiment
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.shell import Shell, quoted

TOOL = "python -m recipes.text.bpe"


class Bpe(TranslationStage):
    number = 5
    title = "BPE"
    settings = ("vocab_size",)
    depends_on_bpe = True

    def depends_on(self, experiment: Experiment) -> dict[str, Any]:
        settings, depends = experiment.settings, super().depends_on(experiment)
        if settings.back_translation_model:
            depends |= {name: getattr(settings, name) for name in ("back_translation_tag", "back_translation_share")}
        if settings.distillation_model:
            depends["distilled"] = True
        return depends

    def inputs(self, experiment: Experiment) -> list[Path]:
        old = [experiment.start_data / experiment.subwords] if experiment.start_data else []
        return [*experiment.texts("clean", [*LEARNT, *experiment.translated]), *old]

    def outputs(self, experiment: Experiment) -> list[Path]:
        origins = [_origins(experiment)] * bool(experiment.settings.back_translation_model)
        return [experiment.work / "bpe" / experiment.subwords, *experiment.texts("bpe", LEARNT), *origins]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        model = experiment.work / "bpe" / experiment.subwords
        learn = "sentencepiece-train" if experiment.bpe == "sentencepiece" else "learn"
        shell.command(f"mkdir -p {quoted(model.parent)}")
        train = experiment.texts("clean", ["train"])
        making = f"{TOOL} {learn} --vocab-size {experiment.settings.vocab_size} --output {quoted(model, *train)}"
        if experiment.start_data:
            shell.write(f"cat {quoted(experiment.start_data / experiment.subwords)}", model, makes=[model])
        else:
            shell.tool(making, makes=[model])
        settings = experiment.settings
        # Where the subwords of each set are written.
        names = {"train": "train", "valid": "valid"}
        if settings.back_translation_model:
            names = {"train": "parallel", TRANSLATED: TRANSLATED, "valid": "valid"}
        elif settings.distillation_model:
            names = {TRANSLATED: "train", "valid": "valid"}
        outputs = experiment.texts("bpe", names.values())
        for clean, out in zip(experiment.texts("clean", names), outputs, strict=True):
            apply(experiment, shell, model, clean, out)
        if settings.back_translation_model:
            parallel, translated, mixed = (experiment.work / "bpe" / name for name in ("parallel", TRANSLATED, "train"))
            # With "=", the tag may begin with a hyphen.
            tag = f" {quoted(f'--tag={settings.back_translation_tag}')}" if settings.back_translation_tag else ""
            shell.tool(
                f"python -m recipes.text.mix {experiment.languages} --parallel {quoted(parallel)} "
                f"--translated {quoted(translated)} --share {settings.back_translation_share}{tag} "
                f"--output {quoted(mixed)}"
            )
        elif _origins(experiment).exists():  # of a run with back-translation
            shell.command(f"rm {quoted(_origins(experiment))}")


class BpeTest(TranslationStage):
    number = 5
    title = "apply BPE to the test set"
    label = ".test"
    settings = ()
    depends_on_bpe = True
    of_test_set = True

    def inputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.work / "bpe" / experiment.subwords, *experiment.texts("tokenised", TEST)]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return experiment.texts("bpe", TEST)

    def run(self, experiment: Experiment, shell: Shell) -> None:
        model, *tokenised = self.inputs(experiment)
        for text, out in zip(tokenised, self.outputs(experiment), strict=True):
            apply(experiment, shell, model, text, out)


def _origins(experiment: Experiment) -> Path:
    """The origins of the pairs of the training set, if some are back-translated."""
    return experiment.work / "bpe" / "train.origin"


def apply(experiment: Experiment, shell: Shell, model: Path, text: Path, output: Path) -> None:
    """Write the subwords of *text* to *output*."""
    flags = "apply --codes" if experiment.bpe == "subword-nmt" else "sentencepiece-encode --model"
    files = f"--input {quoted(text)} --output {quoted(output)}"
    shell.tool(f"{TOOL} {flags} {quoted(model)} {files} --workers {available_cores()}", makes=[output])
