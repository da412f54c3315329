"""The systems of a comparison, their seeds, and the runs of a command in their order.

A file of systems has the settings of each system by its name; the first one is the baseline. A list of values in place
of one value is a sweep: the first seed is trained with each value, the lowest validation loss chooses, and the other
seeds take it.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fairseq_rope.errors import InputError
from recipes import machine
from recipes.corpus import Corpus
from recipes.report.history import lowest_loss
from recipes.settings import Settings, merged, read_yaml
from recipes.steps import Pipeline
from recipes.work import StepError

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
    corpus: Corpus

    def __post_init__(self) -> None:
        for run in self.runs:
            self.settings(run)

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

    def settings(self, run: Run, chosen: Any = None) -> Settings:
        """Return the settings of *run*, with the *chosen* value of a sweep; by default, with its first one."""
        layers = self.recipe, {**self.words, **self.systems[run.system]}
        single = [{name: value for name, value in layer.items() if not isinstance(value, list)} for layer in layers]
        values = {name: values[0] if chosen is None else chosen for name, values in self.sweep(run.system).items()}
        return merged(*single, values | ({run.setting: run.value} if run.setting else {}))

    def pipeline(self, run: Run) -> Pipeline:
        """Return the steps of *run*. Raises a StepError if it needs a sweep that is not finished."""
        chosen = None
        if not run.setting and self.sweep(run.system):
            chosen = self.chosen(run.system)
            if chosen is None:
                raise StepError(f"{run.title}: the sweep of {', '.join(self.sweep(run.system))} is not finished")
        settings = self.settings(run, chosen)
        return self._resolved(Pipeline(run.seed, settings, settings.precision, self.corpus))

    def _resolved(self, pipeline: Pipeline) -> Pipeline:
        """Return *pipeline* with the precision that ``auto`` means on this machine.

        Raises an InputError if a training of this command has begun in another one.
        """
        if pipeline.precision != "auto":
            return pipeline
        here = machine.best_precision(machine.devices(pipeline.settings.gpus, "auto"))
        trainings = self.corpus.work.records("train")
        begun = {record["settings"]["precision"] for record in trainings.values()}
        for other in sorted(begun) if here not in begun else ():
            if replace(pipeline, precision=other).train.name in trainings:
                raise InputError(
                    f"precision=auto: is {here} on this machine, and a training of this command has begun in {other}: "
                    f"set precision={other} to continue, or precision={here} to train all again"
                )
        return replace(pipeline, precision=here)

    def losses(self, system: str) -> dict[Any, float | None] | None:
        """The lowest validation loss of each value of the sweep of *system*; None if a training has not ended."""
        losses = {}
        for run in self.runs:
            if run.system == system and run.setting:
                train = self.pipeline(run).train
                folder = self.corpus.work.folder(train)
                if not train.is_finished(self.corpus.work) and not (folder / "failed").exists():
                    return None
                losses[run.value] = lowest_loss(folder) if train.is_finished(self.corpus.work) else None
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
