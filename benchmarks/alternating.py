"""Time things against each other: in turns, in one process, and by medians."""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import torch


def build_parser(module: str, description: str, rounds: int = 5) -> argparse.ArgumentParser:
    """Return a parser with the flags of all benchmarks; *description* is the docstring of *module*."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.{module}", description=description.splitlines()[0])
    parser.add_argument("--rounds", type=at_least_one, default=rounds, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def at_least_one(text: str) -> int:
    """Return *text* as an integer; an ArgumentTypeError says that it must be 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be an integer, 1 or more")
    return int(text)


def in_turns(candidates: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each of *candidates*, *rounds* times; every round runs all, each time another first.

    Before the first round each runs once, untimed.
    """
    for run in candidates.values():
        run()
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for number in range(rounds):
        for name in turned(list(candidates), number):
            seconds[name].append(seconds_of(candidates[name]))
    return seconds


def turned(names: Sequence[str], number: int) -> list[str]:
    """Return *names* in the order of round *number*: each round begins with another one."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def seconds_of(run: Callable[[], object]) -> float:
    """Return the seconds that *run* takes. On a GPU a run ends when the device has."""
    _synchronise()
    begun = time.perf_counter()
    run()
    _synchronise()
    return time.perf_counter() - begun


def ratio(seconds: Mapping[str, list[float]], name: str, to: str) -> float:
    """How many times as fast as *to* is *name*: the median over the rounds of the quotient in one round."""
    return statistics.median(b / a for a, b in zip(seconds[name], seconds[to], strict=True))


def _synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def machine() -> str:
    """Hardware and versions, for the head of a table."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "CPU"
    return f"{device}, {torch.get_num_threads()} threads, Python {platform.python_version()}, torch {torch.__version__}"


def report(title: str, rows: list[dict[str, object]], as_json: bool) -> None:
    """Print *rows*, all with the same keys, as a table or as one line of JSON."""
    if as_json:
        print(json.dumps({"benchmark": title, "machine": machine(), "rows": rows}), flush=True)
        return
    print(f"\n{title} ({machine()})")
    columns = list(rows[0])
    texts = [columns] + [
        [f"{row[c]:.3g}" if isinstance(row[c], float) else str(row[c]) for c in columns] for row in rows
    ]
    widths = [max(len(text[i]) for text in texts) for i in range(len(columns))]
    for text in texts:
        print("  ".join(cell.ljust(width) for cell, width in zip(text, widths, strict=True)).rstrip())
    sys.stdout.flush()
