"""Convert text of one sentence a line in several processes, each with one chunk in memory."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle, islice
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

from tqdm import tqdm

from fairseq_rope.errors import InputError
from fairseq_rope.files import written_whole
from fairseq_rope.lines import chunks_of, count_lines, split

Convert = Callable[[list[str]], list[str]]  # lines without their ends to as many


def progress(items: Iterable | None, total: int | None, title: str, unit: str = " lines", **more: Any) -> tqdm:
    """A bar on standard error with rate and time left; in a log file, a line every half minute."""
    if not sys.stderr.isatty() and "TQDM_MININTERVAL" not in os.environ:
        more["mininterval"] = 30
    return tqdm(items, total=total, desc=f"  {title}", unit=unit, unit_scale=True, **more)


def convert_file(make: Callable[[], Convert], source: str, target: str, workers: int, title: str) -> None:
    """Write the lines of *source*, converted in *workers* processes, to *target* in their order.

    Args:
        make: called once in each process for the function that converts; importable from a module
        title: what is done, for the progress bar

    Raises:
        InputError: *source* is empty or not UTF-8, *workers* is below 1, a process was killed, or lines
            became more or fewer
        OSError: a file cannot be read or written
    """
    if workers < 1:
        raise InputError(f"--workers {workers}: must be at least 1")
    start = time.perf_counter()
    total = count_lines(source)
    done = 0
    with written_whole(target) as (file,), progress(None, total, title) as bar:
        for wanted, converted in _in_order(make, source, workers):
            count = converted.count("\n")
            if count != wanted:
                raise InputError(f"{source}, after line {done}: {wanted} lines became {count}")
            file.write(converted.encode("utf-8"))
            done += count
            bar.update(count)
        if done != total:
            raise InputError(f"{source}: had {total} lines when counted and {done} when read")
    seconds = time.perf_counter() - start
    rates = f"{done / seconds:.0f} lines per second, {done / seconds / workers:.0f} per core"
    print(f"{target}: {done} lines in {seconds:.1f} s, {rates}")


def _converted(make: Callable[[], Convert], source: str, first: int, every: int) -> Iterator[tuple[int, str]]:
    """For every *every*-th chunk of *source* from *first* on: how many lines it has, and what they are converted to."""
    convert = make()
    for chunk in islice(chunks_of(source), first, None, every):
        yield chunk.count("\n"), "".join(line + "\n" for line in convert(split(chunk)))


def _in_order(make: Callable[[], Convert], source: str, workers: int) -> Iterator[tuple[int, str]]:
    """:func:`_converted` of all chunks of *source*, which *workers* processes take in turns."""
    if workers == 1:
        yield from _converted(make, source, 0, 1)
        return
    # Of the ways to start a process, spawn is the one that all systems have and that starts with no thread or lock
    # of ours. Each process has its own pipe, which reports its end also in the middle of a message, and which stops a
    # process that is ahead of its turn. In Python 3.10, executors wait for ever once one of their processes was killed.
    context = multiprocessing.get_context("spawn")
    processes = []
    resource_tracker.ensure_running()  # the first process to start would start it, and end the block of SIGINT
    try:
        for number in range(workers):
            ours, theirs = context.Pipe()  # of sockets, which hold a few chunks; a pipe of one way would hold less
            process = context.Process(target=_work, args=(theirs, make, source, number, workers), daemon=True)
            before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # for the process, too
            try:
                process.start()
                processes.append((process, ours))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
                theirs.close()
        for _, connection in cycle(processes):
            try:
                answer = connection.recv()
            except (EOFError, OSError):
                killed = "one of the processes was killed; if for lack of memory, ask for fewer"
                raise InputError(f"--workers {workers}: {killed}") from None
            if answer is None:
                return
            if isinstance(answer, Exception):
                raise answer
            yield answer
    finally:
        for process, connection in processes:
            process.terminate()
            process.join()
            connection.close()


def _work(connection: Connection, *what: Any) -> None:
    """In a process of its own: send each of :func:`_converted`, and None at the end."""
    with contextlib.suppress(OSError):  # the other end was closed
        try:
            for answer in _converted(*what):
                connection.send(answer)
            connection.send(None)
        except Exception as error:
            connection.send(error)
