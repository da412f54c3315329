"""What the runner, the stamps and the launcher know of a run."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fairseq_rope.errors import InputError

ROOT = Path(__file__).resolve().parents[2]  # the project's folder


class StageError(InputError):
    """A stage cannot run or has failed. The message names the stage and says what to do."""


class Run(ABC):
    """One system with one seed, as the stages of :mod:`recipes.run` see it.

    Files of this run alone are in the folder *model*. Files that runs share are in *work*.
    """

    work: Path
    gpus: int | None  # to train on; None: the default of the program; 0: the CPU
    dry_run: bool = False  # print commands, run none, write nothing
    training_of: str = ""  # the system whose model it has; "": it trains its own

    @property
    @abstractmethod
    def title(self) -> str:
        """The name of the run in messages."""

    @property
    @abstractmethod
    def model(self) -> Path:
        """The folder of the run's own files."""

    @property
    def unlabelled(self) -> str:
        """The name of that folder without the suffix that other settings add."""
        return self.model.name

    @property
    def lock(self) -> Path:
        """The lock of the process that works in that folder."""
        return self.work / "locks" / f"{self.model.name}.lock"

    @property
    def training(self) -> "Run":
        """The run that trained the model."""
        return self

    @property
    def resumable(self) -> tuple[Path, ...]:
        """Outputs from which a stage resumes, and which are never set aside."""
        return ()

    @abstractmethod
    def values(self) -> Mapping[str, Any]:
        """The settings by name, for ``settings.yaml`` and for comparisons with earlier stages."""
