"""Convert text of one sentence a line in several processes, a few chunks a process in memory."""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tqdm import tqdm

from fairseq_rope.errors import InputError
from fairseq_rope.files import written_whole
from fairseq_rope.lines import chunks_of, count_lines, split

AHEAD = 4  # chunks a process that are read before their turn

Convert = Callable[[list[str]], list[str]]  # lines without their ends to as many


def progress(items: Iterable | None, total: int | None, title: str, unit: str = " lines", **more: Any) -> tqdm:
    """A bar on standard error with rate and time left; in a log file, a line every half minute."""
    if not sys.stderr.isatty() and "TQDM_MININTERVAL" not in os.environ:
        more["mininterval"] = 30
    return tqdm(items, total=total, desc=f"  {title}", unit=unit, unit_scale=True, **more)


def convert_file(make: Callable[[], Convert], source: str, target: str, workers: int, title: str) -> None:
    """Write the lines of *source*, converted in *workers* processes, to *target* in their order.

    Prints to standard output how many lines it were, and how many a second.

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
        for wanted, converted in _in_order(make, chunks_of(source), workers):
            count = converted.count("\n")
            if count != wanted:
                raise InputError(f"{source}, after line {done}: {wanted} lines became {count}")
            file.write(converted.encode("utf-8"))
            done += count
            bar.update(count)
        if done != total:
            raise InputError(f"{source}: had {total} lines when counted and {done} when read")
    seconds = time.perf_counter() - start
    print(
        f"{target}: {done} lines in {seconds:.1f} s, {done / seconds:.0f} lines per second, "
        f"{done / seconds / workers:.0f} per core"
    )


def _in_order(make: Callable[[], Convert], chunks: Iterator[str], workers: int) -> Iterator[tuple[int, str]]:
    """For each of *chunks*, in their order, how many lines it has and what they are converted to."""
    convert = make()  # in any case: what is wrong with it is said here
    if workers == 1:
        for chunk in chunks:
            yield chunk.count("\n"), _converted(convert, chunk)
        return
    # Of the ways to start a process, spawn is the one that all systems have and that starts with no
    # thread or lock of ours. Each process has its own pipe, which reports its end also in the middle of a
    # message. The queue that the processes of an executor share is full when they are slow, and Python 3.10
    # waits for ever for such a queue once a process was killed.
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, BaseProcess] = {}
    busy: dict[Connection, tuple[int, int]] = {}  # a chunk's number and its lines
    converted: dict[int, tuple[int, str]] = {}
    sent = given = 0  # chunks
    try:
        for _ in range(workers):
            connection, theirs = context.Pipe()
            process = context.Process(target=_work, args=(make, theirs), daemon=True)
            with _interrupts_held():
                process.start()
            theirs.close()
            processes[connection] = process
        left = True
        while True:
            # One chunk each at a time, so that a process that is sent one reads it, and neither waits.
            for connection in processes:
                if left and connection not in busy and sent - given < AHEAD * workers:
                    chunk = next(chunks, None)
                    left = chunk is not None
                    if chunk is not None:
                        connection.send(chunk)
                        busy[connection] = sent, chunk.count("\n")
                        sent += 1
            if not busy:
                break
            for connection in wait(list(busy)):
                answer = connection.recv()
                if isinstance(answer, Exception):
                    raise answer
                number, count = busy.pop(connection)
                converted[number] = count, answer
            while given in converted:
                yield converted.pop(given)
                given += 1
    except (EOFError, ConnectionError):
        raise InputError(
            f"--workers {workers}: one of the processes was killed; if for lack of memory, ask for fewer"
        ) from None
    finally:
        for connection, process in processes.items():
            process.terminate()
            process.join()
            connection.close()


def _converted(convert: Convert, chunk: str) -> str:
    return "".join(line + "\n" for line in convert(split(chunk)))


def _work(make: Callable[[], Convert], connection: Connection) -> None:
    """In a process of its own: answer every chunk from *connection* until its other end is closed."""
    convert = make()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            chunk = connection.recv()
            try:
                answer: str | Exception = _converted(convert, chunk)
            except Exception as error:
                answer = error
            connection.send(answer)


# -- signals ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C waits for the end of the block; processes that are started in it never see one."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
