"""Writing a folder that gets its name, or replaces an older folder, only when it is complete."""

import contextlib
import ctypes
import os
import shutil
import time
from collections.abc import Iterator

from ..errors import InputError, warn
from ..files import naming
from ..locks import locked

PATIENCE = 0.2  # seconds: time for an export that is just removing its folder


def exchange(first: str, second: str) -> bool:
    """Exchange the names of two folders in one step; return False if the system cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)  # Linux, with glibc >= 2.28
    here, flag = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename is not None and rename(here, os.fsencode(first), here, os.fsencode(second), flag) == 0


@contextlib.contextmanager
def replacing(output: str) -> Iterator[str]:
    """Yield the name of a new folder that replaces *output* when the block ends without an error.

    The new folder is written inside a hidden one, and is exchanged with *output* in one step. On systems
    that cannot do this, *output* is first moved into the hidden folder. If the process is killed before the new
    folder gets its name, the next call moves *output* back. If another process writes *output*, it is not replaced. On
    a disk without locks this is not known, and there is a warning.
    """
    hidden = os.path.join(os.path.dirname(output), f".{os.path.basename(output)}.export")
    new, old = os.path.join(hidden, "new"), os.path.join(hidden, "old")

    def put_back() -> None:
        if os.path.exists(old) and not os.path.exists(output):
            os.rename(old, output)

    with contextlib.ExitStack() as lock:
        _lock(lock, hidden, output)
        try:
            put_back()
            for leftover in (new, old):
                shutil.rmtree(leftover, ignore_errors=True)
            yield new
            with naming(f"--output {output}"):
                if not os.path.exists(output):
                    os.rename(new, output)
                elif not exchange(new, output):
                    os.rename(output, old)
                    os.rename(new, output)
        finally:
            put_back()
            for leftover in (new, old, hidden):  # last the one with the lock
                shutil.rmtree(leftover, ignore_errors=True)


def _lock(lock: contextlib.ExitStack, hidden: str, output: str) -> None:
    """Create the folder *hidden* and lock a file in it, until *lock* is closed or the process ends."""
    latest = time.monotonic() + PATIENCE
    with naming(f"--output {output}"):
        while True:
            os.makedirs(hidden, exist_ok=True)
            try:
                path = os.path.join(hidden, "lock")
                held = lock.enter_context(locked(path, wait=False))
                if os.path.samestat(os.fstat(held.descriptor), os.stat(path)):
                    if not held.works:
                        warn("export", f"--output {output}: its disk has no locks, so do not run another export to it")
                    return
            except FileNotFoundError:
                pass
            except BlockingIOError:
                if time.monotonic() > latest:
                    raise InputError(f"--output {output}: another export is writing it") from None
                time.sleep(PATIENCE / 10)
            lock.close()  # another export has just removed the folder
