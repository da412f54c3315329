"""Stage 3: normalise and tokenise as Moses does (``recipes.text.tokenise``)."""

import os
from pathlib import Path

from recipes.pipeline import stage02_extract
from recipes.pipeline.experiment import Experiment

NUMBER = 3
TITLE = "normalise and tokenise"
PER_MODEL = False
SETTINGS = ("normalise_punctuation", "source_lang", "target_lang")
DEPENDS_ON_BPE = True


def inputs(x: Experiment) -> list[Path]:
    return stage02_extract.outputs(x)


def outputs(x: Experiment) -> list[Path]:
    return x.texts("tokenised", stage02_extract.sets(x))


def run(x: Experiment) -> None:
    sides = x.settings["normalise_punctuation"]
    x.command(f"mkdir -p {x.shell(x.work / 'tokenised')}")
    for raw, out in zip(inputs(x), outputs(x), strict=True):
        lang = out.suffix[1:]
        flags = (
            "--normalise-punctuation "
            if sides in ("both", "source" if lang == x.source else "target")
            else ""
        )
        flags += "--no-tokeniser " if x.bpe == "sentencepiece" else ""
        x.tool(
            f"python -m recipes.text.tokenise --lang {lang} --input {x.shell(raw)} "
            f"--output {x.shell(out)} {flags}--workers {os.cpu_count()}",
            makes=[out],
        )
