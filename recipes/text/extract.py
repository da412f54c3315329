"""Extract the sentences of both languages from corpora, and check them.

    python -m recipes.text.extract --source-lang en --target-lang de --output raw/train TEMPLATE …

writes ``raw/train.en`` and ``raw/train.de``, one sentence a line, composed (NFC), from all corpora in order. A template
is ``PATH`` or ``ARCHIVE:MEMBER``. In it, ``{lang}`` stands for the language, ``{side}`` for ``src`` or ``ref``. A file
named ``….en-de.tsv``, compressed or not, has both languages in columns, in the order of its name.

With ``--documents``, blank lines separate documents. A blank line is also written between two files and between two
``<doc>`` elements of SGM. A line without a printing character counts as blank.

Only "\\n" ends a line. Lines of News Commentary v9 contain CR, NEL and U+2028. If these ended lines, all following
sentences would be paired with the wrong translation. Archives are not unpacked, so names in them cannot write anything.
"""

import argparse
import bz2
import gzip
import html
import lzma
import os
import re
import sys
import tarfile
import unicodedata
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import count, dropwhile
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from tqdm import tqdm

from fairseq_rope.errors import InputError, ending_in_one_sentence, nearest
from fairseq_rope.files import written_whole
from fairseq_rope.lines import read_chunks, split
from recipes.text.lines import NOT_PRINTING, progress

BLOCK_BYTES = 2**20
ARCHIVE = re.compile(r"(.+?\.(?:tar|tgz|tbz|tbz2|txz|tar\.\w+)):(.+)", re.DOTALL)
# Endings of formats whose bytes or markup would be read as sentences.
OTHER_FORMATS = (".tar", ".tgz", ".tbz", ".tbz2", ".txz", ".zip", ".xml", ".tmx")
SGM = (".sgm", ".sgml")
# A segment with its text in group 1, or the start of a document.
SEGMENT = re.compile(r"<seg\b[^>]*>(.*?)</seg\s*>|<doc[\s>]", re.DOTALL | re.IGNORECASE)
OPENED = re.compile(r"<seg\b", re.IGNORECASE)
LEADING = re.compile(r"^(\./+)+")  # some programs write it before the name of each member
COMPRESSED = re.compile(r"\.(gz|bz2|xz)$")
OPENERS: dict[str, Callable[..., Any]] = {"gz": gzip.open, "bz2": bz2.open, "xz": lzma.open}


class Place(NamedTuple):
    """Where the sentences of one language are: a file or a member of an archive, or one of its columns."""

    path: Path
    member: str = ""
    column: int | None = None

    def __str__(self) -> str:
        return f"{self.path}:{self.member}" if self.member else str(self.path)


def places_of(template: str, source: str, target: str) -> list[Place]:
    """Where *template* has the source and the target."""
    places = []
    for lang, other, side in ((source, target, "src"), (target, source, "ref")):
        name = template.replace("{lang}", lang).replace("{side}", side)
        table = re.search(rf"\.({source}-{target}|{target}-{source})\.tsv$", COMPRESSED.sub("", name))
        column = int(table[1] != f"{lang}-{other}") if table else None
        archive = ARCHIVE.fullmatch(name)
        places.append(Place(Path(archive[1]), archive[2], column) if archive else Place(Path(name), "", column))
    return places


def texts_at(place: Place, documents: bool) -> Iterator[str]:
    """Yield the sentences at *place* in chunks of complete lines. Raises an InputError if data are damaged."""
    try:
        with place.path.open("rb") as file:
            yield from _of_member(file, place, documents) if place.member else _of_file(file, place, documents)
    except (EOFError, OSError, zlib.error, lzma.LZMAError, tarfile.TarError) as error:
        if getattr(error, "errno", None) is not None:  # an error of the system, not of gzip or bz2
            raise
        reason = str(error).partition(":")[0]
        raise InputError(f"{place.path} is damaged, or not what its name says: {reason}") from None


def _of_member(file: Any, place: Place, documents: bool) -> Iterator[str]:
    """:func:`_of_file` a member of the archive *file*, which is read to its end to find damage."""
    wanted = LEADING.sub("", place.member)
    names: list[str] = []
    with tarfile.open(fileobj=file, bufsize=BLOCK_BYTES) as archive:
        for member in archive:
            name = LEADING.sub("", member.name)
            if name == wanted:
                content = archive.extractfile(member) if member.isreg() else None
                if content is None or name in names:
                    raise InputError(f"{place} must be one regular file in the archive")
                yield from _of_file(content, place, documents)
            names.append(name)
        while archive.fileobj and archive.fileobj.read(BLOCK_BYTES):  # the decompressor tests the checksum at the end
            pass
    if wanted not in names:
        raise InputError(f"{place.path} has no member {place.member}{nearest(wanted, names)}")


def _of_file(file: Any, place: Place, documents: bool) -> Iterator[str]:
    """Yield the sentences of *file* in chunks of complete lines. The name in *place* gives the format."""
    compression, suffix = COMPRESSED.search(str(place)), _suffix(place)
    if suffix in OTHER_FORMATS:
        raise InputError(f"{place}: {suffix} is not read; give a text, .sgm, .tsv, or ARCHIVE:MEMBER for a tar archive")
    chunks = read_chunks(OPENERS[compression[1]](file, "rb") if compression else file, str(place), BLOCK_BYTES)
    if suffix in SGM:
        yield from _segments("".join(chunks), place, documents)
    elif place.column is not None:
        yield from _cells(chunks, place, place.column, documents)
    else:
        yield from chunks


def _suffix(place: Place) -> str:
    """The ending of a name without that of its compression."""
    return Path(COMPRESSED.sub("", str(place))).suffix.lower()


def _segments(text: str, place: Place, documents: bool) -> Iterator[str]:
    """Yield each ``<seg>`` as a line, with entities resolved; with *documents*, also a blank line between documents."""
    segments = [match[1] for match in SEGMENT.finditer(text)]  # None: a document begins
    count, opened = len(segments) - segments.count(None), len(OPENED.findall(text))
    if not count or opened != count:
        raise InputError(f"{place}: has {opened} <seg>, and {count} that end with </seg>")
    for segment in dropwhile(lambda segment: segment is None, segments):
        if segment is not None:
            yield html.unescape(segment).strip().replace("\n", " ") + "\n"
        elif documents:
            yield "\n"


def _cells(chunks: Iterator[str], place: Place, column: int, documents: bool) -> Iterator[str]:
    """Yield one of the two columns of a table. Lines that are empty in both columns are kept only for *documents*."""
    numbers = count(1)
    for text in chunks:
        cells = []
        for line, number in zip(split(text), numbers, strict=False):
            row = line.removesuffix("\r").split("\t") if line.strip() else ["", ""]
            if len(row) != 2:
                raise InputError(f"{place}, line {number}: has {len(row)} columns, and must have 2")
            if documents or any(row):
                cells.append(row[column] + "\n")
        yield "".join(cells)


def _write(place: Place, file: BinaryIO, documents: bool, lower_case: bool, bar: tqdm) -> tuple[int, int]:
    """Write the sentences at *place* to *file*. Returns the number of lines, and that of the boundaries among them."""
    lines = boundaries = 0
    for text in texts_at(place, documents):
        if documents:
            stripped = [line if NOT_PRINTING.sub("", line).strip() else "" for line in split(text)]
            boundaries += stripped.count("")
            text = "".join(line + "\n" for line in stripped)
        text = unicodedata.normalize("NFC", text)
        file.write((text.lower() if lower_case else text).encode("utf-8"))
        lines += text.count("\n")
        bar.update(text.count("\n"))
    if documents and not boundaries and _suffix(place) not in SGM:
        raise InputError(f"{place}: has no blank line; a blank line separates two documents")
    return lines, boundaries


def extract(
    templates: Sequence[str],
    source: str,
    target: str,
    prefix: Path,
    documents: bool = False,
    references: Sequence[str] = (),
    lower_case: bool = False,
) -> int:
    """Write ``PREFIX.SOURCE`` and ``PREFIX.TARGET`` from all *templates*. Returns the number of pairs.

    Both files get their names when both are complete. *documents*: whether blank lines separate documents. If there
    are *references*, one for each template, the target comes from them.
    """
    langs, pairs = (source, target), 0
    sources = [places_of(template, *langs)[0] for template in templates]
    targets = [places_of(template, *langs)[1] for template in references or templates]
    for place in sources:
        if place in targets:
            columns = f"a name that ends in .{source}-{target}.tsv if the languages are columns"
            raise InputError(f"{place}: must have {{lang}} or {{side}} in it, or {columns}")
    for path, *_ in sources + targets:
        if not path.is_file():
            known = os.listdir(path.parent) if path.parent.is_dir() else []
            raise InputError(f"{path}: is not a file{nearest(path.name, known)}")
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(*(f"{prefix}.{lang}" for lang in langs)) as files, progress(None, None, "extract") as bar:
        for template, *places in zip(templates, sources, targets, strict=True):
            for file in files if documents and pairs else []:
                file.write(b"\n")
            (lines, boundaries), (others, _) = (
                _write(place, file, documents, lower_case, bar) for place, file in zip(places, files, strict=True)
            )
            if lines != others:
                raise InputError(f"{places[0]} has {lines} lines and {places[1]} has {others} lines: must be as many")
            bar.write(f"{template}: {lines - boundaries:,} pairs", file=sys.stdout)
            pairs += lines - boundaries
    return pairs


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.text.extract", description=__doc__.partition("\n")[0])
    parser.add_argument("--source-lang", required=True, metavar="LANG")
    parser.add_argument("--target-lang", required=True, metavar="LANG")
    parser.add_argument("--output", required=True, type=Path, metavar="PREFIX", help="writes PREFIX.LANG of both")
    parser.add_argument("--documents", action="store_true", help="blank lines separate documents")
    parser.add_argument("--lower-case", action="store_true", help="write all letters in lower case")
    form = "PATH or ARCHIVE:MEMBER with {lang} for the language or {side} for src or ref in it; .gz, .bz2 and .xz are"
    parser.add_argument("templates", nargs="+", metavar="TEMPLATE", help=f"{form} decompressed")
    parser.add_argument("--reference", action="append", default=[], help="of the target, one for each TEMPLATE")
    args = parser.parse_args(argv)
    with ending_in_one_sentence("recipes.text.extract"):
        langs = args.source_lang, args.target_lang
        pairs = extract(args.templates, *langs, args.output, args.documents, args.reference, args.lower_case)
        print(f"{args.output}: {pairs:,} pairs")


if __name__ == "__main__":
    main()
