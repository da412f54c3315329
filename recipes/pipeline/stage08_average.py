"""Stage 8: average the last checkpoints (``fairseq-rope average``)."""

from pathlib import Path

from recipes.pipeline import stage07_train
from recipes.pipeline.experiment import Experiment

NUMBER = 8
TITLE = "average the last checkpoints"
PER_MODEL = True
SETTINGS = ("average_checkpoints", "save_every_updates")


def inputs(x: Experiment) -> list[Path]:
    return stage07_train.outputs(x)


def outputs(x: Experiment) -> list[Path]:
    return [x.model / "averaged.pt"]


def run(x: Experiment) -> None:
    kind = "update" if x.settings["save_every_updates"] else "epoch"
    x.command(
        f"python -m fairseq_rope average --inputs {x.shell(x.model / 'checkpoints')} "
        f"--num-{kind}-checkpoints {x.quoted('average_checkpoints')} "
        f"--output {x.shell(x.model / 'averaged.pt')}"
    )
