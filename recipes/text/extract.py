"""Extract the sentences of both languages from corpora, and check them.

    python -m recipes.text.extract --source-lang en --target-lang de --output raw/train TEMPLATE …

writes ``raw/train.en`` and ``raw/train.de``, one raw sentence a line, from all corpora in order. A template is ``PATH``
or ``ARCHIVE:MEMBER``. In it, ``{lang}`` stands for the language and ``{side}`` for ``src`` or ``ref``. A file named
``….en-de.tsv``, compressed or not, has both languages in columns, in the order of its name.

With ``--documents``, blank lines separate documents. A blank line is also written between two files and between two
``<doc>`` elements of SGM. A line without a printing character counts as blank.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import IO, Any, NamedTuple

from tqdm import tqdm

from fairseq_rope.errors import InputError, ending_in_one_sentence
from fairseq_rope.files import written_whole
from fairseq_rope.lines import read_chunks, split
from recipes.text.lines import NOT_PRINTING

BLOCK_BYTES = 2**20
ARCHIVE = re.compile(r"(.+?\.(?:tar|tgz|tbz|tbz2|txz|tar\.\w+)):(.+)", re.DOTALL)
# Endings of formats whose bytes or markup would be read as sentences.
OTHER_FORMATS = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".zip", ".xml", ".tmx")
# A segment with its text in group 1, or the start of a document.
SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg\s*>|<doc[\s>]", re.DOTALL | re.IGNORECASE)
OPENED = re.compile(r"<seg\b", re.IGNORECASE)
LEADING = re.compile(r"^(\./+)+")  # some programs write it before the name of each member
OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
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
    """The output of one language."""

    lang: str
    word: str  # replaces ``{side}``
    path: Path
    documents: bool = False  # whether blank lines separate documents
    file: IO[bytes] = field(init=False)
    lines: int = 0  # the number of written lines
    blank: int = 0  # the number of blank ones among them; 0 without documents

    def write(self, text: str) -> None:
        """Write *text*, which consists of complete lines."""
        if self.documents:
            lines = [line if NOT_PRINTING.sub("", line).strip() else "" for line in split(text)]
            self.blank += lines.count("")
            text = "".join(line + "\n" for line in lines)
        self.file.write(text.encode("utf-8"))
        self.lines += text.count("\n")

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
    """A member's header. Raises a ReadError if it is damaged; tarfile would treat it as the end of the archive."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> "_Header":
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:  # type: ignore[attr-defined]
            raise tarfile.ReadError(str(error)) from None


@contextlib.contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Turn the errors of decompressors and tarfile into an InputError that names *path*."""
    try:
        yield
    except (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError) as error:
        if getattr(error, "errno", None) is not None:  # an error of the system, not of gzip or bz2
            raise
        raise InputError(f"{path} is damaged, or is not what its name says: {error}") from None


def _segments(texts: Iterable[str], place: Place, documents: bool) -> Iterator[str]:
    """Yield each ``<seg>`` as a line, with entities resolved; with *documents*, also a blank line between documents."""
    rest, number = "", 0
    for text in texts:
        rest += text
        end = 0
        for match in SEGMENT.finditer(rest):
            is_segment = match.group(1) is not None
            opened = OPENED.search(match.group(1)) if is_segment else OPENED.search(rest, end, match.start())
            if opened:
                raise InputError(f"{place}: <seg> number {number + 1} is not closed by </seg>")
            end = match.end()
            if not is_segment:
                if documents and number:
                    yield "\n"
                continue
            number += 1
            yield html.unescape(match.group(1)).strip().replace("\n", " ") + "\n"
        rest = rest[end:]
        if not OPENED.search(rest):
            rest = rest[-len("<seg") :]  # can be the start of a segment
    if OPENED.search(rest):
        raise InputError(f"{place}: <seg> number {number + 1} is not closed by </seg>")


def copy(stream: IO[bytes], place: Place, side: Side) -> int:
    """Write the sentences of *stream* to *side*, and return their number. The name in *place* gives the format."""
    lines_before, blank_before = side.lines, side.blank
    name = Path(place.member or place.path)
    if name.suffix in OPENERS:
        stream = OPENERS[name.suffix](stream, "rb")
        name = name.with_suffix("")
    _refuse_other_format(place, name)
    chunks = read_chunks(stream, str(place), BLOCK_BYTES)
    is_sgm = name.suffix.lower() in (".sgm", ".sgml")
    for text in _segments(chunks, place, side.documents) if is_sgm else chunks:
        side.write(text)
    if side.lines == lines_before:
        raise InputError(f"{place} has no <seg>")
    if not is_sgm:
        _refuse_no_documents(side, blank_before, str(place))
    return side.lines - lines_before


def _refuse_other_format(place: Place, name: Path) -> None:
    """Raise an InputError if *name*, of the file at *place* without compression, has the ending of another format."""
    suffix = name.suffix.lower()
    if suffix in OTHER_FORMATS:
        raise InputError(
            f"{place}: files with the ending {suffix} are not read; give a text with one sentence a line, .sgm, or "
            "ARCHIVE:MEMBER for such a file in a tar archive"
        )


def _refuse_no_documents(side: Side, blank_before: int, name: str) -> None:
    """Raise an InputError if the file *name* added no blank line to *side*, which had *blank_before* of them."""
    if side.documents and side.blank == blank_before:
        instead = "a blank line separates two documents, and segment_tokens=0 is for texts without documents"
        raise InputError(f"{name}: has no blank line; {instead}")


def _copy_columns(stream: IO[bytes], path: Path, columns: Sequence[Side]) -> None:
    """Write the columns of a TSV file to their sides.

    Lines that are empty in all columns separate documents. Without documents they are left out.
    """
    if path.suffix in OPENERS:
        stream = OPENERS[path.suffix](stream, "rb")
    blank_before, numbers = columns[0].blank, count(1)
    for text in read_chunks(stream, str(path), BLOCK_BYTES):
        rows = []
        for line, number in zip(split(text), numbers, strict=False):
            row = line.removesuffix("\r").split("\t") if line.strip() else [""] * len(columns)
            if len(row) != len(columns):
                raise InputError(f"{path}, line {number}: has {len(row)} columns, and must have {len(columns)}")
            if columns[0].documents or any(row):
                rows.append(row)
        for side, cells in zip(columns, zip(*rows, strict=True), strict=False):
            side.write("".join(f"{cell}\n" for cell in cells))
    _refuse_no_documents(columns[0], blank_before, str(path))


def _read_archive(path: Path, file: "io.BufferedReader[Any]", wanted: dict[Place, Side]) -> dict[Side, int]:
    """Write the wanted members of the archive *path*, in any order. Returns the number of sentences of each side.

    It reads the whole archive, to find duplicate members and damage.
    """
    members = {LEADING.sub("", place.member or ""): place for place in wanted}
    counts: dict[Side, int] = {}
    names = []
    kind = next((kind for magic, kind in MAGIC.items() if file.peek(8).startswith(magic)), None)
    stream = file if kind is None else OPENERS[kind](file, "rb")
    with tarfile.open(fileobj=stream, mode="r|", bufsize=BLOCK_BYTES, tarinfo=_Header) as archive:
        for member in archive:
            place = members.get(LEADING.sub("", member.name))
            if place is None:
                names += [member.name] if member.isreg() else []
                continue
            if not member.isreg():
                raise InputError(f"{place} is a {KINDS.get(member.type, 'device or pipe')}, and must be a regular file")
            if wanted[place] in counts:
                raise InputError(f"{path} has {place.member} twice")
            content = archive.extractfile(member)
            assert content is not None  # as for all regular files
            counts[wanted[place]] = copy(content, place, wanted[place])
    while stream.read(BLOCK_BYTES):  # the decompressor tests the checksum at the end
        pass
    for place, side in wanted.items():
        if side not in counts:
            raise InputError(f"{path} has no member {place.member}{_nearest(place.member or '', names)}")
    return counts


def _nearest(name: str, names: Sequence[str]) -> str:
    nearest = difflib.get_close_matches(name, names, 1, 0.0)
    return f"; the nearest name is {nearest[0]}" if nearest else "; it is empty"


def _places(template: str, sides: Sequence[Side], reference: str) -> dict[Place, Side]:
    """The place of the source in *template*, and of the target in *reference*.

    Raises an InputError if they are the same, or if a file is missing.
    """
    places = {side.place(text): side for side, text in zip(sides, (template, reference), strict=True)}
    with_columns = [text for text in (template, reference) if _columns(text, sides)]
    if reference != template and with_columns:
        problem = "has both languages as columns; for further references, divide it into two files"
        raise InputError(f"{with_columns[0]}: {problem}")
    if len(places) < len(sides) and not _columns(template, sides):
        tsv = "-".join(side.lang for side in sides)
        columns = f"have them as columns and a name that ends in .{tsv}.tsv"
        raise InputError(f"{template}: must contain {{lang}} or {{side}} to distinguish the sides, or {columns}")
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


def _columns(template: str, sides: Sequence[Side]) -> list[Side]:
    """The side of each column of a TSV file, by the languages in its name; [] if *template* names none."""
    for columns in (list(sides), list(reversed(sides))):
        languages = "-".join(re.escape(side.lang) for side in columns)
        if re.search(rf"\.{languages}\.tsv(\.gz|\.bz2|\.xz)?$", template) and not ARCHIVE.fullmatch(template):
            return columns
    return []


def extract(
    templates: Sequence[str],
    source: str,
    target: str,
    prefix: Path,
    documents: bool = False,
    references: Sequence[str] = (),
) -> int:
    """Write ``PREFIX.SOURCE`` and ``PREFIX.TARGET`` from all *templates*. Returns the number of pairs.

    Both files get their names when both are complete. *documents*: whether blank lines separate documents. If there
    are *references*, the target comes from these templates.
    """
    prefix.parent.mkdir(parents=True, exist_ok=True)
    words = {source: "src", target: "ref"}
    sides = [Side(lang, word, prefix.with_name(f"{prefix.name}.{lang}"), documents) for lang, word in words.items()]
    pairs_of_templates = zip(templates, references or templates, strict=True)
    corpora = [(template, _places(template, sides, reference)) for template, reference in pairs_of_templates]
    size = sum(path.stat().st_size for _, places in corpora for path in {place.path for place in places})
    with written_whole(*(str(side.path) for side in sides)) as (sides[0].file, sides[1].file):
        with tqdm(total=size, desc="  read", unit="B", unit_scale=True, mininterval=0.5) as bar:
            for template, places in corpora:
                lines_before, blank_before = sides[0].lines, sides[0].blank
                for side in sides if documents and lines_before else []:
                    side.write("\n")
                _read(template, places, sides, bar)
                pairs = sides[0].lines - lines_before - (sides[0].blank - blank_before)
                bar.write(f"{template}: {pairs:,} pairs", file=sys.stdout)
                sys.stdout.flush()
    return sides[0].lines - sides[0].blank


def _read(template: str, places: dict[Place, Side], sides: Sequence[Side], bar: tqdm) -> None:
    """Write both sides of one template."""
    columns = _columns(template, sides)
    counts: dict[Side, int] = {}
    for path in dict.fromkeys(place.path for place in places):
        in_file = {place: side for place, side in places.items() if place.path == path}
        place, side = next(iter(in_file.items()))
        with io.BufferedReader(_Counted(path, bar), BLOCK_BYTES) as file, naming_damage(path):
            if columns:
                _copy_columns(file, path, columns)
            elif place.member is None:
                counts[side] = copy(file, place, side)
            else:
                counts.update(_read_archive(path, file, in_file))
    if len(set(counts.values())) > 1:
        lengths = " and ".join(f"{place} has {counts[side]} lines" for place, side in places.items())
        raise InputError(f"{template}: {lengths}, and both must have the same number")


def main(argv: Sequence[str] | None = None) -> None:
    description = "Extract the sentences of both languages from corpora, one a line."
    parser = argparse.ArgumentParser(prog="recipes.text.extract", description=description)
    parser.add_argument("--source-lang", required=True, metavar="LANG")
    parser.add_argument("--target-lang", required=True, metavar="LANG")
    parser.add_argument("--output", required=True, type=Path, metavar="PREFIX", help="writes PREFIX.LANG of both")
    parser.add_argument("--documents", action="store_true", help="blank lines separate documents")
    form = "PATH or ARCHIVE:MEMBER with {lang} for the language and {side} for src or ref in it; .gz, .bz2 and .xz are"
    parser.add_argument("templates", nargs="+", metavar="TEMPLATE", help=f"{form} decompressed, .sgm gives its <seg>s")
    other = "for each TEMPLATE, in order: the template of the target, another reference; default: TEMPLATE"
    parser.add_argument("--reference", action="append", default=[], metavar="TEMPLATE", help=other)
    args = parser.parse_args(argv)
    with ending_in_one_sentence("recipes.text.extract"):
        if args.reference and len(args.reference) != len(args.templates):
            raise InputError(f"--reference {' '.join(args.reference)}: must be as many as templates")
        if args.source_lang == args.target_lang:
            raise InputError(f"--target-lang {args.target_lang}: must differ from --source-lang")
        for flag, lang in (("--source-lang", args.source_lang), ("--target-lang", args.target_lang)):
            if not re.fullmatch(r"\w[\w-]*", lang):
                raise InputError(f"{flag} {lang}: must be a language's code, like en or pt-BR")
        langs = args.source_lang, args.target_lang
        pairs = extract(args.templates, *langs, args.output, args.documents, args.reference)
        print(f"{args.output}: {pairs:,} pairs")


if __name__ == "__main__":
    main()
