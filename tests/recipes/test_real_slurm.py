"""The recipes' launcher with SLURM itself: two nodes on this machine, no accounting. Processes are real, models not."""

import json
import re
import signal
import sys
import time

import pytest

from fairseq_rope.lines import read_lines
from fairseq_rope.serving.translator import Translator
from tests import forked_programs
from tests.commands import LIMIT
from tests.real_slurm import Launched
from tests.recipes.small_demo import SHORT_OUTPUTS, SMALL, label, setting_flags, small_corpus
from tests.serving.exports import exported

pytestmark = pytest.mark.slow
OFTEN = {"ASKING": 2, "LATE": 1}


class QuickLaunched(Launched):
    """Quick runs with these *names*, whose launcher asks SLURM every two seconds by default."""

    def __init__(self, slurm, folder, names, *flags, seconds=OFTEN, **environment):
        slurm_flags = ["--launcher", "slurm", *flags]
        if not any(str(flag).startswith("time=") for flag in flags):
            slurm_flags += ["--slurm", "time=60"]
        words = ["-m", "tests.recipes.quick_runs", folder, ",".join(names), *slurm_flags]
        super().__init__(slurm, folder, words, seconds, **environment)

    def outcomes(self):
        """Wait for the end of the command. Returns why each run has failed, by its name."""
        self.wait_for_end()
        return json.loads((self.folder / "outcomes.json").read_text())

    def events(self, name):
        """What trainings of the run have noted."""
        file = self.folder / name / "events"
        return file.read_text().split() if file.exists() else []

    def wait_for(self, name, *events):
        log = self.log(name)

        def instead():
            return f"{name}: {self.events(name)} in place of {events}; {log.read_text() if log.exists() else 'no log'}"

        self.slurm.wait_until(lambda: self.events(name) == [*events], instead)

    def end(self, *names):
        """Let the trainings of these runs end."""
        for name in names:
            (self.folder / name / "end").touch()


SETTINGS = [*SMALL, *SHORT_OUTPUTS, "max_epochs=1", "average_checkpoints=1"]
NAMES = ("transformer", "transformer_rope")  # the systems of a comparison


@pytest.fixture(scope="module")
def compared(slurm, tmp_path_factory):
    """A comparison of two tiny models. Its jobs of the second seed are cancelled before they begin.

    It lasts a minute or two, so other tests run meanwhile.
    """
    folder = tmp_path_factory.mktemp("compared")
    where = ["--data-dir", small_corpus(200, 17), "--work-dir", folder / "work"]
    flags = ["--seeds", "2", "--gpus", "0", "--launcher", "slurm", "--slurm", "time=60", "--slurm", "gres=second:1"]
    words = ["-m", "recipes.compare", "demo", *where, *setting_flags(*SETTINGS), *flags]
    launched = Launched(slurm, folder, words, FORKED_PROGRAMS=forked_programs.folder())
    slurm.wait_until(lambda: launched.shows("== transformer_rope, seed 2: begun"), "not submitted", LIMIT)
    slurm.do("scancel", *(launched.job(f"{name}, seed 2") for name in NAMES))
    return launched


@pytest.fixture(scope="module")
def limited(slurm, tmp_path_factory):
    """Two launches whose jobs have a minute. SLURM needs up to 90 seconds to end them, so other tests run meanwhile."""
    folder = tmp_path_factory.mktemp("limited")
    with_signal = QuickLaunched(slurm, folder / "signal", ["warned"], "--slurm", "time=1")
    flags = ["--slurm", "time=1", "--slurm", "signal_delay_s=0"]
    return with_signal, QuickLaunched(slurm, folder / "none", ["ended"], *flags)


def test_cancelled_jobs_are_noticed_within_a_minute_and_a_requeued_one_is_waited_for(
    slurm, limited, compared, tmp_path
):
    names = ["cancelled", "requeued", "waiting", "dropped"]
    launched = QuickLaunched(slurm, tmp_path, names, "--slurm", "gres=first:1", seconds={})
    jobs = {name: launched.job(name) for name in names}
    for name in names[:2]:
        launched.wait_for(name, "begun")
    assert slurm.state(jobs["dropped"]) == "PENDING"
    begun = time.monotonic()
    slurm.do("scancel", jobs["cancelled"], jobs["dropped"])
    slurm.do("scontrol", "requeue", jobs["requeued"])
    launched.end("waiting")
    slurm.wait_until(lambda: all(launched.shows(f"== {name}: failed") for name in ("cancelled", "dropped")), "unseen")
    assert time.monotonic() - begun < 60
    launched.wait_for("requeued", "begun", "begun")
    launched.end("requeued")
    ended = "SLURM ended its job {}: CANCELLED"
    assert launched.outcomes() == {
        "cancelled": f"{ended.format(jobs['cancelled'])} (log: {launched.log('cancelled')})",
        "dropped": f"{ended.format(jobs['dropped'])}, and it has no log",
        "waiting": "",
        "requeued": "",
    }
    assert launched.events("requeued") == ["begun", "begun", "ended"]
    assert launched.events("dropped") == [] and launched.events("waiting") == ["begun", "ended"]
    assert len(launched.lines()) == 2 * len(names), "one line for each begin and end"


def test_a_killed_command_continues_with_its_jobs_that_still_run(slurm, tmp_path):
    killed = QuickLaunched(slurm, tmp_path, "ab")
    for name in "ab":
        killed.wait_for(name, "begun")
    killed.process.kill()
    killed.process.wait(LIMIT)
    again = QuickLaunched(slurm, tmp_path, "ab")
    logs = [again.log(name) for name in "ab"]
    slurm.wait_until(lambda: all(log.exists() and "is locked by" in log.read_text() for log in logs), "not locked")
    again.end(*"ab")
    assert again.outcomes() == {"a": "", "b": ""}
    assert [again.events(name) for name in "ab"] == [["begun", "ended"]] * 2, "trained once"


def test_an_interrupted_command_cancels_its_jobs(slurm, tmp_path):
    """Also if variables give squeue and scancel other options."""
    others = {"SQUEUE_PARTITION": "none", "SCANCEL_STATE": "PENDING"}
    launched = QuickLaunched(slurm, tmp_path, "ab", **others)
    for name in "ab":
        launched.wait_for(name, "begun")
    launched.process.send_signal(signal.SIGINT)
    begun = time.monotonic()
    launched.process.wait(LIMIT)
    assert time.monotonic() - begun < 30
    assert [slurm.state(launched.job(name)) for name in "ab"] == ["CANCELLED"] * 2


def test_a_job_depends_on_its_own_allocation_and_flags_alone(slurm, tmp_path):
    """Not on the variables of the allocation that submits it, nor on those of sbatch that the flags contradict."""
    allocation = {"SLURM_JOB_ID": "1", "SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "2"}
    allocation |= {"SLURM_CPU_BIND": "quiet,mask_cpu:0x1", "SLURM_MEM_PER_CPU": "1", "SLURM_NTASKS": "9"}
    of_sbatch = {"SBATCH_TIMELIMIT": "1", "SBATCH_OUTPUT": "/none/out", "SBATCH_NO_REQUEUE": "1"}
    launched = QuickLaunched(slurm, tmp_path, "a", "--slurm", "time=60", **allocation, **of_sbatch)
    launched.wait_for("a", "begun")
    job = slurm.do("scontrol", "show", "job", launched.job("a"))
    assert "TimeLimit=01:00:00 " in job and "Requeue=0 " in job and "NumTasks=1 " in job
    launched.end("a")
    assert launched.outcomes() == {"a": ""}


def test_a_second_interrupt_names_the_jobs_that_may_still_run(slurm, tmp_path):
    launched = QuickLaunched(slurm, tmp_path, "ab")
    for name in "ab":
        launched.wait_for(name, "begun")
    for _ in range(2):
        launched.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
    launched.process.wait(LIMIT)
    numbers = " ".join(launched.job(name) for name in "ab")
    assert launched.shows(f"== SLURM's jobs {numbers} may still run; cancel them with scancel\n")


def test_jobs_of_a_hidden_partition_are_cancelled(slurm, tmp_path):
    """root sees all partitions, and so another user cancels the job, who can read the files of this test."""
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/sh\n")
    tmp_path.chmod(0o777)
    user = ["setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=+dac_override", "--ambient-caps=+dac_override"]
    slurm.do(*user, "sbatch", "--hold", "--partition=hidden", "--chdir=/", "--output=/dev/null", script)
    cancel = f"from fairseq_rope.launch import slurm; print(*slurm.cancel_jobs_in(slurm.Path({str(tmp_path)!r})))"
    (number,) = slurm.do(*user, sys.executable, "-c", cancel).split()
    assert slurm.state(number) == "CANCELLED"


def test_the_time_limit_of_a_job_is_named(slurm, limited):
    for launched, name in zip(limited, ("warned", "ended"), strict=True):
        job = launched.job(name)
        assert launched.outcomes()[name].startswith(f"SLURM ended its job {job}: TIMEOUT (log: ")
        assert launched.events(name) == ["begun"] and len(launched.lines()) == 2
    again = QuickLaunched(slurm, launched.folder, ["ended"])
    again.end("ended")
    assert again.outcomes() == {"ended": ""} and again.events("ended") == ["begun", "begun", "ended"]


def test_a_comparison_runs_on_two_nodes_to_its_report_which_names_the_cancelled_runs(slurm, compared):
    jobs = [compared.job(f"{name}, seed 1") for name in NAMES]
    compared.wait_for_end(1)
    assert {slurm.node(job) for job in jobs} == {*slurm.nodes}
    page = (compared.folder / "work" / f"compare.{label('demo', SETTINGS)}" / "report.html").read_text()
    assert all(name in page for name in NAMES)
    for name in NAMES:
        ended = f"SLURM ended its job {compared.job(f'{name}, seed 2')}: CANCELLED, and it has no log"
        assert re.search(rf"{name}, seed 2\W.*{ended}", re.sub("<[^>]*>", " ", page)), page[:3000]
        assert compared.shows(f"== {name}, seed 2: failed: {ended}")
    assert compared.lines()[-1].endswith(f"2 of 4 runs failed: {NAMES[0]}, seed 2; {NAMES[1]}, seed 2")
    of_jobs = [re.match(r"== (\w+), seed 1: (begun|done),", line) for line in compared.lines()]
    assert sorted(line.groups() for line in of_jobs if line) == [
        (name, what) for name in NAMES for what in ("begun", "done")
    ]
    assert not compared.shows("sacct") and not compared.shows("accounting")


def test_texts_for_the_training_set_are_translated_by_jobs(slurm, trained, data_bin, tmp_path):
    model, work = exported(trained, data_bin, tmp_path / "model"), tmp_path / "work"
    where = ["--data-dir", small_corpus(100, 17), "--work-dir", work, "--gpus", "0", "--stop-stage", "2"]
    flags = [f"distillation_model={model}", "translate_flags=--launcher slurm --slurm time=60"]
    Launched(slurm, tmp_path, ["-m", "recipes.pipeline", "demo", *where, *setting_flags(*SMALL, *flags)]).wait_for_end()
    with Translator(str(model)) as translator:
        expected = list(translator.translate_lines(read_lines(str(work / "raw" / "train.en"))))
    assert read_lines(str(work / "raw" / "translated.de"), may_be_blank=True) == expected
    jobs = slurm.do("squeue", "--noheader", "--states=all", "--format=%T %o").splitlines()
    assert [job.split()[0] for job in jobs if str(work) in job] == ["COMPLETED"]


def test_no_run_is_lost_while_slurmctld_does_not_answer(slurm, tmp_path):
    launched = QuickLaunched(slurm, tmp_path, "abc", "--jobs", "2")
    for name in "ab":
        launched.wait_for(name, "begun")
    slurm.stop_controller()
    launched.end("a")
    refused = "== c: it could not be submitted: "
    slurm.wait_until(lambda: launched.shows(refused), "c is not submitted")
    assert launched.shows("== a: done") and launched.process.poll() is None
    slurm.start_controller()
    launched.wait_for("c", "begun")
    launched.end("b", "c")
    assert launched.outcomes() == dict.fromkeys("abc", "")
    assert all(launched.events(name) == ["begun", "ended"] for name in "abc")
    assert len(launched.lines()) == 2 * 3 + 1 and sum(refused in line for line in launched.lines()) == 1


def test_the_jobs_of_a_node_that_goes_down_are_repeated_on_another_one_or_named(slurm, tmp_path):
    """The node's daemon ends. Then the processes of the run "dead" end, too, and those of "silent" go on.

    SLURM does not repeat the job of "failing".
    """
    fixed = ["--slurm", f"nodelist={slurm.nodes[1]}"]
    launched = QuickLaunched(slurm, tmp_path / "repeated", ["dead", "silent"], *fixed)
    failing = QuickLaunched(slurm, tmp_path / "failing", ["failing"], *fixed, SBATCH_NO_REQUEUE="1")
    for name, launch in (("dead", launched), ("silent", launched), ("failing", failing)):
        launch.wait_for(name, "begun")
    slurm.stop_node(slurm.nodes[1])
    slurm.kill_job(launched.job("dead"))
    for name in ("dead", "silent"):
        job = launched.job(name)
        slurm.wait_until(lambda: slurm.state(job) == "PENDING", f"{name} is not requeued")  # noqa: B023
        slurm.do("scontrol", "update", f"JobId={job}", f"NodeList={slurm.nodes[0]}")
    launched.wait_for("dead", "begun", "begun")
    log = launched.log("silent")
    slurm.wait_until(lambda: "is locked by" in log.read_text(), "the second process does not wait")
    launched.end("dead", "silent")
    assert launched.outcomes() == {"dead": "", "silent": ""}
    assert launched.events("dead") == ["begun", "begun", "ended"]
    assert launched.events("silent") == ["begun", "ended"], "trained once"
    outcome = f"SLURM ended its job {failing.job('failing')}: NODE_FAIL (log: {failing.log('failing')})"
    assert failing.outcomes() == {"failing": outcome}
    slurm.start_node(slurm.nodes[1])
    slurm.wait_for_nodes()
