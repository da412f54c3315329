"""The interface of all stages."""

from abc import abstractmethod
from typing import Any

from recipes.run.moves import Moves
from recipes.run.shell import Shell
from recipes.run.stage_files import AnyRun, StageFiles
from recipes.run.stamps import Stamps


class Stage(StageFiles[AnyRun]):
    """A numbered part of a run, and the commands that make its outputs."""

    is_needed = True  # whether later stages of a run cannot do without it

    @abstractmethod
    def run(self, run: AnyRun, shell: Shell) -> None:
        """Write the outputs with commands that *shell* runs. Raises a StageError if one fails."""

    def prepare(self, run: AnyRun, stamps: Stamps, moves: Moves) -> None:  # noqa: B027  most prepare nothing
        """Called before the runner decides whether the stage runs."""

    def noted(self, run: AnyRun) -> dict[str, Any]:
        """What ``run.yaml`` says of the training, when the stage runs."""
        return {}

    def refuse(self, run: AnyRun, stamps: Stamps) -> None:  # noqa: B027  most can always run again
        """Raise a StageError if the stage cannot run with these settings."""
