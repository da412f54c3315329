"""Stage 6: one joined dictionary, and fairseq's binary data (fairseq-preprocess)."""

import os
import shutil
from pathlib import Path

from recipes.pipeline.experiment import SETS, Experiment

NUMBER = 6
TITLE = "binarise"
PER_MODEL = False
SETTINGS = ("source_lang", "target_lang")


def inputs(x: Experiment) -> list[Path]:
    return [x.work / "bpe" / "bpecodes", *x.texts("bpe")]


def outputs(x: Experiment) -> list[Path]:
    pair = f"{x.source}-{x.target}"
    names = [
        f"{n}.{pair}.{lang}.{end}" for n in SETS for lang in (x.source, x.target) for end in ("bin", "idx")
    ]
    names += [f"dict.{x.source}.txt", f"dict.{x.target}.txt", "bpecodes"]
    return [x.work / "data-bin" / name for name in names]


def run(x: Experiment) -> None:
    final, part = x.work / "data-bin", x.work / "data-bin.tmp"
    shutil.rmtree(part, ignore_errors=True)
    prefixes = " ".join(f"--{n}pref {x.shell(x.work / 'bpe' / n)}" for n in SETS)
    x.command(
        f"fairseq-preprocess --source-lang {x.source} --target-lang {x.target} {prefixes} "
        f"--joined-dictionary --workers {os.cpu_count()} --destdir {x.shell(part)}"
    )
    # The codes go where the dictionaries go: neither is of use without the other.
    x.command(f"cp {x.shell(inputs(x)[0])} {x.shell(part / 'bpecodes')}")
    shutil.rmtree(final, ignore_errors=True)
    x.command(f"mv {x.shell(part)} {x.shell(final)}")
