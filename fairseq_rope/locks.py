"""Locks on files, between processes. The system releases the lock of a process that ends, also of a killed one."""

import contextlib
import fcntl
import os
from collections.abc import Iterator


@contextlib.contextmanager
def locked(path: str, wait: bool = True, shared: bool = False) -> Iterator[bool]:
    """Lock the file *path* for this process, and create it if necessary. Yields False if its disk has no locks.

    Args:
        wait: whether to wait until no other process holds the lock
        shared: whether several processes can have this lock at once

    Raises:
        BlockingIOError: another process holds the lock, and *wait* is False
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        is_held = True
        try:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            raise
        except OSError:  # some network file systems have no locks
            is_held = False
        yield is_held
    finally:
        os.close(descriptor)
