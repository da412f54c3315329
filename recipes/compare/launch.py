"""Train the runs of a comparison one after another, side by side on this machine, or as jobs of SLURM.

submitit starts the processes. A run is one system with one seed. It is locked while a process works on it, so that two
launches never train the same run at once.
"""

import argparse
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import submitit
from submitit.local.local import LocalExecutor

from recipes.compare.stage08_take_model import TakeModel
from recipes.compare.stage22_translate_joined import TranslateJoined
from recipes.pipeline.experiment import ROOT, Experiment, StageError
from recipes.pipeline.lock import locked_when_free
from recipes.pipeline.runner import Runner
from recipes.pipeline.session import write_down
from recipes.pipeline.settings import SettingsError
from recipes.pipeline.stage import Stage
from recipes.pipeline.stages import SCORE, STAGES, TO_SCORE, TRANSLATE

LONGEST = 60 * 24 * 365  # minutes that a job may take on this machine

Outcome = tuple[Experiment, str]  # a run, and why it failed, or ""


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that say where runs are trained."""
    add = parser.add_argument
    side_by_side = (
        "runs side by side; on CPUs each with one thread if N > 1, on GPUs each on one GPU; default: 1, with "
    )
    add("--jobs", type=int, metavar="N", help=side_by_side + "slurm all")
    where = "slurm: one job of SLURM for each run, by submitit; default: this machine"
    add("--launcher", choices=("local", "slurm"), default="local", help=where)
    add("--slurm-partition", metavar="NAME", help="SLURM's partition")
    further = "a parameter of submitit's SlurmExecutor: gpus_per_node=1, mem=16GB, or time=600 (in minutes; required)"
    add("--slurm", action="append", default=[], metavar="KEY=VALUE", help=further)


def check(args: argparse.Namespace) -> None:
    """Raise a SettingsError if the flags contradict each other."""
    if args.jobs is not None and args.jobs < 1:
        raise SettingsError(f"--jobs {args.jobs}: must be 1 or more")
    of_slurm = {"--slurm-partition": args.slurm_partition, "--slurm": " ".join(args.slurm)}
    for flag, value in of_slurm.items():
        if value and args.launcher != "slurm":
            raise SettingsError(f"{flag} {value}: needs --launcher slurm")
    for given in args.slurm:
        if "=" not in given:
            raise SettingsError(f"--slurm {given}: must have the form KEY=VALUE")
    if args.launcher == "slurm" and not any(given.startswith("time=") for given in args.slurm):
        raise SettingsError("--launcher slurm: needs --slurm time=MINUTES; submitit would ask for 5 minutes")


def stages_of(run: Experiment) -> tuple[Stage, ...]:
    """The stages of a run, in order."""
    own = (TakeModel(), TRANSLATE, SCORE) if run.training_of else (stage for stage in TO_SCORE if stage.per_model)
    return (*own, TranslateJoined())


def train(experiment: Experiment, program: str, on_signal: bool = False) -> str:
    """Run the stages of one run that are not done. Returns why it failed, or "".

    Args:
        program: the command of the comparison
        on_signal: whether a signal ends this process and the command that it runs; submitit ignores SIGTERM
    """
    if on_signal:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    with locked_when_free(experiment.work / "locks" / f"{experiment.model.name}.lock") as lock:
        record = functools.partial(write_down, experiment, program)
        runner = Runner(experiment, STAGES, locks=(lock,), record=record)
        try:
            if experiment.training_of:
                TakeModel().check(experiment)
            for stage in stages_of(experiment):
                runner.ensure(stage)
        except StageError as error:
            return str(error)
        except OSError as error:
            return f"{error.filename or experiment.model}: {error.strerror or error}"
    return ""


def outcomes(runs: Sequence[Experiment], program: str, args: argparse.Namespace) -> Iterator[Outcome]:
    """Train *runs*, and yield each with the reason of its failure, or "", when it has ended."""
    if args.launcher == "local" and (args.jobs or 1) == 1:
        for run in runs:
            print(f"== {run.system}, seed {run.seed}", flush=True)
            yield run, train(run, program)
        return
    folder = runs[0].work / "jobs"
    yield from _submitted(runs, program, args.jobs or len(runs), _executors(args, folder, runs[0]))


def _executors(args: argparse.Namespace, folder: Path, experiment: Experiment) -> Callable[[int], submitit.Executor]:
    """A function that returns submitit's executor for a place, one of 0 … jobs - 1.

    Raises a StageError if this machine has no SLURM, or if submitit does not know a parameter.
    """
    # Jobs import the recipes, wherever they run.
    os.environ["PYTHONPATH"] = ":".join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if args.launcher == "slurm":
        parameters: dict[str, Any] = dict(given.split("=", 1) for given in args.slurm)
        if args.slurm_partition:
            parameters["partition"] = args.slurm_partition
        if experiment.gpus:
            parameters.setdefault("gpus_per_node", experiment.gpus)
        try:
            executor = submitit.SlurmExecutor(folder=folder)
            executor.update_parameters(**{key: int(v) if v.isdigit() else v for key, v in parameters.items()})
        except (ValueError, TypeError, NameError, RuntimeError) as error:
            given = f"--launcher slurm --slurm {' '.join(args.slurm)}"
            raise StageError(f"{given}: {' '.join(str(error).split())}") from None
        return lambda place: executor
    gpus = _gpus(experiment)
    os.environ["OMP_NUM_THREADS"] = "1"
    # submitit stops a job with SIGINT, which it would ignore, as this process does in the background of a script.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def local(place: int) -> submitit.Executor:
        executor = LocalExecutor(folder=folder)
        executor.update_parameters(timeout_min=LONGEST, stderr_to_stdout=True)
        if gpus:
            executor.update_parameters(gpus_per_node=1, visible_gpus=(place % gpus,))
        return executor

    return local


def _gpus(experiment: Experiment) -> int:
    """The GPUs of this machine that the comparison may use."""
    if experiment.gpus == 0:
        return 0
    import torch

    return torch.cuda.device_count()


def _submitted(
    runs: Sequence[Experiment], program: str, jobs: int, executor: Callable[[int], submitit.Executor]
) -> Iterator[Outcome]:
    waiting = list(runs)
    running: dict[int, tuple[Experiment, submitit.Job, float]] = {}  # by place
    try:
        while waiting or running:
            for place in [place for place in range(jobs) if place not in running]:
                run = _first_ready(waiting, [run for run, _, _ in running.values()])
                if run is None:
                    break
                waiting.remove(run)
                job = executor(place).submit(train, run, program, on_signal=True)
                print(f"== {run.system}, seed {run.seed}: begun, log: {job.paths.stdout}", flush=True)
                running[place] = run, job, time.time()
            time.sleep(1)
            for place, (run, job, begun) in list(running.items()):
                if job.done():
                    del running[place]
                    failure = _failure(job)
                    ended = f"failed: {failure}" if failure else "done"
                    print(f"== {run.system}, seed {run.seed}: {ended}, {time.time() - begun:.0f} s", flush=True)
                    yield run, failure
    finally:
        for _, job, _ in running.values():
            job.cancel(check=False)
        for _, job, _ in running.values():  # the commands of a job end with it
            while not job.done():
                time.sleep(0.1)


def _first_ready(waiting: Sequence[Experiment], running: Sequence[Experiment]) -> Experiment | None:
    """The first of the runs *waiting* whose model no other run has still to train, or None."""
    trainings = {run.model for run in (*waiting, *running)}
    return next((run for run in waiting if not run.training_of or run.training.model not in trainings), None)


def _failure(job: submitit.Job) -> str:
    """Why the ended *job* failed, or ""."""
    if job.exception() is None:
        return str(job.result())
    return f"its process ended without a result (log: {job.paths.stdout})"
