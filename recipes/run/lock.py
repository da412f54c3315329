"""Locks on work folders and models: one run at a time. The lock file names the process that holds it."""

import contextlib
import fcntl
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def locked_when_free(path: Path, refused: str = "") -> Iterator[int]:
    """Lock the file *path* for this process and the commands that it starts. Yields the lock's descriptor.

    If another process holds the lock, wait for it. With *refused*, end this process with that sentence instead.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if refused:
                instead = "to train several models side by side, run python -m recipes.compare with --jobs N"
                sys.exit(f"{refused}: {_holder(path)}; {instead}")
            print(f"{path} is locked by {_holder(path)}: waiting for it", flush=True)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:  # some network file systems have no locks
            print(f"{path}: cannot be locked ({error.strerror}); do not start a second run there", file=sys.stderr)
        note_holder(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


def note_holder(descriptor: int, command: int | None = None) -> None:
    """Write this process into the lock file, or add the process id of the *command* that it runs."""
    line = f"{os.getpid() if command is None else command} {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    before = b"" if command is None else os.pread(descriptor, 100, 0).partition(b"\n")[0] + b"\n"
    with contextlib.suppress(OSError):  # for example, on a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, before + line.encode(), 0)


def _holder(path: Path) -> str:
    """The process that holds the lock in the file *path*, as text."""
    try:
        lines = [line.split(" ", 1) for line in path.read_text().splitlines()]
        for what, (pid, since) in zip(("process", "its command, process"), lines, strict=False):
            if _is_alive(int(pid)):
                return f"{what} {pid}, since {since}"
    except (OSError, ValueError):
        pass
    return "an unknown process"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        pass
    return True
