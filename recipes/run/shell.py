"""Run the commands of a stage: print them, write them to a script, log their output, show progress."""

import contextlib
import errno
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rope.locks import note_holder
from recipes.run.run import ROOT, StageError
from recipes.run.stage_files import StageFiles
from recipes.run.stamps import Partial

PROGRAMS = str(Path(sys.executable).parent)  # where this Python has fairseq-train, subword-nmt, …
DEFAULTS = {"TQDM_MININTERVAL": "0.5"}  # of variables that the user has not set

# fairseq takes the number of processes and their addresses from these variables before its flags, and the port from the
# number of the job, which is the same for all trainings in the job. A recipe is one process, and starts those of its
# GPUs itself, also in an allocation of several tasks.
OF_LAUNCHERS = (
    *("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_ARRAY_TASK_ID"),
    *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK"),
)

# SLURM sends this signal to all processes of a job before its time limit. Only the job itself, submitit, handles it: it
# ends the commands, and says that the time was over. A command that ended first would hide this reason.
IGNORED = "trap '' USR2; "

# The texts are UTF-8 on every machine, also those that fairseq-generate prints.
UTF8 = {"PYTHONUTF8": "1", "PYTHONIOENCODING": ""}  # the second one, if not empty, would precede


def named(path: Path) -> str:
    """*path* for commands and messages, relative if it is in the project."""
    return str(path.relative_to(ROOT) if ROOT in path.parents else path)


def quoted(*values: object) -> str:
    """*values* quoted for a shell. Paths are given by :func:`named`."""
    return shlex.join(named(value) if isinstance(value, Path) else str(value) for value in values)


@contextlib.contextmanager
def part_of(path: Path) -> Iterator[Path]:
    """Yield the temporary name of *path*, for a command that renames it at the end. After an error it is removed."""
    part = path.with_name(path.name + ".tmp")
    try:
        yield part
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise


def say(line: str) -> None:
    """Print *line* under the title of the stage."""
    print(f"  {line}", flush=True)


@dataclass
class Shell:
    """Runs the commands of one stage."""

    stage: StageFiles[Any]
    script: Path | None = None  # the record of its commands; None in a dry run
    log: Path = Path(os.devnull)  # the record of their output
    partial: Partial | None = None  # the record of finished outputs; None in a dry run
    locks: tuple[int, ...] = ()  # every command inherits them, so that the work folder stays locked while it runs

    def __post_init__(self) -> None:
        if self.script is not None:
            self.script.parent.mkdir(parents=True, exist_ok=True)
            exports = [f'export PATH={shlex.quote(PROGRAMS)}:"$PATH"']
            exports += [f'export {name}="${{{name}-{value}}}"' for name, value in DEFAULTS.items()]
            exports += [f"export {name}={value}" for name, value in UTF8.items()]
            unset = f"unset {' '.join(OF_LAUNCHERS)}"
            head = "\n".join(["set -euo pipefail", f"cd {shlex.quote(str(ROOT))}", unset, *exports, ""])
            self.script.write_text(head, encoding="utf-8")

    def command(
        self, command: str, on_line: Callable[[str], None] | None = None, makes: Sequence[Path] = ()
    ) -> float | None:
        """Print *command*, add it to the stage's script, and run it with bash from the project's root.

        A pipeline fails if any part of it does. *on_line* is called with every line of the output. The command is
        skipped if an interrupted run of the stage already wrote the files that it *makes* and everything before them.
        Returns the peak host memory of the largest process, in MiB; None if it did not run.
        """
        if self.script is None:
            say(f"$ {command}")
            return None
        with self.script.open("a", encoding="utf-8") as script:
            script.write(command + "\n")
        if makes and self.partial is not None and self.partial.has(makes):
            say(f"made before the interruption: {', '.join(map(named, makes))}")
            return None
        say(f"$ {command}")
        peak = run_logged(self.stage, command, on_line, self.log, self.locks)
        if makes and self.partial is not None:
            self.partial.add(makes)
        return peak

    def write(self, command: str, path: Path, makes: Sequence[Path] = ()) -> None:
        """Run *command* as :meth:`command` does; *path* gets its output, and its name when it is complete."""
        with part_of(path) as part:
            self.command(f"{command} > {quoted(part)} && mv {quoted(part, path)}", makes=makes)

    def tool(self, command: str, makes: Sequence[Path] = ()) -> None:
        """Run *command* as :meth:`command` does, and show the few lines that it prints."""

        def show(line: str) -> None:
            # The error message ends with the sentence of a tool that fails.
            if line.strip() and not re.match(r"(recipes\.text\.\w+|fairseq-rope [\w-]+): (?!warning)", line):
                say(f"  {line.rstrip()}")

        self.command(command, show, makes)


def run_logged(
    stage: StageFiles[Any], command: str, on_line: Callable[[str], None] | None, log: Path, locks: tuple[int, ...]
) -> float:
    """Run *command*: show its progress bars, append its other output to *log*. Raises a StageError if it fails.

    Returns the peak host memory of its largest process, in MiB.
    """
    own = {name: value for name, value in os.environ.items() if name not in OF_LAUNCHERS}
    environment = {**DEFAULTS, **own, **UTF8, "PATH": f"{PROGRAMS}:{own.get('PATH', '')}"}
    # python -m recipes.… needs the project's root; fairseq finds the plugin by --user-dir.
    environment["PYTHONPATH"] = ":".join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    log.parent.mkdir(parents=True, exist_ok=True)
    last, disk_is_full = "", False
    bar = _Bar()
    with log.open("a", encoding="utf-8") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"{IGNORED}set -euo pipefail; {command}"], cwd=ROOT, env=environment, pass_fds=locks,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            encoding="utf-8", errors="replace",
            start_new_session=True,  # so that one signal ends all processes of a pipeline
        )  # fmt: skip
        assert process.stdout is not None
        try:
            for lock in locks:
                note_holder(lock, process.pid)
            for line in process.stdout:
                if bar.draws(line):
                    continue
                file.write(line)
                file.flush()
                last = line.strip() or last
                disk_is_full |= os.strerror(errno.ENOSPC) in line
                if on_line is not None:
                    on_line(line)
            # getrusage(RUSAGE_CHILDREN) would include the commands that ran before. bash waits for all parts of a
            # pipeline, so that its own usage includes them.
            _, ended, usage = os.wait4(process.pid, 0)
            status = process.returncode = os.waitstatus_to_exitcode(ended)
        except BaseException:
            with contextlib.suppress(ProcessLookupError):  # SLURM can have ended the command first
                os.killpg(process.pid, signal.SIGTERM)
            raise
        finally:
            bar.close()
            process.stdout.close()
    if status != 0:
        full = f"; the disk of {log.parent.parent} is full" if disk_is_full else ""
        failed = f"failed with status {status}: {last or 'no output'}{full} (full output: {log})"
        raise StageError(f"{stage.description} {failed}")
    return usage.ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)  # bytes, or KiB


class _Bar:
    """Shows the progress bars of a command: in place on a terminal, elsewhere as a line every 30 seconds."""

    # " 45%|####     | 123/456 [00:01<00:02, 45.6it/s]", or without a total "123it [00:01, 45.6it/s]"
    PATTERN = re.compile(r"\[\d+:\d\d[^\]]*(/s|s/\S+|\?\S*)\S*( \S+=\S+)*\]\s*$")

    def __init__(self) -> None:
        self._in_place = sys.stderr.isatty()
        self._drawn = time.time()
        self._open = False
        self._after_bar = True

    def draws(self, line: str) -> bool:
        """Whether *line* is a progress bar. Draws it, unless one was drawn less than 30 seconds ago."""
        if line.isspace() and self._after_bar:  # tqdm clears its line with blanks
            return True
        self._after_bar = self.PATTERN.search(line) is not None
        if not self._after_bar:
            return False
        if self._in_place:
            print(f"\r\033[K  {line.strip()}", end="", file=sys.stderr, flush=True)
            self._open = True
        elif time.time() - self._drawn > 30:
            print(f"  {line.strip()}", file=sys.stderr, flush=True)
            self._drawn = time.time()
        return True

    def close(self) -> None:
        if self._open:
            print(file=sys.stderr, flush=True)
