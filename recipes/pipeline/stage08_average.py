"""Stage 8: average the last checkpoints (fairseq_rope.average)."""

from pathlib import Path

from recipes.pipeline import stage07_train
from recipes.pipeline.experiment import Experiment

NUMBER = 8
TITLE = "average the last checkpoints"
PER_MODEL = True
SETTINGS = ("average_checkpoints",)


def inputs(x: Experiment) -> list[Path]:
    return stage07_train.outputs(x)


def outputs(x: Experiment) -> list[Path]:
    return [x.model / "averaged.pt"]


def run(x: Experiment) -> None:
    x.command(
        f"python -m fairseq_rope.average --inputs {x.shell(x.model / 'checkpoints')} "
        f"--num-epoch-checkpoints {x.settings['average_checkpoints']} "
        f"--output {x.shell(x.model / 'averaged.pt')}"
    )
