"""Stage 8: average the last checkpoints (``fairseq-rope average``)."""

from pathlib import Path

from recipes.pipeline.checkpoints import to_average
from recipes.pipeline.commands import Shell, quoted
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.stage import Stage


class Average(Stage):
    number = 8
    title = "average the last checkpoints"
    settings = ("average_checkpoints", "save_every_updates")
    per_model = True

    def inputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.last_checkpoint, *(path for _, path in to_average(experiment))]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.averaged]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        kind = "update" if experiment.settings.save_every_updates else "epoch"
        shell.command(
            f"python -m fairseq_rope average --inputs {quoted(experiment.checkpoints)} "
            f"--num-{kind}-checkpoints {experiment.settings.average_checkpoints} "
            f"--output {quoted(experiment.averaged)}"
        )
