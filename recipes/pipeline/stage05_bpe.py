"""Stage 5: learn one byte-pair encoding over both languages, and apply it (subword-nmt or sentencepiece).

If the training starts from an old model, its subwords are applied, and none are learned.
"""

import os
from pathlib import Path

from recipes.pipeline.commands import Shell, quoted
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.stage import Stage


class Bpe(Stage):
    number = 5
    title = "BPE"
    settings = ("vocab_size",)
    depends_on_bpe = True

    def inputs(self, experiment: Experiment) -> list[Path]:
        old = [experiment.start_data / experiment.subwords] if experiment.start_data else []
        return [*experiment.texts("clean"), *old]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.work / "bpe" / experiment.subwords, *experiment.texts("bpe")]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        model, *texts = self.outputs(experiment)
        learn, apply, flag = ("learn", "apply", "--codes")
        if experiment.bpe == "sentencepiece":
            learn, apply, flag = ("sentencepiece-train", "sentencepiece-encode", "--model")
        shell.command(f"mkdir -p {quoted(model.parent)}")
        tool = "python -m recipes.text.bpe"
        train = experiment.texts("clean", ["train"])
        making = f"{tool} {learn} --vocab-size {experiment.settings.vocab_size} --output {quoted(model, *train)}"
        if experiment.start_data:
            shell.write(f"cat {quoted(experiment.start_data / experiment.subwords)}", model, makes=[model])
        else:
            shell.tool(making, makes=[model])
        for clean, out in zip(experiment.texts("clean"), texts, strict=True):
            files = f"--input {quoted(clean)} --output {quoted(out)}"
            shell.tool(f"{tool} {apply} {flag} {quoted(model)} {files} --workers {os.cpu_count()}", makes=[out])
