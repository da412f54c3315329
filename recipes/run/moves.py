"""Move results of other settings aside, so that no run removes or overwrites them."""

import itertools
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recipes.run.run import Run
from recipes.run.shell import named, say
from recipes.run.stage_files import StageFiles
from recipes.run.stamps import Stamps, differences, partial_of


class Moves:
    """Moves files and prints each move. In a dry run, only prints."""

    def __init__(self, run: Run) -> None:
        self._dry_run = run.dry_run
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


def next_earlier(folder: Path) -> Path:
    """The first of ``earlier/1``, ``earlier/2``, … in *folder* that does not exist."""
    return first_unused(folder / "earlier" / str(number) for number in itertools.count(1))


def first_unused(paths: Iterable[Path]) -> Path:
    return next(path for path in paths if not path.exists())


def set_results_aside(run: Run, stage: StageFiles[Any], stamps: Stamps, moves: Moves) -> None:
    """Move outdated results to ``earlier/``, with the ``settings.yaml`` and ``run.yaml`` that describe them.

    If the settings or inputs of *stage* have changed, its results are outdated. So are later results that were made
    from them or with other settings. The *resumable* outputs of the run stay, and so do results of *stage* that an
    interrupted run with these settings and inputs has written.
    """
    model = run.model
    if not stage.per_model or model in moves.planned:
        return
    last = stamps.last(stage)
    interrupted = stamps.read(partial_of(stamps.path(stage)))
    if any(made is not None and not differences(made["of"], stamps.of(stage)) for made in (last, interrupted)):
        return
    settings = run.values()
    outdated = dict.fromkeys(stamps.name(path) for path in stage.outputs(run))
    outdated_stamps = []
    for path in sorted((model / "stamps").glob("*.json")):
        stamp = stamps.read(path)
        if stamp is None or int(path.stem.partition(".")[0]) < stage.number:
            continue
        changed = any(settings.get(name, value) != value for name, value in stamp["of"].items())
        if path == stamps.path(stage) or changed or outdated.keys() & stamp["of"].keys():
            outdated.update(dict.fromkeys(stamp["made"]))
            outdated_stamps.append(path)
    results = dict.fromkeys(model / Path(name).parts[1] for name in outdated)
    results_there = [path for path in results if path.exists() and path not in run.resumable]
    if not results_there:
        return
    folder = next_earlier(model)
    if not run.dry_run:
        folder.mkdir(parents=True)
        for name in ("settings.yaml", "run.yaml"):
            if (model / name).exists():
                shutil.copy(model / name, folder / name)
    for result in results_there:
        moves.move(result, folder / result.name, "is from another run")
    if not run.dry_run:
        for path in outdated_stamps:
            path.unlink()
