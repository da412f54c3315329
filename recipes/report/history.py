"""The loss curve, speed and memory of a training, from its log."""

import contextlib
import json
import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_rope.errors import InputError


def history(folder: Path) -> list[dict[str, Any]]:
    """Return what the log of a training says: its processes, its epochs, and the peaks of memory, as JSON objects.

    A process is what ``Train`` notes before it starts fairseq-train. fairseq writes a line about each epoch.
    """
    log = folder / "log"
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines() if log.exists() else []
    entries = (entry for line in lines if (entry := logged(line)))
    return [entry for entry in entries if {"process", "peak_memory_mib", "train_loss", "valid_loss"} & {*entry}]


def logged(line: str) -> dict[str, Any]:
    """Return the JSON in *line* of fairseq's log, or {} if it has none."""
    start = line.find("{")
    with contextlib.suppress(ValueError):  # fairseq also prints its configuration in braces
        if start >= 0 and line.rstrip().endswith("}"):
            found = json.loads(line[start:])
            return found if isinstance(found, dict) else {}
    return {}


def progress_of(folder: Path) -> tuple[int, int]:
    """Return the finished epochs and updates of a training."""
    epochs = updates = 0
    for entry in history(folder):
        epochs = max(epochs, int(entry.get("epoch", 0)) if "train_loss" in entry else 0)
        for name in ("train_num_updates", "valid_num_updates"):
            updates = max(updates, int(float(entry.get(name, 0))))
    return epochs, updates


def lowest_loss(folder: Path) -> float | None:
    """Return the lowest validation loss of a training; None if it has no finite one."""
    losses = [float(entry["valid_loss"]) for entry in history(folder) if "valid_loss" in entry]
    return min(filter(math.isfinite, losses), default=None)


def read_history(folder: Path, last_update: int) -> dict[str, Any]:
    """Return the training in *folder* up to *last_update*; a longer training can have continued it.

    Of an interrupted process, the epochs up to the last whole one count. If it trained an epoch twice, the later one
    counts. Raises an InputError if the log has no validation or no whole epoch.

    Returns:
        for each validation ``validated_at`` (the update), ``seconds`` (the running time of fairseq-train, including
        validation) and ``losses`` (label-smoothed, in bits a token; None if not finite); ``tokens_per_second`` (target
        tokens, the median over the epochs); ``processes``, the facts about each process with a validation or a whole
        epoch; ``peak_memory_mib``, the host memory of the largest one, or None
    """
    last, wall, seconds_before = rounded(last_update), 0.0, 0.0  # wall is of this process, the other of earlier ones
    validations: dict[int, float] = {}  # by update: the loss
    epochs: dict[int, tuple[float, float]] = {}  # by update: seconds, tokens a second
    processes: list[dict[str, Any]] = []
    running: list[dict[str, Any]] = []  # the latest process, until its first validation or epoch
    peaks: list[float] = []
    for entry in history(folder):
        updates = rounded(entry.get("valid_num_updates") or entry.get("train_num_updates") or 0)
        if "process" in entry:
            running, wall = [entry["process"]], math.inf
        elif "peak_memory_mib" in entry:
            peaks += [] if running else [float(entry["peak_memory_mib"])]
        elif 0 < updates <= last:
            if "valid_loss" in entry:
                validations = {n: loss for n, loss in validations.items() if n < updates}
                validations[updates] = float(entry["valid_loss"])
            else:
                epochs = {n: epoch for n, epoch in epochs.items() if n < updates}
                if float(entry["train_wall"]) < wall:  # fairseq counts from 0 in every process
                    seconds_before = epochs[max(epochs)][0] if epochs else 0.0
                wall = float(entry["train_wall"])
                epochs[updates] = seconds_before + wall, float(entry["train_wps"])
            processes, running = processes + running, []
    if not validations or not epochs:
        raise InputError(f"{folder}/log: has no {'whole epoch' if validations else 'validation'}; train again")
    times = [(0, 0.0), *((updates, seconds) for updates, (seconds, _) in sorted(epochs.items()))]
    curve = sorted(validations.items())
    return {
        "validated_at": [updates for updates, _ in curve],
        "seconds": [_between(times, updates) for updates, _ in curve],
        "losses": [loss if math.isfinite(loss) else None for _, loss in curve],
        "tokens_per_second": statistics.median(speed for _, speed in epochs.values()),
        "processes": processes,
        "peak_memory_mib": max(peaks, default=None),
    }


def rounded(updates: str | int) -> int:
    """Return the number of *updates* as in fairseq's log: six digits, and from a million on the form 1.23457e+06."""
    return int(float(f"{float(updates):g}"))


def _between(points: list[tuple[int, float]], at: int) -> float:
    """Return the y at x = *at*, by linear interpolation between the nearest *points* (x, y)."""
    after = next((n for n in range(1, len(points)) if at <= points[n][0]), len(points) - 1)
    (x1, y1), (x2, y2) = points[after - 1], points[after]
    return y1 + (y2 - y1) * (at - x1) / (x2 - x1)


def last_fall(training: dict[str, Any]) -> float:
    """Return how much the validation loss fell in the last fifth of the updates; 0 if it is not finite there."""
    losses = [math.nan if loss is None else loss for loss in training["losses"]]
    before = float(np.interp(0.8 * training["validated_at"][-1], training["validated_at"], losses))
    return before - losses[-1] if math.isfinite(before - losses[-1]) else 0.0
