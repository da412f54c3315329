"""The runs of a comparison as tasks of an array, with SLURM itself: two nodes on this machine, and fake programs."""

import collections
import os
import sys

import pytest

from recipes import compared, script
from recipes.__main__ import main
from tests.recipes import fake_programs
from tests.recipes.fake_programs import FEW, RECIPES, change_data

pytestmark = pytest.mark.slow
RUNS = "1234"
# A training calls it in each epoch, and stays in the second one while the file exists. It ignores SIGTERM.
SLEEP = """#!/bin/sh
trap '' TERM
while [ -e checkpoints/checkpoint_last.pt ] && [ -e {} ]; do /bin/sleep 0.1; done
"""


class Comparison:
    """Two systems from two seeds, which SLURM runs in *place*."""

    def __init__(self, slurm, place, monkeypatch, capsys):
        self.slurm, self.place, self.capsys, self.hold = slurm, place, capsys, place / "hold"
        programs = fake_programs.install(place / "fake")
        python = RECIPES.format(python=sys.executable, programs=programs)
        for path, text in ((place / "python", python), (programs / "sleep", SLEEP.format(self.hold))):
            path.write_text(text)
            path.chmod(0o755)
        (place / "systems.yaml").write_text("a: {arch: transformer}\nb: {}\n")
        change_data(place, "data A")
        folders = [f"data={place / 'data'}", f"work={place / 'work'}"]
        self.words = ["demo", f"systems={place / 'systems.yaml'}", "seeds=2", *folders, *FEW]
        self.reported = []
        monkeypatch.setattr(compared.page, "write", lambda folder, contents: self.reported.append(contents))
        monkeypatch.setattr(compared.page, "verdict", lambda folder: [])

    def submit(self, runs="1-4", *flags):
        """Submit an array as the documentation does, with two tasks on a node; returns its number."""
        path = f"PATH={self.place}:{os.environ['PATH']},LEDGER={self.place / 'ledger'}"
        where = [f"--chdir={script.ROOT}", f"--output={self.place}/%A_%a.log", f"--export=ALL,{path}", "--parsable"]
        wrapped = f"python -m recipes {' '.join(self.words)} --run $SLURM_ARRAY_TASK_ID"
        flags = flags or ["--cpus-per-task=3"]
        return self.slurm.do("sbatch", f"--array={runs}", *where, *flags, "--wrap", wrapped).strip()

    def wait_for(self, condition):
        self.slurm.wait_until(condition, lambda: "\n".join(path.read_text() for path in self.place.glob("*.log")))

    def wait_for_end(self, array, others=None):
        """Wait until all tasks of an array have completed, or have another state."""
        ends = [(others or {}).get(run, "COMPLETED") for run in RUNS]
        self.wait_for(lambda: [self.slurm.state(f"{array}_{run}") for run in RUNS] == ends)

    def wait_for_line(self, array, run, text):
        path = self.place / f"{array}_{run}.log"
        self.wait_for(lambda: path.exists() and text in path.read_text())

    def epochs(self):
        """How often each epoch of each training has been finished."""
        return [*collections.Counter((self.place / "ledger").read_text().splitlines()).values()]

    def listed(self):
        self.capsys.readouterr()
        main([*self.words, "--list"])
        return [line.split(": ")[1] for line in self.capsys.readouterr().out.splitlines()[:4]]

    def missing(self):
        """The runs that the report names as missing."""
        main([*self.words, "--report"])
        return [*self.reported[-1].missing]


def test_an_array_of_runs_goes_to_its_end_and_again_does_only_what_is_missing(slurm, tmp_path, monkeypatch, capsys):
    comparison = Comparison(slurm, tmp_path, monkeypatch, capsys)
    for _ in range(2):
        array = comparison.submit()
        comparison.wait_for_end(array)
        assert {slurm.shown(f"{array}_{run}", "NodeList") for run in RUNS} == {*slurm.nodes}
        assert comparison.listed() == ["finished"] * 4 and comparison.missing() == []
        assert comparison.epochs() == [1] * 4 * 2

    # Of new trainings, one is cancelled, one requeued, and a node dies with two, of which SLURM repeats one.
    comparison.words.append("dropout=0.2")
    comparison.hold.touch()
    array = comparison.submit()
    comparison.wait_for(lambda: len(comparison.epochs()) == 12)
    assert comparison.listed() == ["running"] * 4
    nodes = {run: slurm.shown(f"{array}_{run}", "NodeList") for run in RUNS}
    (cancelled, requeued), (failing, _) = ([run for run in RUNS if nodes[run] == name] for name in slurm.nodes)
    second = comparison.submit(requeued, f"--nodelist={slurm.nodes[0]}")
    comparison.wait_for_line(second, requeued, ": waiting for another process")
    slurm.do("scancel", f"{array}_{cancelled}")
    comparison.wait_for(lambda: not slurm.processes(f"{array}_{cancelled}"))
    slurm.do("scontrol", "requeue", f"{array}_{requeued}")
    comparison.wait_for_line(second, requeued, "== train-")  # it takes over at once
    slurm.do("scontrol", "update", f"JobId={array}_{failing}", "Requeue=0")
    slurm.kill_node(slurm.nodes[1])
    comparison.wait_for(lambda: slurm.state(f"{array}_{failing}") == "NODE_FAIL")
    states = [comparison.listed()[int(run) - 1] for run in (cancelled, requeued, failing)]
    assert states == ["interrupted", "running", "interrupted"]
    comparison.hold.unlink()
    comparison.wait_for_end(array, {cancelled: "CANCELLED", failing: "NODE_FAIL"})
    assert len(comparison.missing()) == 2
    slurm.start_node(slurm.nodes[1])
    comparison.wait_for_end(comparison.submit())
    assert comparison.listed() == ["finished"] * 4 and comparison.missing() == []
    assert comparison.epochs() == [1] * 8 * 2
