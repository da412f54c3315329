"""What a report is made from: the finished runs of each system, and the test sets that they translated."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class TestSet:
    """Raw text of a test set, one sentence a line."""

    name: str
    source: Path
    references: tuple[Path, ...]  # one file for each reference


@dataclass(frozen=True)
class FinishedRun:
    """One training of a system from one seed, with its translations."""

    system: str
    seed: int
    settings: Mapping[str, Any]  # all settings of this run, resolved
    training: Path  # the folder of the training: settings.yaml, log, checkpoints/
    updates: int  # of the last checkpoint that is averaged
    epochs: int
    hypotheses: Mapping[str, Path]  # by test set: plain text, one translation a line
    scores: Mapping[str, Path]  # by test set: score.json, the output of fairseq-rope score --json
    generated: Mapping[str, Path]  # by test set: the output of fairseq-generate


@dataclass(frozen=True)
class Sweep:
    """The trainings of one system, from seed 1, with several values of a setting."""

    setting: str
    losses: Mapping[str, float | None]  # by value: the lowest validation loss; None if this training failed
    chosen: str


@dataclass(frozen=True)
class Contents:
    """Everything that a report says."""

    recipe: str
    command: str  # the command that repeats exactly this report
    settings: Mapping[str, Any]  # the recipe's settings, which all systems have unless they say otherwise
    runs: Mapping[str, Sequence[FinishedRun]]  # by system, the baseline first; each has at least one run
    definitions: Mapping[str, Mapping[str, Any]]  # by system: its own settings
    test_sets: Sequence[TestSet]
    train_sources: Path  # the subwords of the training set's source side
    tokenize: str  # sacreBLEU's tokeniser
    sweeps: Mapping[str, Sweep] = field(default_factory=dict)  # by system
    missing: Mapping[str, str] = field(default_factory=dict)  # why a run is not in the report, by "system, seed N"
