"""How a training went: fairseq's own numbers, as stage 7 keeps them beside the checkpoints."""

import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Training:
    """The curve of one training.

    Attributes:
        updates, seconds, losses: of each validation how many updates and seconds it came after (time that
            fairseq-train ran, validation included), and its loss, label-smoothed, in bits a token
        tokens_per_second: target tokens, the median over the epochs
    """

    updates: list[int]
    seconds: list[float]
    losses: list[float]
    tokens_per_second: float


def read_history(path: Path) -> Training:
    """The training of which *path* has the history.

    Of what was trained twice, since a run was interrupted, the later one counts.
    """
    validations: dict[int, float] = {}  # updates: loss
    epochs: dict[int, dict[str, Any]] = {}  # updates: what fairseq says at the end of an epoch
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            told = json.loads(line)
        except ValueError:  # cut off by a crash
            continue
        kind, into = ("valid", validations) if "valid_loss" in told else ("train", epochs)
        updates = int(told[f"{kind}_num_updates"])
        for later in [n for n in into if n >= updates]:
            del into[later]
        into[updates] = float(told["valid_loss"]) if kind == "valid" else told
    times = [(0, 0.0), *((n, float(told["train_wall"])) for n, told in sorted(epochs.items()))]
    return Training(
        updates=sorted(validations),
        seconds=[_between(times, n) for n in sorted(validations)],
        losses=[validations[n] for n in sorted(validations)],
        tokens_per_second=statistics.median(float(told["train_wps"]) for told in epochs.values()),
    )


def _between(points: list[tuple[int, float]], at: int) -> float:
    """The y at x = *at* on the line through the last *points* (x, y) before it and the first after it."""
    after = next((n for n in range(1, len(points)) if at <= points[n][0]), len(points) - 1)
    (x1, y1), (x2, y2) = points[after - 1], points[after]
    return y1 + (y2 - y1) * (at - x1) / (x2 - x1)
