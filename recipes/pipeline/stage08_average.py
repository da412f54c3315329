"""Stage 8: average the last checkpoints (``fairseq-rope average``).

A system that differs from another one only in the search takes the averaged model of that.
"""

from pathlib import Path
from typing import Any

from recipes.pipeline.checkpoints import to_average
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.stage07_train import Train
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.moves import Moves
from recipes.run.shell import Shell, part_of, quoted, say
from recipes.run.stamps import Stamps


class Average(TranslationStage):
    number = 8
    title = "average the last checkpoints"
    settings = ("average_checkpoints", "save_every_updates")
    per_model = True

    def inputs(self, experiment: Experiment) -> list[Path]:
        if experiment.training_of:
            return [experiment.training.averaged, experiment.training.history]
        return [experiment.last_checkpoint, *(path for _, path in to_average(experiment))]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.averaged, experiment.history] if experiment.training_of else [experiment.averaged]

    def depends_on(self, experiment: Experiment) -> dict[str, Any]:
        depends = super().depends_on(experiment)
        if experiment.training_of:  # another training of the other system makes another model
            stamps = Stamps(experiment.training)
            depends[f"model of {experiment.training_of}"] = {**stamps.of(Train()), **stamps.of(self)}
        return depends

    def prepare(self, experiment: Experiment, stamps: Stamps, moves: Moves) -> None:
        """Raise a StageError unless the other system has an averaged model of its present settings and data."""
        if not experiment.training_of or experiment.dry_run:
            return
        other = experiment.training
        if not all(Stamps(other).is_done(stage) for stage in (Train(), self)):
            raise self.error(f"takes the averaged model of {other.title}, which has none ({other.model})")

    def run(self, experiment: Experiment, shell: Shell) -> None:
        if experiment.training_of:
            self._take(experiment, shell)
            return
        kind = "update" if experiment.settings.save_every_updates else "epoch"
        shell.command(
            f"python -m fairseq_rope average --inputs {quoted(experiment.checkpoints)} "
            f"--num-{kind}-checkpoints {experiment.settings.average_checkpoints} "
            f"{experiment.own_user_dir}--output {quoted(experiment.averaged)}"
        )

    def _take(self, experiment: Experiment, shell: Shell) -> None:
        """Take the averaged model of the other system, and the history of its training."""
        model, history = self.inputs(experiment)
        say(f"takes the averaged model of {experiment.training.title}")
        shell.command(f"mkdir -p {quoted(experiment.checkpoints)}")
        # Not all file systems have hard links.
        with part_of(experiment.averaged) as part:
            both, new = quoted(model, part), quoted(part, experiment.averaged)
            shell.command(f"rm -f {new} && (ln {both} || cp {both}) && mv {new}")
        shell.write(f"cat {quoted(history)}", experiment.history)
