"""Measure in a new process, so that its peak memory is that of one model."""

import contextlib
import multiprocessing
import re
import resource
import signal
import statistics
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.alternating import ratio, turned


class OutOfMemoryError(Exception):
    """A process needs more memory than it may have."""


def in_a_process(run: Callable[..., Any], *args: object, limit: int = 0) -> tuple[Any, float]:
    """Return what *run* returns in a new process, and the MiB that the process took beyond its imports.

    Args:
        run: a function of a module
        args: its arguments
        limit: the bytes that *run* may allocate on the CPU, on Linux; 0: any number

    Raises:
        OutOfMemoryError: *run* needs more than *limit*, or the system ended the process
        SystemExit: the process ended with another error, which it has printed
    """
    spawn = multiprocessing.get_context("spawn")
    receive, send = spawn.Pipe()
    process = spawn.Process(target=_measure, args=(run, args, limit, send))
    process.start()
    send.close()  # so that a process that dies is noticed
    with contextlib.suppress(EOFError):
        measured = receive.recv()
        process.join()
        if measured is None:
            raise OutOfMemoryError(f"more than {limit / 2**30:.3g} GiB are needed")
        return measured
    process.join()
    if process.exitcode in (-signal.SIGKILL, -signal.SIGABRT):  # as the system does if its memory is full
        raise OutOfMemoryError(f"the system ended the process with signal {-process.exitcode}")
    raise SystemExit(f"{run.__module__}.{run.__qualname__}{args} ended with status {process.exitcode}")


def measure(
    seconds_for: Callable[..., float], names: Sequence[str], rounds: int, *args: object, limit: int
) -> list[dict[str, object]]:
    """Return a row for each of *names*: medians of its seconds and of its peak memory over the rounds.

    Each measurement has a process, and the names take turns. The first name is what the others are compared with.

    Args:
        seconds_for: called with a name and *args*
        limit: the bytes that a process may allocate; 0: any number
    """
    first = names[0]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, list[float]] = {name: [] for name in names}
    failures: dict[str, str] = {}
    for number in range(rounds):
        for name in turned(names, number):
            if name not in failures:
                try:
                    second, peak = in_a_process(seconds_for, name, *args, limit=limit)
                except OutOfMemoryError as error:
                    failures[name] = str(error)
                    continue
                seconds[name].append(second)
                peaks[name].append(peak)
    rows: list[dict[str, object]] = []
    for name in names:
        row = {
            "model": name,
            "seconds": failures.get(name, ""),
            "times as fast": "",
            "peak MiB": "",
            "of the memory": "",
        }
        if name not in failures:
            row.update({"seconds": statistics.median(seconds[name]), "peak MiB": statistics.median(peaks[name])})
            if first not in failures:
                row["times as fast"] = ratio(seconds, name, first)
                row["of the memory"] = row["peak MiB"] / statistics.median(peaks[first])
        rows.append(row)
    return rows


def _measure(run: Callable[..., Any], args: tuple[object, ...], limit: int, pipe: Connection) -> None:
    before = _peak()
    if limit and not torch.cuda.is_available():
        with contextlib.suppress(FileNotFoundError):  # not on Linux
            pages = int(Path("/proc/self/statm").read_text().split()[0])
            most = pages * resource.getpagesize() + limit
            resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        result = run(*args)
    except (MemoryError, RuntimeError) as error:
        # torch raises RuntimeErrors
        if not isinstance(error, MemoryError) and not re.search("out of memory|allocate memory", str(error)):
            raise
        pipe.send(None)
        return
    pipe.send((result, torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else _peak() - before))


def _peak() -> float:
    """Return the largest number of MiB that this process has had in memory."""
    with contextlib.suppress(FileNotFoundError):
        return int(_table("/proc/self/status")["VmHWM"].split()[0]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS; on Linux, it includes the parent's peak


def _table(path: str) -> dict[str, str]:
    return dict(line.split(":", 1) for line in Path(path).read_text().splitlines())


def available_memory() -> int:
    """Return the bytes that new processes can have without swapping; 0 if the system does not say it."""
    with contextlib.suppress(FileNotFoundError):
        return 1024 * int(_table("/proc/meminfo")["MemAvailable"].split()[0])
    return 0
