"""Write the translations in the output of fairseq-generate as plain text, in the order of the test set."""

import argparse
from collections.abc import Sequence

from fairseq_rope.errors import ending_in_one_sentence
from fairseq_rope.files import written_whole
from fairseq_rope.lines import count_lines, lines_of
from fairseq_rope.text.generated import read_generated


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.text.translations", description=__doc__)
    flag = parser.add_argument
    flag("--generated", required=True, metavar="FILE", help="the output of fairseq-generate, with D- lines")
    flag("--source", required=True, metavar="FILE", help="the source of the test set")
    flag("--output", required=True, metavar="FILE", help="one translation for each line of the source")
    args = parser.parse_args(argv)
    with ending_in_one_sentence("recipes.text.translations"):
        generated = read_generated(lines_of(args.generated), args.generated)
        lines = generated.in_order(generated.detokenised, count_lines(args.source), args.source)
        with written_whole(args.output) as (file,):
            file.writelines(f"{line}\n".encode() for line in lines)
        print(f"{args.output}: {len(lines)} translations")


if __name__ == "__main__":
    main()
