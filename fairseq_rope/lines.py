r"""Reading UTF-8 text with one sentence per line.

Only ``\n`` ends a line. Python, fairseq and subword-nmt also break lines at CR, NEL, U+2028 and similar
characters. Here these are part of the line, as in the tools that aligned the corpora.
"""

import codecs
import contextlib
import gzip
import sys
import zlib
from collections.abc import Iterator
from typing import IO

from .errors import InputError

GZIP = b"\x1f\x8b"  # gzip files begin with these bytes, and text in UTF-8 does not
CHUNK_BYTES = 1 << 16  # bytes: a few hundred lines, which take 50 ms to tokenise


def decode(data: bytes, name: str, lines_before: int = 0) -> str:
    """Return *data* as text; raise an InputError, which names the file and the line, if a byte is not UTF-8.

    *lines_before* is the number of lines before *data* in the file.
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = lines_before + 1 + data.count(b"\n", 0, error.start)
        raise InputError(f"{name}, line {line}: the byte 0x{data[error.start]:02x} is not UTF-8") from None


def split(text: str) -> list[str]:
    r"""Return the lines of *text* without line ends; the last one may lack its ``\n``."""
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def read_chunks(file: IO[bytes], name: str, size: int = CHUNK_BYTES) -> Iterator[str]:
    r"""Yield the text of *file* in chunks of complete lines, about *size* bytes each.

    Every line ends with ``\n``, which is added to the last line if it is missing. A byte order mark at the start is not
    part of the text. An InputError that names the file *name* is raised if it is empty, or a byte of it is not UTF-8.
    """
    lines_before = 0
    while lines := file.readlines(size):
        if not lines_before:
            lines[0] = lines[0].removeprefix(codecs.BOM_UTF8)
        text = decode(b"".join(lines), name, lines_before)
        lines_before += len(lines)
        yield text if text.endswith("\n") else text + "\n"
    if not lines_before:
        raise InputError(f"{name}: is empty")


def chunks_of(path: str) -> Iterator[str]:
    """Yield the chunks of :func:`read_chunks` for the file *path*."""
    with open(path, "rb") as file:
        yield from read_chunks(file, path)


def lines_of(path: str) -> Iterator[str]:
    """Yield the lines of the UTF-8 file *path* without line ends; raise the errors of :func:`read_chunks`."""
    for chunk in chunks_of(path):
        yield from split(chunk)


@contextlib.contextmanager
def naming_damage(name: str) -> Iterator[None]:
    """Raise an InputError that begins with *name* if the data of a gzip file are damaged."""
    try:
        yield
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise InputError(f"{name}: is not a valid gzip file ({error})") from None


def named(path: str) -> str:
    """Return the name of *path* in messages; "-" is standard input."""
    return "standard input" if path == "-" else path


def read_lines(path: str, may_be_blank: bool = False) -> list[str]:
    r"""Return the lines of a UTF-8 file, split on ``\n`` only; it may be gzipped, and "-" is standard input.

    A byte order mark at the start is not part of the text. *may_be_blank*: the file may contain only white space.

    Raises:
        InputError: a byte is not UTF-8, the file is empty or blank, or its compressed data are damaged
        OSError: the file cannot be read
    """
    with contextlib.nullcontext(sys.stdin.buffer) if path == "-" else open(path, "rb") as file:
        data = file.read()
    if data.startswith(GZIP):
        with naming_damage(named(path)):
            data = gzip.decompress(data)
    text = decode(data.removeprefix(codecs.BOM_UTF8), named(path))
    if not text.strip() and not (text and may_be_blank):
        raise InputError(f"{named(path)}: is empty, or all its lines are")
    return split(text)


def count_lines(path: str) -> int:
    """Return the number of lines that :func:`lines_of` yields for *path*."""
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")
