"""Processes of this machine, which submitit starts. None outlives the one that started it.

Each waits in a thread for a lock that the starting process holds, and ends when it gets the lock.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from submitit.local.local import LocalExecutor

from ..locks import locked

LONGEST = 60 * 24 * 365  # minutes that a process may take


@dataclass(frozen=True)
class Starter:
    """What a process gets from the one that starts it."""

    lock: Path  # which the starting process holds
    gpus: str | None  # the value of CUDA_VISIBLE_DEVICES

    def prepare(self) -> None:
        """Prepare the new process, which calls this: set its GPUs, and let it end with the one that started it."""
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        if self.gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = self.gpus
        self._end_after(wait=False)
        threading.Thread(target=self._end_after, args=(True,), daemon=True).start()

    def _end_after(self, wait: bool) -> None:
        """End this process if the one that holds the lock has ended; *wait*: wait until it has."""
        with contextlib.suppress(FileNotFoundError, BlockingIOError), locked(self.lock, wait, shared=True) as held:
            if held.works:
                os.kill(os.getpid(), signal.SIGTERM)


def executor(folder: Path) -> LocalExecutor:
    """Return submitit's executor, whose files will be in *folder*."""
    created = _QuietExecutor(folder=folder)
    created.update_parameters(timeout_min=LONGEST, stderr_to_stdout=True)
    return created


class _QuietExecutor(LocalExecutor):
    """Starts jobs on this machine. A stopped job does not print the traceback of submitit's own process."""

    def _submit_command(self, command: str) -> Any:
        sys.stderr.flush()
        terminal = os.dup(2)
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 2)
        try:
            job: Any = super()._submit_command(command)
        finally:
            os.dup2(terminal, 2)
            os.close(terminal)
        job._results_timeout_s = 0  # a result is there when its process ends; submitit waits 15 s for a missing one
        return job


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Handle SIGINT, with which submitit ends jobs. They would ignore it, as a shell's background processes do."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
