"""Run the stages of several runs: one run after another, side by side on this machine, or as jobs of SLURM.

A run is locked while a process works on it, so that two launches never train the same run at once.
"""

import argparse
import dataclasses
import functools
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from fairseq_rope.errors import InputError, sentence_of
from fairseq_rope.launch import flags, jobs
from fairseq_rope.tools import escape_unencodable_output
from recipes.run.command_line import LARGEST_SEED
from recipes.run.lock import locked_when_free
from recipes.run.run import Run
from recipes.run.runner import Runner
from recipes.run.stage import Stage
from recipes.run.stamps import Stamps
from recipes.run.yaml_file import SettingsError

# A run that the stages' type accepts. Dataclasses are required, since the launcher replaces their GPUs.
LaunchedRun = Any
StagesOf = Callable[[LaunchedRun], Sequence[Stage[Any]]]


def add_flags(parser: argparse.ArgumentParser, seeds: int) -> None:
    """Add the flags that say where runs are trained, and from which seeds; default: *seeds*."""
    add = parser.add_argument
    help_of_seeds = "train seeds 1 to N, or seeds FIRST to LAST; default: %(default)s"
    add("--seeds", default=str(seeds), metavar="N|FIRST-LAST", help=help_of_seeds)
    side_by_side = "runs side by side; on CPUs each with one thread if N > 1, on GPUs each on one GPU, which several "
    side_by_side += "share if N is larger than their number; "
    add("--jobs", type=int, metavar="N", help=side_by_side + "default: 1, with slurm all")
    flags.add_flags(parser, "run")


def refuse_contradictions(args: argparse.Namespace) -> None:
    """Raise an InputError if the flags contradict each other."""
    if args.jobs is not None and args.jobs < 1:
        raise SettingsError(f"--jobs {args.jobs}: must be 1 or more")
    flags.refuse_contradictions(args)


def seeds_of(words: str) -> range:
    """The seeds of N, which are 1 to N, or of FIRST-LAST. Raises a SettingsError if *words* is something else."""
    numbers = re.fullmatch(r"(?:([1-9]\d*)-)?(\d+)", words)
    seeds = range(int(numbers[1] or 1), int(numbers[2]) + 1) if numbers else range(0)
    if not seeds or seeds[-1] > LARGEST_SEED:
        allowed = f"must be N, for seeds 1 to N, or FIRST-LAST, from 1 to {LARGEST_SEED}"
        raise SettingsError(f"--seeds {words}: {allowed}")
    return seeds


def is_done(run: LaunchedRun, stages_of: StagesOf) -> bool:
    """Whether the stages of *run* are done with the present settings and inputs."""
    stamps = Stamps(run)
    return all(stamps.is_done(stage) for stage in stages_of(run))


def is_trained(run: LaunchedRun, stages_of: StagesOf) -> bool:
    """Whether nothing has to be trained for *run*."""
    stamps = Stamps(run)
    return all(stamps.is_done(stage) for stage in stages_of(run) if stage.trains)


def run_stages(run: LaunchedRun, stages_of: StagesOf, program: str) -> str:
    """Run the stages of one run that are not done. Returns why it failed, or ""."""
    escape_unencodable_output()
    failures = []
    with locked_when_free(run.lock) as lock:
        stages = stages_of(run)
        runner = Runner(run, stages, locks=(lock,), program=program)
        for stage in stages:
            try:
                runner.ensure(stage)
            except (InputError, OSError) as error:
                failures.append(sentence_of(error, run.model) if isinstance(error, OSError) else str(error))
                if stage.is_needed:
                    break
    return "; ".join(failures)


def outcomes(
    runs: Sequence[LaunchedRun], stages_of: StagesOf, program: str, args: argparse.Namespace
) -> Iterator[tuple[LaunchedRun, str]]:
    """Run the stages of *runs*, and yield each run with the reason of its failure, or "", when it has ended.

    *stages_of* gives the stages of a run, in order. It must be a function of a module, so that jobs can import it.
    *program* is the command that repeats the runs.
    """
    if not runs:
        return
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
    done = [run for run in runs if is_done(run, stages_of)]
    for run in done:
        print(f"== {run.title}: done before", flush=True)
        yield run, ""
    waiting = [run for run in runs if run not in done]
    launcher = launcher_of(args, runs[0])
    if launcher.slurm is None:
        os.environ["OMP_NUM_THREADS"] = "1"
    if launcher.gpus:
        waiting = [dataclasses.replace(run, gpus=1) for run in waiting]
    screen = _Screen(len(runs), waiting, untrained)
    function = functools.partial(run_stages, stages_of=stages_of, program=program)
    for outcome in jobs.outcomes(waiting, function, launcher, runs[0].work / "jobs", screen):
        failure = outcome.failure or outcome.result or ""
        screen.ended(outcome.task, failure)
        yield outcome.task, failure


def launcher_of(args: argparse.Namespace, run: Run) -> jobs.Launcher:
    """Where runs like *run* are trained. Raises an InputError if there is no SLURM, or a parameter of it is unknown."""
    slurm = flags.slurm_parameters(args, run.gpus)
    if slurm is None:
        return jobs.Launcher(args.jobs, () if run.gpus == 0 else _gpus(run.gpus))
    requested = slurm.get("gpus_per_node")
    if run.gpus and isinstance(requested, int) and requested < run.gpus:
        raise SettingsError(f"--gpus {run.gpus}: --slurm gpus_per_node={requested} requests fewer; drop one of them")
    launcher = jobs.Launcher(args.jobs, slurm=slurm)
    launcher.check()
    return launcher


def _gpus(most: int | None) -> list[str]:
    import torch

    return jobs.visible_gpus(torch.cuda.device_count(), most)


class _Screen(jobs.Watcher[LaunchedRun]):
    """Prints one line for each change, and lets a run begin after the training of its model."""

    def __init__(self, runs: int, waiting: Sequence[LaunchedRun], untrained: Collection[Any]) -> None:
        """*runs* is the number of all runs; those *waiting* are not done."""
        self._runs, self._waiting, self._untrained = runs, [*waiting], untrained
        self._running = dict[str, tuple[LaunchedRun, float]]()  # by title, each with the time when it began
        self._took: list[float] = []

    def begun(self, task: LaunchedRun, log: str) -> None:
        self._waiting.remove(task)
        self._running[task.title] = task, time.monotonic()
        self._say(task, f"begun, run {self._runs - len(self._waiting)} of {self._runs}, log: {log}")

    def waits(self, task: LaunchedRun | None, why: str) -> None:
        self._say(task, why)

    def next_task(self, waiting: Sequence[LaunchedRun], running: Sequence[LaunchedRun]) -> LaunchedRun | None:
        """The first of the runs *waiting* whose model no other run has still to train, or None."""
        trainings = {run.model for run in (*waiting, *running)}
        return next((run for run in waiting if not run.training_of or run.training.model not in trainings), None)

    def ended(self, run: LaunchedRun, failure: str) -> None:
        """Say that *run* has ended; one that could not be submitted has not begun."""
        if run.title not in self._running:
            self._waiting.remove(run)
            return
        at_a_time, now = len(self._running), time.monotonic()
        seconds = now - self._running.pop(run.title)[1]
        if run.model in self._untrained and not failure:
            self._took.append(seconds)
        since = [now - begun for other, begun in self._running.values() if other.model in self._untrained]
        untrained = sum(other.model in self._untrained for other in self._waiting)
        left = time_left(self._took, untrained, since, at_a_time)
        number = self._runs - len(self._waiting) - len(self._running)
        how = f"failed: {failure}" if failure else "done"
        self._say(run, f"{how}, {seconds:.0f} s; {number} of {self._runs} runs have ended{left}")

    def _say(self, run: LaunchedRun | None, what: str) -> None:
        print(f"== {run.title}: {what}" if run is not None else f"== {what}", flush=True)


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
