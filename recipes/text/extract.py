"""Extract the sentences of both languages from corpora, and check them.

    python -m recipes.text.extract --source-lang en --target-lang de --output raw/train TEMPLATE …

writes ``raw/train.en`` and ``raw/train.de``, one raw sentence a line, from all corpora in order. A template is ``PATH``
or ``ARCHIVE:MEMBER``. In it, ``{lang}`` stands for the language and ``{side}`` for ``src`` or ``ref``.

Only "\\n" ends a line. Lines of News Commentary v9 contain CR, NEL and U+2028. If these ended lines, all following
sentences would be paired with the wrong translation. Archives are not unpacked to the disk, so the names and links in
them cannot write anything.
"""

import argparse
import bz2
import contextlib
import difflib
import gzip
import html
import io
import lzma
import os
import re
import sys
import tarfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tqdm import tqdm

from fairseq_rope.errors import InputError, ending_in_one_sentence
from fairseq_rope.files import written_whole
from fairseq_rope.lines import read_chunks

CHUNK = 2**20
ARCHIVE = re.compile(r"(.+?\.(?:tar|tgz|tbz|tbz2|txz|tar\.\w+)):(.+)", re.DOTALL)
SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg\s*>", re.DOTALL | re.IGNORECASE)
OPENED = re.compile(r"<seg\b", re.IGNORECASE)
OPENERS = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
KINDS = {tarfile.DIRTYPE: "folder", tarfile.SYMTYPE: "symbolic link", tarfile.LNKTYPE: "hard link"}
MAGIC = {b"\x1f\x8b": ".gz", b"BZh": ".bz2", b"\xfd7zXZ\x00": ".xz"}


class Place(NamedTuple):
    """Where the sentences of one language are: a file, or a member of an archive."""

    path: Path
    member: str | None

    def __str__(self) -> str:
        return str(self.path) if self.member is None else f"{self.path}:{self.member}"


@dataclass(eq=False)
class Side:
    """The output of one language: *word* replaces ``{side}``, *lines* is the number of lines written."""

    lang: str
    word: str
    path: Path
    file: BinaryIO | None = None
    lines: int = 0

    def place(self, template: str) -> Place:
        """The place of this language in *template*."""
        named = template.replace("{lang}", self.lang).replace("{side}", self.word)
        match = ARCHIVE.fullmatch(named)
        return Place(Path(match.group(1)), match.group(2)) if match else Place(Path(named), None)


class _Counted(io.FileIO):
    """A file that moves a progress bar when it is read."""

    def __init__(self, path: Path, bar: tqdm) -> None:
        super().__init__(path)
        self._bar = bar

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer)
        self._bar.update(count)
        return count


class _Header(tarfile.TarInfo):
    """A member's header. Raises for a damaged one, which tarfile takes for the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> tarfile.TarInfo:
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:
            raise tarfile.ReadError(str(error)) from None


@contextlib.contextmanager
def _naming_damage(path: Path) -> Iterator[None]:
    """Turn the errors of decompressors and tarfile into an InputError that names *path*."""
    try:
        yield
    except (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError) as error:
        if getattr(error, "errno", None) is not None:  # an error of the system, not of gzip or bz2
            raise
        raise InputError(f"{path} is damaged, or is not what its name says: {error}") from None


def _segments(texts: Iterable[str], place: Place) -> Iterator[str]:
    """The text of each ``<seg>`` as a line, with entities resolved."""
    rest, number = "", 0
    for text in texts:
        rest += text
        end = 0
        for match in SEGMENT.finditer(rest):
            end = match.end()
            number += 1
            if OPENED.search(match.group(1)):
                raise InputError(f"{place}: <seg> number {number} is not closed by </seg>")
            yield html.unescape(match.group(1)).strip().replace("\n", " ") + "\n"
        rest = rest[end:]
        if not OPENED.search(rest):
            rest = rest[-len("<seg") :]  # may be the start of one
    if OPENED.search(rest):
        raise InputError(f"{place}: <seg> number {number + 1} is not closed by </seg>")


def _copy(stream: BinaryIO, place: Place, side: Side) -> int:
    """Write the sentences of *stream* to *side*, and return their number. The name in *place* gives the format."""
    before = side.lines
    name = Path(place.member or place.path)
    if name.suffix in OPENERS:
        stream = OPENERS[name.suffix](stream, "rb")
        name = name.with_suffix("")
    chunks = read_chunks(stream, str(place), CHUNK)
    for text in _segments(chunks, place) if name.suffix in (".sgm", ".sgml") else chunks:
        side.file.write(text.encode("utf-8"))
        side.lines += text.count("\n")
    if side.lines == before:
        raise InputError(f"{place} has no <seg>")
    return side.lines - before


def _read_archive(path: Path, file: BinaryIO, wanted: dict[Place, Side]) -> dict[Side, int]:
    """Write the wanted members of the archive *path*, in any order. Returns the number of sentences of each side.

    It reads the whole archive, to find duplicate members and damage.
    """
    members = {_plain(place.member or ""): place for place in wanted}
    counts: dict[Side, int] = {}
    names = []
    kind = next((kind for magic, kind in MAGIC.items() if file.peek(8).startswith(magic)), None)
    stream = file if kind is None else OPENERS[kind](file, "rb")
    with tarfile.open(fileobj=stream, mode="r|", bufsize=CHUNK, tarinfo=_Header) as archive:
        for member in archive:
            place = members.get(_plain(member.name))
            if place is None:
                names += [member.name] if member.isreg() else []
                continue
            if not member.isreg():
                raise InputError(f"{place} is a {KINDS.get(member.type, 'device or pipe')}, and must be a regular file")
            if wanted[place] in counts:
                raise InputError(f"{path} has {place.member} twice")
            counts[wanted[place]] = _copy(archive.extractfile(member), place, wanted[place])
    while stream.read(CHUNK):  # so that the checksum at the end is tested
        pass
    for place, side in wanted.items():
        if side not in counts:
            raise InputError(f"{path} has no member {place.member}{_nearest(place.member or '', names)}")
    return counts


def _plain(name: str) -> str:
    return re.sub(r"^(\./+)+", "", name)


def _nearest(name: str, names: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, names, 1, 0.0)
    return f"; the nearest name is {nearest[0]}" if nearest else "; it is empty"


def _places(template: str, sides: Sequence[Side]) -> dict[Place, Side]:
    """The place of each side in *template*. Raises an InputError if they are the same, or if a file is missing."""
    places = {side.place(template): side for side in sides}
    if len(places) < len(sides):
        raise InputError(f"{template}: must contain {{lang}} or {{side}} to distinguish the sides")
    for path, _ in places:
        if path.exists() and not path.is_file():
            raise InputError(f"{path}: is not a file")
        if not path.parent.is_dir():
            raise InputError(f"{path}: the folder {path.parent} does not exist")
        if not path.exists():
            nearest = _nearest(path.name, sorted(os.listdir(path.parent)))
            raise InputError(f"{path}: does not exist in {path.parent}{nearest}")
        for side in sides:
            if side.path.exists() and side.path.samefile(path):
                raise InputError(f"--output: {side.path} would overwrite a file of {template}")
    return places


def extract(templates: Sequence[str], source: str, target: str, prefix: Path) -> int:
    """Write ``PREFIX.SOURCE`` and ``PREFIX.TARGET`` from all *templates*. Returns the number of pairs.

    Both files get their names when both are complete.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    words = {source: "src", target: "ref"}
    sides = [Side(lang, word, prefix.with_name(f"{prefix.name}.{lang}")) for lang, word in words.items()]
    corpora = [(template, _places(template, sides)) for template in templates]
    size = sum(path.stat().st_size for _, places in corpora for path in {place.path for place in places})
    with written_whole(*(str(side.path) for side in sides)) as (sides[0].file, sides[1].file):
        with tqdm(total=size, desc="  read", unit="B", unit_scale=True, mininterval=0.5) as bar:
            for template, places in corpora:
                pairs = _read(template, places, bar)
                bar.write(f"{template}: {pairs:,} pairs", file=sys.stdout)
                sys.stdout.flush()
    return sides[0].lines


def _read(template: str, places: dict[Place, Side], bar: tqdm) -> int:
    """Write both sides of one template. Returns the number of pairs."""
    counts: dict[Side, int] = {}
    for path in dict.fromkeys(place.path for place in places):
        here = {place: side for place, side in places.items() if place.path == path}
        place, side = next(iter(here.items()))
        with io.BufferedReader(_Counted(path, bar), CHUNK) as file, _naming_damage(path):
            if place.member is None:
                counts[side] = _copy(file, place, side)
            else:
                counts.update(_read_archive(path, file, here))
    if len(set(counts.values())) > 1:
        both = " and ".join(f"{place} has {counts[side]} lines" for place, side in places.items())
        raise InputError(f"{template}: {both}, and both must have the same number")
    return next(iter(counts.values()))


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; exits with status 1 and one sentence on standard error if it cannot."""
    parser = argparse.ArgumentParser(
        prog="recipes.text.extract", description="Extract the sentences of both languages from corpora, one a line."
    )
    parser.add_argument("--source-lang", required=True, metavar="LANG")
    parser.add_argument("--target-lang", required=True, metavar="LANG")
    parser.add_argument("--output", required=True, type=Path, metavar="PREFIX", help="writes PREFIX.LANG of both")
    form = "PATH or ARCHIVE:MEMBER with {lang} for the language and {side} for src or ref in it; .gz, .bz2 and .xz are"
    parser.add_argument("templates", nargs="+", metavar="TEMPLATE", help=f"{form} decompressed, .sgm gives its <seg>s")
    args = parser.parse_args(argv)
    languages = {"--source-lang": args.source_lang, "--target-lang": args.target_lang}
    with ending_in_one_sentence("recipes.text.extract"):
        if args.source_lang == args.target_lang:
            raise InputError(f"--target-lang {args.target_lang}: must differ from --source-lang")
        for flag, lang in languages.items():
            if not re.fullmatch(r"\w[\w-]*", lang):
                raise InputError(f"{flag} {lang}: must be a language's code, like en or pt-BR")
        pairs = extract(args.templates, *languages.values(), args.output)
    print(f"{args.output}: {pairs:,} pairs")


if __name__ == "__main__":
    main()
