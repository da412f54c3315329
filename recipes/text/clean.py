"""Remove pairs that cannot be translations of each other, and hold out a validation set."""

import argparse
from collections import Counter
from collections.abc import Sequence

from fairseq_rope.errors import InputError, ending_in_one_sentence
from fairseq_rope.files import written_whole
from fairseq_rope.lines import count_lines
from fairseq_rope.text.languages import UNSPACED, language
from recipes.text.lines import pairs_of, progress

MAX_CHARACTERS = 1000  # of a word; Moses' clean-corpus-n.perl has the same limit

EMPTY = "a side is empty"
LONG = "a side has more than {max_words} words"
UNLIKE = "a side is more than {max_ratio:g} times as long as the other"
LONG_WORD = f"a word has more than {MAX_CHARACTERS} characters"


def why_not(
    pair: Sequence[Sequence[str]], max_words: int, max_ratio: float, unspaced: Sequence[bool] = (False, False)
) -> str | None:
    """The reason to remove *pair*, or None, by the rules of Moses' clean-corpus-n.perl in their order.

    *pair* has the words of both sides. A *max_ratio* of 0 is no limit. *unspaced* says whether source and target are
    written without spaces; then every character counts as a word.
    """
    sides = list(zip(pair, unspaced, strict=True))
    shorter, longer = sorted(sum(map(len, words)) if is_unspaced else len(words) for words, is_unspaced in sides)
    if shorter == 0:
        return EMPTY
    if longer > max_words:
        return LONG
    if max_ratio and longer / shorter > max_ratio:
        return UNLIKE
    if any(len(word) > MAX_CHARACTERS for words, is_unspaced in sides if not is_unspaced for word in words):
        return LONG_WORD
    return None


def clean(
    sources: Sequence[str],
    outputs: Sequence[str],
    heldout: Sequence[str],
    max_words: int,
    max_ratio: float,
    holdout_every: int,
    unspaced: Sequence[bool] = (False, False),
) -> Counter[str]:
    """Write the pairs of the two files *sources* that :func:`why_not` accepts to *outputs*.

    Words are separated by any Unicode white space, as in Perl, and written with one blank between them. Every
    *holdout_every*-th accepted pair goes to *heldout* instead. Returns the number of pairs that were "read", "kept" and
    "held out", and the number that were removed for each reason.
    """
    pairs = pairs_of(sources)
    counts: Counter[str] = Counter()
    with written_whole(*outputs, *heldout) as files:
        for pair in progress(pairs, count_lines(sources[0]), f"clean {sources[0]}", " pairs"):
            counts["read"] += 1
            reason = why_not(pair, max_words, max_ratio, unspaced)
            if reason is not None:
                counts[reason] += 1
                continue
            accepted = counts["kept"] + counts["held out"] + 1
            hold_out = holdout_every > 0 and accepted % holdout_every == 0
            for words, file in zip(pair, files[2:] if hold_out else files[:2], strict=True):
                file.write(" ".join(words).encode("utf-8") + b"\n")
            counts["held out" if hold_out else "kept"] += 1
        if not counts["kept"]:
            raise InputError(f"{' and '.join(sources)}: none of the {counts['read']} pairs is left")
        if heldout and not counts["held out"]:
            limit = f"must be at most {counts['kept']}, the number of pairs that are left"
            raise InputError(f"--holdout-every {holdout_every}: {limit}")
    return counts


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.text.clean", description=__doc__)
    flag = parser.add_argument
    flag("--source-lang", required=True, metavar="LANG")
    flag("--target-lang", required=True, metavar="LANG")
    flag("--input", required=True, metavar="PREFIX", help="reads PREFIX.LANG of both")
    flag("--output", required=True, metavar="PREFIX", help="writes PREFIX.LANG of both")
    flag("--max-words", type=int, default=250, metavar="N", help="in a side; characters in a language without spaces")
    flag("--max-ratio", type=float, default=9.0, metavar="R", help="of the longer side to the shorter; 0: no limit")
    flag("--holdout-every", type=int, default=0, metavar="N", help="hold out every N-th pair")
    flag("--heldout", metavar="PREFIX", help="write the held-out pairs to PREFIX.LANG of both")
    args = parser.parse_args(argv)
    langs = (args.source_lang, args.target_lang)
    with ending_in_one_sentence("recipes.text.clean"):
        prefixes = (args.input, args.output, args.heldout)
        sources, outputs, heldout = ([f"{prefix}.{lang}" for lang in langs] if prefix else [] for prefix in prefixes)
        unspaced = [language(lang) in UNSPACED for lang in langs]
        counts = clean(sources, outputs, heldout, args.max_words, args.max_ratio, args.holdout_every, unspaced)
        for name in ("read", "kept", "held out") if heldout else ("read", "kept"):
            print(f"{counts[name]:>10} pairs {name}")
        for reason in (EMPTY, LONG, UNLIKE, LONG_WORD):
            print(f"{counts[reason]:>10} removed: {reason.format_map(vars(args))}")


if __name__ == "__main__":
    main()
