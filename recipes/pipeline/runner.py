"""Run the stages of an experiment, skip the finished ones, and record each run."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rope.files import write_whole
from recipes.pipeline.commands import Shell
from recipes.pipeline.experiment import Experiment, StageError
from recipes.pipeline.model_folder import Moves, set_results_aside
from recipes.pipeline.stage import Stage
from recipes.pipeline.stamps import Partial, Stamps, differences


def needed(stages: Sequence[Stage], experiment: Experiment) -> list[Stage]:
    """*stages* without those of the test set, if *experiment* has none."""
    return [stage for stage in stages if experiment.settings.test_files or not stage.of_test_set]


@dataclass
class Runner:
    """Runs stages of *experiment* that are not done."""

    experiment: Experiment
    stages: Sequence[Stage] = ()  # all stages of the recipe, in order
    locks: tuple[int, ...] = ()  # descriptors that every command inherits
    # Called before a stage runs, with the folder of its outputs and what it notes of the training.
    record: Callable[[Path, dict[str, Any]], None] | None = None

    def __post_init__(self) -> None:
        self.stamps, self.moves = Stamps(self.experiment), Moves(self.experiment)
        self.stages = needed(self.stages, self.experiment)

    def ensure(self, stage: Stage) -> bool:
        """Run *stage* unless it is done. Returns whether it ran; in a dry run, True."""
        title = f"stage {stage.number}: {stage.title}"
        if self.experiment.dry_run:
            print(title)
            stage.prepare(self.experiment, self.stamps, self.moves)
            set_results_aside(self.experiment, stage, self.stamps, self.moves)
            if not stage.per_model and not self.stamps.is_done(stage):
                self.stamps.remade.update(stage.outputs(self.experiment))
            stage.run(self.experiment, Shell(stage))
            return True
        missing = [path for path in stage.inputs(self.experiment) if not path.exists()]
        if missing:
            raise StageError(f"{title} needs {missing[0]}, {self._maker(missing[0])}")
        stage.prepare(self.experiment, self.stamps, self.moves)
        stamp = self.stamps.last(stage)  # as Stamps.is_done, but naming what has changed
        changed = "" if stamp is None else self.stamps.changed(stage, stamp)
        if stamp is not None and not changed:
            print(f"{title}: done before, skipped", flush=True)
            return False
        print(title + (f" (again, since {changed})" if changed else ""), flush=True)
        set_results_aside(self.experiment, stage, self.stamps, self.moves)
        self._run(stage, title)
        return True

    def _run(self, stage: Stage, title: str) -> None:
        of = self.stamps.of(stage)
        stamp = self.stamps.path(stage)
        stamp.unlink(missing_ok=True)
        partial = Partial(self.stamps, stage, of)
        folder, begun = self.stamps.folder(stage), time.time()
        shell = Shell(stage, folder / "commands" / f"{stage.file}.sh", self.log(stage), partial, self.locks)
        if self.record is not None:
            self.record(folder, stage.noted(self.experiment))
        stage.run(self.experiment, shell)
        for path in stage.outputs(self.experiment):
            if not path.exists():
                raise StageError(f"{title} ended without writing {path}")
        done = {"of": of, "made": self.stamps.made(stage), "seconds": round(time.time() - begun, 1)}
        write_whole(stamp, json.dumps(done, indent=1) + "\n")
        partial.end()

    def log(self, stage: Stage) -> Path:
        """The log file of the commands of *stage*."""
        return self.stamps.folder(stage) / "logs" / f"{stage.file}.log"

    def refuse_stale_inputs(self, stage: Stage, *following: Stage) -> None:
        """Raise a StageError if a stage before *stage* has not ended, or if its settings or inputs have changed.

        It is not checked if the user deleted its inputs to save space, or if it makes the test set, and neither *stage*
        nor those *following* need that.
        """
        of_test_set = any(one.of_test_set for one in (stage, *following))
        for earlier in self.stages[: self.stages.index(stage)]:
            if earlier.of_test_set and not of_test_set:
                continue
            if not all(path.exists() for path in earlier.inputs(self.experiment)):
                continue
            stamp = self.stamps.last(earlier)
            changed = stamp and differences(stamp["of"], self.stamps.of(earlier))
            if stamp is None or changed:
                earlier.refuse(self.experiment, self.stamps)
                why = f"since {changed}" if changed else "which has not ended yet"
                first = f"needs stage {earlier.number} ({earlier.title}) to run first, {why}"
                raise StageError(f"stage {stage.number}: {stage.title} {first}: run with --stage {earlier.number}")

    def _maker(self, path: Path) -> str:
        """The end of a message that says which stage makes *path*."""
        for stage in self.stages:
            if path in stage.outputs(self.experiment):
                return f"which stage {stage.number} ({stage.title}) makes: run with --stage {stage.number}"
        return "which does not exist"
