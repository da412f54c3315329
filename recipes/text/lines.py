"""Convert the lines of a text, in several processes if it is long."""

import functools
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import zip_longest
from typing import Any

import regex
from tqdm import tqdm

from fairseq_rope.errors import InputError
from fairseq_rope.files import written_whole
from fairseq_rope.lines import chunks_of, count_lines, lines_of, split
from fairseq_rope.serving.ctranslate2_search import available_cores

Convert = Callable[[list[str]], list[str]]  # takes and returns lines without their ends, in equal number
# The characters that Moses' remove-non-printing-char.perl replaces by blanks, and two more that end lines in Python.
NOT_PRINTING = regex.compile(r"[\p{C}\u2028\u2029]")
SHARE = 1 << 20  # bytes of text for each process, at least: a process for less text takes longer to start than it saves


def pairs_of(paths: Sequence[str]) -> Iterator[Any]:
    """The words of each line of two files. Raises an InputError unless both have the same number of lines."""
    lengths = [count_lines(path) for path in paths]
    if 0 not in lengths and lengths[0] != lengths[1]:
        counted = f"{paths[0]} has {lengths[0]} lines and {paths[1]} has {lengths[1]}"
        raise InputError(f"{counted}: both must have the same number")
    return zip_longest(*(map(str.split, lines_of(path)) for path in paths), fillvalue=[])


def progress(items: Iterable[Any] | None, total: int | None, title: str, unit: str = " lines") -> tqdm:
    """A progress bar on standard error; in a log file, a line every 30 seconds."""
    interval = 0.1 if sys.stderr.isatty() else float(os.environ.get("TQDM_MININTERVAL", 30))
    return tqdm(items, total=total, desc=f"  {title}", unit=unit, unit_scale=True, mininterval=interval)


def convert_file(make: Callable[[], Convert], source: str, target: str, title: str) -> None:
    """Write the lines of *source*, converted in a process for each core, to *target* in their order.

    A text of less than two times :data:`SHARE` bytes is converted in this process. Each process calls *make*, which
    must be picklable, for the function that converts. Raises an InputError also if the number of lines changed.
    """
    total, done = count_lines(source), 0
    workers = min(available_cores(), max(1, os.path.getsize(source) // SHARE))
    with written_whole(target) as (file,), progress(None, total, title) as bar:
        try:
            for lines in _in_order(make, source, workers):
                text = "".join(line + "\n" for line in lines)
                file.write(text.encode("utf-8"))
                done += text.count("\n")
                bar.update(done - bar.n)
        except BrokenProcessPool:
            raise InputError(f"{source}: one of {workers} processes was killed; memory may have run out") from None
        if done != total:
            raise InputError(f"{source}: has {total} lines, and {target} would have {done}")
    print(f"{target}: {done} lines")


def _in_order(make: Callable[[], Convert], source: str, workers: int) -> Iterator[list[str]]:
    """The converted lines of each chunk of *source*. Memory holds a few chunks for each of the *workers*."""
    if workers == 1:
        convert = make()
        yield from (convert(split(chunk)) for chunk in chunks_of(source))
        return
    pickled = pickle.dumps(make)
    waiting: deque[Future[list[str]]] = deque()
    # "spawn" exists on all systems and copies no threads or locks.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), _start_worker) as pool:
        for chunk in chunks_of(source):
            waiting.append(pool.submit(_convert_in_worker, pickled, chunk))
            if len(waiting) == 4 * workers:
                yield waiting.popleft().result()
        yield from (future.result() for future in waiting)


def _start_worker() -> None:
    """Let only the parent handle Ctrl-C, and end this process when the parent ends, even if it was killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def end_with_parent() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()


def _convert_in_worker(pickled: bytes, chunk: str) -> list[str]:
    return _unpickled(pickled)(split(chunk))


@functools.lru_cache(1)
def _unpickled(pickled: bytes) -> Convert:
    """The function that converts, which each worker makes once."""
    convert: Convert = pickle.loads(pickled)()
    return convert
