"""Run a function for many tasks, each in a new process. submitit starts the processes.

No process outlives the one that started it: each waits in a thread for a lock that the starting process holds, and ends
when it gets the lock.
"""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from submitit.local.local import LocalExecutor

from .errors import InputError, handle_signals
from .locks import locked

Task = TypeVar("Task")
Result = TypeVar("Result")

LONGEST = 60 * 24 * 365  # minutes that a job may take
ENDING = 60  # seconds that cancelled jobs have to end
POLL = 0.1  # seconds between two looks at the jobs
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Outcome(Generic[Task, Result]):
    """How the process of a *task* ended: with a *result*, or with the reason of its *failure*, otherwise ""."""

    task: Task
    result: Result | None
    failure: str


@dataclass(frozen=True)
class _Raised:
    """An error that ends the whole run, for example because the disk is full."""

    error: Exception


def outcomes(
    tasks: Iterable[Task], function: Callable[[Task], Result], jobs: int, folder: str
) -> Generator[Outcome[Task, Result], None, None]:
    """Call *function* with each of *tasks* in a new process, *jobs* at a time, and yield how each ended.

    Closing the iterator ends the processes that are running.

    Args:
        function: a function of a module, or a ``functools.partial`` of one
        folder: gets a new folder with the files of submitit. The log of a process stays there if the process fails.

    Raises:
        InputError, OSError, ImportError: *function* has raised it; the other processes are ended
    """
    own_folder = Path(folder, f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    own_folder.mkdir(parents=True)
    lock = str(own_folder / "lock")
    executor = QuietExecutor(folder=own_folder)
    executor.update_parameters(timeout_min=LONGEST, stderr_to_stdout=True)
    waiting, running = iter(tasks), dict[Any, Task]()  # by job
    # submitit's local jobs see no GPU unless a number of GPUs is given, so that each job sets the variable again.
    gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
    with _jobs_import_this_package(), _jobs_can_be_interrupted(), locked(lock):
        try:
            while True:
                for task in itertools.islice(waiting, jobs - len(running)):
                    running[executor.submit(_in_job, function, task, lock, gpus)] = task
                if not running:
                    return
                time.sleep(POLL)
                for job in [job for job in running if job.done()]:
                    yield _outcome(job, running.pop(job))
        finally:
            _cancel(list(running))


def _in_job(function: Callable[[Task], Result], task: Task, lock: str, gpus: str | None) -> Result | _Raised:
    """Return what *function* returns, or the error that ends the run."""
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    handle_signals(lambda number, _: sys.exit(128 + number))  # submitit ignores SIGTERM
    _end_after_the_launcher(lock, wait=False)
    threading.Thread(target=_end_after_the_launcher, args=(lock, True), daemon=True).start()
    try:
        return function(task)
    except (InputError, OSError, ImportError) as error:
        return _Raised(error)


def _end_after_the_launcher(lock: str, wait: bool) -> None:
    """End this process if the one that holds *lock* has ended; *wait*: wait until it has."""
    with contextlib.suppress(FileNotFoundError, BlockingIOError), locked(lock, wait, shared=True) as held:
        if held.works:
            os.kill(os.getpid(), signal.SIGTERM)


def _outcome(job: Any, task: Task) -> Outcome[Task, Any]:
    """Return how *job* ended, and remove its files. Its log stays if it failed."""
    failure, result = "its process ended without a result", None
    if job.paths.result_pickle.exists():  # otherwise submitit would look for it for some seconds
        error = job.exception()
        if error is None:
            failure, result = "", job.result()
        else:
            trace = str(error).rpartition("\n-----")[0].strip()  # submitit's advice follows
            failure = trace.splitlines()[-1] if trace else failure
    # A later process can have the same number, which is in the names of these files.
    for path in (job.paths.submitted_pickle, job.paths.result_pickle, *([] if failure else [job.paths.stdout])):
        path.unlink(missing_ok=True)
    if isinstance(result, _Raised):
        raise result.error
    return Outcome(task, result, f"{failure} (log: {job.paths.stdout})" if failure else "")


def _cancel(jobs: Sequence[Any]) -> None:
    """End *jobs*, and wait for their ends."""
    for job in jobs:
        job.cancel(check=False)
    latest = time.monotonic() + ENDING
    while not all(job.done(force_check=True) for job in jobs) and time.monotonic() < latest:
        time.sleep(POLL)


@contextlib.contextmanager
def _jobs_import_this_package() -> Iterator[None]:
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), before]))
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        if before is not None:
            os.environ["PYTHONPATH"] = before


@contextlib.contextmanager
def _jobs_can_be_interrupted() -> Iterator[None]:
    """Handle SIGINT, with which submitit ends jobs. They would ignore it, as a shell's background processes do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class QuietExecutor(LocalExecutor):
    """Starts jobs on this machine. A stopped job does not print the traceback of submitit's own process."""

    def _submit_command(self, command: str) -> Any:
        sys.stderr.flush()
        terminal = os.dup(2)
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        try:
            return super()._submit_command(command)
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
