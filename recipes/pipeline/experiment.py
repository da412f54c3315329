"""One experiment in its folder: where things lie, what ran, and what can be skipped.

A stage is a module with a NUMBER, a TITLE, the names of the SETTINGS that change its outputs, PER_MODEL
(whether these depend on architecture and seed), and three functions of an Experiment: inputs(), outputs()
and run(). After a stage has run, its stamp records the settings and the inputs it ran with; while these
are the same and its outputs exist, it is skipped.
"""

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SETS = ("train", "valid", "test")


class StageError(RuntimeError):
    """A stage cannot run or has failed; the message says which, and what to do."""


@dataclass
class Experiment:
    """The settings and the folder of one run of a recipe.

    Attributes:
        settings: the resolved settings
        work: the recipe's work folder; what depends on the data alone lies directly in it
        arch, seed: the model; what depends on these too lies in ``work/ARCH.seedSEED``
        held: descriptors that every command inherits: the lock on the work folder lasts while one runs
    """

    settings: dict[str, Any]
    work: Path
    arch: str
    seed: int
    held: tuple[int, ...] = ()
    _stage: ModuleType | None = field(default=None, init=False)  # the one that runs now

    @property
    def source(self) -> str:
        return self.settings["source_lang"]

    @property
    def target(self) -> str:
        return self.settings["target_lang"]

    @property
    def model(self) -> Path:
        return self.work / f"{self.arch}.seed{self.seed}"

    def texts(self, folder: str) -> list[Path]:
        """The six text files of ``work/FOLDER``: train, valid and test in both languages."""
        return [self.work / folder / f"{n}.{lang}" for n in SETS for lang in (self.source, self.target)]

    def shell(self, path: Path) -> str:
        """*path* as it is written in a command: quoted, and relative where it lies in the project."""
        return shlex.quote(str(path.relative_to(ROOT) if ROOT in path.parents else path))

    # -- skipping ----------------------------------------------------------------------------------

    def ensure(self, stage: ModuleType) -> bool:
        """Run *stage* unless it is done. Returns whether it ran.

        Raises:
            StageError: an input is missing, a command failed, or an output did not appear
        """
        title = f"stage {stage.NUMBER}: {stage.TITLE}"
        missing = [path for path in stage.inputs(self) if not path.exists()]
        if missing:
            raise StageError(f"{title} needs {missing[0]}; run the recipe from an earlier --stage")
        wanted = self.fingerprint(stage)
        stamp = self._stamp(stage)
        found = json.loads(stamp.read_text()) if stamp.exists() else None
        if found == wanted and all(path.exists() for path in stage.outputs(self)):
            print(f"{title}: done before, skipped", flush=True)
            return False
        print(f"{title}{_what_changed(found, wanted)}", flush=True)
        stamp.unlink(missing_ok=True)
        script = self._script(stage)
        script.parent.mkdir(parents=True, exist_ok=True)
        environment = f'export PATH={shlex.quote(_program_path())}:"$PATH"'
        script.write_text(f"set -euo pipefail\ncd {shlex.quote(str(ROOT))}\n{environment}\n")
        self._stage = stage
        stage.run(self)
        for path in stage.outputs(self):
            if not path.exists():
                raise StageError(f"{title} ended without writing {path}")
        write_whole(stamp, json.dumps(wanted, indent=1) + "\n")
        return True

    def _folder(self, stage: ModuleType) -> Path:
        return self.model if stage.PER_MODEL else self.work

    def _stamp(self, stage: ModuleType) -> Path:
        return self._folder(stage) / "stamps" / f"{stage.NUMBER:02d}.json"

    def _script(self, stage: ModuleType) -> Path:
        name = stage.__name__.rsplit(".", 1)[-1]
        return self._folder(stage) / "commands" / f"{name}.sh"

    def log(self, stage: ModuleType) -> Path:
        """Where the output of the commands of *stage* goes."""
        path = self._folder(stage) / "logs" / f"{stage.__name__.rsplit('.', 1)[-1]}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def fingerprint(self, stage: ModuleType) -> dict[str, Any]:
        """What the outputs of *stage* depend on, as JSON."""
        wanted: dict[str, Any] = {name: self.settings[name] for name in stage.SETTINGS}
        for path in stage.inputs(self):
            wanted[str(path)] = _digest(path)
        return wanted

    # -- commands ----------------------------------------------------------------------------------

    def command(self, command: str, on_line: Callable[[str], None] | None = None) -> None:
        """Print *command*, keep it in the stage's script, and run it by bash from the project's root.

        Args:
            command: one shell command; a pipeline fails if any part of it does
            on_line: called with every line of its output, which goes to the log in any case

        Raises:
            StageError: the command failed; the message ends with the last lines that it printed
        """
        stage = self._stage
        assert stage is not None, "commands run inside a stage"
        print(f"  $ {command}", flush=True)
        with self._script(stage).open("a") as script:
            script.write(command + "\n")
        environment = dict(os.environ, PATH=f"{_program_path()}:{os.environ.get('PATH', '')}")
        log = self.log(stage)
        last: list[str] = []
        with log.open("a") as file:
            process = subprocess.Popen(
                ["bash", "-c", f"set -euo pipefail; {command}"],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,  # so that all of a pipeline can be ended together
                pass_fds=self.held,
            )
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    file.write(line)
                    file.flush()
                    last = [*last[-9:], line]
                    if on_line is not None:
                        on_line(line)
                status = process.wait()
            except BaseException:
                os.killpg(process.pid, signal.SIGTERM)
                raise
        if status != 0:
            tail = "".join(f"    {line.rstrip()}\n" for line in last)
            raise StageError(
                f"stage {stage.NUMBER} ({stage.TITLE}) failed with status {status}; the end of {log}:\n{tail}"
            )


def _digest(path: Path) -> str:
    """What stands for the contents of *path*: a hash, or for a large file its size and date."""
    status = path.stat()
    if status.st_size > 64 * 2**20:
        return f"{status.st_size} bytes of {status.st_mtime_ns}"
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


def _program_path() -> str:
    """The folder of the programs of this Python: fairseq-train, subword-nmt, …"""
    return str(Path(sys.executable).parent)


def _what_changed(found: dict[str, Any] | None, wanted: dict[str, Any]) -> str:
    if found is None:
        return ""
    names = sorted(name for name in {**found, **wanted} if found.get(name) != wanted.get(name))
    return f" (again, since {', '.join(names)} changed)" if names else " (again, since an output is gone)"


def write_whole(path: Path, text: str) -> None:
    """Write *text* to *path*, which is never seen half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)
