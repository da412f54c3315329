"""The interface that every file ``stageNN_….py`` implements."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipes.pipeline.experiment import Experiment, StageError

if TYPE_CHECKING:
    from recipes.pipeline.commands import Shell
    from recipes.pipeline.runner import Runner


class Stage(ABC):
    """A step of a recipe. It is skipped if its settings, inputs and outputs match its stamp.

    Attributes:
        number, title: what a run prints
        settings: the names of the settings that change its outputs
        depends_on_bpe: whether its outputs depend on --bpe
        depends_on_documents: whether its outputs depend on the text having documents
        per_model: whether its outputs depend on architecture and seed, and are in the model's folder
    """

    number: int
    title: str
    settings: tuple[str, ...]
    depends_on_bpe = False
    depends_on_documents = False
    per_model = False

    @abstractmethod
    def inputs(self, experiment: Experiment) -> list[Path]:
        """The files that it reads, which must exist before it runs."""

    @abstractmethod
    def outputs(self, experiment: Experiment) -> list[Path]:
        """The files that it writes."""

    @abstractmethod
    def run(self, experiment: Experiment, shell: "Shell") -> None:
        """Write the outputs with commands that *shell* runs. Raises a StageError if one fails."""

    def also(self, experiment: Experiment) -> dict[str, Any]:
        """What else changes the outputs, besides settings and inputs."""
        return {}

    def prepare(self, runner: "Runner") -> None:  # noqa: B027  most stages have nothing to prepare
        """Called before the runner decides whether the stage runs."""

    @property
    def file(self) -> str:
        """The name of its script and its log, which is that of its module."""
        return type(self).__module__.rpartition(".")[2]

    def error(self, problem: str) -> StageError:
        return StageError(f"stage {self.number} ({self.title}): {problem}")
