"""The stamps of stages: settings, inputs and outputs of each stage's last run."""

import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fairseq_rope.files import checksum, write_whole, written_whole
from recipes.run.run import Run
from recipes.run.stage_files import StageFiles

NONE, SHA256 = "none", "sha256:"  # the digest of a file that does not exist, and how that of another one begins
LARGE = 64 * 2**20  # bytes; the hash of a larger file is computed once and kept


class Stamps:
    """The stamps in the folders of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._hashes = run.work / "stamps" / "hashes.json"
        self.remade: set[Path] = set()  # in a dry run, the files that stages would write again, with unknown contents

    def folder(self, stage: StageFiles[Any]) -> Path:
        return self._run.model if stage.per_model else self._run.work

    def path(self, stage: StageFiles[Any]) -> Path:
        return self.folder(stage) / "stamps" / f"{stage.number:02d}{stage.label}.json"

    def of(self, stage: StageFiles[Any]) -> dict[str, Any]:
        """What the outputs of *stage* depend on: values by name, as JSON."""
        # An input can be a file of another model, whose folder differs only in its label. Stamps, when they are read,
        # have it under the name of this model's folder.
        return self.current(stage.depends_on(self._run) | self.digests(stage.inputs(self._run)))

    def made(self, stage: StageFiles[Any]) -> dict[str, str]:
        """The digests of the outputs of *stage*."""
        return self.digests(stage.outputs(self._run))

    def digests(self, paths: Iterable[Path]) -> dict[str, str]:
        """The digests of files by name. The names stay the same when the work folder is moved.

        Several files outside of it with the same name are numbered.
        """
        digests: dict[str, str] = {}
        for path in dict.fromkeys(paths):
            name, number = self.name(path), 1
            while name in digests:
                number += 1
                name = f"{self.name(path)} ({number})"
            digests[name] = self._digest(path)
        return digests

    def name(self, path: Path) -> str:
        work = self._run.work
        return str(path.relative_to(work)) if work in path.parents else path.name

    def _digest(self, path: Path) -> str:
        if path in self.remade:
            return "will be written again"
        if not path.exists():
            return NONE
        if path.stat().st_size <= LARGE:
            return f"{SHA256}{checksum(path)}"
        status = path.stat()
        name, size_and_date = str(path), f"{status.st_size} bytes of {status.st_mtime_ns}"
        try:
            known = json.loads(self._hashes.read_text())
        except (OSError, ValueError):
            known = {}
        if known.get(name, [""])[0] != size_and_date:
            known[name] = [size_and_date, f"{SHA256}{checksum(path)}"]
            if not self._run.dry_run:
                # Runs side by side write it too. What one of them overwrites is computed again.
                self._hashes.parent.mkdir(parents=True, exist_ok=True)
                with written_whole(str(self._hashes), suffix=f".{os.getpid()}.tmp") as (file,):
                    file.write((json.dumps(known, indent=1) + "\n").encode())
        return known[name][1]

    def last(self, stage: StageFiles[Any]) -> dict[str, Any] | None:
        """The stamp of *stage*, or None if the stage has not ended or the stamp cannot be read."""
        return self.read(self.path(stage))

    def read(self, path: Path) -> dict[str, Any] | None:
        """The stamp in the file *path*, with keys "of" and "made", or None if it cannot be read."""
        try:
            stamp = json.loads(path.read_text())
            return {**stamp, "of": self.current(stamp["of"]), "made": self.current(stamp["made"])}
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def current(self, of: dict[str, Any]) -> dict[str, Any]:
        """*of*, with the current name of the model's folder in place of the one at that time."""
        folder = re.compile(rf"^{self._run.unlabelled}(\.[^/]*)?/")
        return {folder.sub(f"{self._run.model.name}/", name): value for name, value in of.items()}

    def is_done(self, stage: StageFiles[Any]) -> bool:
        """Whether *stage* has run with these settings and with the present inputs and outputs."""
        stamp = self.last(stage)
        return stamp is not None and not self.changed(stage, stamp)

    def changed(self, stage: StageFiles[Any], stamp: dict[str, Any]) -> str:
        """What has changed since *stage* wrote *stamp*, as :func:`differences` says; "" if nothing has."""
        made = {**dict.fromkeys(stamp["made"], NONE), **self.made(stage)}
        return differences(stamp["of"], self.of(stage)) or differences(stamp["made"], made)

    def of_present(self, stage: StageFiles[Any], stamp: dict[str, Any]) -> dict[str, Any]:
        """:meth:`of`, with the digests in *stamp* of inputs that do not exist any more.

        They were deleted, or are in a --data-dir that this command does not give.
        """
        of = self.of(stage)
        settings = stage.depends_on(self._run)
        deleted = {
            name: digest
            for name, digest in stamp["of"].items()
            if name not in settings and of.get(name, NONE) == NONE and str(digest).startswith(SHA256)
        }
        return {name: value for name, value in {**of, **deleted}.items() if name in stamp["of"] or value != NONE}


def partial_of(stamp: Path) -> Path:
    """The file that a stage has, until its end, in place of *stamp*."""
    return stamp.with_suffix(".partial")


class Partial:
    """The finished outputs of a running stage, in a file that remains if the stage is interrupted."""

    def __init__(self, stamps: Stamps, stage: StageFiles[Any], of: dict[str, Any]) -> None:
        self._stamps = stamps
        self._path = partial_of(stamps.path(stage))
        before = stamps.read(self._path)
        self._before = before["made"] if before is not None and before["of"] == of else {}
        self._now: dict[str, Any] = {"of": of, "made": {}}

    def has(self, paths: Iterable[Path]) -> bool:
        """Whether the interrupted run has made *paths* and everything before them."""
        digests = self._stamps.digests(paths)
        if not digests.items() <= self._before.items():
            return False
        self._now["made"].update(digests)
        return True

    def add(self, paths: Iterable[Path]) -> None:
        self._before = {}
        self._now["made"].update(self._stamps.digests(paths))
        write_whole(self._path, json.dumps(self._now) + "\n")

    def end(self) -> None:
        self._path.unlink(missing_ok=True)


def differences(old: dict[str, Any], new: dict[str, Any]) -> str:
    """What has changed, and which files are missing, at most four names; "" if the dictionaries are equal."""
    different = [name for name in {**old, **new} if old.get(name) != new.get(name)]
    names = sorted(different, key=lambda name: ("/" in name, name))
    shown = names if len(names) <= 4 else names[:3]
    missing = [name for name in shown if new.get(name) == NONE and ("/" in name or "." in name)]  # not a setting
    changed = [name for name in shown if name not in missing] + [f"{len(names) - 3} more"] * (len(names) > 4)
    clauses = [f"{', '.join(changed)} changed"] * bool(changed)
    clauses += [f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"] * bool(missing)
    return " and ".join(clauses)
