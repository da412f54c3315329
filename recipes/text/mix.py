"""Add pairs with translated sources to a training set, and note the origin of each pair."""

import argparse
from collections.abc import Sequence
from fractions import Fraction
from itertools import islice

from fairseq_rope.errors import InputError, ending_in_one_sentence, refuse_output
from fairseq_rope.files import written_whole
from fairseq_rope.lines import count_lines, lines_of

PARALLEL, BACK_TRANSLATED = "parallel", "back-translated"  # the origins


def most_translated(parallel: int, share: float) -> int:
    """The largest number of translated pairs beside *parallel* ones so that they are at most the *share*, below 1."""
    exact = Fraction(str(share))  # 0.6 of 10 pairs are 15; the nearest float would give 14
    return int(parallel * exact / (1 - exact))


def mix(parallel: Sequence[str], translated: Sequence[str], outputs: Sequence[str], share: float, tag: str) -> int:
    """Write the pairs of the files *parallel*, and after them the first pairs of the files *translated*, to *outputs*.

    *outputs* are the files for both sides and for the origins, one a line. At most *share* of the pairs are
    translated ones, whose sources begin with the word *tag*, if it is not empty. Returns the number of those.
    Raises an InputError if two files of a pair have different numbers of lines, or if *tag* is a word of the text.
    """
    counts = []
    for paths in (parallel, translated):
        lines = [count_lines(path) for path in paths]
        if lines[0] != lines[1]:
            raise InputError(f"{paths[0]} has {lines[0]} lines and {paths[1]} has {lines[1]}: must be as many")
        counts.append(lines[0])
    wanted = counts[1] if share == 1 else min(counts[1], most_translated(counts[0], share))
    before = [f"{tag} " if tag else "", ""]
    with written_whole(*outputs) as (*files, origins):
        for file, own, more, begin in zip(files, parallel, translated, before, strict=True):
            for path, limit, prefix in ((own, counts[0], ""), (more, wanted, begin)):
                for number, line in enumerate(islice(lines_of(path), limit), 1):
                    if tag and tag in line.split(" "):  # both languages share the word's embedding
                        raise InputError(f"--tag {tag}: is a word of {path}, line {number}; choose another tag")
                    file.write(f"{prefix}{line}\n".encode())
        origins.write(f"{PARALLEL}\n".encode() * counts[0] + f"{BACK_TRANSLATED}\n".encode() * wanted)
    return wanted


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.text.mix", description=__doc__)
    flag = parser.add_argument
    flag("--source-lang", required=True, metavar="LANG")
    flag("--target-lang", required=True, metavar="LANG")
    flag("--parallel", required=True, metavar="PREFIX", help="reads PREFIX.LANG of both")
    flag("--translated", required=True, metavar="PREFIX", help="reads PREFIX.LANG of both")
    flag("--share", type=float, default=0.5, metavar="S", help="largest share of translated pairs (default: 0.5)")
    flag("--tag", default="", metavar="WORD", help="a word before each translated source")
    flag("--output", required=True, metavar="PREFIX", help="writes PREFIX.LANG of both, and PREFIX.origin")
    args = parser.parse_args(argv)
    with ending_in_one_sentence("recipes.text.mix"):
        if not 0 <= args.share <= 1:
            raise InputError(f"--share {args.share:g}: must be 0 to 1")
        langs = (args.source_lang, args.target_lang)
        outputs = [f"{args.output}.{end}" for end in (*langs, "origin")]
        for path in outputs:
            refuse_output(path)
        parallel, translated = ([f"{prefix}.{lang}" for lang in langs] for prefix in (args.parallel, args.translated))
        count = mix(parallel, translated, outputs, args.share, args.tag)
        total = count_lines(outputs[0])
        print(f"{args.output}: {total} pairs, {count} of them ({100 * count / total:.1f}%) back-translated")


if __name__ == "__main__":
    main()
