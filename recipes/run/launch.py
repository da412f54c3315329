"""Run the stages of several runs: one run after another, side by side on this machine, or as jobs of SLURM.

submitit starts the processes. A run is locked while a process works on it, so that two launches never train the same
run at once.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import math
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import FailedJobError, FailedSubmissionError
from submitit.slurm.slurm import SlurmJob

from fairseq_rope.errors import InputError, handle_signals, sentence_of
from fairseq_rope.launch import QuietExecutor
from fairseq_rope.tools import escape_unencodable_output
from recipes.run.lock import locked_when_free
from recipes.run.run import ROOT, Run, StageError
from recipes.run.runner import Runner
from recipes.run.stage import Stage
from recipes.run.yaml_file import SettingsError

# A run that the stages' type accepts. Dataclasses are required, since the launcher replaces their GPUs.
LaunchedRun = Any
StagesOf = Callable[[LaunchedRun], Sequence[Stage[Any]]]

LONGEST = 60 * 24 * 365  # minutes that a job may take on this machine
ENDING = 60  # seconds that cancelled jobs have to end
ASKING = 20  # seconds between two questions to SLURM about its jobs
LATE = 15  # seconds after the end of a job of SLURM in which a network file system shows its result
UNKNOWN = 60  # seconds that SLURM has not known a job, after which it counts as failed
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


@dataclass
class _Running:
    """A submitted job, and when it began, in seconds."""

    run: LaunchedRun
    job: submitit.Job[str]
    begun: float


def add_flags(parser: argparse.ArgumentParser, seeds: int) -> None:
    """Add the flags that say where runs are trained, and from which seeds; default: *seeds*."""
    add = parser.add_argument
    help_of_seeds = "train seeds 1 to N, or seeds FIRST to LAST; default: %(default)s"
    add("--seeds", default=str(seeds), metavar="N|FIRST-LAST", help=help_of_seeds)
    side_by_side = "runs side by side; on CPUs each with one thread if N > 1, on GPUs each on one GPU, which several "
    side_by_side += "share if N is larger than their number; "
    add("--jobs", type=int, metavar="N", help=side_by_side + "default: 1, with slurm all")
    where = "slurm: one job of SLURM for each run, by submitit; default: this machine"
    add("--launcher", choices=("local", "slurm"), default="local", help=where)
    add("--slurm-partition", metavar="NAME", help="SLURM's partition")
    further = "a parameter of submitit's SlurmExecutor: gpus_per_node=1, mem=16GB, or time=600 (in minutes; required)"
    command = "; each setup=COMMAND adds a command"
    add("--slurm", action="append", default=[], metavar="KEY=VALUE", help=further + command)


def refuse_contradictions(args: argparse.Namespace) -> None:
    """Raise a SettingsError if the flags contradict each other."""
    if args.jobs is not None and args.jobs < 1:
        raise SettingsError(f"--jobs {args.jobs}: must be 1 or more")
    for flag, value in (("--slurm-partition", args.slurm_partition), ("--slurm", " ".join(args.slurm))):
        if value and args.launcher != "slurm":
            raise SettingsError(f"{flag} {value}: needs --launcher slurm")
    for parameter in args.slurm:
        if "=" not in parameter:
            raise SettingsError(f"--slurm {parameter}: must have the form KEY=VALUE")
        if parameter.startswith("additional_parameters="):
            dictionary = "submitit's additional_parameters is a dictionary, and not a flag here"
            raise SettingsError(f"--slurm {parameter}: {dictionary}")
    if args.launcher == "slurm":
        minutes = [parameter.partition("=")[2] for parameter in args.slurm if parameter.startswith("time=")]
        if not minutes:
            raise SettingsError("--launcher slurm: needs --slurm time=MINUTES; submitit would ask for 5 minutes")
        if not re.fullmatch("[1-9][0-9]*", minutes[-1]):
            raise SettingsError(f"--slurm time={minutes[-1]}: must be a number of minutes, 1 or more")


def seeds_of(words: str) -> range:
    """The seeds of N, which are 1 to N, or of FIRST-LAST. Raises a SettingsError if *words* is something else."""
    numbers = re.fullmatch(r"(?:([1-9]\d*)-)?(\d+)", words)
    seeds = range(int(numbers[1] or 1), int(numbers[2]) + 1) if numbers else range(0)
    if not seeds:
        raise SettingsError(f"--seeds {words}: must be N, for seeds 1 to N, or FIRST-LAST, both 1 or more")
    return seeds


def is_done(run: LaunchedRun, stages_of: StagesOf) -> bool:
    """Whether the stages of *run* are done with the present settings and inputs."""
    stamps = Runner(run).stamps
    return all(stamps.is_done(stage) for stage in stages_of(run))


def is_trained(run: LaunchedRun, stages_of: StagesOf) -> bool:
    """Whether nothing has to be trained for *run*."""
    stamps = Runner(run).stamps
    return all(stamps.is_done(stage) for stage in stages_of(run) if stage.trains)


def run_stages(
    run: LaunchedRun, stages_of: StagesOf, program: str, on_signal: bool = False, gpu: str | None = None
) -> str:
    """Run the stages of one run that are not done. Returns why it failed, or "".

    *on_signal* and *gpu* are the arguments of :func:`begin_job`.
    """
    begin_job(on_signal, gpu)
    with locked_when_free(run.lock) as lock:
        stages = stages_of(run)
        runner = Runner(run, stages, locks=(lock,), program=program)
        try:
            for stage in stages:
                runner.ensure(stage)
        except InputError as error:
            return str(error)
        except OSError as error:
            return sentence_of(error, run.model)
    return ""


def begin_job(on_signal: bool, gpu: str | None) -> None:
    """Prepare this process to work on a run.

    *on_signal*: whether a signal ends this process and the command that it runs; submitit ignores SIGTERM. *gpu* is the
    GPU to use, as in CUDA_VISIBLE_DEVICES; None: those that are visible.
    """
    escape_unencodable_output()
    if gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    if on_signal:
        handle_signals(lambda number, _: sys.exit(128 + number))


def outcomes(
    runs: Sequence[LaunchedRun], stages_of: StagesOf, program: str, args: argparse.Namespace
) -> Iterator[tuple[LaunchedRun, str]]:
    """Run the stages of *runs*, and yield each run with the reason of its failure, or "", when it has ended.

    *stages_of* gives the stages of a run, in order. It must be a function of a module, so that jobs can import it.
    *program* is the command that repeats the runs.
    """
    # The time left is that of these runs. The others, which may still have to translate, take much less.
    untrained = {run.model for run in runs if not is_trained(run, stages_of)}
    if args.launcher == "local" and (args.jobs or 1) == 1:
        took: list[float] = []
        for number, run in enumerate(runs):
            left = time_left(took, sum(waiting.model in untrained for waiting in runs[number:]))
            print(f"== run {number + 1} of {len(runs)}: {run.title}{left}", flush=True)
            begun = time.monotonic()
            failure = run_stages(run, stages_of, program)
            if run.model in untrained and not failure:
                took.append(time.monotonic() - begun)
            yield run, failure
        return
    how = stages_of, program, untrained
    if args.launcher == "slurm":
        yield from _submitted(runs, how, args.jobs or len(runs), slurm_executor(args, runs[0]))
        return
    gpus = _gpus(runs[0])
    os.environ["OMP_NUM_THREADS"] = "1"
    # submitit stops a job with SIGINT, which it would ignore, as this process does in the background of a script.
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    executor = QuietExecutor(folder=_job_folder(runs[0]))
    executor.update_parameters(timeout_min=LONGEST, stderr_to_stdout=True)
    if gpus:
        runs = [dataclasses.replace(run, gpus=1) for run in runs]
    try:
        yield from _submitted(runs, how, args.jobs, executor, gpus)
    finally:
        signal.signal(signal.SIGINT, previous_handler)


def time_left(took: Sequence[float], waiting: int, running: Sequence[float] = (), jobs: int = 1) -> str:
    """The time until all runs have ended, as ", about 5 min left", if each takes the mean of those that have ended.

    Args:
        took: the seconds of the runs that have ended; if there are none, the text is empty
        waiting: how many runs have not begun
        running: the seconds since each of the others has begun
        jobs: how many runs are trained at a time
    """
    if not took or not (waiting or running):
        return ""
    mean = statistics.mean(took)
    of_each = [*([mean] * waiting), *(max(0.0, mean - seconds) for seconds in running)]
    hours, minutes = divmod(math.ceil(max(*of_each, sum(of_each) / jobs, 1.0) / 60), 60)
    return f", about {f'{hours} h ' if hours else ''}{minutes} min left"


def _job_folder(run: Run) -> Path:
    """A new folder for the files of submitit: job numbers of this machine are process numbers, which can repeat."""
    return run.work / "jobs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


def slurm_executor(args: argparse.Namespace, run: Run) -> submitit.SlurmExecutor:
    """submitit's executor with the parameters of the flags, for the folder and the GPUs of *run*.

    Raises a StageError if this machine has no SLURM, or if submitit does not know a parameter.
    """
    parameters: dict[str, Any] = {}
    for parameter in args.slurm:
        key, _, value = parameter.partition("=")
        if key in ("setup", "teardown"):
            parameters.setdefault(key, []).append(value)
        elif key == "srun_args":
            parameters[key] = shlex.split(value)
        else:
            plain = int(value) if value.isdigit() else value
            parameters[key] = {"true": True, "false": False}.get(value.lower(), plain)
    if args.slurm_partition:
        parameters["partition"] = args.slurm_partition
    if run.gpus:
        parameters.setdefault("gpus_per_node", run.gpus)
    parameters.setdefault("stderr_to_stdout", True)
    try:
        executor = _SlurmExecutor(folder=_job_folder(run))
        executor.update_parameters(**parameters)
    except (ValueError, TypeError, NameError, RuntimeError) as error:
        flags = f"--launcher slurm --slurm {' '.join(args.slurm)}"
        raise StageError(f"{flags}: {' '.join(str(error).split())}") from None
    return executor


class _SlurmJob(SlurmJob[str]):
    """A job of SLURM, whose state slurmctld knows while it runs and for some minutes afterwards.

    submitit asks only the accounting, which many clusters lack, and prints two warnings each time it fails.
    """

    _results_timeout_s = 0  # done() waits for a late result, so that one job does not stop the others

    def __init__(self, folder: Path | str, job_id: str, tasks: Sequence[int] = (0,)) -> None:
        super().__init__(folder, job_id, tasks)
        self._state = "PENDING"
        self._unknown_since: float | None = None
        self._ended: float | None = None  # when SLURM first said so

    def _register_in_watcher(self) -> None:  # of submitit, which asks the accounting
        pass

    @property
    def state(self) -> str:
        """The last known state, by SLURM's name; "UNKNOWN" if SLURM has not known the job for a minute."""
        return self._state

    def ask(self) -> bool:
        """Ask SLURM for the state. Returns whether it answers."""
        shown = _ask("scontrol", "--oneliner", "show", "job", self.job_id)
        state = re.search(r"\bJobState=(\w+)", shown.stdout)
        if state is None and "invalid job id" not in shown.stderr.lower():
            return False
        if state is None:
            form = ("--allocations", "--noheader", "--parsable2", "--format=State")
            state = re.match(r"\s*(\w+)", _ask("sacct", *form, "--jobs", self.job_id).stdout)
        if state is not None:
            self._state, self._unknown_since = state[1], None
        elif self._unknown_since is None:
            self._unknown_since = time.monotonic()
        elif time.monotonic() - self._unknown_since >= UNKNOWN:
            self._state = "UNKNOWN"
        if self._state not in (*ENDED, "UNKNOWN"):
            self._ended = None
        elif self._ended is None:
            self._ended = time.monotonic()
        return True

    def done(self, force_check: bool = False) -> bool:
        """Whether it has a result, or has ended and will have none; *force_check*: whether it has ended at all."""
        with contextlib.suppress(OSError):  # a network file system then shows a new file at once
            self.paths.folder.chmod(self.paths.folder.stat().st_mode)
        late = 0 if force_check else LATE
        without_result = self._ended is not None and time.monotonic() - self._ended >= late
        return self.paths.result_pickle.exists() or without_result

    def ending(self, error: Exception) -> str:
        """Why the job has no result, after *error* of submitit."""
        if "timed-out and not checkpointable" in str(error):  # by the signal that SLURM sends before the limit
            return f"SLURM ended its job {self.job_id}: TIMEOUT"
        if self.state == "UNKNOWN":
            return f"SLURM does not know its job {self.job_id} any more, which has no result"
        if self.state in ENDED and self.state != "COMPLETED":
            return f"SLURM ended its job {self.job_id}: {self.state}"
        return "its process ended without a result"


def _ask(*command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of SLURM and keep what it prints."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:  # not all clusters have sacct
        return subprocess.CompletedProcess(command, 1, "", str(error))


def _ask_slurm(jobs: Iterable[submitit.Job[str]]) -> None:
    """Ask for the states of those *jobs* that are SLURM's and have not ended, until a question has no answer.

    Without slurmctld, each question takes some 20 seconds.
    """
    for job in jobs:
        if isinstance(job, _SlurmJob) and not job.done() and not job.ask():
            break


class _SlurmExecutor(submitit.SlurmExecutor):
    """Submits jobs to SLURM. An error of sbatch is part of the exception, and submitit does not print it."""

    job_class = _SlurmJob

    def _submit_command(self, command: str) -> Any:
        with contextlib.redirect_stderr(io.StringIO()):
            return super()._submit_command(command)


def _gpus(run: Run) -> list[str]:
    """The GPUs that the comparison may use, as in CUDA_VISIBLE_DEVICES."""
    if run.gpus == 0:
        return []
    import torch

    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")] if visible else []
    count = torch.cuda.device_count()
    return (names or [str(number) for number in range(count)])[: min(count, run.gpus or count)]


def _submitted(
    runs: Sequence[LaunchedRun],
    how: tuple[StagesOf, str, Collection[Path]],
    jobs: int,
    executor: submitit.Executor,
    gpus: Sequence[str] = (),
) -> Iterator[tuple[LaunchedRun, str]]:
    stages_of, program, untrained = how
    # Jobs import the recipes, wherever they run.
    os.environ["PYTHONPATH"] = ":".join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = [run for run in runs if is_done(run, stages_of)]
    for run in done:
        print(f"== {run.title}: done before", flush=True)
        yield run, ""
    waiting = [run for run in runs if run not in done]
    running: dict[int, _Running] = {}  # by place
    took: list[float] = []
    asked = submit_from = time.monotonic()
    silent = False  # whether slurmctld did not answer the last submission
    try:
        while waiting or running:
            while len(running) < jobs and time.monotonic() >= submit_from:
                place = next(place for place in itertools.count() if place not in running)
                ready = _first_ready(waiting, [submitted.run for submitted in running.values()])
                if ready is None:
                    break
                try:
                    gpu = gpus[place % len(gpus)] if gpus else None
                    job = executor.submit(run_stages, ready, stages_of, program, on_signal=True, gpu=gpu)
                except (FailedJobError, FailedSubmissionError) as error:  # of sbatch: refused, or without a job number
                    message = str(error).partition("\nJob instance")[0]  # without submitit's advice
                    why = f"it could not be submitted: {' '.join(message.split())}"
                    if re.search(NO_ANSWER, why, re.I):
                        if not silent:
                            print(f"== {ready.title}: {why}; tried again until it can be", flush=True)
                        silent, submit_from = True, time.monotonic() + ASKING
                    elif not running:
                        waiting.remove(ready)
                        yield ready, why
                    else:  # for example, there is a limit on the jobs of a user
                        print(f"== {ready.title}: {why}; it waits for the end of a job", flush=True)
                        jobs = len(running)
                    break
                waiting.remove(ready)
                silent = False
                number = f"run {len(runs) - len(waiting)} of {len(runs)}"
                print(f"== {ready.title}: begun, {number}, log: {job.paths.stdout}", flush=True)
                running[place] = _Running(ready, job, time.time())
            time.sleep(1)
            if time.monotonic() - asked >= ASKING:
                _ask_slurm([submitted.job for submitted in running.values()])
                asked = time.monotonic()
            for place, submitted in list(running.items()):
                failure = _failure(submitted.job)
                if failure is not None:
                    del running[place]
                    seconds = time.time() - submitted.begun
                    if submitted.run.model in untrained and not failure:
                        took.append(seconds)
                    ended = f"failed: {failure}" if failure else "done"
                    number = f"{len(runs) - len(waiting) - len(running)} of {len(runs)} runs have ended"
                    since = [time.time() - job.begun for job in running.values() if job.run.model in untrained]
                    left = time_left(took, sum(run.model in untrained for run in waiting), since, jobs)
                    print(f"== {submitted.run.title}: {ended}, {seconds:.0f} s; {number}{left}", flush=True)
                    yield submitted.run, failure
    finally:
        _cancel([submitted.job for submitted in running.values()])


def _cancel(jobs: Sequence[submitit.Job[str]]) -> None:
    """Cancel *jobs* and wait for their ends, with which their commands end too."""
    for job in jobs:
        job.cancel(check=False)
    latest = time.monotonic() + ENDING
    while not all(job.done(force_check=True) for job in jobs) and time.monotonic() < latest:
        time.sleep(0.5)
        _ask_slurm(jobs)


def _first_ready(waiting: Sequence[Any], running: Sequence[Any]) -> Any:
    """The first of the runs *waiting* whose model no other run has still to train, or None."""
    trainings = {run.model for run in (*waiting, *running)}
    return next((run for run in waiting if not run.training_of or run.training.model not in trainings), None)


def _failure(job: submitit.Job[str]) -> str | None:
    """Why the job has failed, or "" if it has not; None if it has not ended."""
    if not job.done():
        return None
    error = job.exception()
    if error is None:
        return str(job.result())
    why = job.ending(error) if isinstance(job, _SlurmJob) else "its process ended without a result"
    return f"{why} (log: {job.paths.stdout})" if job.paths.stdout.exists() else f"{why}, and it has no log"
