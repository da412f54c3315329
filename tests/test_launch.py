"""fairseq_rope/launch: results, failures and errors of processes. tests/serving/test_corpus.py kills them."""

import argparse
import contextlib
import errno
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from submitit.slurm.slurm import _make_sbatch_string

from fairseq_rope.errors import InputError
from fairseq_rope.launch import flags, local, slurm
from fairseq_rope.launch.jobs import Launcher, outcomes, visible_gpus
from fairseq_rope.locks import locked
from tests.commands import ENVIRONMENT, LIMIT, ROOT

KILLED = "__import__('os').kill(__import__('os').getpid(), 9)"


def test_each_task_has_its_result_or_the_reason_of_its_failure(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    tasks = ["1 + 1", KILLED, "[0] * 10**15", "__import__('os').environ['CUDA_VISIBLE_DEVICES']"]
    before = dict(os.environ)
    ended = {outcome.task: outcome for outcome in outcomes(tasks, eval, Launcher(2), tmp_path)}
    assert os.environ == before
    assert [ended[task].result for task in tasks] == [2, None, None, "3,5"]
    assert ended[tasks[0]].failure == ended[tasks[3]].failure == ""
    assert ended[KILLED].failure.startswith("its process ended without a result (log: ")
    assert ended[tasks[2]].failure.startswith("MemoryError (log: ")
    logs = [outcome.failure.partition("(log: ")[2].rstrip(")") for outcome in ended.values() if outcome.failure]
    assert logs == [outcome.log for outcome in ended.values() if outcome.failure]
    assert sorted(map(str, tmp_path.rglob("*.*"))) == sorted(outcome.log for outcome in ended.values()), "only logs"


def test_without_locks_no_process_ends_because_of_them(tmp_path, monkeypatch):
    """Some network file systems have none."""

    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fairseq_rope.locks.fcntl.flock", flock)
    killed = []
    monkeypatch.setattr("fairseq_rope.launch.local.os.kill", lambda *process: killed.append(process))
    with locked(tmp_path / "lock") as lock:
        assert not lock.works
    local.Starter(tmp_path / "lock", None)._end_after(wait=False)
    assert not killed


@pytest.mark.parametrize(
    "visible, number, most, names",
    [
        ("2,GPU-ab,5", 3, None, ["2", "GPU-ab", "5"]),
        ("2, GPU-ab ,5", 3, 2, ["2", "GPU-ab"]),
        ("7,8", 1, None, ["7"]),  # CUDA does not know the second one
        ("", 3, None, ["0", "1", "2"]),
        ("", 3, 1, ["0"]),
        ("", 0, None, []),
    ],
)
def test_the_visible_gpus_have_the_names_of_the_variable(monkeypatch, visible, number, most, names):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_gpus(number, most) == names


def test_processes_use_the_gpus_in_turn(tmp_path, monkeypatch):
    """The second of three processes ends first, so that the fourth one gets its GPU."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "9")
    show = "[__import__('time').sleep({}), __import__('os').environ['CUDA_VISIBLE_DEVICES']][1]"
    tasks = [show.format(seconds) for seconds in (4.0, 0, 4.01, 0.01)]
    ended = {outcome.task: outcome for outcome in outcomes(tasks, eval, Launcher(3, ["2", "GPU-ab"]), tmp_path)}
    assert [ended[task].result for task in tasks] == ["2", "GPU-ab", "2", "GPU-ab"]


def test_an_error_of_a_file_ends_the_other_processes(tmp_path):
    tasks = ["__import__('time').sleep(100)", "open('/none')"]
    with (
        pytest.raises(FileNotFoundError, match="'/none'"),
        contextlib.closing(outcomes(tasks, eval, Launcher(2), tmp_path, fatal=(OSError,))) as ended,
    ):
        list(ended)


def test_a_process_ends_after_the_one_that_started_it_was_killed(tmp_path):
    code = (
        "import sys\n"
        "from fairseq_rope.launch.jobs import Launcher, outcomes\n"
        "task = f\"[open({sys.argv[1]!r}, 'w').write(str(__import__('os').getpid())), __import__('time').sleep(99)]\"\n"
        "list(outcomes([task], eval, Launcher(), sys.argv[2]))\n"
    )
    words = [sys.executable, "-c", code, str(tmp_path / "pid"), str(tmp_path / "jobs")]
    launcher = subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT)
    limit = time.monotonic() + LIMIT / 5
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
        assert time.monotonic() < limit and launcher.poll() is None
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    os.kill(pid, 0)  # it is there
    launcher.kill()
    launcher.wait(LIMIT)
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < limit:
            os.kill(pid, 0)
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        pytest.fail("the process has not ended")


# -- jobs of SLURM; tests/serving/test_corpus_on_slurm.py has more ------------------------


@pytest.fixture
def squeue(tmp_path, monkeypatch):
    """squeue(*answers): a program of that name prints the next answer at each call, or fails if the answer is "".

    It returns the file with the jobs that scancel gets.
    """
    monkeypatch.setattr(time, "sleep", lambda _: None)

    def squeue(*answers):
        programs = {
            "squeue": 'read -r line < answers; sed -i 1d answers; [ "$line" = silent ] && exit 1; printf "$line"',
            "scancel": 'echo "$@" >> cancelled',
        }
        (tmp_path / "answers").write_text("".join(f"{answer or 'silent'}\n" for answer in answers))
        for name, code in programs.items():
            (tmp_path / name).write_text(f"#!/bin/bash\ncd {tmp_path}\n{code}\n")
            (tmp_path / name).chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        return tmp_path / "cancelled"

    return squeue


def test_only_the_jobs_with_a_script_in_the_folder_are_cancelled(squeue):
    jobs = [f"{number}|{path}" for number, path in ((9, "/out/jobs/1/x.sh"), (10, "/out/jobs/2/y.sh"))]
    others = ["7|/out/jobs", "8|/out/jobs2/1/x.sh", "11|(null)", r"12|/not\xfc-utf-8/x.sh"]
    cancelled = squeue("", r"\n".join([jobs[1], *others, jobs[0]]), jobs[0], others[0])
    assert slurm.cancel_jobs_in(Path("/out/jobs")) == ["9", "10"]
    assert cancelled.read_text() == "10 9\n9\n"


def test_slurm_is_asked_about_many_jobs_in_parts(tmp_path, monkeypatch):
    """One argument of a command has at most 128 KiB."""
    squeue = "#!/bin/bash\nfor job in ${!#/--jobs=/}; do echo \"${job//,/|RUNNING|None$'\\n'}|RUNNING|None\"; done\n"
    (tmp_path / "squeue").write_text(squeue)
    (tmp_path / "squeue").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    jobs = [slurm.SlurmJob(tmp_path, str(10_000_000 + number)) for number in range(15_000)]
    assert slurm.waiting_jobs(jobs) == {}
    assert {job.state for job in jobs} == {"RUNNING"}


def test_srun_gives_a_job_the_cores_that_it_requests():
    """Since SLURM 22.05, srun does not take them from sbatch, whose script calls it."""
    parser = argparse.ArgumentParser()
    flags.add_flags(parser, "run")
    words = [
        "--launcher",
        "slurm",
        "--slurm",
        "time=9",
        "--slurm",
        "cpus_per_task=4",
        "--slurm",
        "srun_args=--mpi none",
    ]
    script = _make_sbatch_string("python x.py", Path("jobs"), **flags.slurm_parameters(parser.parse_args(words)))
    (srun,) = (shlex.split(line) for line in script.splitlines() if line.startswith("srun "))
    assert "--cpus-per-task=4" in srun and srun[srun.index("--mpi") + 1] == "none"
    account = flags.slurm_parameters(parser.parse_args([*words, "--slurm", "account=0421"]))
    assert (account["account"], account["cpus_per_task"]) == ("0421", 4), "the zero is a part of the name"
    assert "cpus-per-task" not in str(flags.slurm_parameters(parser.parse_args(words[:4])))


def test_a_folder_whose_name_submitit_cannot_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(slurm, "NEEDED", ())
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xfc"))
    with pytest.raises(InputError, match=r"^--launcher slurm: .*: the name must be UTF-8"):
        slurm.executor({"time": 9}, folder)


@pytest.mark.parametrize(
    "answer, message",
    [
        ("", "SLURM does not answer, and its jobs of /out/jobs may still run"),
        ("9|/out/jobs/1/x.sh", "SLURM's jobs 9 may still run"),
    ],
)
def test_jobs_that_do_not_end_are_named(squeue, monkeypatch, answer, message):
    squeue(answer)
    monkeypatch.setattr(slurm, "ENDING", 0)
    with pytest.raises(InputError, match=f"^{message}; cancel them with scancel$"):
        slurm.cancel_jobs_in(Path("/out/jobs"))


def test_a_late_result_and_a_job_that_slurm_does_not_know_are_waited_for(tmp_path, monkeypatch):
    """On a network file system, the result can arrive some seconds after the end."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    job = slurm.SlurmJob(tmp_path, "7")
    for clock[0], given, state in (
        (1, None, "PENDING"), (60, None, "PENDING"), (61, "RUNNING", "RUNNING"),
        (100, None, "RUNNING"), (159, None, "RUNNING"), (160, None, "UNKNOWN"),
    ):  # fmt: skip
        job.note(given)
        assert job.state == state
    ended = slurm.SlurmJob(tmp_path, "8")
    ended.note("COMPLETED")
    for clock[0], is_done in ((174.9, False), (175.1, True)):
        assert ended.done() == is_done
