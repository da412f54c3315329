"""The output of ``fairseq-generate``: sources, hypotheses and detokenised translations, in the test set's order."""

import re
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import InputError


class Generated(NamedTuple):
    """The texts in the output of ``fairseq-generate``, by the number of the sentence. Hypotheses are the best ones.

    Attributes:
        path: the name of the file in messages
        sources: the S- lines, in tokens
        hypotheses: the H- lines, in tokens
        detokenised: the D- lines, which fairseq prints since 0.10
    """

    path: str
    sources: dict[int, str]
    hypotheses: dict[int, str]
    detokenised: dict[int, str]

    def in_order(self, texts: dict[int, str], count: int, text_name: str) -> list[str]:
        """Return *texts*, which must be of sentences 0 to *count* - 1, as in the text *text_name* (for messages)."""
        expected = set(range(count))
        for numbers, what in ((sorted(expected - set(texts)), "lacks"), (sorted(set(texts) - expected), "has")):
            if numbers:
                listed = ", ".join(map(str, numbers[:5])) + (", …" if len(numbers) > 5 else "")
                differing = f"{what} {len(numbers)} sentence{'s' * (len(numbers) > 1)} ({listed})"
                lines = f"{text_name} has {count} lines, which are sentences 0 to {count - 1}"
                raise InputError(f"{self.path}: {differing}, and {lines}")
        return [texts[number] for number in range(count)]


def read_generated(lines: Iterable[str], path: str) -> Generated:
    """Return the texts in *lines* that ``fairseq-generate`` printed to *path*, with the first of each n-best list.

    The outputs of several shards may be concatenated. Log lines are skipped.

    Raises:
        InputError: a sentence is repeated, a line is cut short, or no line has a translation
    """
    texts: dict[str, dict[int, str]] = {"S": {}, "T": {}, "H": {}, "D": {}}
    for number, line in enumerate(lines, 1):
        match = re.fullmatch(r"([STHD])-(\d+)\t(.*)", line, re.DOTALL)
        if match is None:
            continue
        kind, sentence, text = match.group(1), int(match.group(2)), match.group(3)
        if kind in "ST" and sentence in texts[kind]:
            raise InputError(
                f"{path}, line {number}: has sentence {sentence} a second time; give the output of one run"
            )
        if kind not in "ST":
            _, tab, text = text.partition("\t")
            if not tab:
                whole = f"{kind}-{sentence}, score and text"
                raise InputError(f"{path}, line {number}: is cut short; it must have {whole}")
        texts[kind].setdefault(sentence, text)
    if not texts["D"] and not texts["H"]:
        raise InputError(f"{path}: has no line D-… or H-…; give the output of fairseq-generate")
    return Generated(path, texts["S"], texts["H"], texts["D"])
