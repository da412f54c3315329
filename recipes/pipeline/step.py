"""What a stage reads and writes, which is all that stamps and model folders know of it."""

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from recipes.pipeline.experiment import Experiment, StageError


class Step(ABC):
    """The inputs and outputs of a stage. A stage is skipped if its settings, inputs and outputs match its stamp."""

    number: int
    title: str  # what a run prints
    settings: tuple[str, ...]  # the names of the settings that change its outputs
    depends_on_bpe = False  # whether its outputs depend on --bpe
    depends_on_documents = False  # whether its outputs depend on the text having documents
    label = ""  # of stages with the same number: what their scripts, logs and stamps have in their names
    of_test_set = False  # whether it needs the test set; without one, a run leaves it out
    per_model = False  # whether its outputs depend on architecture and seed, and are in the model's folder

    @abstractmethod
    def inputs(self, experiment: Experiment) -> list[Path]:
        """The files that it reads, which must exist before it runs."""

    @abstractmethod
    def outputs(self, experiment: Experiment) -> list[Path]:
        """The files that it writes."""

    def also(self, experiment: Experiment) -> dict[str, Any]:
        """What else changes the outputs, besides settings and inputs."""
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
