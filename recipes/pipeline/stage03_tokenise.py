"""Stage 3: tokenise as Moses does (sacremoses), hyphens left whole.

At translation time ``--tokenizer moses --moses-no-dash-splits`` does the same.
"""

import os
from pathlib import Path

from recipes.pipeline.experiment import Experiment

NUMBER = 3
TITLE = "tokenise"
PER_MODEL = False
SETTINGS = ()


def inputs(x: Experiment) -> list[Path]:
    return x.texts("raw")


def outputs(x: Experiment) -> list[Path]:
    return x.texts("tokenised")


def run(x: Experiment) -> None:
    (x.work / "tokenised").mkdir(parents=True, exist_ok=True)
    for raw, out in zip(inputs(x), outputs(x), strict=True):
        part = out.with_name(out.name + ".tmp")
        x.command(
            f"sacremoses --language {out.suffix[1:]} --processes {os.cpu_count()} --quiet tokenize "
            f"< {x.shell(raw)} > {x.shell(part)} && mv {x.shell(part)} {x.shell(out)}"
        )
