"""fairseq-rope translate --launcher slurm, with SLURM itself: two nodes on this machine, no accounting."""

import gzip
import random
import re
import signal

import pytest

from fairseq_rope.tools import translate
from tests.commands import LIMIT
from tests.real_slurm import Launched

pytestmark = pytest.mark.slow
WORDS = "the a dog cat sees takes red blue big old house book under over".split()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A plain file of 41 lines, which is five shards, and a compressed one of 12 lines, which is two."""
    folder, draw = tmp_path_factory.mktemp("inputs"), random.Random(1)
    lines = [" ".join(draw.choices(WORDS, k=draw.randint(1, 8))).encode() for _ in range(53)]
    lines[17] = b"\xff"
    (folder / "a").write_bytes(b"\n".join(lines[:41]))
    (folder / "b.gz").write_bytes(gzip.compress(b"\n".join(lines[41:]) + b"\n"))
    return [folder / "a", folder / "b.gz"]


@pytest.fixture(scope="module")
def expected(model, inputs, tmp_path_factory):
    """What processes of this machine write."""
    folder = tmp_path_factory.mktemp("expected")
    words = ["--model", model, "--output-dir", folder, "--shard-lines", 100, "--input", *inputs]
    translate.main([*map(str, words)])
    return texts(folder)


def texts(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


class Translation(Launched):
    """The command, whose jobs begin to translate when the file "go" is in *folder*."""

    def __init__(self, slurm, folder, model, inputs, *flags, seconds=None):
        self.output, self.go = folder / "out", folder / "go"
        where = ["--model", model, "--output-dir", self.output, "--shard-lines", 10]
        of_slurm = ["--launcher", "slurm", "--slurm", "time=60", "--slurm", "gres=first:1"]
        wait = f"setup=until [ -e {self.go} ]; do sleep 0.1; done"
        words = [*where, *of_slurm, "--slurm", wait, *flags, "--input", *inputs]
        super().__init__(slurm, folder, ["-m", "fairseq_rope.__main__", "translate", *words], seconds)

    def jobs(self, state):
        """The numbers of the jobs in a *state*, in order."""
        rows = self.slurm.do("squeue", "--noheader", f"--states={state}", "--format=%i|%o").splitlines()
        numbers = (row.strip().partition("|") for row in rows)
        return sorted((number for number, _, script in numbers if script.startswith(f"{self.output}/")), key=int)

    def wait_for_jobs(self, number):
        """Wait until two jobs run, one on each node, and *number* in all are submitted."""

        def are_submitted():
            return len(self.jobs("RUNNING")) == 2 and len(self.jobs("PENDING")) == number - 2

        self.slurm.wait_until(are_submitted, f"there are not {number} jobs")
        return self.jobs("RUNNING"), self.jobs("PENDING")


@pytest.fixture
def start(slurm, tmp_path, model, inputs):
    return lambda *flags, **options: Translation(slurm, tmp_path, model, inputs, *flags, **options)


def test_the_output_is_that_of_processes_of_this_machine(start, expected):
    launched = start("--jobs", 3)
    launched.wait_for_jobs(3)
    launched.go.touch()
    launched.wait_for_end()
    assert texts(launched.output) == expected
    (warning,) = launched.lines()
    assert "lines that were not translated and are empty: 1, listed in " in warning
    left = {path.name for path in (launched.output / "shards").iterdir()}
    assert left == {"plan.json", "lock", "0.joined", "1.joined"}
    again = start("--jobs", 3)
    again.wait_for_end()
    assert again.lines() == [f"{launched.output}/{name}: done before" for name in "ab"]


def test_cancelled_and_held_jobs_are_named_and_the_same_command_continues(slurm, start, expected, inputs):
    launched = start(seconds={"ASKING": 2, "LATE": 1, "PENDING": 5})
    (running, other), (pending, held, *_) = launched.wait_for_jobs(7)
    slurm.do("scancel", running, pending)
    slurm.do("scontrol", "hold", held)
    ended = f"SLURM ended its job {running}: CANCELLED (log: "
    slurm.wait_until(lambda: launched.shows(ended), "the cancelled job is not named")
    slurm.wait_until(lambda: launched.shows(f"SLURM ended its job {pending}: CANCELLED, and it has no log"), "nor this")
    reason = f"SLURM has not begun its job {held} for a minute: JobHeldAdmin"  # root holds it
    slurm.wait_until(lambda: launched.shows(reason), "the reason of the held job is not shown")
    assert sum(reason in line for line in launched.lines()) == 1
    slurm.do("scontrol", "release", held)
    launched.go.touch()
    launched.wait_for_end(1)
    assert launched.lines()[-1].startswith(
        "fairseq-rope translate: 2 of 7 shards failed, and the same command continues: lines 1 to 10 of "
    )
    assert set(texts(launched.output)) == {"b"}, "two shards of the other file are not translated"
    again = start()
    again.wait_for_end()
    assert texts(again.output) == expected
    assert not again.shows("earlier start"), "no job was left"


def test_an_error_of_sbatch_ends_the_run_in_one_sentence(start, expected):
    launched = start("--slurm-partition", "none")
    launched.wait_for_end(1)
    (line,) = launched.lines()
    refused = "fairseq-rope translate: lines 1 to 10 of .*: it could not be submitted: .*invalid partition"
    assert re.match(refused, line)
    again = start()
    again.go.touch()
    again.wait_for_end()
    assert texts(again.output) == expected


@pytest.mark.parametrize("sent, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_cancels_the_jobs(slurm, start, sent, status):
    launched = start()
    running, pending = launched.wait_for_jobs(7)
    launched.process.send_signal(sent)
    launched.wait_for_end(status)
    assert {slurm.state(job) for job in (*running, *pending)} == {"CANCELLED"}
    assert launched.lines() == []


@pytest.mark.parametrize("more", [(), ("--jobs", 2)])
def test_after_a_kill_of_the_command_the_same_command_cancels_its_jobs_and_continues(slurm, start, expected, more):
    launched = start(*more)
    running, pending = launched.wait_for_jobs(2 if more else 7)
    launched.process.kill()
    launched.process.wait(LIMIT)
    assert launched.jobs("RUNNING") == running, "they go on"
    again = start(*more)
    slurm.wait_until(lambda: again.shows("jobs of an earlier start, now cancelled: "), "not cancelled")
    assert {slurm.state(job) for job in (*running, *pending)} == {"CANCELLED"}
    again.go.touch()
    again.wait_for_end()
    assert re.findall(r"\d+", again.lines()[0]) == [*running, *pending]
    assert texts(again.output) == expected
