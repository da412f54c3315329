"""Writing a folder that gets its name, or replaces an older folder, only when it is complete."""

import contextlib
import os
import shutil
import time
from collections.abc import Iterator

from ..errors import InputError, warn
from ..files import naming
from ..locks import locked

PATIENCE = 0.2  # seconds: time for an export that is just removing its folder


@contextlib.contextmanager
def replacing(output: str) -> Iterator[str]:
    """Yield the name of a new folder that replaces *output* when the block ends without an error.

    The new folder is written inside a hidden one, into which *output* is moved before the new folder gets its name. If
    the process is killed between these two renames, there is no *output*, and the next call moves the old one back. If
    another process writes *output*, it is not replaced. On a disk without locks this is not known, and there is a
    warning.
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
                if os.path.exists(output):
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
