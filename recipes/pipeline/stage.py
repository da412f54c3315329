"""The interface that every file ``stageNN_….py`` implements."""

from abc import abstractmethod
from typing import Any

from recipes.pipeline.commands import Shell
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.model_folder import Moves
from recipes.pipeline.precision import last_process, of_process
from recipes.pipeline.stamps import Stamps
from recipes.pipeline.step import Step


class Stage(Step):
    """A step of a recipe, and the commands that make its outputs."""

    @abstractmethod
    def run(self, experiment: Experiment, shell: Shell) -> None:
        """Write the outputs with commands that *shell* runs. Raises a StageError if one fails."""

    def prepare(self, experiment: Experiment, stamps: Stamps, moves: Moves) -> None:  # noqa: B027  most prepare nothing
        """Called before the runner decides whether the stage runs."""

    def noted(self, experiment: Experiment) -> dict[str, Any]:
        """What run.yaml says of the training of the model, when the stage runs."""
        process = last_process(experiment.training.history) if self.per_model else {}
        if not process:
            return {}
        device = process.get("batches", {}).get("device", "not noted")
        return {"training": {"device": device, "precision": of_process(process) or "not noted"}}

    def refuse(self, experiment: Experiment, stamps: Stamps) -> None:  # noqa: B027  most can always run again
        """Raise a StageError if the stage cannot run with these settings."""
