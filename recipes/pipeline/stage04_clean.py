"""Stage 4: leave out the pairs that cannot be a sentence and its translation, and hold some out."""

from pathlib import Path

from recipes.pipeline import stage03_tokenise
from recipes.pipeline.experiment import Experiment

NUMBER = 4
TITLE = "clean and split"
PER_MODEL = False
SETTINGS = ("max_words", "max_length_ratio", "holdout_every", "valid_files", "source_lang", "target_lang")
DEPENDS_ON_BPE = True


def inputs(x: Experiment) -> list[Path]:
    return stage03_tokenise.outputs(x)


def outputs(x: Experiment) -> list[Path]:
    return x.texts("clean")


def run(x: Experiment) -> None:
    tokenised, clean = x.work / "tokenised", x.work / "clean"
    x.command(f"mkdir -p {x.shell(clean)}")
    held_out = ""
    if not x.settings["valid_files"]:
        held_out = f" --holdout-every {x.quoted('holdout_every')} --heldout {x.shell(clean / 'valid')}"
    x.tool(
        f"python -m recipes.text.clean --source-lang {x.source} --target-lang {x.target} "
        f"--input {x.shell(tokenised / 'train')} --output {x.shell(clean / 'train')} "
        f"--max-words {x.quoted('max_words')} --max-ratio {x.quoted('max_length_ratio')}{held_out}"
    )
    # What is validated and tested stays as it is, every line of it.
    for path in stage03_tokenise.outputs(x)[2:]:
        part = clean / (path.name + ".tmp")
        x.command(f"cp {x.shell(path)} {x.shell(part)} && mv {x.shell(part)} {x.shell(clean / path.name)}")
