"""How the commands of a stage are run: printed, kept in a script, logged, with a progress bar."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from recipes.pipeline.experiment import ROOT, StageError
from recipes.pipeline.lock import note_holder
from recipes.pipeline.stage import Stage
from recipes.pipeline.stamps import Partial

PROGRAMS = str(Path(sys.executable).parent)  # of this Python: fairseq-train, subword-nmt, …


def named(path: Path) -> str:
    """*path* as commands and messages name it: relative where it lies in the project."""
    return str(path.relative_to(ROOT) if ROOT in path.parents else path)


def quoted(*values: object) -> str:
    """*values* as words of a shell; a path as :func:`named` gives it."""
    return shlex.join(named(value) if isinstance(value, Path) else str(value) for value in values)


def say(line: str) -> None:
    """Print *line* under the title of the stage."""
    print(f"  {line}", flush=True)


@dataclass
class Shell:
    """Runs the commands of one stage.

    Attributes:
        stage: the one that runs
        script, log, partial: where its commands, their output, and what an interrupted run has made are kept;
            None in a dry run, which only prints
        locks: descriptors that every command inherits: the lock on the work folder lasts while one runs
    """

    stage: Stage
    script: Path | None = None
    log: Path | None = None
    partial: Partial | None = None
    locks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.script is not None:
            self.script.parent.mkdir(parents=True, exist_ok=True)
            path = f'export PATH={shlex.quote(PROGRAMS)}:"$PATH"'
            self.script.write_text(f"set -euo pipefail\ncd {shlex.quote(str(ROOT))}\n{path}\n")

    def command(self, command: str, on_line: Callable[[str], None] | None = None, makes: Sequence[Path] = ()) -> None:
        """Print *command*, keep it in the stage's script, and run it by bash from the project's root.

        Args:
            command: one shell command; a pipeline fails if any part of it does
            on_line: called with every line of its output
            makes: the files that it writes. The command is not run if an interrupted run of the stage has
                written them, and all that came before
        """
        if self.script is None:
            say(f"$ {command}")
            return
        with self.script.open("a") as script:
            script.write(command + "\n")
        if makes and self.partial.has(makes):
            say(f"made before the interruption: {', '.join(map(named, makes))}")
            return
        say(f"$ {command}")
        run_logged(self.stage, command, on_line, self.log, self.locks)
        if makes:
            self.partial.add(makes)

    def tool(self, command: str, makes: Sequence[Path] = ()) -> None:
        """:meth:`command`, of a tool of ours: what it prints is a few lines that are worth showing."""
        self.command(command, lambda line: say(f"  {line.rstrip()}") if line.strip() else None, makes)


def run_logged(
    stage: Stage, command: str, on_line: Callable[[str], None] | None, log: Path, locks: tuple[int, ...]
) -> None:
    """Run *command*; a StageError if it fails. Its tqdm bars are drawn here; what else it prints goes to *log*."""
    environment = dict(os.environ, PATH=f"{PROGRAMS}:{os.environ.get('PATH', '')}")
    environment.setdefault("TQDM_MININTERVAL", "0.5")
    # For the tools of recipes/; where fairseq loads the plugin, its folder is enough.
    environment["PYTHONPATH"] = ":".join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    log.parent.mkdir(parents=True, exist_ok=True)
    last = ""
    bar = _Bar()
    with log.open("a") as file:
        process = subprocess.Popen(
            ["bash", "-c", f"set -euo pipefail; {command}"], cwd=ROOT, env=environment, pass_fds=locks,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
            start_new_session=True,  # so that all of a pipeline can be ended together
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
                if on_line is not None:
                    on_line(line)
            status = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            raise
        finally:
            bar.close()
            process.stdout.close()
    if status != 0:
        failed = f"failed with status {status}: {last or 'it said nothing'} (all that it said: {log})"
        raise StageError(f"stage {stage.number} ({stage.title}) {failed}")


class _Bar:
    """The progress bars of a command: on a terminal in place, elsewhere a line every half minute."""

    # " 45%|####     | 123/456 [00:01<00:02, 45.6it/s]", or without a total "123it [00:01, 45.6it/s]"
    PATTERN = re.compile(r"\[\d+:\d\d[^\]]*(/s|s/\S+|\?\S*)\S*( \S+=\S+)*\]\s*$")

    def __init__(self) -> None:
        self._in_place = sys.stderr.isatty()
        self._drawn = time.time()
        self._open = False
        self._after_bar = True

    def draws(self, line: str) -> bool:
        """Whether *line* is a bar, which is then drawn, or left out since one was drawn just now."""
        if line.isspace() and self._after_bar:  # what is left of a line that was drawn over
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
