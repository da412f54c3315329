"""Locks on files, between processes. The system releases the lock of a process that ends, also of a killed one.

A lock file can name the process that holds the lock.
"""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from typing import NamedTuple


class Lock(NamedTuple):
    """A lock that this process holds, and the commands that inherit its *descriptor*."""

    descriptor: int
    works: bool  # False if the disk has no locks


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], wait: bool = True, shared: bool = False) -> Iterator[Lock]:
    """Lock the file *path* for this process, and create it if necessary.

    Args:
        wait: whether to wait until no other process holds the lock
        shared: whether several processes can have this lock at once

    Raises:
        BlockingIOError: another process holds the lock, and *wait* is False
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # less the umask, as all files
    try:
        works = True
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:  # some network file systems have no locks
            works = False
        yield Lock(descriptor, works)
    finally:
        os.close(descriptor)


def note_holder(descriptor: int, command: int | None = None) -> None:
    """Write this process into the lock file, or add the process id of the *command* that it runs."""
    line = f"{os.getpid() if command is None else command} {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    before = b"" if command is None else os.pread(descriptor, 100, 0).partition(b"\n")[0] + b"\n"
    with contextlib.suppress(OSError):  # for example, on a full disk
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, before + line.encode(), 0)


def holder_of(path: str | os.PathLike[str]) -> str:
    """Return the process that holds the lock in the file *path*, as text."""
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        lines = [line.split(" ", 1) for line in file.read().splitlines()]
        for what, (pid, since) in zip(("process", "its command, process"), lines):
            if _is_alive(int(pid)):
                return f"{what} {pid}, since {since}"
    return "an unknown process"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user
        pass
    return True
