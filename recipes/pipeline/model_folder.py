"""Move trainings and results of other settings aside, so that no run removes or overwrites them."""

import hashlib
import itertools
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recipes.pipeline.checkpoints import check_limit
from recipes.pipeline.commands import named, say
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.settings import LEARNT_FROM
from recipes.pipeline.stamps import Stamps, differences, without_test_set
from recipes.pipeline.step import Step


class Moves:
    """Moves files and prints each move. In a dry run, only prints."""

    def __init__(self, experiment: Experiment) -> None:
        self._dry_run = experiment.dry_run
        self.planned: set[Path] = set()  # in a dry run, the paths that would be moved

    def move(self, old: Path, new: Path, why: str) -> None:
        """Move *old* to *new*, and print *why*."""
        if self._dry_run:
            if old not in self.planned:
                say(f"{named(old)} {why}: would be moved to {named(new)}")
            self.planned.add(old)
            return
        say(f"{named(old)} {why}: moved to {named(new)}")
        new.parent.mkdir(parents=True, exist_ok=True)
        old.rename(new)


# -- trainings ---------------------------------------------------------------------------------------


def learnt_from(stage: Step, stamps: Stamps) -> dict[str, Any]:
    """What identifies a training: the data, and the settings that must not change when it resumes."""
    can_change = {*stage.settings} - {*LEARNT_FROM}
    return {name: value for name, value in stamps.of(stage).items() if name not in can_change}


def begun(checkpoints: Path, stamps: Stamps) -> dict[str, Any] | None:
    """:func:`learnt_from` of the training in the folder *checkpoints*; None if begun.json cannot be read."""
    try:
        return without_test_set(stamps.current(json.loads((checkpoints / "begun.json").read_text())))
    except (OSError, ValueError, AttributeError):
        return None


def choose_training(experiment: Experiment, stage: Step, stamps: Stamps, moves: Moves) -> None:
    """Make the model's folder the one of the training that the settings and data describe, or leave none.

    A folder with checkpoints of another training is renamed. If the wanted training was renamed before, its folder gets
    its name back.
    """
    if not all(path.exists() or path in stamps.remade for path in stage.inputs(experiment)):
        return  # a dry run, before there is data
    wanted = learnt_from(stage, stamps)
    trainings = {
        folder: begun(folder / "checkpoints", stamps)
        for folder in sorted(experiment.work.glob(f"{experiment.model.name}*"))
        if folder.name.partition(".old-")[0] == experiment.model.name
    }
    current = trainings.pop(experiment.model, None)
    if current == wanted:
        check_limit(experiment)
        return
    earlier = next((folder for folder, training in trainings.items() if training == wanted), None)
    trained = any(experiment.checkpoints.glob("*.pt"))
    if trained or earlier is not None and experiment.model.exists():
        moves.move(experiment.model, _aside(experiment.model, current), "has other settings or data")
    if earlier is not None:
        moves.move(earlier, experiment.model, "has these settings and data")
        check_limit(experiment)


def _aside(folder: Path, training: dict[str, Any] | None) -> Path:
    """An unused path ``FOLDER.old-HASH`` for *folder* while another training has its name."""
    digest = hashlib.sha256(json.dumps(training, sort_keys=True).encode()).hexdigest()[:8]
    name = f"{folder.name.partition('.old-')[0]}.old-{digest}"
    return _first_unused(folder.with_name(name if n == 1 else f"{name}-{n}") for n in itertools.count(1))


def next_earlier(folder: Path) -> Path:
    """The first of ``earlier/1``, ``earlier/2``, … in *folder* that does not exist."""
    return _first_unused(folder / "earlier" / str(number) for number in itertools.count(1))


def _first_unused(paths: Iterable[Path]) -> Path:
    return next(path for path in paths if not path.exists())


# -- results -----------------------------------------------------------------------------------------


def set_results_aside(experiment: Experiment, stage: Step, stamps: Stamps, moves: Moves) -> None:
    """Move outdated results to ``earlier/``, with the ``settings.yaml`` and ``run.yaml`` that describe them.

    If the settings or inputs of *stage* have changed, its results are outdated. So are later results that were made
    from them or with other settings. Checkpoints stay, because training resumes from them.
    """
    model = experiment.model
    if not stage.per_model or model in moves.planned:
        return
    last = stamps.last(stage)
    if last is not None and not differences(last["of"], stamps.of(stage)):
        return
    outdated = dict.fromkeys(stamps.name(path) for path in stage.outputs(experiment))
    outdated_stamps = []
    for path in sorted((model / "stamps").glob("*.json")):
        stamp = stamps.read(path)
        if stamp is None or int(path.stem.partition(".")[0]) < stage.number:
            continue
        changed = any(getattr(experiment.settings, name, value) != value for name, value in stamp["of"].items())
        if path == stamps.path(stage) or changed or outdated.keys() & stamp["of"].keys():
            outdated.update(dict.fromkeys(stamp["made"]))
            outdated_stamps.append(path)
    results = dict.fromkeys(model / Path(name).parts[1] for name in outdated)
    results_there = [path for path in results if path.exists() and path != experiment.checkpoints]
    if not results_there:
        return
    folder = next_earlier(model)
    if not experiment.dry_run:
        folder.mkdir(parents=True)
        for name in ("settings.yaml", "run.yaml"):
            if (model / name).exists():
                shutil.copy(model / name, folder / name)
    for result in results_there:
        moves.move(result, folder / result.name, "is from another run")
    if not experiment.dry_run:
        for path in outdated_stamps:
            path.unlink()
