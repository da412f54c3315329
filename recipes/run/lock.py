"""Locks on work folders and models: one run at a time."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from fairseq_rope.locks import holder_of, locked, note_holder


@contextlib.contextmanager
def locked_when_free(path: Path, refused: str = "") -> Iterator[int]:
    """Lock the file *path* for this process and the commands that it starts. Yields the lock's descriptor.

    If another process holds the lock, wait for it. With *refused*, end this process with that sentence instead.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            lock = stack.enter_context(locked(path, wait=False))
        except BlockingIOError:
            if refused:
                instead = "to train several models side by side, run python -m recipes.compare with --jobs N"
                sys.exit(f"{refused}: {holder_of(path)}; {instead}")
            print(f"{path} is locked by {holder_of(path)}: waiting for it", flush=True)
            lock = stack.enter_context(locked(path))
        if not lock.works:
            print(f"{path}: its disk has no locks; do not start a second run there", file=sys.stderr)
        note_holder(lock.descriptor)
        yield lock.descriptor
