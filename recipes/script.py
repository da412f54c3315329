"""Run the commands of a step as one bash script, with its output in a log.

The script writes into the log itself. So a training goes on, and its log too, if this process is killed.
"""

import contextlib
import errno
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TextIO

from fairseq_rope.errors import InputError
from fairseq_rope.files import write_whole

ROOT = Path(__file__).resolve().parents[1]  # of the clone
PROGRAMS = str(Path(sys.executable).parent)  # where this Python has fairseq-train, subword-nmt, …
# fairseq takes the number of processes and their addresses from these variables before its flags. A recipe is one
# process, which starts those of its GPUs itself, also in an allocation of several tasks.
OF_LAUNCHERS = (
    *("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID"),
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
)
HEAD = f"""\
#!/usr/bin/env bash
# By hand: FAIRSEQ_ROPE=path/of/the/clone bash script.sh
set -euo pipefail
cd "$(dirname "$0")"
export PYTHONPATH="$FAIRSEQ_ROPE${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONUTF8=1 PYTHONIOENCODING=
unset {" ".join(OF_LAUNCHERS)}
"""
# " 45%|####     | 123/456 [00:01<00:02, 45.6it/s]", or without a total "123it [00:01, 45.6it/s]"
BAR = re.compile(r"\[\d+:\d\d[^\]]*\]\s*$")


def say(line: str) -> None:
    print(line, flush=True)


def run_script(folder: Path, commands: Sequence[str], on_line: Callable[[str], None] | None = None) -> int:
    """Write *commands* to ``folder/script.sh`` and run it. Returns the peak memory of its largest process, in MiB.

    *on_line* gets each line that is added to ``folder/log``; by default, lines are shown as they are, but for progress
    bars. Raises an InputError with the last line if a command fails.
    """
    write_whole(folder / "script.sh", HEAD + "".join(f"{command}\n" for command in commands))
    for command in commands:
        say(f"  $ {command}")
    environment = {"TQDM_MININTERVAL": "0.5", **os.environ, "FAIRSEQ_ROPE": str(ROOT)}
    environment["PATH"] = f"{PROGRAMS}:{environment.get('PATH', '')}"
    log = folder / "log"
    with log.open("ab") as output, log.open("r", encoding="utf-8", errors="replace", newline="") as reader:
        reader.seek(0, os.SEEK_END)
        process = subprocess.Popen(
            ["bash", "script.sh"], cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            close_fds=False,  # it inherits the lock
            start_new_session=True,  # so that one signal ends all its processes
        )  # fmt: skip
        shown = _Shown(on_line)
        try:
            while (ended := os.wait4(process.pid, os.WNOHANG))[0] == 0:
                shown.follow(reader)
                time.sleep(0.1)
        except BaseException:
            end(process)
            raise
        shown.follow(reader)
        shown.end()
    process.returncode = os.waitstatus_to_exitcode(ended[1])
    if process.returncode:
        full = "; the disk is full" if os.strerror(errno.ENOSPC) in shown.last else ""
        raise InputError(f"status {process.returncode}: {shown.last or 'no output'}{full} (see {log})")
    return ended[2].ru_maxrss // (2**20 if sys.platform == "darwin" else 2**10)


def end(process: subprocess.Popen[bytes], seconds: float = 10) -> None:
    """End a script and all that it has started. What ignores SIGTERM is killed after some seconds."""
    latest = time.monotonic() + seconds
    with contextlib.suppress(ProcessLookupError, PermissionError):  # none is left; macOS: none that runs
        os.killpg(process.pid, signal.SIGTERM)
        while time.monotonic() < latest:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class _Shown:
    """Passes on the lines of a log, and draws its progress bars: on a terminal in place, elsewhere every 30 seconds."""

    def __init__(self, on_line: Callable[[str], None] | None):
        self._show = on_line or (lambda line: say(f"  {line}"))
        self._rest, self._drawn, self._open = "", time.monotonic(), False
        self.last = ""  # the last line that is no progress bar

    def follow(self, reader: TextIO) -> None:
        *lines, self._rest = re.split(r"[\r\n]", self._rest + reader.read())
        for line in filter(str.strip, lines):
            if BAR.search(line):
                self._draw(line.strip())
            else:
                self.last = line.strip()
                self._show(line.rstrip())

    def _draw(self, bar: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[K  {bar}", end="", file=sys.stderr, flush=True)
            self._open = True
        elif time.monotonic() - self._drawn > 30:
            print(f"  {bar}", file=sys.stderr, flush=True)
            self._drawn = time.monotonic()

    def end(self) -> None:
        self.last = self._rest.strip() or self.last
        if self._open:
            print(file=sys.stderr, flush=True)
