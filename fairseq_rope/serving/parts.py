"""Translate files of any size in parts, each by one of several processes of this machine.

Each part is a file in the folder ``parts`` of the output folder, which is written whole. Its name has a digest of
everything on which its translations depend. So the same command continues after a kill at any moment, and a command
with other settings does not use the part. When all parts of an input exist, they are joined and removed.
"""

import contextlib
import functools
import gzip
import hashlib
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..errors import InputError, warn
from ..files import checksum, write_whole, written_whole
from ..lines import GZIP, naming_damage
from ..locks import locked
from .ctranslate2_search import Sampling
from .exported_folder import CHARACTERS, SETTINGS, TranslateError
from .translator import LINES, Translator, decoded

LONGEST_PART = 8 * LINES  # lines, of which a kill loses at most one part of each process
REFUSED = ".refused.tsv"  # the ending of the list of lines that were not translated


def name_of(path: str) -> str:
    """Return the name of the output for the input *path*."""
    return os.path.basename(path).removesuffix(".gz")


@dataclass(frozen=True)
class Settings:
    """How each part is translated: the arguments of :class:`Translator`, with the whole search."""

    folder: str
    threads: int
    device: str
    shortlist: bool
    replace_unk: bool
    sampling: Sampling | None
    beam: int
    lenpen: float
    max_len_b: int
    checksum: str  # of the model's settings file, which has the checksums of its other files


class Source:
    """The lines of one *shard* (its number, from 1, and the number of shards) of the file *path*, and their parts."""

    def __init__(self, path: str, folder: str, settings: Settings, shard: tuple[int, int], jobs: int) -> None:
        self.path, self.state = path, _state(path)
        lines = divide(sum(1 for _ in lines_of(path)), shard[1])[shard[0] - 1]
        self.lines, self.output = len(lines), os.path.join(folder, name_of(path))
        same = replace(settings, folder="", threads=0, device="")  # these three may change between two starts
        made_from = repr((os.path.abspath(path), self.state, lines, same))
        self.digest = hashlib.sha256(made_from.encode("utf-8", "surrogateescape")).hexdigest()[:16]
        self.folder = Path(folder, "parts")
        self.record = self.folder / f"{name_of(path)}.digest"  # of the command that has written the output
        count = max(1, min(self.lines, jobs * -(-self.lines // (jobs * LONGEST_PART))))  # as many for each process
        parts = [range(lines.start + part.start, lines.start + part.stop) for part in divide(self.lines, count)]
        self.parts = {self.folder / f"{self.digest}.{part.start + 1}-{part.stop}.json": part for part in parts}
        self.is_joined = os.path.exists(self.output) and self.record.exists() and self.record.read_text() == self.digest
        if os.path.lexists(self.output) and not self.is_joined:
            other = "exists, and is not from this input, model and search"
            raise TranslateError(f"--output-dir: {self.output} {other}; remove it, or give another folder")

    def missing(self) -> dict[Path, range]:
        """Return the parts that are not translated, and their lines, numbered from 0."""
        return {} if self.is_joined else {path: part for path, part in self.parts.items() if not path.exists()}

    def join(self) -> None:
        """Write the output and remove the parts."""
        refused: list[str] = []
        with written_whole(self.output) as (file,):
            for path in self.parts:
                texts, rows = json.loads(path.read_bytes())
                file.writelines(f"{text}\n".encode() for text in texts)
                refused += rows
            if refused:
                write_whole(Path(self.output + REFUSED), "".join(f"{row}\n" for row in refused))
                empty = f"lines that were not translated and are empty: {len(refused)}"
                warn("translate", f"{self.path}: {empty}, listed in {self.output}{REFUSED}")
            else:
                Path(self.output + REFUSED).unlink(missing_ok=True)  # of another command
            write_whole(self.record, self.digest)  # the output comes last: it counts only with its record
        for path in self.folder.glob(f"{self.digest}.*"):
            path.unlink()


def translate_files(
    inputs: Sequence[str],
    folder: str,
    settings: Settings,
    jobs: int,
    gpus: Sequence[str],
    shard: tuple[int, int],
    progress: Callable[[int, int], contextlib.AbstractContextManager[Any]],
) -> None:
    """Translate *inputs* into files of *folder*, in *jobs* processes. Parts that exist are not translated again.

    Args:
        gpus: the processes use these GPUs in turn, named as in CUDA_VISIBLE_DEVICES
        progress: returns the progress bar of a number of lines; the second argument says how many of them are finished
    """
    names = [name_of(path) for path in inputs]
    for path, name in zip(inputs, names):
        if names.count(name) > 1:
            raise TranslateError(f"--input {path}: the outputs of two files would both be {name}; rename one of them")
    os.makedirs(os.path.join(folder, "parts"), exist_ok=True)
    lock = os.path.join(folder, "parts", "lock")
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(lock, wait=False))
        except BlockingIOError:
            raise TranslateError(f"--output-dir {folder}: another process is translating into it") from None
        sources = [Source(path, folder, settings, shard, jobs) for path in inputs]
        total = sum(source.lines for source in sources)
        missing = sum(sum(map(len, source.missing().values())) for source in sources)
        with progress(total, total - missing) as bar:
            _translate_missing(sources, settings, jobs, gpus, bar.update)
        for source in sources:
            if source.is_joined:
                print(f"{source.output}: done before", flush=True)
            else:
                source.join()


def divide(lines: int, parts: int) -> list[range]:
    """Return the lines of each of *parts* parts, numbered from 0.

    If there are enough lines, each part begins with a chunk of LINES lines. Then the lines that are translated together
    are the same as without parts.
    """
    unit = LINES if lines >= parts * LINES else 1
    units = -(-lines // unit)
    bounds = [min(lines, number * units // parts * unit) for number in range(parts + 1)]
    return [range(*pair) for pair in itertools.pairwise(bounds)]


def lines_of(path: str) -> Iterator[bytes]:
    """Yield the lines of a text file or .gz, or of standard input ("-"), without their ends.

    Of a line with too many characters, only a part is yielded.
    """
    most = 4 * CHARACTERS + 1  # bytes of a line that may be possible; decoded() refuses a longer one
    if path == "-":  # not sys.stdin.buffer: a thread that waits for input holds its lock, and Python aborts if it exits
        opened: Any = open(sys.stdin.fileno(), "rb", closefd=False)
    else:
        opened = gzip.open(path) if path.endswith(".gz") else open(path, "rb")
    with naming_damage(path), opened as file:
        while line := (rest := file.readline(most)):
            while len(rest) == most and not rest.endswith(b"\n"):
                rest = file.readline(most)
            if line.startswith(GZIP):  # text in UTF-8 does not
                raise TranslateError(f"--input {path}: is compressed with gzip; its name must end in .gz")
            yield line.removesuffix(b"\n")


def _state(path: str) -> str:
    if not os.path.isfile(path):
        pipe = "must be a file, because it is read more than once"
        raise TranslateError(f"--input {path}: {pipe if os.path.exists(path) else 'does not exist'}")
    return f"{os.path.getsize(path)} {os.stat(path).st_mtime_ns}"


def _translate_missing(
    sources: Sequence[Source], settings: Settings, jobs: int, gpus: Sequence[str], done: Callable[[int], object]
) -> None:
    """Translate the missing parts in *jobs* processes, which end with this one, even if it is killed."""
    running: dict[Future[None], int] = {}  # the number of lines of each part

    def finish() -> None:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            future.result()
            done(running.pop(future))

    context = multiprocessing.get_context("spawn")
    places, (receiver, sender) = context.SimpleQueue(), context.Pipe(duplex=False)
    for number in range(jobs):
        places.put(gpus[number % len(gpus)] if gpus else None)
    try:
        with ProcessPoolExecutor(jobs, context, _begin, (receiver, places)) as pool, sender:  # closed before the pool
            for source in sources:
                lines, position = lines_of(source.path), 0
                for output, part in source.missing().items():
                    selected = list(itertools.islice(lines, part.start - position, part.stop - position))
                    position = part.stop
                    if _state(source.path) != source.state:
                        raise TranslateError(f"--input {source.path}: has changed since the command was started")
                    future = pool.submit(_translate, settings, source.path, part.start + 1, selected, str(output))
                    running[future] = len(part)
                    if len(running) >= 2 * jobs:
                        finish()
            while running:
                finish()
    except BrokenProcessPool:
        killed = "one of the processes was killed, for example because the memory is full"
        raise TranslateError(f"--jobs {jobs}: {killed}; the same command continues") from None


def _begin(receiver: Any, places: Any) -> None:
    """Prepare a new process: it uses the next GPU of *places*, and ends when the other end of *receiver* is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C, the process that started it ends it
    # It waits, because nothing is sent, until there is an end of file.
    threading.Thread(target=lambda: receiver.poll(None) and os._exit(1), daemon=True).start()
    if (gpu := places.get()) is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpu


@functools.lru_cache(1)
def _loaded(settings: Settings) -> Translator:
    """Return the translator of this process."""
    options = vars(settings).copy()
    described = options.pop("checksum")
    translator = Translator(**options)
    if checksum(os.path.join(settings.folder, SETTINGS)) != described:
        raise TranslateError(f"--model {settings.folder}: has changed since the command was started")
    return translator


def _translate(settings: Settings, path: str, first: int, lines: Sequence[bytes], output: str) -> None:
    """Translate a part of the file *path*. A refused line has an empty translation, and a row with the reason."""
    if settings.sampling is not None:  # each part has random numbers of its own, which do not depend on the process
        place = f"{settings.sampling.seed} {name_of(path)} {first}".encode("utf-8", "surrogateescape")
        seed = int(hashlib.sha256(place).hexdigest()[:7], 16)
        settings = replace(settings, sampling=replace(settings.sampling, seed=seed))
    texts, reasons = [], dict[int, str]()
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):  # warnings about single lines
        translator = _loaded(settings)
        for start in range(first, first + len(lines), LINES):
            chunk = []
            for number, line in enumerate(lines[start - first : start - first + LINES], start):
                try:
                    chunk.append(decoded(line, path, number))
                except InputError as error:
                    chunk.append("")
                    reasons[number] = str(error).removeprefix(f"{path}, line {number}: ")
            for number, result in enumerate(translator.translate_chunk(chunk, start), start):
                if isinstance(result, TranslateError):
                    reasons[number] = str(result).removeprefix(f"line {number} ")
                texts.append("" if isinstance(result, TranslateError) else result[0][0])
    rows = [f"{number}\t{reasons[number]}" for number in sorted(reasons)]
    with written_whole(output, suffix=f".{os.getpid()}.tmp") as (file,):
        file.write(json.dumps([texts, rows], ensure_ascii=False).encode())
