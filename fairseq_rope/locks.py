"""Locks on files, between processes. The system releases the lock of a process that ends, also of a killed one."""

import contextlib
import fcntl
import os
from collections.abc import Iterator


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], wait: bool = True, shared: bool = False) -> Iterator[int]:
    """Lock the file *path* for this process, create it if necessary, and yield its descriptor.

    Args:
        wait: whether to wait until no other process holds the lock
        shared: whether several processes can have this lock at once

    Raises:
        BlockingIOError: another process holds the lock, and *wait* is False
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)  # less the umask, as all files
    try:
        operation = (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
        try:
            fcntl.flock(descriptor, operation)
        except OSError as error:  # some network file systems have no locks
            if isinstance(error, BlockingIOError):
                raise
        yield descriptor
    finally:
        os.close(descriptor)
