"""Join monolingual texts, one sentence a line, to one text.

    python -m recipes.text.monolingual --output raw/monolingual.de FILE …

The files are read as those of parallel corpora (``recipes.text.extract``): they may end with .gz, .bz2 or .xz, ``.sgm``
gives its segments, and only "\\n" ends a line. Files with columns and archives are refused.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from fairseq_rope.errors import InputError, ending_in_one_sentence
from fairseq_rope.files import written_whole
from recipes.text.extract import Place, Side, copy, naming_damage

COLUMNS = re.compile(r"\.\w+-\w+\.tsv(\.gz|\.bz2|\.xz)?$")


def join(paths: Sequence[Path], output: Path) -> list[int]:
    """Write the lines of all *paths* to *output*, and return the number of lines of each.

    Raises an InputError that names the file if it is empty or damaged, a byte is not UTF-8, or it is *output*.
    """
    for path in paths:
        if output.exists() and output.samefile(path):
            raise InputError(f"--output {output}: is one of the files to read")
        if COLUMNS.search(path.name):
            raise InputError(f"{path}: has two languages as columns: give a file with the column of one language")
    output.parent.mkdir(parents=True, exist_ok=True)
    side = Side("", "", output)
    counts = []
    with written_whole(str(output)) as (side.file,):
        for path in paths:
            with open(path, "rb") as file, naming_damage(path):
                counts.append(copy(file, Place(path, None), side))
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.text.monolingual", description="Join monolingual texts to one text.")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE")
    parser.add_argument("inputs", nargs="+", type=Path, metavar="FILE", help="one sentence a line, plain or compressed")
    args = parser.parse_args(argv)
    with ending_in_one_sentence("recipes.text.monolingual"):
        counts = join(args.inputs, args.output)
        for path, count in zip(args.inputs, counts, strict=True):
            print(f"{path}: {count:,} lines")


if __name__ == "__main__":
    main()
