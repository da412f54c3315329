"""What a stage reads and writes, which is all that stamps know of it."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Generic, TypeVar

from recipes.run.run import Run, StageError

AnyRun = TypeVar("AnyRun", bound=Run)


class StageFiles(ABC, Generic[AnyRun]):
    """The inputs and outputs of a stage of a run. A stage is skipped if its stamp matches them."""

    number: int
    title: str  # what a run prints
    label: str = ""  # of stages with the same number: what their scripts, logs and stamps have in their names
    per_model = False  # whether its outputs are in the folder of the run's own files
    trains = False  # whether it trains a model, which takes most of a run's time

    @abstractmethod
    def inputs(self, run: AnyRun) -> list[Path]:
        """The files that it reads, which must exist before it runs."""

    @abstractmethod
    def outputs(self, run: AnyRun) -> list[Path]:
        """The files that it writes."""

    def depends_on(self, run: AnyRun) -> dict[str, Any]:
        """What changes the outputs, besides the inputs: values by name, as JSON."""
        return {}

    @property
    def file(self) -> str:
        """The name of its script and its log, which is that of its module, with the label."""
        return type(self).__module__.rpartition(".")[2] + self.label

    @property
    def description(self) -> str:
        return f"stage {self.number} ({self.title})"

    def error(self, problem: str) -> StageError:
        return StageError(f"{self.description}: {problem}")
