"""Make a test set of the long documents of the test set, and of some that are moved from the training set.

    python -m recipes.documents_en_de.long_test_set DIR OUTPUT

DIR has train, valid and test, each as NAME.LANG.gz, with blank lines between documents. OUTPUT gets the same files. Its
test set has the test documents of more than 350 words. 60 training documents of that length, in which no line lacks its
translation, move to it.
"""

import argparse
import gzip
import itertools
from collections.abc import Sequence
from pathlib import Path

from fairseq_rope.errors import InputError, ending_in_one_sentence
from fairseq_rope.files import written_whole
from fairseq_rope.lines import read_lines
from recipes.text.lines import NOT_PRINTING

SETS = ("train", "valid", "test")

Document = list[tuple[str, ...]]  # the lines of a document, each in all languages


def read(folder: Path, name: str, languages: Sequence[str]) -> list[Document]:
    """The documents of the set *name* in *folder*."""
    texts = [read_lines(str(folder / f"{name}.{lang}.gz")) for lang in languages]
    if len({len(text) for text in texts}) > 1:
        raise InputError(f"{folder}: the sides of {name} have {' and '.join(str(len(text)) for text in texts)} lines")
    documents: list[Document] = [[]]
    for line in zip(*texts, strict=True):
        if any(map(has_text, line)):
            documents[-1].append(line)
        elif documents[-1]:
            documents.append([])
    return [document for document in documents if document]


def has_text(line: str) -> bool:
    """Whether *line* has more than blanks and characters that are not printed, which stage 2 removes."""
    return bool(NOT_PRINTING.sub("", line).strip())


def words(document: Document) -> int:
    """The words of the first language in *document*."""
    return sum(len(line[0].split()) for line in document)


def divide(train: list[Document], test: list[Document], least: int, count: int) -> tuple[list[Document], ...]:
    """The new training set and the new test set, whose documents have more than *least* words.

    *count* documents of the training set, spread over it evenly, go to the test set. They have a text in each line in
    all languages, which a test set must have. Raises an InputError if the training set has fewer such documents.
    """
    complete = {n for n, document in enumerate(train) if all(has_text(text) for line in document for text in line)}
    long = [n for n, document in enumerate(train) if n in complete and words(document) > least]
    if len(long) < count:
        limit = f"must be at most {len(long)}, the complete training documents of more than {least} words"
        raise InputError(f"--documents {count}: {limit}")
    moved = {long[n * len(long) // count] for n in range(count)}
    remaining = [document for n, document in enumerate(train) if n not in moved]
    return remaining, [document for document in test if words(document) > least] + [train[n] for n in sorted(moved)]


def main(argv: Sequence[str] | None = None) -> None:
    description = "Make a test set of long documents; some are moved from the training set."
    parser = argparse.ArgumentParser(prog="recipes.documents_en_de.long_test_set", description=description)
    flag = parser.add_argument
    flag("folder", type=Path, metavar="DIR", help="has NAME.LANG.gz of train, valid and test")
    flag("output", type=Path, metavar="OUTPUT", help="the folder to write")
    flag("--languages", nargs=2, default=("en", "de"), metavar="LANG", help="default: en de")
    flag("--words", type=int, default=350, metavar="N", help="test documents have more; default: %(default)s")
    flag("--documents", type=int, default=60, metavar="N", help="moved from train to test; default: %(default)s")
    args = parser.parse_args(argv)
    with ending_in_one_sentence("recipes.documents_en_de.long_test_set"):
        if args.output.resolve() == args.folder.resolve():
            raise InputError(f"{args.output}: OUTPUT must be another folder than DIR")
        train, valid, test = (read(args.folder, name, args.languages) for name in SETS)
        train, test = divide(train, test, args.words, args.documents)
        args.output.mkdir(parents=True, exist_ok=True)
        sets = dict(zip(SETS, (train, valid, test), strict=True))
        paths = [str(args.output / f"{name}.{lang}.gz") for name in sets for lang in args.languages]
        with written_whole(*paths) as files:  # a killed run leaves no sets that share documents
            for file, (documents, n) in zip(files, itertools.product(sets.values(), (0, 1)), strict=True):
                text = "\n\n".join("\n".join(line[n] for line in document) for document in documents) + "\n"
                file.write(gzip.compress(text.encode("utf-8"), mtime=0))
        for name, documents in sets.items():
            print(f"{name}: {len(documents)} documents, {sum(map(words, documents))} words")


if __name__ == "__main__":
    main()
