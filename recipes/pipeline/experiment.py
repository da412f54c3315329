"""One experiment in its folder: where things lie, what ran, and what can be skipped.

A stage is a module with a NUMBER, a TITLE, the names of the SETTINGS that change its outputs, PER_MODEL
(whether these depend on architecture and seed), and three functions of an Experiment: inputs(), outputs()
and run(). It may have also(), a dictionary of what else changes its outputs, and prepare(), which is called
before it is decided whether the stage runs. After a stage has run, its stamp records its settings, inputs
and outputs; while these are the same, it is skipped.
"""

import contextlib
import hashlib
import itertools
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from recipes.text.lines import written_whole

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
        name: what the user has added to the name of that folder
        differs: settings that make another model than the recipe's own, which adds their hash to the name
        bpe: "subword-nmt" or "sentencepiece"
        tokenize: sacreBLEU's tokeniser
        gpus: how many to train on, None for all that there are; 0 for the CPU
        data_dir: a folder of files that were fetched elsewhere, which is only read
        manifest: names, sizes, checksums and addresses of the corpus' files; None if it has none
        dry_run: print commands, run none, write nothing
        held: descriptors that every command inherits: the lock on the work folder lasts while one runs. The
            file of the lock names who holds it
        stages: all of them, in order
        record: called before a stage runs, with the folder that its outputs belong to
    """

    settings: dict[str, Any]
    work: Path
    arch: str
    seed: int
    name: str = ""
    differs: dict[str, Any] = field(default_factory=dict)
    bpe: str = "subword-nmt"
    tokenize: str = "13a"
    gpus: int | None = None
    data_dir: Path | None = None
    manifest: Path | None = None
    dry_run: bool = False
    held: tuple[int, ...] = ()
    stages: tuple[ModuleType, ...] = ()
    record: Callable[[Path], None] | None = None
    _stage: ModuleType | None = field(default=None, init=False)  # the one that runs now
    # Of the outputs of this stage: what an earlier run has made, which was interrupted, and this run so far.
    _resumable: dict[str, str] = field(default_factory=dict, init=False)
    _partial: dict[str, Any] = field(default_factory=dict, init=False)
    _planned: set[Path] = field(default_factory=set, init=False)  # in a dry run: what would be moved

    @property
    def source(self) -> str:
        return self.settings["source_lang"]

    @property
    def target(self) -> str:
        return self.settings["target_lang"]

    @property
    def label(self) -> str:
        """What the name of the model's folder has after its seed; "" for the recipe's own settings."""
        if self.name or not self.differs:
            return self.name
        return hashlib.sha256(json.dumps(self.differs, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def model(self) -> Path:
        return self.work / ".".join(filter(None, (self.unlabelled, self.label)))

    @property
    def unlabelled(self) -> str:
        """The name of the model's folder for the recipe's own settings."""
        return f"{self.arch}.seed{self.seed}"

    def texts(self, folder: str, sets: Iterable[str] = SETS) -> list[Path]:
        """The text files of ``work/FOLDER``: train, valid and test in both languages."""
        return [self.work / folder / f"{n}.{lang}" for n in sets for lang in (self.source, self.target)]

    def templates(self, name: str) -> list[str]:
        """The corpora of a set, as the setting NAME_files names them: FILE or ARCHIVE:MEMBER, with {lang}."""
        return shlex.split(self.settings[f"{name}_files"])

    def fetched(self, file: str) -> Path:
        """Where *file* of the corpus is: in the data folder if it is there, else among the downloads."""
        if self.data_dir is not None and (self.data_dir / file).exists():
            return self.data_dir / file
        return self.work / "downloads" / file

    def files(self) -> list[str]:
        """The names of the corpus' files, each once."""
        names = [template.partition(":")[0] for n in SETS for template in self.templates(n)]
        sides = ((self.source, "src"), (self.target, "ref"))
        return list(dict.fromkeys(fill(name, lang, side) for name in names for lang, side in sides))

    @property
    def subword_model(self) -> str:
        """The file of subwords, under the name that it has in ``bpe/`` and beside the dictionaries."""
        return "bpecodes" if self.bpe == "subword-nmt" else "sentencepiece.bpe.model"

    @property
    def text_flags(self) -> str:
        """The flags by which fairseq's commands treat raw text as this experiment did."""
        model = self.shell(self.work / "data-bin" / self.subword_model)
        if self.bpe == "sentencepiece":
            return f"--bpe sentencepiece --sentencepiece-model {model}"
        return f"--tokenizer moses --moses-no-dash-splits --bpe subword_nmt --bpe-codes {model}"

    def named(self, path: Path) -> str:
        """*path* as commands are given it: relative where it lies in the project."""
        return str(path.relative_to(ROOT) if ROOT in path.parents else path)

    def shell(self, path: Path) -> str:
        """:meth:`named`, quoted for a shell."""
        return shlex.quote(self.named(path))

    def quoted(self, name: str) -> str:
        """The value of the setting *name* as one word of a shell."""
        return shlex.quote(str(self.settings[name]))

    def flags(self, name: str) -> str:
        """The words of the setting *name*, each quoted for a shell."""
        return shlex.join(shlex.split(self.settings[name]))

    # -- skipping ----------------------------------------------------------------------------------

    def ensure(self, stage: ModuleType) -> bool:
        """Run *stage* unless it is done. Returns whether it ran.

        Raises:
            StageError: an input is missing, a command failed, or an output did not appear
        """
        title = f"stage {stage.NUMBER}: {stage.TITLE}"
        self._stage = stage
        prepare = getattr(stage, "prepare", None)
        if self.dry_run:
            print(title)
            if prepare is not None:
                prepare(self)
            self._set_results_aside(stage)
            stage.run(self)
            return True
        missing = [path for path in stage.inputs(self) if not path.exists()]
        if missing:
            raise StageError(f"{title} needs {missing[0]}, {self._maker(missing[0])}")
        if prepare is not None:
            prepare(self)
        of = self.fingerprint(stage)
        found = self._found(stage)
        changed = ""
        if found is not None:
            changed = _changed(found["of"], of) or _changed(found["made"], self._digests(stage.outputs(self)))
            if not changed:
                print(f"{title}: done before, skipped", flush=True)
                return False
        print(title + (f" (again, since {changed} changed)" if changed else ""), flush=True)
        self._set_results_aside(stage)
        stamp, partial = self._stamp(stage), self._stamp(stage).with_suffix(".partial")
        stamp.unlink(missing_ok=True)
        before = self._read_stamp(partial)
        self._resumable = before["made"] if before is not None and before["of"] == of else {}
        self._partial = {"of": of, "made": {}}
        script = self._script(stage)
        script.parent.mkdir(parents=True, exist_ok=True)
        environment = f'export PATH={shlex.quote(_program_path())}:"$PATH"'
        script.write_text(f"set -euo pipefail\ncd {shlex.quote(str(ROOT))}\n{environment}\n")
        begun = time.time()
        if self.record is not None:
            self.record(self._folder(stage))
        stage.run(self)
        for path in stage.outputs(self):
            if not path.exists():
                raise StageError(f"{title} ended without writing {path}")
        done = {
            "of": of,
            "made": self._digests(stage.outputs(self)),
            "seconds": round(time.time() - begun, 1),
        }
        write_whole(stamp, json.dumps(done, indent=1) + "\n")
        partial.unlink(missing_ok=True)
        return True

    def is_done(self, stage: ModuleType) -> bool:
        """Whether *stage* has run with these settings and the inputs and outputs that are there."""
        found = self._found(stage)
        return (
            found is not None
            and found["of"] == self.fingerprint(stage)
            and found["made"] == self._digests(stage.outputs(self))
        )

    def _found(self, stage: ModuleType) -> dict[str, Any] | None:
        """The stamp of *stage*; None if it did not end, or its stamp cannot be read."""
        return self._read_stamp(self._stamp(stage))

    def _read_stamp(self, path: Path) -> dict[str, Any] | None:
        try:
            stamp = json.loads(path.read_text())
            if path.parent.parent == self.model:  # which had another name if it was moved
                for part in ("of", "made"):
                    stamp[part] = {self._renamed(name): value for name, value in stamp[part].items()}
            return stamp if {"of", "made"} <= set(stamp) else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def _renamed(self, name: str) -> str:
        first, slash, rest = name.partition("/")
        moved = slash and re.fullmatch(rf"{self.unlabelled}(\..*)?", first)
        return f"{self.model.name}/{rest}" if moved else name

    def move(self, old: Path, new: Path, why: str) -> None:
        """Move *old*, which is never removed or written over, and say so; in a dry run say it only."""
        if self.dry_run:
            if old not in self._planned:
                self.say(f"{self.named(old)} {why}: would be moved to {self.named(new)}")
            self._planned.add(old)
            return
        self.say(f"{self.named(old)} {why}: moved to {self.named(new)}")
        new.parent.mkdir(parents=True, exist_ok=True)
        old.rename(new)

    def _set_results_aside(self, stage: ModuleType) -> None:
        """Move results beside the model that would not fit its ``settings.yaml`` once *stage* has begun.

        These are the results of *stage*, if its settings or inputs have changed, what was made from them,
        and what was made later with other settings than now. They go to ``earlier/1``, ``2``, …, with the
        ``settings.yaml`` and ``run.yaml`` that describe them. Checkpoints stay, since a training goes on
        from them.
        """
        found = self._found(stage)
        if not stage.PER_MODEL or self.model in self._planned:
            return
        if found is not None and found["of"] == self.fingerprint(stage):
            return
        outdated = dict.fromkeys(self._name(path) for path in stage.outputs(self))
        stamps = []
        for path in sorted((self.model / "stamps").glob("*.json")):
            stamp = self._read_stamp(path)
            if stamp is None or int(path.stem) < stage.NUMBER:
                continue
            changed = any(self.settings.get(name, value) != value for name, value in stamp["of"].items())
            if path == self._stamp(stage) or changed or outdated.keys() & stamp["of"].keys():
                outdated.update(dict.fromkeys(stamp["made"]))
                stamps.append(path)
        results = dict.fromkeys(self.model / Path(name).parts[1] for name in outdated)
        results_there = [path for path in results if path.exists() and path.name != "checkpoints"]
        if not results_there:
            return
        folders = (self.model / "earlier" / str(number) for number in itertools.count(1))
        folder = next(path for path in folders if not path.exists())
        if not self.dry_run:
            folder.mkdir(parents=True)
            for name in ("settings.yaml", "run.yaml"):
                if (self.model / name).exists():
                    shutil.copy(self.model / name, folder / name)
        for result in results_there:
            self.move(result, folder / result.name, "is of another run")
        if not self.dry_run:
            for path in stamps:
                path.unlink()

    def refuse_stale_inputs(self, stage: ModuleType) -> None:
        """Ask, before *stage* is the first to run, whether the ones before it need not run again.

        One of which the inputs are gone, deleted for their room, is taken to be as it should.

        Raises:
            StageError: one has not ended, or would now run with other settings or inputs
        """
        for earlier in self.stages:
            if earlier.NUMBER >= stage.NUMBER:
                return
            if not all(path.exists() for path in earlier.inputs(self)):
                continue
            found = self._found(earlier)
            changed = found and _changed(found["of"], self.fingerprint(earlier))
            if found is None or changed:
                why = f"since {changed} changed" if changed else "which has not ended yet"
                raise StageError(
                    f"stage {stage.NUMBER}: {stage.TITLE} needs stage {earlier.NUMBER} ({earlier.TITLE}) to "
                    f"run first, {why}: run with --stage {earlier.NUMBER}"
                )

    def _maker(self, path: Path) -> str:
        """Which stage makes *path*, as the end of a sentence."""
        for stage in self.stages:
            if path in stage.outputs(self):
                return f"which stage {stage.NUMBER} ({stage.TITLE}) makes: run with --stage {stage.NUMBER}"
        return "which is not there"

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
        wanted: dict[str, Any] = {name: self.settings.get(name) for name in stage.SETTINGS}
        if getattr(stage, "DEPENDS_ON_BPE", False):
            wanted["--bpe"] = self.bpe
        also = stage.also(self) if hasattr(stage, "also") else {}
        return {**wanted, **also, **self._digests(stage.inputs(self))}

    def _digests(self, paths: Iterable[Path]) -> dict[str, str]:
        """What stands for the contents of files, by names that stay the same where the folder is moved."""
        return {self._name(path): _digest(path) for path in paths}

    def _name(self, path: Path) -> str:
        return str(path.relative_to(self.work)) if self.work in path.parents else path.name

    # -- commands ----------------------------------------------------------------------------------

    def say(self, line: str) -> None:
        """Print *line* under the title of the stage."""
        print(f"  {line}", flush=True)

    def command(
        self, command: str, on_line: Callable[[str], None] | None = None, makes: Iterable[Path] = ()
    ) -> None:
        """Print *command*, keep it in the stage's script, and run it by bash from the project's root.

        A bar that the command draws with tqdm is drawn here; what else it prints goes to the log.

        Args:
            command: one shell command; a pipeline fails if any part of it does
            on_line: called with every line of its output
            makes: the files that it writes. If an earlier run of the stage, which was interrupted, has
                written them, and all that came before, the command is not run

        Raises:
            StageError: the command failed; the message has the last line that it printed
        """
        stage = self._stage
        assert stage is not None, "commands run inside a stage"
        if self.dry_run:
            print(f"  $ {command}", flush=True)
            return
        with self._script(stage).open("a") as script:
            script.write(command + "\n")
        makes = list(makes)
        if makes and (there := self._digests(makes)).items() <= self._resumable.items():
            self.say(f"made before the interruption: {', '.join(map(self.named, makes))}")
            self._partial["made"].update(there)
            return
        print(f"  $ {command}", flush=True)
        self._run(stage, command, on_line)
        if makes:
            self._resumable = {}
            self._partial["made"].update(self._digests(makes))
            write_whole(self._stamp(stage).with_suffix(".partial"), json.dumps(self._partial) + "\n")

    def _run(self, stage: ModuleType, command: str, on_line: Callable[[str], None] | None) -> None:
        environment = dict(os.environ, PATH=f"{_program_path()}:{os.environ.get('PATH', '')}")
        environment.setdefault("TQDM_MININTERVAL", "0.5")
        # For the tools of recipes/; where fairseq loads the plugin, its folder is enough.
        environment["PYTHONPATH"] = ":".join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
        log = self.log(stage)
        last = ""
        bar = _Bar()
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
                for lock in self.held:
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
        if status != 0:
            raise StageError(
                f"stage {stage.NUMBER} ({stage.TITLE}) failed with status {status}: "
                f"{last or 'it said nothing'} (all that it said: {log})"
            )

    def tool(self, command: str, makes: Iterable[Path] = ()) -> None:
        """:meth:`command`, of a tool of ours: what it prints is a few lines that are worth showing."""

        def show(line: str) -> None:
            if line.strip():
                self.say(f"  {line.rstrip()}")

        self.command(command, show, makes)


def note_holder(lock: int, command: int | None = None) -> None:
    """Write into the file of a lock the process that holds it, or after it the *command* that it runs."""
    line = f"{os.getpid() if command is None else command} {time.strftime('%Y-%m-%d %H:%M:%S')}\n"
    before = b"" if command is None else os.pread(lock, 100, 0).partition(b"\n")[0] + b"\n"
    with contextlib.suppress(OSError):  # on a full disk, or where the folder itself is the lock
        os.ftruncate(lock, 0)
        os.pwrite(lock, before + line.encode(), 0)


def holder(path: Path) -> str:
    """Who holds the lock whose file is *path*, in words."""
    try:
        lines = [line.split(" ", 1) for line in path.read_text().splitlines()]
        for what, (pid, since) in zip(("process", "its command, process"), lines, strict=False):
            if _is_alive(int(pid)):
                return f"{what} {pid}, since {since}"
    except (OSError, ValueError):
        pass
    return "an unknown process"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # of another user
        pass
    return True


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


def fill(template: str, lang: str, side: str) -> str:
    """*template* with {lang} and {side} filled in."""
    return template.replace("{lang}", lang).replace("{side}", side)


def _digest(path: Path) -> str:
    """What stands for the contents of *path*: a hash, or for a large file its size and date."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return "none"
    if status.st_size > 64 * 2**20:
        return f"{status.st_size} bytes of {status.st_mtime_ns}"
    return "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()


def _program_path() -> str:
    """The folder of the programs of this Python: fairseq-train, subword-nmt, …"""
    return str(Path(sys.executable).parent)


def _changed(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """The names under which two dictionaries differ, as a list in words; empty if they are the same."""
    return ", ".join(sorted(n for n in {**found, **wanted} if found.get(n) != wanted.get(n)))


def write_whole(path: Path, text: str) -> None:
    """Write *text* to *path*, which is never seen half-written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(str(path)) as (file,):
        file.write(text.encode("utf-8"))
