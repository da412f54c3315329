r"""Reading UTF-8 text of one sentence a line.

A line ends with ``\n`` and nothing else. CR, NEL, U+2028 and the like, at which Python, fairseq and
subword-nmt break lines, are part of the line that holds them, as they are for the tools that aligned the
corpora.
"""

from typing import BinaryIO, Iterator

from .errors import InputError

CHUNK = 1 << 16  # bytes; some hundred lines, 50 ms of tokenising


def decode(data: bytes, name: str, lines_before: int = 0) -> str:
    """*data* as text.

    Args:
        name: what messages call the file
        lines_before: the lines of the file before *data*

    Raises:
        InputError: a byte is not UTF-8; the message names file and line
    """
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = lines_before + 1 + data.count(b"\n", 0, error.start)
        raise InputError(f"{name}, line {line}: the byte 0x{data[error.start]:02x} is not UTF-8") from None


def split(text: str) -> "list[str]":
    r"""The lines of *text* without their ends; the last one may lack its ``\n``."""
    lines = text.split("\n")
    return lines if lines[-1] else lines[:-1]


def read_chunks(file: BinaryIO, name: str, size: int = CHUNK) -> Iterator[str]:
    r"""Yield the text of *file* in pieces of whole lines, about *size* bytes each.

    Every line ends with ``\n``, also the last one of a file that lacks it.

    Args:
        name: what messages call the file

    Raises:
        InputError: the file is empty, or a byte of it is not UTF-8
    """
    before = 0  # lines
    while True:
        lines = file.readlines(size)
        if not lines:
            break
        text = decode(b"".join(lines), name, before)
        before += len(lines)
        yield text if text.endswith("\n") else text + "\n"
    if not before:
        raise InputError(f"{name}: is empty")


def chunks_of(path: str, size: int = CHUNK) -> Iterator[str]:
    """:func:`read_chunks` of the file *path*."""
    with open(path, "rb") as file:
        yield from read_chunks(file, path, size)


def lines_of(path: str) -> Iterator[str]:
    """Yield the lines of the UTF-8 file *path* without their ends; raises as :func:`read_chunks` does."""
    for chunk in chunks_of(path):
        yield from split(chunk)


def count_lines(path: str) -> int:
    """How many lines :func:`lines_of` gives for *path*."""
    count, last = 0, b"\n"
    with open(path, "rb") as file:
        for block in iter(lambda: file.read(1 << 20), b""):
            count += block.count(b"\n")
            last = block[-1:]
    return count + (last != b"\n")
