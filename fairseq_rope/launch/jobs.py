"""Run a function for many tasks, each in a new process, on this machine or as a job of SLURM. submitit starts them.

A process of this machine ends with the one that started it. A job of SLURM goes on if the process that submitted it is
killed.
"""

import contextlib
import os
import re
import site
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Generic, TypeVar

from submitit.core.utils import FailedJobError, FailedSubmissionError

from ..errors import InputError, handle_signals
from ..locks import locked
from . import local, slurm

Task = TypeVar("Task")
Result = TypeVar("Result")

POLL = 0.1  # seconds between two looks at the processes of this machine
POLL_SLURM = 1  # and at jobs of SLURM
NAMED = 3  # jobs that a line names
ROOT = Path(__file__).resolve().parents[2]
SAFE_PATH = "PYTHONSAFEPATH"  # with it, python -m does not import from the current folder (Python 3.11)
FOR_JOBS = "for fairseq_rope's jobs"


@dataclass(frozen=True)
class Launcher:
    """Where processes run, and how many at a time.

    Args:
        jobs: how many run at a time; None: all
        gpus: GPUs of this machine that the processes use in turn, as in CUDA_VISIBLE_DEVICES; none: all visible ones
        slurm: the parameters of submitit's SlurmExecutor; None: the processes are of this machine
    """

    jobs: int | None = 1
    gpus: Sequence[str] = ()
    slurm: Mapping[str, Any] | None = None

    def check(self) -> None:
        """Raise an InputError if this machine has no SLURM, or if submitit does not know a parameter."""
        if self.slurm is not None:
            slurm.executor(self.slurm, Path())

    def executor(self, folder: Path) -> Any:
        """Return submitit's executor, whose files will be in *folder*. Raises the error of :meth:`check`."""
        if self.slurm is not None:
            return slurm.executor(self.slurm, folder)
        return local.executor(folder)


@dataclass(frozen=True)
class Outcome(Generic[Task, Result]):
    """How the process of a *task* ended: with a *result*, or with the reason of its *failure*, otherwise ""."""

    task: Task
    result: Result | None
    failure: str
    log: str = ""  # the path of what it printed; "" if it was not started


class Watcher(Generic[Task]):
    """Methods that :func:`outcomes` calls. This class shows nothing, and begins the tasks in their order."""

    def begun(self, task: Task, log: str) -> None:
        """The process of *task* was started or submitted. It prints into the file *log*."""

    def waits(self, task: Task | None, why: str) -> None:
        """*task*, or also others, does not go on; called once for each change of the reason. None: all tasks."""

    def looked(self) -> None:
        """The processes have been looked at."""

    def next_task(self, waiting: Sequence[Task], running: Sequence[Task]) -> Task | None:
        """Return the task of *waiting* to begin now, or None if each has to wait for one of *running*."""
        return waiting[0]


@dataclass(frozen=True)
class _Raised:
    """An error that ends the whole run, for example because the disk is full."""

    error: Exception


def refuse_tags(folder: str) -> None:
    """Raise an InputError if the path *folder* has a tag that submitit replaces with the number of a job or task."""
    tag = re.search("%[jtAa]", folder)
    if tag:
        raise InputError(
            f"{folder}: must not contain {tag[0]}, which stands for a job's number in the paths of its files"
        )


def visible_gpus(number: int, most: int | None = None) -> list[str]:
    """Return the names of at most *most* of the GPUs that are visible, *number* in all, as in CUDA_VISIBLE_DEVICES."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")] if visible else [str(gpu) for gpu in range(number)]
    return names[: min(number, most or number)]


def outcomes(
    tasks: Iterable[Task],
    function: Callable[[Task], Result],
    launcher: Launcher,
    folder: str | Path,
    watcher: Watcher[Task] | None = None,
    fatal: tuple[type[Exception], ...] = (),
) -> Generator[Outcome[Task, Result], None, None]:
    """Call *function* with each of *tasks* in a new process, and yield how each ended.

    Closing the iterator ends the processes that are running.

    Args:
        function: a function of a module, or a ``functools.partial`` of one
        folder: gets a new folder with the files of submitit, such as the logs of the processes. If it is one that all
            nodes of SLURM see, they can be on any of them.
        fatal: if *function* raises one of these errors, the other processes are ended and the error is raised here

    Raises:
        InputError: there is no SLURM, submitit does not know a parameter of *launcher*, or *folder* has a tag
    """
    own_folder = Path(os.path.realpath(folder), f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    refuse_tags(str(own_folder))
    executor = launcher.executor(own_folder)
    own_folder.mkdir(parents=True, exist_ok=True)
    launch = _Launch(list(tasks), function, launcher, executor, own_folder, watcher or Watcher(), fatal)
    with _jobs_import_this_package(), local.interruptible(), locked(launch.lock):
        try:
            yield from launch.outcomes()
        finally:
            launch.cancel()


class _Launch(Generic[Task, Result]):
    """One call of :func:`outcomes`."""

    def __init__(
        self,
        waiting: list[Task],
        function: Callable[[Task], Result],
        launcher: Launcher,
        executor: Any,
        folder: Path,
        watcher: Watcher[Task],
        fatal: tuple[type[Exception], ...],
    ) -> None:
        self.lock = folder / "lock"
        self._waiting, self._running = waiting, dict[int, tuple[Task, Any]]()  # by place, each with its job
        self._function, self._fatal = function, fatal
        self._executor, self._folder, self._watcher = executor, folder, watcher
        self._most, self._gpus = launcher.jobs or len(waiting), launcher.gpus
        self._jobs = self._most  # at a time, which SLURM can limit
        self._refusal = ""  # the last error of sbatch that was shown
        self._of_slurm = launcher.slurm is not None
        self._asked = self._submit_from = time.monotonic()
        self._is_silent = False  # whether slurmctld did not answer the last submission

    def outcomes(self) -> Iterator[Outcome[Task, Result]]:
        while self._waiting or self._running:
            yield from self._submitted()
            time.sleep(POLL_SLURM if self._of_slurm else POLL)
            if self._of_slurm:
                self._ask_slurm()
            yield from self._ended()
            self._watcher.looked()

    def cancel(self) -> None:
        """End the jobs that are running, and wait for their ends."""
        if self._of_slurm:
            # The last one may just have been submitted.
            if self._running or (self._waiting and not self._is_silent):
                try:
                    slurm.cancel_jobs_in(self._folder)
                except InputError as error:
                    self._watcher.waits(None, str(error))
                except BaseException:  # a second Ctrl-C
                    numbers = " ".join(job.job_id for _, job in self._running.values())
                    self._watcher.waits(None, f"SLURM's jobs {numbers} may still run; cancel them with scancel")
                    raise
            return
        jobs = [job for _, job in self._running.values()]
        for job in jobs:
            job.cancel(check=False)
        latest = time.monotonic() + slurm.ENDING
        while not all(job.done() for job in jobs) and time.monotonic() < latest:
            time.sleep(POLL)

    def _submitted(self) -> Iterator[Outcome[Task, Result]]:
        """Submit the next tasks, for about a second, and yield those that cannot be submitted."""
        until = time.monotonic() + 1
        while self._waiting and len(self._running) < self._jobs and self._submit_from <= time.monotonic() <= until:
            task = self._watcher.next_task(self._waiting, [task for task, _ in self._running.values()])
            if task is None:
                return
            place = next(place for place in count() if place not in self._running)
            try:
                job = self._executor.submit(_in_job, self._function, task, self._fatal, self._starter(place))
            except (FailedJobError, FailedSubmissionError) as error:  # of sbatch: refused, or without a job number
                message = str(error).partition("\nJob instance")[0]  # without submitit's advice
                yield from self._refused(task, f"it could not be submitted: {' '.join(message.split())}")
                return
            self._waiting.remove(task)
            self._running[place] = task, job
            self._is_silent = False
            self._watcher.begun(task, str(job.paths.stdout))

    def _starter(self, place: int) -> local.Starter | None:
        if self._of_slurm:
            return None
        # submitit's local jobs see no GPU unless a number of GPUs is given, so that each job sets the variable again.
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return local.Starter(self.lock, self._gpus[place % len(self._gpus)] if self._gpus else visible)

    def _refused(self, task: Task, why: str) -> Iterator[Outcome[Task, Result]]:
        """Wait until *task* can be submitted, or yield its failure if nothing is waited for."""
        if re.search(slurm.NO_ANSWER, why, re.I):
            if not self._is_silent:
                self._watcher.waits(task, f"{why}; tried again until it can be")
            self._is_silent, self._submit_from = True, time.monotonic() + slurm.ASKING
        elif self._running:  # for example, there is a limit on the jobs of a user
            if why != self._refusal:
                self._watcher.waits(task, f"{why}; it waits for the end of a job")
            self._refusal, self._jobs = why, len(self._running)
        else:
            self._waiting.remove(task)
            yield Outcome(task, None, why)

    def _ask_slurm(self) -> None:
        if time.monotonic() - self._asked < slurm.ASKING:
            return
        task_of = {job: task for task, job in self._running.values()}
        by_reason: dict[str, list[Any]] = {}
        for job, reason in slurm.waiting_jobs(task_of).items():
            by_reason.setdefault(reason, []).append(job)
        for reason, jobs in by_reason.items():
            numbers = ", ".join(job.job_id for job in jobs[:NAMED])
            more = f" and {len(jobs) - NAMED} more" if len(jobs) > NAMED else ""
            which = f"its job{'s' if len(jobs) > 1 else ''} {numbers}{more}"
            self._watcher.waits(task_of[jobs[0]], f"SLURM has not begun {which} for a minute: {reason}")
        self._asked = time.monotonic()

    def _ended(self) -> Iterator[Outcome[Task, Result]]:
        if self._of_slurm:
            with contextlib.suppress(OSError):  # a network file system then shows a new file at once
                self._folder.chmod(self._folder.stat().st_mode)
        for place, (task, job) in list(self._running.items()):
            if job.done():
                del self._running[place]
                self._jobs = min(self._jobs + 1, self._most)  # the limit can be a larger one now
                yield _outcome(job, task)


def _in_job(
    function: Callable[[Task], Result], task: Task, fatal: tuple[type[Exception], ...], starter: local.Starter | None
) -> Result | _Raised:
    """Return what *function* returns, or the error that ends the run. *starter* is None in a job of SLURM."""
    handle_signals(lambda number, _: sys.exit(128 + number))  # submitit ignores SIGTERM
    if os.environ.get(SAFE_PATH) == FOR_JOBS:  # not for the programs that the job starts
        del os.environ[SAFE_PATH]
    if starter is not None:
        starter.prepare()
    try:
        return function(task)
    except fatal as error:
        return _Raised(error)


def _outcome(job: Any, task: Task) -> Outcome[Task, Any]:
    """Return how *job* ended, and remove its task and its result from the disk."""
    error = job.exception()
    failure, result = "", None
    if error is None:
        result = job.result()
    elif isinstance(job, slurm.SlurmJob):
        failure = job.ending(error)
    if error is not None and not failure:
        trace = str(error).rpartition("\n-----")[0].strip() if isinstance(error, FailedJobError) else ""
        failure = trace.splitlines()[-1] if trace else "its process ended without a result"  # submitit's advice follows
    # A later process can have the same number, which is in the names of these files.
    for path in (job.paths.submitted_pickle, job.paths.result_pickle):
        path.unlink(missing_ok=True)
    if isinstance(result, _Raised):
        raise result.error
    log = job.paths.stdout
    if failure:
        failure += f" (log: {log})" if log.exists() else ", and it has no log"
    return Outcome(task, result, failure, str(log))


@contextlib.contextmanager
def _jobs_import_this_package() -> Iterator[None]:
    """Let jobs find this package, but take no module of Python from the folder around it or from the current one."""
    before = {name: os.environ.get(name) for name in ("PYTHONPATH", SAFE_PATH)}
    if str(ROOT) not in map(os.path.realpath, site.getsitepackages()):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before["PYTHONPATH"]]))
    os.environ.setdefault(SAFE_PATH, FOR_JOBS)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
