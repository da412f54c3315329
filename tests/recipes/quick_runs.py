"""Runs without a model, for tests of the launcher. Each one lasts until the test writes a file."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from recipes.run import launch
from recipes.run.lock import locked_when_free
from recipes.run.run import Run
from recipes.run.stage import Stage

# What a training notes in the file "events": its begin, its end, and whether another one of the run goes on.
TRAINING = """
cd {folder}; touch pids
for pid in $(cat pids); do if [ -e /proc/$pid ]; then echo overlaps >> events; fi; done
echo $$ >> pids; echo begun >> events
for i in $(seq 1000); do if [ -e end ]; then break; fi; sleep 0.2; done
echo ended >> events; touch model
"""


@dataclass
class QuickRun(Run):
    """A run with the name *system* in the folder *work*."""

    work: Path
    system: str
    gpus: int | None = 0

    @property
    def title(self):
        return self.system

    @property
    def model(self):
        return self.work / self.system

    def values(self):
        return {"system": self.system}


class Train(Stage):
    """Waits for the file "end" in the folder of the run."""

    number, title, per_model, trains = 7, "train", True, True

    def inputs(self, run):
        return []

    def outputs(self, run):
        return [run.model / "model"]

    def run(self, run, shell):
        shell.command(TRAINING.format(folder=run.model).strip().replace("\n", "; "))


def stages_of(run):
    return (Train(),)


def main():
    """Launch runs as a comparison does: WORK NAME,NAME… and the flags of the launcher. Writes WORK/outcomes.json."""
    from recipes.compare.__main__ import build_parser  # which the jobs do not need

    work, names, *flags = sys.argv[1:]
    args = build_parser().parse_args(["demo", *flags])
    runs = [QuickRun(Path(work), name) for name in names.split(",")]
    for run in runs:
        run.model.mkdir(parents=True, exist_ok=True)
    with locked_when_free(Path(work) / ".lock", f"{work} is used"):
        outcomes = {run.title: why for run, why in launch.outcomes(runs, stages_of, "the same command", args)}
    (Path(work) / "outcomes.json").write_text(json.dumps(outcomes))
