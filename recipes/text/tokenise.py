"""Normalise and tokenise text as Moses does (sacremoses), without splitting at hyphens.

At translation time ``--tokenizer moses --moses-no-dash-splits`` does the same.
"""

import argparse
from collections.abc import Sequence
from functools import partial
from statistics import fmean

import regex
from sacremoses import MosesPunctNormalizer, MosesTokenizer

from fairseq_rope.errors import ending_in_one_sentence
from fairseq_rope.lines import lines_of
from fairseq_rope.text.languages import language
from recipes.text.lines import NOT_PRINTING, Convert, convert_file

# A token that begins with a mark, or with punctuation that is not ASCII. Moses' detokeniser leaves the blank before it.
APART = regex.compile(r"(?<!\S)(?![ -~])[\p{M}\p{Terminal_Punctuation}]")


def line_converter(lang: str, normalise: bool, tokenise: bool) -> Convert:
    """A function that applies Moses' steps to lines, in the order of its scripts.

    The normaliser is that of ``sacremoses normalize``. It turns a ’ at the end of a word (class’) into ', where Moses'
    own turns it into ". The tokeniser has the options of ``sacremoses tokenize`` and of fairseq's
    ``--tokenizer moses --moses-no-dash-splits``.
    """
    lang = language(lang)  # Moses has no rules for codes with a region
    normaliser, tokeniser = MosesPunctNormalizer(lang), MosesTokenizer(lang)

    def convert(line: str) -> str:
        if normalise:
            # Moses' scripts see the newline, and so they change a German ." at the end of a line to ".
            line = normaliser.normalize(line + "\n")
        line = NOT_PRINTING.sub(" ", line)
        return tokeniser.tokenize(line, return_str=True) if tokenise else line

    return lambda lines: [convert(line) for line in lines]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.text.tokenise", description=__doc__)
    flag = parser.add_argument
    flag("--lang", required=True, help="language of the text: en, de, …")
    flag("--input", required=True, metavar="FILE", help="UTF-8 text, one sentence a line")
    flag("--output", required=True, metavar="FILE", help="the same lines in tokens")
    flag("--normalise-punctuation", action="store_true", help="first turn „ and similar into ASCII")
    flag("--no-tokeniser", action="store_true", help="only replace non-printing characters by blanks")
    args = parser.parse_args(argv)
    with ending_in_one_sentence("recipes.text.tokenise"):
        make_converter = partial(line_converter, args.lang, args.normalise_punctuation, not args.no_tokeniser)
        convert_file(make_converter, args.input, args.output, f"tokenise {args.input}")
        if args.no_tokeniser:
            return
        if (apart := fmean(bool(APART.search(line)) for line in lines_of(args.output))) > 0.01:
            problem = "have marks or punctuation that Moses separates and cannot join again"
            print(f"{args.output}: {apart:.1%} of the lines {problem}; set bpe=sentencepiece")


if __name__ == "__main__":
    main()
