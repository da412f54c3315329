"""The loss curve and speed of a training, from the history that stage 7 writes beside the checkpoints."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.run.history import logged, number_of
from recipes.run.run import StageError


@dataclass
class Training:
    """The curve of one training. Of an interrupted process, the epochs up to the last whole one count."""

    updates: list[int]  # before each validation
    seconds: list[float]  # before each validation: the running time of fairseq-train, including validation
    losses: list[float]  # of each validation, label-smoothed, in bits a token
    tokens_per_second: float  # target tokens, the median over the epochs
    last_epoch: int  # the last epoch with a validation
    # Commit, versions, hardware, batches and command of each process with a validation or a whole epoch, in order.
    processes: list[dict[str, Any]]
    peak_memory_mib: float | None  # the host memory of the largest process; None if the history does not have it


def read_history(path: Path) -> Training:
    """The training whose history is in *path*. Raises a StageError if that has no validation or no whole epoch.

    If an interrupted run trained an epoch twice, the later one counts.
    """
    validations: dict[int, tuple[float, int]] = {}  # updates: loss, epoch
    epochs: dict[int, tuple[float, float]] = {}  # updates: seconds, tokens a second
    processes: list[dict[str, Any]] = []
    running: list[dict[str, Any]] = []  # the latest process, until its first validation or epoch
    seconds_before = wall = 0.0  # the running time of earlier processes, and of this one
    peaks: list[float] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = logged(line)  # {} for a line that a crash cut off
        if "process" in entry:
            running = [entry["process"]]
            wall = float("inf")
            continue
        if "peak_memory_mib" in entry:
            peaks.append(float(entry["peak_memory_mib"]))
            continue
        if "valid_loss" in entry:
            updates = number_of(entry["valid_num_updates"])
            _forget(validations, updates)
            validations[updates] = float(entry["valid_loss"]), int(entry["epoch"])
        elif "train_wall" in entry:
            updates = number_of(entry["train_num_updates"])
            _forget(epochs, updates)
            # fairseq counts from 0 in every process.
            if float(entry["train_wall"]) < wall:
                seconds_before = epochs[max(epochs)][0] if epochs else 0.0
            wall = float(entry["train_wall"])
            epochs[updates] = seconds_before + wall, float(entry["train_wps"])
        else:
            continue
        processes += running
        running = []
    if not validations or not epochs:
        raise StageError(f"{path}: has no {'whole epoch' if validations else 'validation'}; train again")
    times = [(0, 0.0), *((n, seconds) for n, (seconds, _) in sorted(epochs.items()))]
    return Training(
        updates=sorted(validations),
        seconds=[_between(times, n) for n in sorted(validations)],
        losses=[validations[n][0] for n in sorted(validations)],
        tokens_per_second=statistics.median(speed for _, speed in epochs.values()),
        last_epoch=max(epoch for _, epoch in validations.values()),
        processes=processes,
        peak_memory_mib=max(peaks, default=None),
    )


def _forget(by_updates: dict[int, Any], updates: int) -> None:
    """Remove the entries of *by_updates* at *updates* or later."""
    for later_updates in [n for n in by_updates if n >= updates]:
        del by_updates[later_updates]


def _between(points: list[tuple[int, float]], at: int) -> float:
    """The y at x = *at*, by linear interpolation between the nearest *points* (x, y)."""
    after = next((n for n in range(1, len(points)) if at <= points[n][0]), len(points) - 1)
    (x1, y1), (x2, y2) = points[after - 1], points[after]
    return y1 + (y2 - y1) * (at - x1) / (x2 - x1)
