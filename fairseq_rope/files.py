"""Writing files that appear under their names whole or not at all."""

import contextlib
import io
import os
from pathlib import Path
from typing import Any, BinaryIO, Iterator, List


@contextlib.contextmanager
def written_whole(*paths: str, suffix: str = ".tmp") -> Iterator[List[BinaryIO]]:
    """Yield files to write to, which appear as *paths*, synced, when the block ends without an error.

    After an error nothing of them is left, and what *paths* held before is unchanged.

    Args:
        suffix: of the temporary names. With a process number in it, two processes can write the same file at
            once. Without one, the next run overwrites what a killed run has left.

    Raises:
        OSError: a file cannot be written; ``filename`` is its path
    """
    temporaries = [path + suffix for path in paths]
    files: List[BinaryIO] = []
    try:
        for temporary, path in zip(temporaries, paths):
            files.append(io.BufferedWriter(_NamedFile(temporary, path)))
        yield files
        for file, path in zip(files, paths):
            file.flush()
            with naming(path):
                os.fsync(file.fileno())
            file.close()
        if len(paths) > 1:  # killed between two renames, the process leaves no pair of an old and a new file
            for path in paths:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        for temporary, path in zip(temporaries, paths):
            os.replace(temporary, path)
    except BaseException:
        for file in files:
            with contextlib.suppress(OSError):  # closing writes what is buffered: on a full disk, in vain
                file.close()
        for temporary in temporaries[: len(files)]:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise


def write_whole(path: Path, text: str) -> None:
    """Write *text* to *path*, see :func:`written_whole`; its folder is created if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(str(path)) as (file,):
        file.write(text.encode("utf-8"))


class _NamedFile(io.FileIO):
    """A file whose failed writes name *path*; the errors of ``FileIO`` name no file."""

    def __init__(self, temporary: str, path: str) -> None:
        with naming(path):
            super().__init__(temporary, "wb")
        self._path = path

    def write(self, data: Any) -> int:
        with naming(self._path):
            return super().write(data)


@contextlib.contextmanager
def naming(name: str) -> Iterator[None]:
    """Have an OSError name the file *name*, whatever file or none it named."""
    try:
        yield
    except OSError as error:
        error.filename = name
        raise
