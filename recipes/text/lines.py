r"""Text of one sentence a line: read in chunks, converted by several processes, written whole.

A line ends with ``\n`` and nothing else. CR, NEL, U+2028 and the like, at which Python, fairseq and
subword-nmt break lines where they read text, are part of the line that holds them, as they are for the
tools that aligned the corpora. At no time is more than a few chunks a process in memory.
"""

import contextlib
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import BinaryIO

from tqdm import tqdm

from fairseq_rope.errors import InputError

CHUNK = 1 << 16  # bytes; some hundred lines, 50 ms of tokenising
AHEAD = 4  # chunks a process that are read before their turn

Convert = Callable[[list[str]], list[str]]  # lines without their ends to as many


def read_chunks(path: str, size: int = CHUNK) -> Iterator[bytes]:
    r"""The UTF-8 file *path* in pieces of whole lines, about *size* bytes each.

    Every line ends with ``\n``, also the last one of a file that lacks it.

    Raises:
        InputError: the file is empty, or a byte of it is not UTF-8; the message names file and line
        OSError: the file cannot be read
    """
    before = 0  # lines
    with open(path, "rb") as file:
        while lines := file.readlines(size):
            chunk = b"".join(lines)
            if not chunk.endswith(b"\n"):
                chunk += b"\n"
            try:
                chunk.decode("utf-8")
            except UnicodeDecodeError as error:
                line = before + 1 + chunk.count(b"\n", 0, error.start)
                raise InputError(
                    f"{path}, line {line}: the byte 0x{chunk[error.start]:02x} is not UTF-8"
                ) from None
            before += len(lines)
            yield chunk
    if not before:
        raise InputError(f"{path}: is empty")


def count_lines(path: str) -> int:
    """How many lines :func:`read_chunks` gives for *path*."""
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")


@contextlib.contextmanager
def written_whole(*paths: str) -> Iterator[list[BinaryIO]]:
    """Files to write to, which appear as *paths*, synced, once the block has ended without an error.

    After an error nothing of them is left, and what *paths* held before is untouched.
    """
    parts = [f"{path}.tmp" for path in paths]
    files: list[BinaryIO] = []
    try:
        for part in parts:
            files.append(open(part, "wb"))
        yield files
        for file in files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        for part, path in zip(parts, paths, strict=True):
            os.replace(part, path)
    except BaseException as error:
        for file, part in zip(files, parts, strict=False):
            with contextlib.suppress(OSError):
                file.close()  # writes what is buffered: on a full disk, in vain
            with contextlib.suppress(OSError):
                os.unlink(part)
        if isinstance(error, OSError) and error.filename is None:  # a write does not say where to
            error.filename = os.path.dirname(paths[0]) or "."
        raise


def write_whole(path: Path, text: str) -> None:
    """Write *text* to *path*, in a folder that is made if need be; see :func:`written_whole`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(str(path)) as (file,):
        file.write(text.encode("utf-8"))


def progress(items: Iterable | None, total: int, title: str, unit: str = " lines") -> tqdm:
    """A bar on standard error with rate and time left; in a log file, a line every half minute."""
    every = {} if sys.stderr.isatty() or "TQDM_MININTERVAL" in os.environ else {"mininterval": 30}
    return tqdm(items, total=total, desc=f"  {title}", unit=unit, unit_scale=True, **every)


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
        for wanted, converted in _in_order(make, read_chunks(source), workers):
            count = converted.count(b"\n")
            if count != wanted:
                raise InputError(f"{source}, after line {done}: {wanted} lines became {count}")
            file.write(converted)
            done += count
            bar.update(count)
        if done != total:
            raise InputError(f"{source}: had {total} lines when counted and {done} when read")
    seconds = time.perf_counter() - start
    print(
        f"{target}: {done} lines in {seconds:.1f} s, {done / seconds:.0f} lines per second, "
        f"{done / seconds / workers:.0f} per core"
    )


def _in_order(
    make: Callable[[], Convert], chunks: Iterator[bytes], workers: int
) -> Iterator[tuple[int, bytes]]:
    """For each of *chunks*, in their order, how many lines it has and what they are converted to."""
    convert = make()  # in any case: what is wrong with it is said here
    if workers == 1:
        for chunk in chunks:
            yield chunk.count(b"\n"), _converted(convert, chunk)
        return
    # Of the ways to start a process, spawn is the one that all systems have and that starts with no
    # thread or lock of ours. Each process has its own pipe, which reports its end also in the middle of a
    # message. The queue that the processes of an executor share is full when they are slow, and Python 3.10
    # waits for ever for such a queue once a process was killed.
    context = multiprocessing.get_context("spawn")
    processes: dict[Connection, BaseProcess] = {}
    busy: dict[Connection, tuple[int, int]] = {}  # a chunk's number and its lines
    converted: dict[int, tuple[int, bytes]] = {}
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
                        busy[connection] = sent, chunk.count(b"\n")
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


def _converted(convert: Convert, chunk: bytes) -> bytes:
    lines = chunk.decode("utf-8").split("\n")[:-1]
    return "".join(line + "\n" for line in convert(lines)).encode("utf-8")


def _work(make: Callable[[], Convert], connection: Connection) -> None:
    """In a process of its own: answer every chunk from *connection* until its other end is closed."""
    convert = make()
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            chunk = connection.recv()
            try:
                answer: bytes | Exception = _converted(convert, chunk)
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


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the block as an error does, with what it cleans up, and no traceback."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, _stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _stop(number: int, _frame: FrameType | None) -> None:
    sys.exit(128 + number)
