"""Where the files of a corpus are: in the user's folder, at an absolute path, or in the manifest, to be downloaded."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from fairseq_rope.errors import InputError
from recipes.text import fetch
from recipes.text.extract import ARCHIVE, places_of
from recipes.work import Work

_checked = functools.cache(fetch.check)  # each file once


class Located(NamedTuple):
    """Where a template, FILE or ARCHIVE:MEMBER, leads."""

    name: str  # the template without folders
    path: str  # with the user's folder; without one, it is in the folder of the step that fetches
    digests: dict[str, str]  # what identifies each file, by its name
    to_fetch: dict[str, str]  # the checksums or addresses of the files to download, by their names


@dataclass(frozen=True)
class Corpus:
    """The files that a recipe can read."""

    work: Work
    data: Path | None = None  # the user's folder, which is never written to
    manifest: Path | None = None
    entries: Mapping[str, fetch.Entry] = field(default_factory=dict)  # of the manifest

    def locate(self, template: str, langs: Sequence[str], setting: str, is_reference: bool) -> Located:
        """Return where *template* leads; a further reference has no source.

        Raises an InputError that names the *setting* if a file is nowhere.
        """
        archive = ARCHIVE.fullmatch(template)
        file = archive[1] if archive else template
        name = Path(file).name + template[len(file) :]
        digests, to_fetch, folder = dict[str, str](), dict[str, str](), ""
        for one in dict.fromkeys(str(place.path) for place in places_of(template, *langs)[is_reference:]):
            of_user, entry = self._of_user(one), self.entries.get(one)
            if of_user is not None:
                folder = f"{of_user.parent}/"
                digests[of_user.name] = self.work.digest(of_user)[:16]
            elif entry is not None:
                to_fetch[one] = entry.checksum or entry.url
                is_sha = to_fetch[one].startswith("sha256:")
                digests[one] = to_fetch[one][7:23] if is_sha else to_fetch[one]
            else:
                where = f"the manifest {self.manifest}" if self.manifest else "data=DIR, which is not given"
                raise InputError(f"{setting}: {one} is neither an absolute path nor in {where}")
        return Located(name, folder + name if folder else template, digests, to_fetch)

    def _of_user(self, name: str) -> Path | None:
        """Return the file *name* if it is an absolute path or in the user's folder; the manifest must agree."""
        path = Path(name) if self.data is None else self.data / name
        if not path.is_absolute() or not path.exists() and name in self.entries:
            return None
        entry = self.entries.get(name)
        if entry is not None and (problem := _checked(path, entry)):
            raise InputError(f"{path} {problem}; manifest=none accepts other files")
        return path
