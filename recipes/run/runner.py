"""Run the stages of a run, skip the finished ones, and record each."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic

import yaml

from fairseq_rope.files import write_whole
from recipes.run.machine import describe
from recipes.run.moves import Moves, set_results_aside
from recipes.run.run import Run, StageError
from recipes.run.shell import Shell
from recipes.run.stage import Stage
from recipes.run.stage_files import AnyRun
from recipes.run.stamps import Partial, Stamps, differences


@dataclass
class Runner(Generic[AnyRun]):
    """Runs stages of *run* that are not done."""

    run: AnyRun
    stages: Sequence[Stage[AnyRun]] = ()  # all stages that *run* needs, in order
    locks: tuple[int, ...] = ()  # descriptors that every command inherits
    program: str = ""  # the command that repeats this run, for run.yaml; "": no record is written

    def __post_init__(self) -> None:
        self.stamps, self.moves = Stamps(self.run), Moves(self.run)

    def ensure(self, stage: Stage[AnyRun]) -> bool:
        """Run *stage* unless it is done. Returns whether it ran; in a dry run, True."""
        title = f"stage {stage.number}: {stage.title}"
        if self.run.dry_run:
            print(title)
            stage.prepare(self.run, self.stamps, self.moves)
            set_results_aside(self.run, stage, self.stamps, self.moves)
            if not stage.per_model and not self.stamps.is_done(stage):
                self.stamps.remade.update(stage.outputs(self.run))
            stage.run(self.run, Shell(stage))
            return True
        stage.prepare(self.run, self.stamps, self.moves)
        missing = [path for path in stage.inputs(self.run) if not path.exists()]
        if missing:
            raise StageError(f"{title} needs {missing[0]}, {self._maker(missing[0])}")
        stamp = self.stamps.last(stage)  # as Stamps.is_done, but naming what has changed
        changed = "" if stamp is None else self.stamps.changed(stage, stamp)
        if stamp is not None and not changed:
            print(f"{title}: done before, skipped", flush=True)
            return False
        print(title + (f" (again, since {changed})" if changed else ""), flush=True)
        noted = stage.noted(self.run) if self.program else {}  # may refuse to run here, so it comes before any change
        set_results_aside(self.run, stage, self.stamps, self.moves)
        self._run(stage, title, noted)
        return True

    def _run(self, stage: Stage[AnyRun], title: str, noted: Mapping[str, Any]) -> None:
        stamp = self.stamps.path(stage)
        stamp.unlink(missing_ok=True)
        of = self.stamps.of(stage)  # without the stamp, a training depends on the present settings of its device
        partial = Partial(self.stamps, stage, of)
        folder, begun = self.stamps.folder(stage), time.time()
        shell = Shell(stage, folder / "commands" / f"{stage.file}.sh", self.log(stage), partial, self.locks)
        if self.program:
            write_down(self.run, self.program, folder, noted)
        stage.run(self.run, shell)
        for path in stage.outputs(self.run):
            if not path.exists():
                raise StageError(f"{title} ended without writing {path}")
        now = self.stamps.of(stage)  # without what only the outputs before this run depended on
        of = {name: value for name, value in of.items() if name in now}
        done = {"of": of, "made": self.stamps.made(stage), "seconds": round(time.time() - begun, 1)}
        write_whole(stamp, json.dumps(done, indent=1) + "\n")
        partial.end()

    def log(self, stage: Stage[AnyRun]) -> Path:
        """The log file of the commands of *stage*."""
        return self.stamps.folder(stage) / "logs" / f"{stage.file}.log"

    def refuse_stale_inputs(self, *chosen: Stage[AnyRun]) -> None:
        """Raise a StageError if a stage before the *chosen* ones has not ended, or if its settings or inputs changed.

        Only stages count that make inputs of *chosen*, or inputs of such stages. Inputs that the user has deleted, to
        save space, count as unchanged.
        """
        needed = {path for stage in chosen for path in stage.inputs(self.run)}
        stale: list[tuple[Stage[AnyRun], str]] = []
        for earlier in reversed(self.stages[: self.stages.index(chosen[0])]):
            inputs = earlier.inputs(self.run)
            if needed.isdisjoint(earlier.outputs(self.run)):
                continue
            needed.update(inputs)
            earlier.refuse(self.run, self.stamps)
            stamp = self.stamps.last(earlier)
            if stamp is None and not all(path.exists() for path in inputs):
                continue
            changed = stamp and differences(stamp["of"], self.stamps.of_present(earlier, stamp))
            if stamp is None or changed:
                stale.append((earlier, f"since {changed}" if changed else "which has not ended yet"))
        if stale:
            earlier, why = stale[-1]  # the first in the order of the stages
            first = f"needs stage {earlier.number} ({earlier.title}) to run first, {why}"
            stage = chosen[0]
            raise StageError(f"stage {stage.number}: {stage.title} {first}: run with --stage {earlier.number}")

    def _maker(self, path: Path) -> str:
        """The end of a message that says which stage makes *path*."""
        for stage in self.stages:
            if path in stage.outputs(self.run):
                return f"which stage {stage.number} ({stage.title}) makes: run with --stage {stage.number}"
        return "which does not exist"


def write_down(run: Run, program: str, folder: Path, noted: Mapping[str, Any] | None = None) -> None:
    """Write settings.yaml and run.yaml of the last stage that ran into *folder*, with what that has *noted*."""
    record = {"command": program, **(noted or {}), **describe()}
    for name, contents in (("settings.yaml", dict(run.values())), ("run.yaml", record)):
        write_whole(folder / name, yaml.safe_dump(contents, sort_keys=False, allow_unicode=True))
