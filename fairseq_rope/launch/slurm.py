"""Jobs of SLURM: submission by submitit, their states, the reasons why they wait or have ended, and their end.

submitit asks for states only the accounting, which many clusters lack, and prints two warnings each time it fails.
"""

import contextlib
import io
import itertools
import os
import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from submitit.core.utils import FailedJobError
from submitit.helpers import clean_env
from submitit.slurm.slurm import SlurmExecutor
from submitit.slurm.slurm import SlurmJob as SubmititJob

from ..errors import InputError, refuse_other_bytes

ASKING = 20  # seconds between two questions to SLURM about its jobs
LATE = 15  # seconds after the end of a job in which a network file system shows its result
UNKNOWN = 60  # seconds that SLURM has not known a job, after which it counts as failed
PENDING = 60  # seconds that a job has not begun, after which it has a reason
ENDING = 60  # seconds that cancelled jobs have to end
AT_ONCE = 1000  # jobs in one question
NO_ANSWER = "unable to contact slurm controller|socket timed out"  # what sbatch prints without slurmctld
# SLURM's names of the states from which a job does not go on. A requeued job is PENDING.
ENDED = (
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
    "TIMEOUT",
)
# Variables with options: for example, SQUEUE_PARTITION hides the jobs of other partitions.
OPTIONS = ("SQUEUE_", "SACCT_", "SCANCEL_")
OF_CLUSTER = ("SLURM_CONF", "SLURM_CLUSTERS", "SLURM_JWT")  # where SLURM is, and the token of the user
# sbatch's variables precede the flags of its script. Their names are those of the flags, but for these.
VARIABLES = {"time": "TIMELIMIT", "mem": "MEM_PER_NODE"}
NEEDED = ("sbatch", "squeue", "scancel")
QUEUED = ("Priority", "Resources")  # the reasons that alternate while a job waits for its turn


class SlurmJob(SubmititJob[Any]):
    """A job of SLURM, whose state slurmctld knows while it runs and for some minutes afterwards."""

    _results_timeout_s = 0  # done() waits for a late result, so that one job does not stop the others

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._state = "PENDING"
        self._pending_since = time.monotonic()
        self._unknown_since: float | None = None
        self._ended: float | None = None  # when SLURM first said so
        self._named = ""  # the last reason that waits_for has returned

    def _register_in_watcher(self) -> None:  # of submitit, which asks the accounting
        pass

    @property
    def state(self) -> str:
        """The last known state, by SLURM's name; "UNKNOWN" if SLURM has not known the job for a minute."""
        return self._state

    def note(self, state: str | None) -> None:
        """Note the *state* that SLURM says; None: it does not know the job."""
        now = time.monotonic()
        if state is not None:
            if state == "PENDING" != self._state:
                self._pending_since = now
            self._state, self._unknown_since = state, None
        elif self._unknown_since is None:
            self._unknown_since = now
        elif now - self._unknown_since >= UNKNOWN:
            self._state = "UNKNOWN"
        if self._state not in (*ENDED, "UNKNOWN"):
            self._ended = None
        elif self._ended is None:
            self._ended = now

    def waits_for(self, reason: str) -> str:
        """Return *reason*, SLURM's, if the job has been pending for a minute and the reason is a new one; or ""."""
        if self._state != "PENDING":
            self._named = ""
        if self._state != "PENDING" or reason in ("", "None") or time.monotonic() - self._pending_since < PENDING:
            return ""
        before, self._named = self._named, "Priority" if reason in QUEUED else reason
        return "" if before == self._named else reason

    def done(self, force_check: bool = False) -> bool:
        """Whether it has a result, or has ended and will have none."""
        without_result = self._ended is not None and time.monotonic() - self._ended >= LATE
        return self.paths.result_pickle.exists() or without_result

    def ending(self, error: Exception) -> str:
        """Why SLURM ended the job, after *error* of submitit; "" if it did not."""
        if "timed-out and not checkpointable" in str(error):  # by the signal that SLURM sends before the limit
            return f"SLURM ended its job {self.job_id}: TIMEOUT"
        if isinstance(error, FailedJobError):  # with what the task raised
            return ""
        if self.state == "UNKNOWN":
            return f"SLURM does not know its job {self.job_id} any more, which has no result"
        if self.state in ENDED and self.state != "COMPLETED":
            return f"SLURM ended its job {self.job_id}: {self.state}"
        return ""


class _Executor(SlurmExecutor):
    """Submits jobs to SLURM. An error of sbatch is part of the exception, and submitit does not print it.

    A job inherits no variables of an allocation that submits it: srun would bind it to the cores of that allocation, or
    refuse it, and submitit would use the number of that job.
    """

    job_class = SlurmJob

    def _submit_command(self, command: str) -> Any:
        in_script = re.findall(r"^#SBATCH --([\w-]+)", self._make_submission_file_text(command, ""), re.M)
        given = {flag for flag in in_script if flag != "wckey" or flag in self.parameters}  # submitit sets a wckey
        overriding = {f"SBATCH_{VARIABLES.get(flag, flag.upper().replace('-', '_'))}" for flag in given}
        own = {
            name: value
            for name, value in os.environ.items()
            if name in OF_CLUSTER or (name.startswith("SBATCH_") and name not in overriding)
        }
        with contextlib.redirect_stderr(io.StringIO()), clean_env():
            os.environ.update(own)
            return super()._submit_command(command)


def executor(parameters: Mapping[str, Any], folder: Path) -> SlurmExecutor:
    """Return submitit's executor with *parameters*, whose files will be in *folder*.

    Raises:
        InputError: this machine lacks a program of SLURM, submitit does not know a parameter, or the name of *folder*
            is not UTF-8
    """
    if missing := [program for program in NEEDED if shutil.which(program) is None]:
        why = f"must be programs of the machine that submits jobs, which has no {', '.join(missing)}"
        raise InputError(f"--launcher slurm: {', '.join(NEEDED)} {why}")
    refuse_other_bytes(str(folder), "--launcher slurm:")
    try:
        created = _Executor(folder=folder)
        created.update_parameters(**{"stderr_to_stdout": True, **parameters})
    except (ValueError, TypeError, NameError, RuntimeError) as error:
        flags = " ".join(f"{key}={value}" for key, value in parameters.items() if key != "srun_args")
        raise InputError(f"--launcher slurm --slurm {flags}: {' '.join(str(error).split())}") from None
    return created


def waiting_jobs(jobs: Iterable[SlurmJob]) -> dict[SlurmJob, str]:
    """Ask SLURM for the states of *jobs*. Returns those that have been pending for a minute and have a new reason.

    If slurmctld does not answer, which takes some 20 seconds, nothing changes.
    """
    asked = {job.job_id: job for job in jobs if not job.done()}
    if not asked:
        return {}
    form = ("--noheader", "--states=all", "--format=%i|%T|%r")
    rows = dict[str, str]()
    for part in _in_parts(asked):
        shown = _ask("squeue", *form, f"--jobs={','.join(part)}")
        if shown.returncode and "invalid job id" not in shown.stderr.lower():
            return {}
        rows |= re.findall(r"^\s*(\d+)\|(.*)$", shown.stdout, re.M)
    for part in _in_parts([job_id for job_id in asked if job_id not in rows]):
        of_each = ("--allocations", "--noheader", "--parsable2", "--format=JobID,State")
        rows |= re.findall(r"^(\d+)\|(\w+)", _ask("sacct", *of_each, "--jobs", ",".join(part)).stdout, re.M)
    waiting = {}
    for job_id, job in asked.items():
        state, _, reason = rows.get(job_id, "").partition("|")
        job.note(state or None)
        if new := job.waits_for(reason):
            waiting[job] = new
    return waiting


def _in_parts(job_ids: Iterable[str]) -> Iterator[list[str]]:
    """Yield *job_ids* in lists that are not too long for the command line."""
    pending = iter(job_ids)
    return iter(lambda: [*itertools.islice(pending, AT_ONCE)], [])


def cancel_jobs_in(folder: Path) -> list[str]:
    """Cancel the jobs of this user whose scripts are in *folder*, also deeper in it, and wait for their ends.

    The scripts are those that submitit writes. So this finds a job also if the command that submitted it was killed.

    Returns:
        the numbers of the jobs

    Raises:
        InputError: after a minute, some jobs have not ended, or slurmctld has not answered
    """
    latest, cancelled = time.monotonic() + ENDING, set[str]()
    while (jobs := _jobs_in(folder)) is None or jobs:
        if time.monotonic() >= latest:
            which = f"SLURM's jobs {' '.join(jobs)}" if jobs else f"SLURM does not answer, and its jobs of {folder}"
            raise InputError(f"{which} may still run; cancel them with scancel")
        if jobs:
            for part in _in_parts(jobs):
                _ask("scancel", *part)
            cancelled.update(jobs)
        time.sleep(1)
    return sorted(cancelled, key=int)


def _jobs_in(folder: Path) -> list[str] | None:
    """The numbers of those jobs that have not ended; None: slurmctld does not answer."""
    shown = _ask("squeue", "--me", "--all", "--noheader", "--format=%i|%o")  # all: also those of hidden partitions
    if shown.returncode:
        return None
    rows = (line.strip().partition("|") for line in shown.stdout.splitlines())
    return [job_id for job_id, _, script in rows if folder in Path(script).parents]


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of SLURM and keep what it prints. Variables that are options of these programs have no effect."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(OPTIONS)}
    pipes: Any = {"stdin": subprocess.DEVNULL, "capture_output": True}
    try:  # paths of jobs can be bytes that are not UTF-8
        return subprocess.run(command, **pipes, env=variables, text=True, errors="surrogateescape", check=False)
    except OSError as error:  # not all clusters have sacct
        return subprocess.CompletedProcess(command, 1, "", str(error))
