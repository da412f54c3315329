"""Convert the lines of a text, in several processes if it is long, each with one chunk in memory."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice, zip_longest
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import regex
from tqdm import tqdm

from fairseq_rope.errors import InputError
from fairseq_rope.files import written_whole
from fairseq_rope.lines import chunks_of, count_lines, lines_of, split

Convert = Callable[[list[str]], list[str]]  # takes and returns lines without their ends, in equal number
# The characters that Moses' remove-non-printing-char.perl replaces by blanks, and two more that end lines in Python.
NOT_PRINTING = regex.compile(r"[\p{C}\u2028\u2029]")
SHARE = 1 << 20  # bytes of text for each process, at least: starting another one for less takes longer than it saves


def pairs_of(paths: Sequence[str]) -> Iterator[Any]:
    """The words of each line of two files. Raises an InputError unless both have the same number of lines."""
    lengths = [count_lines(path) for path in paths]
    if 0 not in lengths and lengths[0] != lengths[1]:
        counted = f"{paths[0]} has {lengths[0]} lines and {paths[1]} has {lengths[1]}"
        raise InputError(f"{counted}: both must have the same number")
    return zip_longest(*(map(str.split, lines_of(path)) for path in paths), fillvalue=[])


def progress(items: Iterable[Any] | None, total: int | None, title: str, unit: str = " lines", **more: Any) -> tqdm:
    """A progress bar on standard error; in a log file, a line every 30 seconds."""
    if not sys.stderr.isatty() and "TQDM_MININTERVAL" not in os.environ:
        more["mininterval"] = 30
    return tqdm(items, total=total, desc=f"  {title}", unit=unit, unit_scale=True, **more)


def convert_file(make: Callable[[], Convert], source: str, target: str, workers: int, title: str) -> None:
    """Write the lines of *source*, converted in up to *workers* processes, to *target* in their order.

    A text of less than two times :data:`SHARE` bytes is converted in this process. Each process calls *make*, which
    must be importable from a module, for the function that converts. Raises an InputError if *source* is empty or not
    UTF-8, *workers* is below 1, a process was killed, or the number of lines changed.
    """
    if workers < 1:
        raise InputError(f"--workers {workers}: must be at least 1")
    start = time.perf_counter()
    total = count_lines(source)
    workers = min(workers, max(1, os.path.getsize(source) // SHARE))
    done = 0
    with written_whole(target) as (file,), progress(None, total, title) as bar:
        for expected, converted in _in_order(make, source, workers):
            count = converted.count("\n")
            if count != expected:
                raise InputError(f"{source}, after line {done}: {expected} lines became {count}")
            file.write(converted.encode("utf-8"))
            done += count
            bar.update(count)
        if done != total:
            raise InputError(f"{source}: had {total} lines when counted and {done} when read")
    seconds = time.perf_counter() - start
    rates = f"{done / seconds:.0f} lines per second, {done / seconds / workers:.0f} per core"
    print(f"{target}: {done} lines in {seconds:.1f} s, {rates}")


def _converted(make: Callable[[], Convert], source: str, first: int, every: int) -> Iterator[tuple[int, str]]:
    """The number of lines and the converted text of every *every*-th chunk of *source*, from chunk *first* on."""
    convert = make()
    for chunk in islice(chunks_of(source), first, None, every):
        yield chunk.count("\n"), "".join(line + "\n" for line in convert(split(chunk)))


def _in_order(make: Callable[[], Convert], source: str, workers: int) -> Iterator[tuple[int, str]]:
    """:func:`_converted` of all chunks of *source*, which *workers* processes take in turns."""
    if workers == 1:
        yield from _converted(make, source, 0, 1)
        return
    # "spawn" exists on all systems and copies no threads or locks. Each process has its own pipe. A pipe reports the
    # end of its process even within a message, and it blocks a process that is too far ahead. An executor of Python
    # 3.10 waits forever if one of its processes is killed.
    context = multiprocessing.get_context("spawn")
    processes = []
    resource_tracker.ensure_running()  # otherwise process.start() starts it, which unblocks SIGINT
    try:
        for number in range(workers):
            ours, theirs = context.Pipe()  # duplex: a socket pair, which buffers more than a one-way pipe
            process = context.Process(target=_work, args=(theirs, make, source, number, workers), daemon=True)
            previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # the process inherits this
            try:
                process.start()
                processes.append((process, ours))
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
                theirs.close()
        for _, connection in cycle(processes):
            try:
                answer = connection.recv()
            except (EOFError, OSError):
                which = f"one of the {workers} processes of --workers was killed"
                raise InputError(f"{which}; if memory ran out, use fewer workers") from None
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


def _work(connection: Connection, *arguments: Any) -> None:
    """Send the results of :func:`_converted` for *arguments* to *connection*, then None. Runs in a worker."""
    with contextlib.suppress(OSError):  # the other end was closed
        try:
            for answer in _converted(*arguments):
                connection.send(answer)
            connection.send(None)
        except Exception as error:
            connection.send(error)
