"""Stage 4: remove pairs that cannot be translations of each other, and hold out a validation set.

The test set has no stage 4: it keeps every line.
"""

from pathlib import Path

from recipes.pipeline.experiment import LEARNT, Experiment
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.shell import Shell, quoted


class Clean(TranslationStage):
    number = 4
    title = "clean and split"
    settings = ("max_words", "max_length_ratio", "holdout_every", "valid_files", "source_lang", "target_lang")
    depends_on_bpe = True
    depends_on_documents = True

    def inputs(self, experiment: Experiment) -> list[Path]:
        return experiment.texts("tokenised", experiment.learnt_from)

    def outputs(self, experiment: Experiment) -> list[Path]:
        return experiment.texts("clean", [*LEARNT, *experiment.translated])

    def run(self, experiment: Experiment, shell: Shell) -> None:
        settings = experiment.settings
        tokenised, clean = experiment.work / "tokenised", experiment.work / "clean"
        shell.command(f"mkdir -p {quoted(clean)}")
        held_out = ""
        if not settings.valid_files:
            held_out = f" --holdout-every {settings.holdout_every} --heldout {quoted(clean / 'valid')}"
        for name in ("train", *experiment.translated):
            shell.tool(
                f"python -m recipes.text.clean {experiment.languages} "
                f"--input {quoted(tokenised / name)} --output {quoted(clean / name)} --max-words {settings.max_words} "
                f"--max-ratio {settings.max_length_ratio}{held_out if name == 'train' else ''}{experiment.unit.flag}"
            )
        # The validation set keeps every line.
        for path in experiment.texts("tokenised", experiment.given(["valid"])):
            shell.write(f"cat {quoted(path)}", clean / path.name)
