"""A shard of a corpus: dividing files into shards of a number of lines, and translating one in a process of its own."""

import contextlib
import gzip
import hashlib
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO, cast

from ..errors import InputError
from ..files import checksum, written_whole
from ..lines import naming_damage
from ..locks import locked
from .ctranslate2_search import UNSEEDED, Sampling
from .exported_folder import CHARACTERS, SETTINGS, TranslateError
from .translator import LINES, Translator, decoded

REFUSED = ".refused.tsv"  # the ending of the list of lines that were not translated
BLOCK = 1 << 20  # bytes that are read at once


@dataclass(frozen=True)
class How:
    """How each shard is translated."""

    model: str
    search: dict[str, Any]  # beam, lenpen and max_len_b
    shortlist: bool
    replace_unk: bool
    threads: int
    device: str
    strict: bool  # whether a line that cannot be translated ends the run
    sampling: Sampling | None = None  # None: beam search
    described: str | None = None  # the SHA-256 of the model's settings, which must not change; None: not compared


@dataclass(frozen=True)
class Shard:
    """Some lines of an input."""

    input: str
    state: str  # of the input, which must not change
    first: int  # the number of the first line in the input, from 1
    lines: int
    offset: int  # the place of the first line in the file that has the lines, in bytes
    stem: str  # the beginning of the paths of its files
    is_copied: bool  # whether it has a file with its lines, because the input is compressed

    @property
    def source(self) -> str:
        """The path of the file with its lines, if it has one."""
        return f"{self.stem}.source"

    @property
    def text(self) -> str:
        """The path of its translations. It exists if the shard is finished."""
        return f"{self.stem}.txt"

    @property
    def refused(self) -> str:
        """The path of the list of its lines that were not translated."""
        return self.stem + REFUSED

    @property
    def lock(self) -> str:
        """The path of the lock of the process that translates it."""
        return f"{self.stem}.lock"

    @property
    def count(self) -> str:
        """The path of the number of its lines that have been translated, while a process translates it."""
        return f"{self.stem}.count"

    @property
    def is_finished(self) -> bool:
        """Whether its lines are translated."""
        return os.path.exists(self.text)

    def __str__(self) -> str:
        return f"lines {self.first} to {self.first + self.lines - 1} of {self.input}"


def is_compressed(path: str) -> bool:
    """Return whether the input *path* is a gzip file."""
    return path.endswith(".gz")


def state_of(path: str) -> str:
    """Return the size and the time of the last change of a file, as text."""
    status = os.stat(path)
    seconds, fraction = divmod(status.st_mtime_ns, 10**9)
    return f"{status.st_size} bytes of {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(seconds))}.{fraction:09} UTC"


def refusal(path: str, number: object, reason: str) -> TranslateError:
    """Return the error of a line of the input *path*."""
    return TranslateError(f"{path}, line {number}: {reason}")


# -- dividing ----------------------------------------------------------------------------------------


def divide(path: str, shard_lines: int, stem: Callable[[int], str] | None = None) -> tuple[int, list[int]]:
    """Return the number of lines of the file *path*, and the place of each shard's first line, in bytes.

    If *stem* is given, the lines of each shard are written into a file, whose name is ``stem(number)`` and ``.source``.
    """
    lines, position, offsets = 0, 0, list[int]()
    with contextlib.ExitStack() as stack, _opened(path) as file, naming_damage(path):
        begins, data, copy = True, b"", None
        for data, ended, is_last in _pieces(file, shard_lines):
            if begins:
                offsets.append(position)
                if stem is not None:
                    (copy,) = stack.enter_context(written_whole(f"{stem(len(offsets) - 1)}.source"))
            if copy is not None:
                copy.write(data)
            lines += ended
            position += len(data)
            begins = is_last
            if is_last:
                stack.close()
        lines += not data.endswith(b"\n") and bool(data)
    return lines, offsets


def _opened(path: str) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path)) if is_compressed(path) else open(path, "rb")


def _pieces(file: BinaryIO, shard_lines: int) -> Iterator[tuple[bytes, int, bool]]:
    """Yield the content of *file* in pieces; with each, the lines that end in it, and whether it ends a shard."""
    left = shard_lines  # lines until the shard ends
    while block := file.read(BLOCK):
        begin, count = 0, block.count(b"\n")
        while count >= left:
            end = begin
            for _ in range(left):
                end = block.index(b"\n", end) + 1
            yield block[begin:end], left, True
            count -= left
            begin, left = end, shard_lines
        if begin < len(block):
            yield block[begin:], count, False
            left -= count


# -- one shard, in a process of its own --------------------------------------------------------------


def translate_shard(how: How, shard: Shard) -> None:
    """Write the translations of a shard, and the list of its lines that cannot be translated, both or neither.

    Two processes, on a disk without locks, do no harm: each writes files of its own, and renames them when complete.
    """
    with locked(shard.lock):  # a process of a killed run may just be ending
        if not shard.is_finished:
            if state_of(shard.input) != shard.state:
                raise TranslateError(f"--input {shard.input}: has changed since its first lines were translated")
            options = (how.model, how.threads, how.device, how.shortlist, how.replace_unk)
            translator = Translator(*options, sampling_of(how, shard))
            _refuse_another_model(how)  # after it is loaded, because it can be replaced at any moment
            translator.settings.update(how.search)
            with translator, contextlib.suppress(_FinishedByAnother):
                _write(translator, how, shard)
    if shard.is_copied:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(shard.source)


def _refuse_another_model(how: How) -> None:
    """Raise a TranslateError if the model is not the one with which the run began. Its settings have its checksums."""
    if how.described not in (None, checksum(os.path.join(how.model, SETTINGS))):
        raise TranslateError(f"--model {how.model}: has changed since the first lines were translated")


def sampling_of(how: How, shard: Shard) -> Sampling | None:
    """Return how words are drawn for *shard*. Its seed depends on that of the run and on the place of the shard."""
    if how.sampling is None:
        return None
    place = f"{how.sampling.seed} {os.path.basename(shard.stem)}"
    return replace(how.sampling, seed=int(hashlib.sha256(place.encode()).hexdigest()[:8], 16) % UNSEEDED)


class _FinishedByAnother(Exception):
    """Another process has finished the shard meanwhile."""


def _write(translator: Translator, how: How, shard: Shard) -> None:
    # The file whose existence says that the shard is finished is last.
    with written_whole(shard.refused, shard.text, suffix=f".{secrets.token_hex(4)}.tmp") as (refused, text):
        for translations, reasons in _translated(translator, shard, _Counter(shard.count)):
            for number, reason in reasons:
                if how.strict:
                    raise refusal(shard.input, number, reason)
                refused.write(f"{number}\t{reason}\n".encode())
            text.writelines(f"{line}\n".encode() for line in translations)
        if shard.is_finished:
            raise _FinishedByAnother


class _Counter:
    """Writes the number of translated lines into a file, at most once a second, for the progress bar."""

    def __init__(self, path: str) -> None:
        self._path, self._lines, self._next = path, 0, 0.0
        self.add(0)

    def add(self, lines: int) -> None:
        """Count *lines* more."""
        self._lines += lines
        if time.monotonic() >= self._next:
            with contextlib.suppress(OSError), open(self._path, "w", encoding="ascii") as file:
                file.write(f"{self._lines}\n")
            self._next = time.monotonic() + 1


def _translated(
    translator: Translator, shard: Shard, counter: _Counter
) -> Iterator[tuple[list[str], list[tuple[int, str]]]]:
    """Yield translations of some lines; and for each line that has none, its number and the reason."""
    with open(shard.source if shard.is_copied else shard.input, "rb") as file:
        file.seek(shard.offset)
        for first in range(shard.first, shard.first + shard.lines, LINES):
            last = min(first + LINES, shard.first + shard.lines)
            lines, reasons = [], {}
            for number in range(first, last):
                try:
                    lines.append(decoded(_next_line(file), shard.input, number))
                except InputError as error:
                    lines.append("")
                    reasons[number] = str(error).removeprefix(f"{shard.input}, line {number}: ")
            translations = []
            for number, translation in enumerate(translator.chunk_with_errors(lines, first, counter.add), first):
                if isinstance(translation, TranslateError):
                    reasons[number] = str(translation).removeprefix(f"line {number} ")
                translations.append("" if number in reasons else str(translation))
            yield translations, sorted(reasons.items())


def lines_translated(shard: Shard) -> int:
    """Return how many lines of a shard that is not finished have been translated."""
    try:
        with open(shard.count, encoding="ascii") as file:
            return min(int(file.read() or 0), shard.lines)
    except (OSError, ValueError):  # not yet, or just being written
        return 0


def _next_line(file: BinaryIO) -> bytes:
    """Return the next line of *file* without its end; of a line that has too many characters, only a part."""
    most = 4 * CHARACTERS + 1  # bytes of a line that may be possible; :func:`decoded` refuses a longer one
    line = rest = file.readline(most)
    while len(rest) == most and not rest.endswith(b"\n"):
        rest = file.readline(most)
    return line.removesuffix(b"\n")
