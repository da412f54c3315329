"""Write sequences of random symbols, and their copies, repetitions or reversals. sequences.sh calls it.

python -m recipes.paper.sequences TASK OUT LENGTH DEVIATION
"""

import random
import sys
from collections.abc import Callable
from pathlib import Path

from recipes.paper.prepare import write_lines

SYMBOLS = [chr(ord("a") + n) for n in range(20)]
TARGETS: dict[str, Callable[[list[str]], list[str]]] = {
    "copy": lambda word: word,
    "repeat": lambda word: word + word,
    "reverse": lambda word: word[::-1],
}
SETS = {"train": (6000, 1), "valid": (1000, 1), "test": (1000, 1), "long": (1000, 2)}  # sequences, and times LENGTH


def write_sets(task: str, out: Path, length: float, deviation: float) -> None:
    """Write sources and targets of all sets. Their lengths are drawn from a normal distribution."""
    draw = random.Random(1)
    for name, (count, times) in SETS.items():
        sizes = [max(1, round(times * draw.gauss(length, deviation))) for _ in range(count)]
        words = [draw.choices(SYMBOLS, k=size) for size in sizes]
        write_lines(map(" ".join, words), out / f"{name}.source")
        write_lines((" ".join(TARGETS[task](word)) for word in words), out / f"{name}.target")


if __name__ == "__main__":
    write_sets(sys.argv[1], Path(sys.argv[2]), *map(float, sys.argv[3:]))
