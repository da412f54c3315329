"""Train every system with several values of one setting, and choose the value with the lowest validation loss.

Only seed 1 is trained with all values. The test set has no part in the choice.
"""

import argparse
import dataclasses
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from recipes.compare.curves import read_history
from recipes.compare.results import lowest_loss
from recipes.pipeline import fairseq_train
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.settings import FIELDS, LEARNT_FROM
from recipes.run.run import StageError
from recipes.run.yaml_file import SettingsError

SEED = 1  # only runs from this seed are trained with every value
# The validation loss includes the smoothing, so losses with several values of it cannot be compared.
NUMBERS = tuple(name for name in LEARNT_FROM if FIELDS[name].type in (int, float) and name != "label_smoothing")


def add_flag(parser: argparse.ArgumentParser) -> None:
    tuned = f"train seed {SEED} of every system with each value of a setting, and the other seeds with the value whose "
    tuned += "validation loss is the lowest"
    parser.add_argument("--tune", action="append", default=[], metavar="KEY=VALUE,VALUE…", help=tuned)


def read_flag(args: argparse.Namespace) -> tuple[str, list[str]]:
    """The setting and the values of ``--tune``. Raises a SettingsError if they cannot be compared."""
    setting, _, values_text = args.tune[0].partition("=")
    values = values_text.split(",")
    flag = f"--tune {args.tune[0]}"
    if len(args.tune) > 1:
        raise SettingsError(f"--tune {' --tune '.join(args.tune)}: one setting can be tuned at a time")
    if setting not in NUMBERS:
        raise SettingsError(f"{flag}: must be KEY=VALUE,VALUE…, and KEY one of {', '.join(NUMBERS)}")
    if any(override.partition("=")[0] == setting for override in args.set):
        raise SettingsError(f"{flag}: --set has a value for {setting} too; drop one of them")
    try:
        numbers = {FIELDS[setting].type(value) for value in values}  # type: ignore[operator]
    except ValueError:
        raise SettingsError(f"{flag}: each value must be a number, of type {FIELDS[setting].type.__name__}") from None  # type: ignore[union-attr]
    if not all(map(math.isfinite, numbers)):
        raise SettingsError(f"{flag}: each value must be finite")
    if len(numbers) < 2 or len(numbers) < len(values):
        raise SettingsError(f"{flag}: must have 2 or more values, all different")
    return setting, sorted(values, key=float)


@dataclass(frozen=True)
class Tuning:
    """The experiments of a tuning: seed 1 of each system with each value, as written by the user, from low to high."""

    setting: str
    experiments: Mapping[str, Mapping[str, Experiment]]  # value: system: experiment

    def check(self) -> None:
        """Raise a SettingsError if the flags of a system, or of all, give the setting another value."""
        commands = [
            shlex.split(fairseq_train.command(next(iter(by_system.values())), 0, "fp32"))
            for by_system in self.experiments.values()
        ]
        # A flag is the setting's if the word after it differs between the commands for the first two values.
        next_words = zip(*(command[1:] for command in commands[:2]), strict=True)
        tuned = {flag for flag, (first, second) in zip(commands[0], next_words, strict=False) if first != second}
        for name, run in next(iter(self.experiments.values())).items():
            for word in shlex.split(run.settings.fairseq_train_flags):
                if word.partition("=")[0] in tuned:
                    raise SettingsError(f"--tune {self.setting}: the flags of {name} contain {word}; drop one of them")

    def runs(self, systems: Sequence[str]) -> list[Experiment]:
        """Seed 1 of each of *systems* with each value; not of systems that translate with another system's model."""
        return [
            dataclasses.replace(by_system[name], seed=SEED, tuned=f"{self.setting}={value}")
            for value, by_system in self.experiments.items()
            for name in systems
            if not by_system[name].training_of
        ]

    def chosen(self, finished: Callable[[Experiment], bool]) -> dict[str, Experiment]:
        """The experiment of each system with the value whose *finished* training has the lowest loss.

        A system without such a training is left out. A system that translates with the model of another one has the
        value of the other one.
        """
        outcomes = self.outcomes(finished)
        values = {name: outcome["chosen"] for name, outcome in outcomes.items() if outcome["chosen"]}
        systems = next(iter(self.experiments.values())).values()
        owners = {run.system: run.training_of or run.system for run in systems}
        return {name: self.experiments[values[owner]][name] for name, owner in owners.items() if owner in values}

    def outcomes(self, finished: Callable[[Experiment], bool]) -> dict[str, dict[str, Any]]:
        """The "chosen" value, or "", and the "runs", one for each value, of each system that is trained.

        The loss of a run is the lowest of its validations, at "update"; it is None if the training is not *finished*.
        """
        outcomes: dict[str, dict[str, Any]] = {}
        for run in self.runs(list(next(iter(self.experiments.values())))):
            value = run.tuned.partition("=")[2]
            outcome = outcomes.setdefault(run.system, {"chosen": "", "runs": []})
            loss, update = lowest_loss(vars(read_history(run.history))) if finished(run) else (None, None)
            outcome["runs"].append({"value": value, "loss": loss, "update": update})
        for outcome in outcomes.values():
            losses = [
                (run["loss"], float(run["value"]), run["value"]) for run in outcome["runs"] if _is_number(run["loss"])
            ]
            outcome["chosen"] = min(losses)[2] if losses else ""
        return outcomes

    def require(self, chosen: Mapping[str, Experiment], baseline: str, failed: Mapping[str, str]) -> None:
        """Raise a StageError if the *baseline* is not among the *chosen*."""
        if baseline not in chosen:
            reasons = "; ".join(f"{run}: {reason}" for run, reason in failed.items())
            reasons = reasons or "none has ended with a finite loss; name it in --only, too"
            raise StageError(f"--tune {self.setting}: no training of the baseline {baseline} can be chosen: {reasons}")


def _is_number(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)
