"""How a training went: fairseq's own numbers, as stage 7 keeps them beside the checkpoints."""

import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipes.pipeline.experiment import StageError
from recipes.pipeline.history import logged


@dataclass
class Training:
    """The curve of one training.

    Attributes:
        updates, seconds, losses: of each validation the updates and seconds before it, and its loss, label-smoothed,
            in bits a token. Seconds are those that fairseq-train ran, validation included; of processes that were
            interrupted, up to their last whole epoch
        tokens_per_second: target tokens, the median over the epochs
        last_epoch: the last one with a validation
        processes: commit, versions, hardware, batches and command of those that trained, in their order, without
            those that ended before their first validation
    """

    updates: list[int]
    seconds: list[float]
    losses: list[float]
    tokens_per_second: float
    last_epoch: int
    processes: list[dict[str, Any]]


def read_history(path: Path) -> Training:
    """The training whose history is in *path*; a StageError if that has no validation, or no whole epoch.

    Of epochs that were trained twice, since a run was interrupted, the later one counts.
    """
    validations: dict[int, tuple[float, int]] = {}  # updates: loss, epoch
    epochs: dict[int, tuple[float, float]] = {}  # updates: seconds, tokens a second
    processes: list[dict[str, Any]] = []
    running: list[dict[str, Any]] = []  # the process that the lines below it are of, until there are some
    before = wall = 0.0  # what earlier processes took, and this one
    for line in path.read_text(encoding="utf-8").splitlines():
        entry = logged(line)  # {} for a line that a crash has cut off
        if "process" in entry:
            running = [entry["process"]]
            wall = float("inf")
            continue
        if "valid_loss" in entry:
            updates = int(entry["valid_num_updates"])
            _forget(validations, updates)
            validations[updates] = float(entry["valid_loss"]), int(entry["epoch"])
        elif "train_wall" in entry:
            updates = int(entry["train_num_updates"])
            _forget(epochs, updates)
            # fairseq counts from nought in every process.
            if float(entry["train_wall"]) < wall:
                before = epochs[max(epochs)][0] if epochs else 0.0
            wall = float(entry["train_wall"])
            epochs[updates] = before + wall, float(entry["train_wps"])
        else:
            continue
        processes += running
        running = []
    if not validations or not epochs:
        raise StageError(f"{path}: tells of no {'whole epoch' if validations else 'validation'}; train anew")
    times = [(0, 0.0), *((n, seconds) for n, (seconds, _) in sorted(epochs.items()))]
    return Training(
        updates=sorted(validations),
        seconds=[_between(times, n) for n in sorted(validations)],
        losses=[validations[n][0] for n in sorted(validations)],
        tokens_per_second=statistics.median(speed for _, speed in epochs.values()),
        last_epoch=max(epoch for _, epoch in validations.values()),
        processes=processes,
    )


def _forget(by_updates: dict[int, Any], updates: int) -> None:
    """Remove from *by_updates* what is not before so many *updates*."""
    for later in [n for n in by_updates if n >= updates]:
        del by_updates[later]


def _between(points: list[tuple[int, float]], at: int) -> float:
    """The y at x = *at* on the line through the last *points* (x, y) before it and the first after it."""
    after = next((n for n in range(1, len(points)) if at <= points[n][0]), len(points) - 1)
    (x1, y1), (x2, y2) = points[after - 1], points[after]
    return y1 + (y2 - y1) * (at - x1) / (x2 - x1)
