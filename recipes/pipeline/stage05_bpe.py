"""Stage 5: learn one byte-pair encoding over both languages, and apply it (subword-nmt or sentencepiece).

If the training starts from an old model, its subwords are applied, and none are learned.
"""

import os
from pathlib import Path

from recipes.pipeline.experiment import LEARNT, TEST, Experiment
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.shell import Shell, quoted

TOOL = "python -m recipes.text.bpe"


class Bpe(TranslationStage):
    number = 5
    title = "BPE"
    settings = ("vocab_size",)
    depends_on_bpe = True

    def inputs(self, experiment: Experiment) -> list[Path]:
        old = [experiment.start_data / experiment.subwords] if experiment.start_data else []
        return [*experiment.texts("clean", LEARNT), *old]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.work / "bpe" / experiment.subwords, *experiment.texts("bpe", LEARNT)]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        model, *texts = self.outputs(experiment)
        learn = "sentencepiece-train" if experiment.bpe == "sentencepiece" else "learn"
        shell.command(f"mkdir -p {quoted(model.parent)}")
        train = experiment.texts("clean", ["train"])
        making = f"{TOOL} {learn} --vocab-size {experiment.settings.vocab_size} --output {quoted(model, *train)}"
        if experiment.start_data:
            shell.write(f"cat {quoted(experiment.start_data / experiment.subwords)}", model, makes=[model])
        else:
            shell.tool(making, makes=[model])
        for clean, out in zip(experiment.texts("clean", LEARNT), texts, strict=True):
            apply(experiment, shell, model, clean, out)


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


def apply(experiment: Experiment, shell: Shell, model: Path, text: Path, output: Path) -> None:
    """Write the subwords of *text* to *output*."""
    flags = "apply --codes" if experiment.bpe == "subword-nmt" else "sentencepiece-encode --model"
    files = f"--input {quoted(text)} --output {quoted(output)}"
    shell.tool(f"{TOOL} {flags} {quoted(model)} {files} --workers {os.cpu_count()}", makes=[output])
