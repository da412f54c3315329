"""The systems of a comparison, their seeds, and the runs of a command in their order.

A file of systems has the settings of each system by its name; the first one is the baseline. A list of values in place
of one value is a sweep: the first seed is trained with each value, the lowest validation loss chooses, and the other
seeds take it.
"""

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairseq_rope.errors import InputError
from recipes import machine
from recipes.settings import Settings, merged, read_yaml
from recipes.steps import Pipeline
from recipes.text.fetch import Entry
from recipes.training import lowest_loss
from recipes.work import StepError, Work

LARGEST_SEED = 2**31 - 1  # of fairseq's --seed


@dataclass(frozen=True)
class Run:
    """A training of one system: from one seed, or of a sweep, with one of its values."""

    system: str
    seed: int
    value: Any = None  # of the sweep that this run is part of
    setting: str = ""  # of that sweep

    @property
    def title(self) -> str:
        return f"{self.system}, seed {self.seed}" + (f", {self.setting}={self.value}" if self.setting else "")


@dataclass
class Plan:
    """All runs of a command."""

    name: str  # of the recipe
    recipe: Mapping[str, Any]  # the values of its settings.yaml
    words: Mapping[str, Any]  # those of the command line
    systems: Mapping[str, Mapping[str, Any]]
    seeds: range
    work: Work
    data: Path | None = None
    manifest: Path | None = None
    entries: Mapping[str, Entry] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in self.systems:
            self.sweep(name)
        for run in self.runs:
            self.settings(run.system, *([run.value] if run.setting else self._first_value(run.system)))

    @property
    def runs(self) -> list[Run]:
        """The sweeps, then all systems from the first seed, then all from the second, and so on."""
        sweeps = [
            Run(name, self.seeds[0], value, setting)
            for name in self.systems
            for setting, values in self.sweep(name).items()
            for value in values
        ]
        return sweeps + [Run(name, seed) for seed in self.seeds for name in self.systems]

    def sweep(self, system: str) -> dict[str, list[Any]]:
        """The setting of *system* that has several values, and these; {} if none has."""
        own = {**self.words, **self.systems[system]}
        lists = {name: values for name, values in own.items() if isinstance(values, list)}
        if len(lists) > 1 or not all(lists.values()):
            raise InputError(f"{system}: {', '.join(lists)}: one setting can have several values")
        return lists

    def _first_value(self, system: str) -> list[Any]:
        return [values[0] for values in self.sweep(system).values()]

    def settings(self, system: str, *value: Any) -> Settings:
        """The settings of *system*, with *value* for the setting of its sweep."""
        chosen = dict(zip(self.sweep(system), value))
        layers = (self.recipe, {**self.words, **self.systems[system]}, chosen)
        single = [{name: v for name, v in layer.items() if not isinstance(v, list)} for layer in layers]
        return merged(*single)

    def pipeline(self, run: Run) -> Pipeline:
        """The steps of *run*. Raises a StepError if it needs a sweep that is not finished."""
        value = run.value
        if not run.setting and self.sweep(run.system):
            value = self.chosen(run.system)
            if value is None:
                raise StepError(f"{run.title}: the sweep of {', '.join(self.sweep(run.system))} is not finished")
        settings = self.settings(run.system, *([value] if self.sweep(run.system) else []))
        of_sweep = f"{run.setting}={run.value}" if run.setting else ""
        make = functools.partial(self.pipeline_of, run.system, run.seed, settings, of_sweep)
        return make(self._precision(settings, make))

    def pipeline_of(self, system: str, seed: int, settings: Settings, of_sweep: str, precision: str) -> Pipeline:
        """The steps of a training with these settings."""
        shared = (self.work, self.data, self.manifest, self.entries)
        return Pipeline(system, seed, settings, precision, *shared, of_sweep)

    def _precision(self, settings: Settings, make: Any) -> str:
        """The precision of a training, with ``auto`` resolved.

        Raises an InputError if ``auto`` is another one here than in a training of this command that has begun.
        """
        if settings.precision != "auto":
            return settings.precision
        gpus = machine.devices(settings.gpus, "auto")
        here = machine.best_precision(gpus)
        begun = {record["settings"]["precision"] for record in self._trainings.values()}
        others = begun - {here}
        if others and here not in begun and any(make(other).train.name in self._trainings for other in others):
            (other, *_) = sorted(others)
            raise InputError(
                f"precision=auto: is {here} on this machine, and a training of this command has begun in {other}: set "
                f"precision={other} to continue, or precision={here} to train all again"
            )
        return here

    @property
    def _trainings(self) -> dict[str, Any]:
        return self.work.records("train")

    def losses(self, system: str) -> dict[Any, float | None] | None:
        """The lowest validation loss of each value of the sweep of *system*; None if a training has not ended."""
        losses = {}
        for run in self.runs:
            if run.system == system and run.setting:
                train = self.pipeline(run).train
                folder = self.work.folder(train)
                if not train.is_finished(self.work) and not (folder / "failed").exists():
                    return None
                losses[run.value] = lowest_loss(folder) if train.is_finished(self.work) else None
        return losses

    def chosen(self, system: str) -> Any:
        """The value of the sweep of *system* with the lowest loss; None if it is not finished, or all have failed."""
        finite = {value: loss for value, loss in (self.losses(system) or {}).items() if loss is not None}
        return min(finite, key=lambda value: finite[value], default=None)


def read_systems(path: Path | None, arch: str) -> dict[str, dict[str, Any]]:
    """Return the settings of each system by its name. Without a file, there is one system, with the name of *arch*."""
    if path is None:
        return {arch: {}}
    systems = {}
    for name, own in read_yaml(path).items():
        if not re.fullmatch(r"[\w.+-]+", str(name)):
            raise InputError(f"{path}: {name}: must be a name of letters, digits, points and hyphens")
        if not isinstance(own or {}, dict):
            raise InputError(f"{path}: {name}: must have settings of the form KEY: VALUE")
        systems[str(name)] = dict(own or {})
    return systems


def seeds_of(words: str) -> range:
    """Return the seeds of N, which are 1 to N, or of FIRST-LAST."""
    numbers = re.fullmatch(r"(?:([1-9]\d*)-)?(\d+)", words)
    seeds = range(int(numbers[1] or 1), int(numbers[2]) + 1) if numbers else range(0)
    if not seeds or seeds[-1] > LARGEST_SEED:
        raise InputError(f"seeds={words}: must be N, for seeds 1 to N, or FIRST-LAST, from 1 to {LARGEST_SEED}")
    return seeds


def ensure_sweep(plan: Plan, system: str, train: Any) -> None:
    """Train the sweep of *system* by calling *train* for each of its runs. A value that fails is left out."""
    runs: Sequence[Run] = [run for run in plan.runs if run.system == system and run.setting]
    failures = []
    for run in runs:
        try:
            train(run)
        except StepError as error:
            failures.append(str(error))
    if runs and plan.chosen(system) is None:
        raise StepError(f"{system}: no value of {runs[0].setting} has a training with a finite loss: {failures[0]}")
