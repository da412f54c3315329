"""Join consecutive sentences of documents to segments, and write these as ordinary parallel text.

    python -m recipes.documents.segments --source-lang en --target-lang de --words 350 --share 0.5 \\
        --output data/train 'raw/train.{lang}.gz'

It writes ``data/train.en`` and ``data/train.de``, which any recipe can train on. A line is a segment: sentences of one
document, with a separator between two of them. ``data/train.segments.tsv`` says which sentences a line contains.
:mod:`recipes.documents.join_and_score` reads it to divide translated segments again.
"""

import argparse
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fairseq_rope.errors import InputError, ending_in_one_sentence
from fairseq_rope.files import written_whole
from fairseq_rope.lines import lines_of, read_lines
from fairseq_rope.text.languages import UNSPACED, language
from fairseq_rope.text.segments import SEPARATOR, segments
from recipes.text.extract import extract

MAP = ".segments.tsv"  # the name of the map after the prefix of the text
COLUMNS = ("line", "sentences", "document")

Pair = tuple[str, str]  # a sentence and its translation
Divide = Callable[[list[Pair]], list[range]]  # returns the indices of the sentences of each segment of a document


class Segment(NamedTuple):
    """A row of the map: the number of a line, how many sentences it contains, and the number of their document."""

    line: int
    sentences: int
    document: int


def read_map(path: str) -> list[Segment]:
    """Return the rows of the map *path*. Raises an InputError if it is another file."""
    header, *rows = read_lines(path)
    if header.split("\t") != [*COLUMNS]:
        raise InputError(f"{path}, line 1: must have the columns {', '.join(COLUMNS)}")
    return [Segment(*map(int, row.split("\t"))) for row in rows]


def read_documents(
    paths: Sequence[str], names: Sequence[str], is_training: bool, one_document: bool, separated: bool
) -> Iterator[list[Pair]]:
    """Yield the documents of the two files *paths* that are not empty. Blank lines separate them.

    Pairs that are blank on one side are left out if *is_training*. With *one_document*, blank lines separate nothing.
    Raises an InputError, with *names* for the files, for other pairs that are blank on one side, and for a sentence
    that contains the separator although *separated* says that the segments need it.
    """
    document: list[Pair] = []
    for number, pair in enumerate(zip(*map(lines_of, paths), strict=True), 1):
        source, target = (line.strip() for line in pair)
        if bool(source) != bool(target):
            if is_training:
                continue
            blank = names[0] if target else names[1]
            raise InputError(f"{blank}, line {number}: is blank on this side only; blank lines must be on both sides")
        for name, sentence in zip(names, (source, target), strict=True):
            if separated and SEPARATOR in sentence:
                raise InputError(f"{name}, line {number}: contains {SEPARATOR}, which separates sentences of segments")
        if source:
            document.append((source, target))
        elif document and not one_document:
            yield document
            document = []
    if document:
        yield document


class Longest:
    """Divides documents into segments with as many sentences as fit into *words* words of the longer side.

    A word is a character in languages without blanks. A separator counts as a word.
    """

    def __init__(self, words: int, langs: Sequence[str]) -> None:
        self._words = words
        self._unspaced = [language(lang) in UNSPACED for lang in langs]

    def lengths(self, document: Sequence[Pair]) -> list[int]:
        """Return the words of the longer side of each pair."""
        return [
            max(
                len("".join(words) if unspaced else words)
                for words, unspaced in zip(map(str.split, pair), self._unspaced)
            )
            for pair in document
        ]

    def __call__(self, document: Sequence[Pair]) -> list[range]:
        return segments(self.lengths(document), lambda: self._words)


class Mixture(Longest):
    """Divides training documents into segments of all lengths, or into single sentences.

    The limit of each segment is drawn uniformly from 1 to *words*. A document is divided into segments if that brings
    the share of the sentences in segments so far closer to *share*. Otherwise each sentence is a line by itself.
    """

    def __init__(self, words: int, langs: Sequence[str], share: float, seed: int) -> None:
        super().__init__(words, langs)
        self._share, self._random = share, random.Random(seed)
        self.sentences = self.in_segments = 0

    def __call__(self, document: Sequence[Pair]) -> list[range]:
        size = len(document)
        in_segments = self.in_segments + size / 2 <= self._share * (self.sentences + size)
        self.sentences += size
        if not in_segments:
            return [range(n, n + 1) for n in range(size)]
        self.in_segments += size
        return segments(self.lengths(document), lambda: self._random.randint(1, self._words))


def every(count: int, document: Sequence[Pair]) -> list[range]:
    """Return segments of exactly *count* sentences. The last sentences are left out if they are fewer."""
    return [range(n, n + count) for n in range(0, len(document) - count + 1, count)]


def write(
    documents: Iterator[list[Pair]], divide: Divide, prefix: str, langs: Sequence[str], between: str, sentences: bool
) -> str:
    """Write the segments of *documents* and their map, and return a sentence with their number.

    *between* is written between two sentences. *sentences*: whether to write the sentences of the segments too, one a
    line. They are the references of :mod:`recipes.documents.join_and_score`.
    """
    paths = [*(f"{prefix}.{lang}" for lang in langs), prefix + MAP]
    paths += [f"{prefix}.sentences.{lang}" for lang in langs] if sentences else []
    count = lines = joined = left_out = number = 0
    with written_whole(*paths) as (source, target, table, *of_sentences):
        table.write("\t".join(COLUMNS).encode() + b"\n")
        for number, document in enumerate(documents, 1):
            divisions = divide(document)
            left_out += len(document) - sum(map(len, divisions))
            for segment in divisions:
                lines, count = lines + 1, count + len(segment)
                joined += len(segment) if len(segment) > 1 else 0
                table.write(f"{lines}\t{len(segment)}\t{number}\n".encode())
                sides = [[document[n][side] for n in segment] for side in (0, 1)]
                for file, side in zip((source, target), sides, strict=True):
                    file.write(f"{between.join(side)}\n".encode())
                for file, side in zip(of_sentences, sides):  # no files for training text
                    file.writelines(f"{sentence}\n".encode() for sentence in side)
        if not lines:
            raise InputError(f"{prefix}: would be empty, because {left_out} sentences are too few for a segment")
    counts = f"{number} documents, {count} sentences, {lines} lines, {joined / count:.1%} of the sentences"
    return f"{counts} on a line with others" + (f"; {left_out} sentences left out" if left_out else "")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="recipes.documents.segments", description=__doc__.partition("\n")[0])
    flag = parser.add_argument
    flag("--source-lang", required=True, metavar="LANG")
    flag("--target-lang", required=True, metavar="LANG")
    flag("--output", required=True, type=Path, metavar="PREFIX", help=f"writes PREFIX.LANG of both, and PREFIX{MAP}")
    limit = parser.add_mutually_exclusive_group(required=True)
    words = "the longest segments, in words of the longer side, or in characters for languages without blanks"
    limit.add_argument("--words", type=int, metavar="N", help=words)
    exactly = "join exactly every N sentences of a document, and leave out the last ones if they are fewer"
    limit.add_argument("--sentences", type=int, metavar="N", help=exactly)
    share = "for training text: share of the sentences that are in segments, of random lengths; needs --words"
    flag("--share", type=float, metavar="P", help=share)
    flag("--seed", type=int, default=1, metavar="N", help="of the random lengths; default: %(default)s")
    flag("--one-document", action="store_true", help="the text has no boundaries, and all of it is one document")
    blank = f"join with a blank instead of {SEPARATOR}, to test models that do not know it"
    flag("--no-separator", action="store_true", help=blank)
    places = "PATH or ARCHIVE:MEMBER with {lang} and {side}, as in the settings of recipes; text with blank lines, .sgm"
    flag("templates", nargs="+", metavar="TEMPLATE", help=f"{places}, or .LANG-LANG.tsv")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    args = build_parser().parse_args(argv)
    with ending_in_one_sentence("recipes.documents.segments"):
        for name in ("words", "sentences"):
            if (value := getattr(args, name)) is not None and value < 1:
                raise InputError(f"--{name} {value}: must be 1 or more")
        langs = (args.source_lang, args.target_lang)
        divide: Divide = partial(every, args.sentences)
        if args.words is not None:
            divide = Longest(args.words, langs)
        if args.share is not None:
            if args.words is None or not 0 <= args.share <= 1:
                raise InputError(f"--share {args.share}: must be from 0 to 1, and needs --words")
            divide = Mixture(args.words, langs, args.share, args.seed)
        args.output.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f"{args.output.name}.", dir=args.output.parent) as folder:
            extract(args.templates, *langs, Path(folder, "raw"), documents=not args.one_document)
            paths = [f"{folder}/raw.{lang}" for lang in langs]
            names = [f"{' '.join(args.templates)} ({lang})" for lang in langs]
            is_training = args.share is not None
            documents = read_documents(paths, names, is_training, args.one_document, not args.no_separator)
            between = " " if args.no_separator else f" {SEPARATOR} "
            counts = write(documents, divide, str(args.output), langs, between, sentences=not is_training)
            print(f"{args.output}: {counts}")
        if isinstance(divide, Mixture):
            print(f"{args.output}: {divide.in_segments / divide.sentences:.1%} of the sentences in segments")


if __name__ == "__main__":
    main()
