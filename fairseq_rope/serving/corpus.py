"""Translate files of any size, in shards of a number of lines. Each shard is translated by a process of its own.

The output folder has a folder ``shards`` with the plan of the run and the finished shards. A file gets its name only
when it is complete, so that the same command continues after the run, or a process of it, was killed at any moment.
"""

import collections
import contextlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

from ..errors import InputError, flag_of, refuse_other_bytes, warn
from ..files import written_whole
from ..launch.jobs import Launcher, Watcher, outcomes, refuse_tags
from ..launch.slurm import cancel_jobs_in
from ..lines import GZIP
from ..locks import holder_of, locked, note_holder
from .ctranslate2_search import refuse_topk
from .exported_folder import SETTINGS, TranslateError, exported_settings, refuse_changed_files
from .shards import (
    BLOCK,
    REFUSED,
    How,
    Shard,
    divide,
    is_compressed,
    lines_translated,
    refusal,
    state_of,
    translate_shard,
)

SHARDS = "shards"  # the folder in the output folder
LATE = 60  # seconds until a network file system shows a file that another machine has written
NAMED = 3  # failed shards that the last message names


@dataclass(frozen=True)
class CorpusFile:
    """An input, its shards and its output."""

    input: str
    number: int  # of the input, from 0
    state: str  # of the input, which must not change
    lines: int
    offsets: Sequence[int]  # of the first lines of the shards, in bytes
    folder: str  # of the output
    shard_lines: int

    @property
    def output(self) -> str:
        """The path of the translations."""
        return os.path.join(self.folder, output_name(self.input))

    @property
    def refused(self) -> str:
        """The path of the list of lines that were not translated."""
        return self.output + REFUSED

    @property
    def record(self) -> str:
        """The path of a file that exists if *output* was written by this run."""
        return os.path.join(self.folder, SHARDS, f"{self.number}.joined")

    @cached_property
    def shards(self) -> list[Shard]:
        """The shards, in order."""
        copied = is_compressed(self.input)
        return [
            Shard(
                self.input,
                self.state,
                1 + n * self.shard_lines,
                min(self.shard_lines, self.lines - n * self.shard_lines),
                0 if copied else offset,
                stem_of(self.folder, self.number, n),
                copied,
            )
            for n, offset in enumerate(self.offsets)
        ]

    @property
    def is_joined(self) -> bool:
        """Whether the output is complete."""
        return os.path.exists(self.record) and os.path.exists(self.output)


def output_name(path: str) -> str:
    """Return the name of the output for the input *path*."""
    return os.path.basename(path).removesuffix(".gz")


def stem_of(folder: str, number: int, shard: int) -> str:
    """Return the beginning of the paths of the files of a shard of the input with a *number*, both from 0."""
    return os.path.join(folder, SHARDS, f"{number}.{shard:06}")


def translate_corpus(
    inputs: Sequence[str],
    folder: str,
    how: How,
    launcher: Launcher,
    shard_lines: int,
    progress: Callable[[int, int], contextlib.AbstractContextManager[Any]],
) -> None:
    """Translate *inputs* into files of *folder*, in processes that *launcher* starts. Finished parts are not repeated.

    Args:
        inputs: paths of text files or .gz, which must not change meanwhile
        folder: with SLURM, all nodes must see it, and the inputs and the model
        shard_lines: how many lines a process translates
        progress: returns the progress bar of a number of lines; the second argument says how many of them are finished

    Raises:
        InputError: an input, an output, the model or SLURM cannot be used; the settings are not those of an earlier
            start in *folder*; another process is working there; or shards have failed
    """
    launcher.check()
    if launcher.slurm is not None:
        refuse_other_bytes(os.path.realpath(folder), "--output-dir")
    refuse_tags(os.path.realpath(folder))
    _refuse_names(inputs, folder)
    present = _settings(inputs, how, shard_lines)
    refuse_topk(how.model, how.sampling)
    shards = os.path.join(folder, SHARDS)
    lock, plan = os.path.join(shards, "lock"), os.path.join(shards, "plan.json")
    if os.path.isdir(shards) and os.listdir(shards) and not os.path.exists(lock):
        raise TranslateError(f"--output-dir {folder}: its folder {SHARDS} is not of this command; give another folder")
    if not os.path.exists(plan):
        _refuse_outputs(inputs, folder)
    os.makedirs(shards, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            held = stack.enter_context(locked(lock, wait=False))
        except BlockingIOError:
            other = f"another process is translating into it: {holder_of(lock)}"
            raise TranslateError(f"--output-dir {folder}: {other}") from None
        if not held.works:
            warn("translate", f"--output-dir {folder}: its disk has no locks; do not start a second process there")
        note_holder(held.descriptor)
        jobs = Path(os.path.realpath(shards), "jobs")
        _cancel_earlier_jobs(jobs)
        if not os.path.exists(plan):
            _write_plan(plan, inputs, folder, shard_lines, present)
        files = _read_plan(plan, inputs, folder, present)
        finished = 0
        for file in files:
            _refuse_state(file, how.strict)
            if file.is_joined:
                print(f"{file.output}: done before", flush=True)
                _remove_shards(file)
            finished += file.lines if file.is_joined else sum(shard.lines for shard in file.shards if shard.is_finished)
        with progress(sum(file.lines for file in files), finished) as bar:
            _translate(files, how, launcher, jobs, bar)
        shutil.rmtree(jobs, ignore_errors=True)


# -- before work begins ------------------------------------------------------------------------------


def _refuse_names(inputs: Sequence[str], folder: str) -> None:
    """Raise a TranslateError if an input is not a file, or if two would be written into the same file."""
    if os.path.exists(folder) and not os.path.isdir(folder):
        raise TranslateError(f"--output-dir {folder}: must be a folder, or not exist")
    input_of: dict[str, str] = {}  # by each name that is written
    for path in inputs:
        if not os.path.isfile(path):
            pipe = "must be a file, because --output-dir reads it more than once"
            raise TranslateError(f"--input {path}: {pipe if os.path.exists(path) else 'does not exist'}")
        with open(path, "rb") as file:
            if file.read(len(GZIP)) == GZIP and not is_compressed(path):
                raise TranslateError(f"--input {path}: is compressed with gzip; its name must end in .gz")
        name = output_name(path)
        if name in ("", SHARDS):
            raise TranslateError(f"--input {path}: an output cannot have the name {name!r}; rename the input")
        for written in _names_for(name):
            if written in input_of:
                both = f"the outputs of this file and of {input_of[written]} would both be {written}"
                raise TranslateError(f"--input {path}: {both}; rename one of them")
            input_of[written] = path


def _refuse_outputs(inputs: Sequence[str], folder: str) -> None:
    """Raise a TranslateError if an output exists before the run has begun."""
    for name in (name for path in inputs for name in _names_for(output_name(path))):
        if os.path.lexists(output := os.path.join(folder, name)):
            if os.path.exists(output) and any(os.path.samefile(output, path) for path in inputs):
                raise TranslateError(f"--output-dir {folder}: {output} is an input; give another folder")
            raise TranslateError(f"--output-dir: {output} exists already; remove it, or give another folder")


def _names_for(name: str) -> list[str]:
    """Return the names of the files that are written for the output with a *name*, also temporarily."""
    return [name, name + REFUSED, f"{name}.tmp", f"{name}{REFUSED}.tmp"]


def _settings(inputs: Sequence[str], how: How, shard_lines: int) -> dict[str, Any]:
    """Return what must be the same at each start, with names for messages."""
    sums = exported_settings(how.model)["sha256"]
    refuse_changed_files(how.model, sums)
    sums = {**sums, SETTINGS: how.described}
    drawn = how.sampling and {"--sampling-topk": how.sampling.topk or "all words", "--seed": how.sampling.seed}
    return {
        "--input": " ".join(map(os.path.abspath, inputs)),
        **{f"--input {path}": state_of(path) for path in map(os.path.abspath, inputs)},
        "--shard-lines": shard_lines,
        **{f"--model: the SHA-256 of {name}": sums[name] for name in sorted(sums)},
        **{flag_of(name): value for name, value in how.search.items()},
        "--replace-unk": how.replace_unk,
        "--no-shortlist": not how.shortlist,
        **({"--sampling": "used", **drawn} if drawn else {}),
    }


def _read_plan(plan: str, inputs: Sequence[str], folder: str, present: dict[str, Any]) -> list[CorpusFile]:
    """Return the files of the *plan*; raise a TranslateError if its settings are not those of the *present* start."""
    with open(plan, encoding="utf-8") as file:
        try:
            content = json.load(file)
            before, same = dict(content["settings"]), {"folder": folder, "shard_lines": present["--shard-lines"]}
            files = [CorpusFile(path, n, **row, **same) for n, (path, row) in enumerate(zip(inputs, content["files"]))]
        except (ValueError, TypeError, LookupError):
            raise TranslateError(f"--output-dir {folder}: {plan} is damaged; give another folder") from None
    for name in dict.fromkeys([*present, *before]):
        if present.get(name) != before.get(name):
            was = f"{name} was {before.get(name, 'not used')} when --output-dir {folder} was begun"
            ways = "give the same value, or another --output-dir"
            raise TranslateError(f"{was}, and is now {present.get(name, 'not used')}: {ways}")
    return files


def _refuse_state(file: CorpusFile, strict: bool) -> None:
    """Raise a TranslateError if the output is from another program, or was removed; or for a line, if *strict*."""
    if os.path.lexists(file.output) and not os.path.exists(file.record):
        raise TranslateError(f"--output-dir: {file.output} is not from this command; remove it, or give another folder")
    finished = [shard for shard in file.shards if shard.is_finished]
    if os.path.exists(file.record) and not file.is_joined and len(finished) < len(file.shards):
        gone = f"{file.output} was finished and is gone"
        raise TranslateError(f"--output-dir: {gone}; to translate {file.input} again, give another folder")
    if strict:
        for path in [file.refused] if file.is_joined else [shard.refused for shard in finished]:
            with contextlib.suppress(FileNotFoundError), open(path, encoding="utf-8") as refused:
                for line in refused:
                    raise refusal(file.input, *line.rstrip("\n").split("\t", 1))


def _cancel_earlier_jobs(folder: Path) -> None:
    """Cancel the jobs of SLURM that a start before this one has left, because it was killed."""
    if any(folder.glob("*/*.sh")):  # the scripts of such jobs
        try:
            cancelled = cancel_jobs_in(folder)
        except InputError as error:
            raise TranslateError(f"{error}; or remove {folder} if none of them runs") from None
        if cancelled:
            print(f"jobs of an earlier start, now cancelled: {', '.join(cancelled)}", flush=True)


# -- dividing ----------------------------------------------------------------------------------------


def _write_plan(plan: str, inputs: Sequence[str], folder: str, shard_lines: int, settings: dict[str, Any]) -> None:
    """Divide *inputs* into shards, and write the *plan*, which says where they are."""
    for name in os.listdir(os.path.dirname(plan)):
        if name.endswith((".source", ".source.tmp")):  # of a start that was killed before it had a plan
            os.unlink(os.path.join(os.path.dirname(plan), name))
    rows = []
    for number, path in enumerate(inputs):
        state = state_of(path)
        lines, offsets = divide(path, shard_lines, partial(stem_of, folder, number) if is_compressed(path) else None)
        if state_of(path) != state:
            raise TranslateError(f"--input {path}: has changed while it was read")
        rows.append({"state": state, "lines": lines, "offsets": offsets})
    with written_whole(plan) as (file,):
        file.write(json.dumps({"settings": settings, "files": rows}).encode())


# -- all shards --------------------------------------------------------------------------------------


def _translate(files: Sequence[CorpusFile], how: How, launcher: Launcher, folder: Path, bar: Any) -> None:
    """Translate the shards that are not finished, and join those of each file when they are complete."""

    def join_if_complete(file: CorpusFile) -> None:
        if not file.is_joined and all(shard.is_finished for shard in file.shards):
            count = _join(file)
            if count:
                lines = "lines that were not translated and are empty"
                _say(bar, f"warning: {file.input}: {lines}: {count}, listed in {file.refused}")

    failures = []
    for file in files:
        join_if_complete(file)
    unjoined = [file for file in files if not file.is_joined]
    file_of = {shard: file for file in unjoined for shard in file.shards if not shard.is_finished}
    left = collections.Counter(file.number for file in file_of.values())  # shards of each file
    function, progress = partial(translate_shard, how), _Progress(bar)
    # On one machine, an error of a file or a package would be that of each process. A single node can lack one.
    fatal = (InputError,) if launcher.slurm is not None else (InputError, OSError, ImportError)
    with contextlib.closing(outcomes(file_of, function, launcher, folder, progress, fatal)) as ended:
        for outcome in ended:
            file, shard = file_of[outcome.task], outcome.task
            left[file.number] -= 1
            if outcome.failure and not outcome.log:  # sbatch would refuse the others, too
                raise TranslateError(f"{shard}: {outcome.failure}")
            failure = outcome.failure or _lacking(shard)
            progress.ended(shard, is_finished=not failure)
            if failure:
                failures.append(f"{shard}: {failure}")
                _say(bar, failures[-1])
                continue
            with contextlib.suppress(FileNotFoundError):
                os.unlink(outcome.log)
            if not left[file.number]:
                join_if_complete(file)
    if failures:
        more = f"; and {len(failures) - NAMED} more" if len(failures) > NAMED else ""
        failed = f"{len(failures)} of {len(file_of)} shards failed, and the same command continues"
        raise TranslateError(f"{failed}: {'; '.join(failures[:NAMED])}{more}")


def _lacking(shard: Shard) -> str:
    """Wait until this machine shows the translations of *shard*. Returns "", or why it does not."""
    latest = time.monotonic() + LATE
    while not (shard.is_finished and os.path.exists(shard.refused)):
        if time.monotonic() >= latest:
            return f"it is translated, but {shard.text} does not appear on this machine"
        os.listdir(os.path.dirname(shard.text))  # so that a network file system looks for new files
        time.sleep(1)
    return ""


class _Progress(Watcher[Shard]):
    """Moves the progress bar, by the lines of finished shards and those that processes have translated of others."""

    def __init__(self, bar: Any) -> None:
        self._bar, self._finished = bar, bar.n
        self._running: dict[Shard, int] = {}  # the lines that each has translated
        self._next = 0.0  # when the processes' counts are read again

    def begun(self, task: Shard, log: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # of an earlier start
            os.unlink(task.count)
        self._running[task] = 0

    def waits(self, task: Shard | None, why: str) -> None:
        _say(self._bar, f"warning: {why}" if task is None else f"warning: {task}: {why}")  # recipes show warnings

    def looked(self) -> None:
        begun = time.monotonic()
        if begun >= self._next:
            self._running = {shard: lines_translated(shard) for shard in self._running}
            self._move()
            # Reading takes at most a twentieth of the time.
            self._next = max(begun + 1, time.monotonic() + 20 * (time.monotonic() - begun))

    def ended(self, shard: Shard, is_finished: bool) -> None:
        """Count all lines of a shard, or none if it has failed."""
        self._running.pop(shard, None)
        self._finished += shard.lines if is_finished else 0
        with contextlib.suppress(FileNotFoundError):
            os.unlink(shard.count)
        self._move()

    def _move(self) -> None:
        if lines := self._finished + sum(self._running.values()) - self._bar.n:
            self._bar.update(lines)


def _say(bar: Any, message: str) -> None:
    """Print *message* to standard error, above the progress bar of a terminal."""
    write = bar.write if sys.stderr.isatty() else print
    write(f"fairseq-rope translate: {message}", file=sys.stderr)


def _join(file: CorpusFile) -> int:
    """Write the output of *file* from its shards, and remove them. Returns the number of refused lines."""
    lists_refused = any(os.path.getsize(shard.refused) for shard in file.shards)
    paths = [file.refused] if lists_refused else []
    lines = refused = 0
    # The output is last: it is complete if it exists, and the record says that it is from this run.
    with written_whole(*paths, file.record, file.output) as (*lists, _, output):
        for shard in file.shards:
            lines += _copy(shard.text, output)
            if lists_refused:
                refused += _copy(shard.refused, lists[0])
        if lines != file.lines:
            differ = f"has {file.lines} lines, and its translation {lines}"
            raise TranslateError(f"--input {file.input}: {differ}; give another --output-dir")
    _remove_shards(file)
    return refused


def _copy(path: str, output: BinaryIO) -> int:
    """Append the file *path* to *output*, and return the number of its lines."""
    lines = 0
    with open(path, "rb") as file:
        while block := file.read(BLOCK):
            lines += block.count(b"\n")
            output.write(block)
    return lines


def _remove_shards(file: CorpusFile) -> None:
    """Remove all files of the shards, also those of killed processes."""
    folder = os.path.join(file.folder, SHARDS)
    for name in os.listdir(folder):
        if re.match(rf"{file.number}\.\d{{6,}}\.", name):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(folder, name))
