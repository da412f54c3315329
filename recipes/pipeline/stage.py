"""What a stage is: the interface that every file ``stageNN_….py`` fills in."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.pipeline.experiment import Experiment, StageError

if TYPE_CHECKING:
    from recipes.pipeline.commands import Shell
    from recipes.pipeline.runner import Runner


class Stage(ABC):
    """A step of a recipe. It is skipped while its settings, inputs and outputs are as its stamp says.

    Attributes:
        number, title: as a run prints them
        settings: the names of those that change its outputs
        depends_on_bpe: whether the choice of subword-nmt or sentencepiece does, too
        per_model: whether its outputs depend on architecture and seed, and lie in the model's folder
    """

    number: int
    title: str
    settings: tuple[str, ...]
    depends_on_bpe = False
    per_model = False

    @abstractmethod
    def inputs(self, experiment: Experiment) -> list[Path]:
        """The files that it reads, which must exist before it runs."""

    @abstractmethod
    def outputs(self, experiment: Experiment) -> list[Path]:
        """The files that it writes."""

    @abstractmethod
    def run(self, experiment: Experiment, shell: "Shell") -> None:
        """Write the outputs by commands that *shell* runs; a StageError if one fails or its output is wrong."""

    def also(self, experiment: Experiment) -> dict[str, Any]:
        """What changes the outputs besides settings and inputs."""
        return {}

    def prepare(self, runner: "Runner") -> None:  # noqa: B027  most stages have nothing to prepare
        """Called before it is decided whether the stage runs."""

    @property
    def file(self) -> str:
        """The name of its script and its log: that of its module."""
        return type(self).__module__.rpartition(".")[2]

    def error(self, said: str) -> StageError:
        return StageError(f"stage {self.number} ({self.title}): {said}")
