"""Normalise and tokenise text as Moses does (sacremoses), hyphens left whole.

At translation time ``--tokenizer moses --moses-no-dash-splits`` does the same.
"""

import argparse
import os
from collections.abc import Sequence
from functools import partial

import regex
from sacremoses import MosesPunctNormalizer, MosesTokenizer

from fairseq_rope.errors import ending_in_one_sentence, refuse_output
from recipes.text.lines import Convert, convert_file

# What Moses' remove-non-printing-char.perl takes for blanks, and the two other characters at which
# Python breaks lines.
_NOT_PRINTING = regex.compile(r"[\p{C}\u2028\u2029]")


def line_converter(lang: str, normalise: bool, tokenise: bool) -> Convert:
    """The function that does to lines what Moses' scripts do, in their order.

    The normaliser is that of ``sacremoses normalize``, which differs from Moses' own in ’ at the end of a
    word (class’): ' there, " in Moses. The tokeniser is called as by ``sacremoses tokenize`` and by
    fairseq's ``--tokenizer moses --moses-no-dash-splits``.
    """
    normaliser, tokeniser = MosesPunctNormalizer(lang), MosesTokenizer(lang)

    def convert(line: str) -> str:
        if normalise:
            # With its end, as the scripts read it: to them, the German ." at the end of a line is a ". then.
            line = normaliser.normalize(line + "\n")
        line = _NOT_PRINTING.sub(" ", line)
        return tokeniser.tokenize(line, return_str=True) if tokenise else line

    return lambda lines: [convert(line) for line in lines]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; exits with status 1 and one sentence on standard error if it cannot."""
    parser = argparse.ArgumentParser(prog="recipes.text.tokenise", description=__doc__)
    flag = parser.add_argument
    flag("--lang", required=True, help="its language: en, de, …")
    flag("--input", required=True, metavar="FILE", help="UTF-8 text, a sentence a line")
    flag("--output", required=True, metavar="FILE", help="where to write as many lines")
    flag("--workers", type=int, default=os.cpu_count(), metavar="N", help="processes; default: all cores")
    flag("--normalise-punctuation", action="store_true", help="„ and the like become ASCII first, also in translations")
    flag("--no-tokeniser", action="store_true", help="for sentencepiece: only what does not print becomes blanks")
    args = parser.parse_args(argv)
    with ending_in_one_sentence("recipes.text.tokenise"):
        refuse_output(args.output)
        make = partial(line_converter, args.lang, args.normalise_punctuation, not args.no_tokeniser)
        convert_file(make, args.input, args.output, args.workers, f"tokenise {args.input}")


if __name__ == "__main__":
    main()
