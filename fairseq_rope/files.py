"""Writing files that get their names only when they are complete; the names of numbered checkpoints."""

import contextlib
import errno
import hashlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

# the names of the checkpoints that fairseq writes after an epoch, and after an interval of updates
NUMBERS = {"epoch": r"checkpoint(\d+)\.pt", "update": r"checkpoint_\d+_(\d+)\.pt"}


@contextlib.contextmanager
def written_whole(*paths: str, suffix: str = ".tmp") -> Iterator[list[BinaryIO]]:
    """Yield files to write to; they are synced and renamed to *paths* when the block ends without an error.

    After an error in the block the new files are removed, and the old files at *paths* are unchanged. Several old files
    are removed before the first new one gets its name.

    If *suffix*, which ends the temporary names, contains the process number, two processes can write the same file at
    once. If not, the next run overwrites the temporary file of a killed run. ``filename`` of an OSError is the path.
    """
    temporaries = [path + suffix for path in paths]
    files: list[BinaryIO] = []
    try:
        for temporary, path in zip(temporaries, paths):
            files.append(io.BufferedWriter(_NamedFile(temporary, path)))
        yield files
        for file, path in zip(files, paths):
            file.flush()
            with naming(path):
                os.fsync(file.fileno())
            file.close()
        for path in paths:
            if os.path.isdir(path):  # os.replace would say so after other files are replaced
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if len(paths) > 1:  # a process that is killed between two renames leaves no old file beside a new one
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        for temporary, path in zip(temporaries, paths):
            with naming(path):
                os.replace(temporary, path)
    except BaseException:
        for file in files:
            with contextlib.suppress(OSError):  # closing writes the buffer, which fails on a full disk
                file.close()
        for temporary in temporaries[: len(files)]:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write *text* to *path* with :func:`written_whole`; create its folder if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(str(path)) as (file,):
        file.write(text.encode("utf-8"))


def checksum(path: str | Path, kind: str = "sha256") -> str:
    """Return the checksum of a file, in hexadecimal; *kind* is a name of ``hashlib``."""
    digest = hashlib.new(kind, usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class _NamedFile(io.FileIO):
    """A file whose errors name *path*; the errors of ``FileIO`` name no file."""

    def __init__(self, temporary: str, path: str) -> None:
        with naming(path):
            super().__init__(temporary, "wb")
        self._path = path

    def write(self, data: Any) -> int:
        with naming(self._path):
            return super().write(data)


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Set the file name in an OSError to *name*."""
    try:
        yield
    except OSError as error:
        error.filename = name
        raise
