"""Stage 5: learn one byte-pair encoding over both languages, and apply it (subword-nmt or sentencepiece)."""

import os
from pathlib import Path

from recipes.pipeline import stage04_clean
from recipes.pipeline.experiment import Experiment

NUMBER = 5
TITLE = "BPE"
PER_MODEL = False
SETTINGS = ("vocab_size",)
DEPENDS_ON_BPE = True


def inputs(x: Experiment) -> list[Path]:
    return stage04_clean.outputs(x)


def outputs(x: Experiment) -> list[Path]:
    return [x.work / "bpe" / x.subword_model, *x.texts("bpe")]


def run(x: Experiment) -> None:
    model, *texts = outputs(x)
    learn, apply, flag = ("learn", "apply", "--codes")
    if x.bpe == "sentencepiece":
        learn, apply, flag = ("sentencepiece-train", "sentencepiece-encode", "--model")
    x.command(f"mkdir -p {x.shell(model.parent)}")
    tool = "python -m recipes.text.bpe"
    train = " ".join(x.shell(path) for path in inputs(x)[:2])
    x.tool(
        f"{tool} {learn} --vocab-size {x.quoted('vocab_size')} --output {x.shell(model)} {train}",
        makes=[model],
    )
    for clean, out in zip(inputs(x), texts, strict=True):
        x.tool(
            f"{tool} {apply} {flag} {x.shell(model)} --input {x.shell(clean)} --output {x.shell(out)} "
            f"--workers {os.cpu_count()}",
            makes=[out],
        )
