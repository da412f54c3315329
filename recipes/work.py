"""The work folder: one folder for each step, named by what the step reads.

A step declares its inputs, which are other steps, and the settings that it reads, among them the checksums of the
user's files. The name of its folder has a hash of these. So another setting makes another folder beside the old one, a
finished step is skipped, and nothing is moved aside or overwritten.

A folder has ``settings.yaml`` (what the step read), ``script.sh`` (its commands) and ``log`` (what they printed).
"""

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import yaml

from fairseq_rope.errors import InputError
from fairseq_rope.files import checksum, write_whole
from fairseq_rope.locks import locked
from recipes.script import run_script, say


class StepError(InputError):
    """A step that cannot run, or that has failed."""


class Busy(Exception):
    """Another process works on a folder."""


@dataclass(frozen=True)
class Step:
    """A piece of work with its own folder. A subclass has the commands.

    ``kind`` is the name of the step; ``label`` distinguishes steps of one kind for people, such as ``rope-seed1``.
    """

    kind: str
    label: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, "Step"] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  # how it runs, not what it makes: no part of the name

    continues: ClassVar[bool] = False  # whether the commands go on with what an interrupted run has left
    speaks: ClassVar[bool] = True  # whether the screen shows what the commands print; the log always has it

    @cached_property
    def name(self) -> str:
        """The name of the folder of this step."""
        read = json.dumps([self.kind, dict(self.settings), self.named_by], sort_keys=True)
        return "-".join(filter(None, (self.kind, self.label, hashlib.sha256(read.encode()).hexdigest()[:8])))

    @property
    def named_by(self) -> dict[str, str]:
        """The folders of the inputs, by role, which are part of the name."""
        return {role: step.name for role, step in self.inputs.items()}

    def at(self, role: str, file: str = "") -> str:
        """Return the path of *file* of an input, for commands that run in the folder of this step."""
        return f"../{self.inputs[role].name}/{file}".rstrip("/")

    def commands(self) -> list[str]:
        """Return the lines of the script that makes the outputs. It runs in the folder of this step."""
        raise NotImplementedError

    def check(self, folder: Path) -> None:
        """Raise a StepError if the commands wrote something wrong into *folder*."""

    def needs(self) -> list["Step"]:
        """Return the steps that must be finished before this one."""
        return [*self.inputs.values()]

    def is_finished(self, work: "Work") -> bool:
        return work.folder(self).is_dir()

    def make(self, work: "Work") -> None:
        """Run the commands under a temporary name, which becomes the name of the folder when all is complete."""
        part = work.path / f".{self.name}.part"
        if not self.continues:
            shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True, exist_ok=True)
        write_whole(part / "settings.yaml", self.record())
        say(f"== {self.name}")
        self.produce(work, part)
        self.check(part)
        for path in part.rglob("*"):
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        part.rename(work.folder(self))

    def produce(self, work: "Work", part: Path) -> None:
        """Write the outputs into the folder *part*."""
        try:
            run_script(part, self.commands(), None if self.speaks else lambda line: None)
        except InputError as error:
            raise StepError(f"{self.name}: {error}") from None

    def record(self) -> str:
        """Return the text of settings.yaml."""
        inputs = {role: step.name for role, step in self.inputs.items()}
        read = {"step": self.kind, "label": self.label, "settings": dict(self.settings), "inputs": inputs}
        return yaml.safe_dump(read, sort_keys=False, allow_unicode=True)


@dataclass
class Work:
    """A work folder, and what its steps have in common."""

    path: Path
    waits: bool = True  # whether to wait for another process, or raise Busy

    def folder(self, step: Step) -> Path:
        return self.path / step.name

    def ensure(self, step: Step) -> Path:
        """Make *step* and what it needs, unless it is finished. Returns its folder."""
        if step.is_finished(self):
            return self.folder(step)
        for needed in step.needs():
            self.ensure(needed)
        with self.lock(step.name):
            if not step.is_finished(self):  # another process may have finished it meanwhile
                self.say_what_differs(step)
                step.make(self)
        return self.folder(step)

    @contextlib.contextmanager
    def lock(self, name: str) -> Iterator[None]:
        """Hold the lock of a folder. If another process holds it, wait, or raise Busy if this work does not wait."""
        path = self.path / ".locks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            try:
                held = stack.enter_context(locked(path, wait=False))
            except BlockingIOError:
                if not self.waits:
                    raise Busy(name) from None
                say(f"{name}: waiting for another process")
                held = stack.enter_context(locked(path))
            os.set_inheritable(held, True)  # a command that outlives this process keeps the lock
            yield

    def is_locked(self, name: str) -> bool:
        path = self.path / ".locks" / name
        try:
            with locked(path, wait=False, shared=True) if path.exists() else contextlib.nullcontext():
                return False
        except BlockingIOError:
            return True

    def records(self, kind: str) -> dict[str, dict[str, Any]]:
        """Return what settings.yaml of each step of this *kind* says, by the name of its folder."""
        paths = sorted(self.path.glob(f"{kind}-*/settings.yaml"))
        return {path.parent.name: yaml.safe_load(path.read_text(encoding="utf-8")) for path in paths}

    def say_what_differs(self, step: Step) -> None:
        """Say how *step* differs from the most similar one with its label, unless it goes on in its own folder."""
        records = {name: one for name, one in self.records(step.kind).items() if one["label"] == step.label}
        if not records or step.name in records:
            return
        here = flat(dict(step.settings))
        nearest = min((differences(here, flat(one["settings"])) for one in records.values()), key=len)
        words = [f"{key} {new}, not {old}" for key, (new, old) in nearest.items()]
        if words:
            say(f"{', '.join(words)}: new folder")

    def digest(self, path: Path) -> str:
        """Return the checksum of a file of the user, which is computed again if its size or time has changed."""
        cache_path = self.path / ".digests.json"
        cache = json.loads(cache_path.read_text()) if cache_path.exists() else {}
        key = str(path)
        if not path.is_file():
            if key in cache:  # its text may be in this work folder, which came from another machine
                return str(cache[key][0])
            raise InputError(f"{path}: does not exist, or is not a file")
        state = [path.stat().st_size, path.stat().st_mtime_ns]
        if cache.get(key, [])[1:] != state:
            cache[key] = [checksum(path), *state]
            self.path.mkdir(parents=True, exist_ok=True)
            write_whole(cache_path, json.dumps(cache, indent=1))
        return str(cache[key][0])

    def link(self, name: str, step: Step, inside: str = "") -> None:
        """Let the plain *name* lead to the folder of *step*, or to a file in it."""
        temporary = self.path / f".{name}.{os.getpid()}"
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(Path(step.name, inside))
        temporary.replace(self.path / name)


def flat(nested: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Return the values of a nested mapping by their dotted names."""
    values: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{before}{key}.")
        else:
            values[before + key] = value
    return values


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ, here and there, by name."""
    names = [*here, *(name for name in there if name not in here)]
    return {name: (here.get(name), there.get(name)) for name in names if here.get(name) != there.get(name)}
