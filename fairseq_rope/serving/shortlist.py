"""Build a shortlist: for each subword of the source, the subwords of the target that can translate it.

CTranslate2 reads it (``vmap.txt``) and scores only these subwords, and frequent ones, for a batch of sentences. So the
projection onto the vocabulary becomes cheap, which takes nearly half of the decoder's time with 37,000 words. The idea
is from Jean et al. 2015 (arXiv:1412.2007) and Marian (Junczys-Dowmunt et al. 2018, arXiv:1805.12096).

The words are aligned by eflomal (Östling and Tiedemann 2016), a separate program under the GPL.
"""

import bisect
import collections
import itertools
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from subprocess import PIPE, STDOUT, Popen
from typing import NamedTuple

from ..errors import REQUIREMENTS, InputError
from ..lines import count_lines, lines_of
from ..text.tokens import Pair, Tokens

ALIGNER = "eflomal-align"
CANDIDATES, FREQUENT = 30, 2000  # docs/serving.md has what they cost
LONGEST_WORD = 8  # subwords; text between two spaces that has more is not a word, as in Japanese

Links = set[tuple[int, int]]  # (position in the source, position in the target)


class Shortlist(NamedTuple):
    """What can translate a sentence.

    Attributes:
        frequent: subwords of the target that are always possible
        candidates: for each subword of the source, the most frequent subwords of its translations, best first, and
            itself if the corpus's target has it, without those that are always possible
    """

    frequent: Tokens
    candidates: dict[str, Tokens]

    def write(self, path: str) -> None:
        """Write the file that CTranslate2 reads as ``vmap.txt``: a line for each subword of the source."""
        with open(path, "w", encoding="utf-8", newline="\n") as file:
            for source, targets in (("", self.frequent), *self.candidates.items()):
                file.write(f"{source}\t{' '.join(targets)}\n")


def find_aligner() -> str:
    """Return the path of eflomal's program; raise an InputError if it is not installed."""
    program = shutil.which(ALIGNER, path=os.path.dirname(sys.executable)) or shutil.which(ALIGNER)
    if program is None:
        install = f"install it (its licence is the GPL) with pip install '{REQUIREMENTS['eflomal']}'"
        raise InputError(f"--shortlist: needs the program {ALIGNER}; {install}")
    return program


def refuse_corpus(source: str, target: str) -> None:
    """Raise an InputError if two files have different numbers of lines; an OSError if one cannot be read."""
    counts = count_lines(source), count_lines(target)
    if counts[0] != counts[1]:
        raise InputError(f"--shortlist {source} {target}: they have {counts[0]} and {counts[1]} lines, not as many")


def align(pairs: Iterable[Pair], program: str) -> Iterator[tuple[Tokens, Tokens, Links]]:
    """Yield *pairs* with their links, those of both directions. A pair with an empty sentence is left out."""
    with tempfile.TemporaryDirectory(prefix="shortlist.") as folder:
        paths = {flag: os.path.join(folder, flag) for flag in "stfr"}
        with open(paths["s"], "w", encoding="utf-8") as sources, open(paths["t"], "w", encoding="utf-8") as targets:
            for source, target in pairs:
                if source and target:
                    sources.write(" ".join(source) + "\n")
                    targets.write(" ".join(target) + "\n")
        command = [program, *(word for flag, path in paths.items() for word in (f"-{flag}", path))]
        # eflomal starts another program, which must end with it
        with Popen(command, stdout=PIPE, stderr=STDOUT, start_new_session=True) as process:
            try:
                printed = process.communicate()[0].decode("utf-8", "replace")
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode:
            last = (printed.strip().splitlines() or ["no message"])[-1]
            raise InputError(f"--shortlist: {program} ended with status {process.returncode}: {last}")
        for source_line, target_line, *directions in zip(*(lines_of(path) for path in paths.values()), strict=True):
            source, target = (list(map(sys.intern, line.split(" "))) for line in (source_line, target_line))
            links = (link.split("-") for line in directions for link in line.split())
            yield source, target, {(int(i), int(j)) for i, j in links}


def words_of(tokens: Sequence[str], separator: str) -> list[range]:
    """Return the positions of the subwords of each word, for subword-nmt (``ab@@ c``) and sentencepiece (``▁ab c``).

    The *separator* of documents is a word. Each subword is, where more than LONGEST_WORD have no space between them.
    """
    pieces = any(token.startswith("\u2581") for token in tokens)
    begins = [
        number
        for number, token in enumerate(tokens)
        if number == 0
        or separator in (token, tokens[number - 1])
        or (token.startswith("\u2581") if pieces else not tokens[number - 1].endswith("@@"))
    ]
    words: list[range] = []
    for begin, end in zip(begins, [*begins[1:], len(tokens)]):
        words += [range(begin, end)] if end - begin <= LONGEST_WORD else (range(n, n + 1) for n in range(begin, end))
    return words


def of_whole_words(source: Sequence[str], target: Sequence[str], links: Links, separator: str = "") -> Links:
    """Return the links of all subwords of the words that *links* connect.

    A word of the target without a link gets those of the nearest word with one: subwords are often aligned in part
    only, and a word such as an article to none. Without this, a shortlist lacks them.
    """
    source_words, target_words = words_of(source, separator), words_of(target, separator)
    word_of = [{n: number for number, word in enumerate(words) for n in word} for words in (source_words, target_words)]
    linked: dict[int, set[int]] = collections.defaultdict(set)  # words of the source by word of the target
    for i, j in links:
        linked[word_of[1][j]].add(word_of[0][i])
    spread: Links = set()
    places = sorted(linked)
    for number, word in enumerate(target_words):
        at = bisect.bisect(places, number)
        for nearest in sorted(places[max(0, at - 1) : at + 1], key=lambda place: abs(place - number))[:1]:  # or none
            spread.update((i, j) for source_word in linked[nearest] for i in source_words[source_word] for j in word)
    return spread


def build(
    pairs: Iterable[Pair], candidates: int = CANDIDATES, frequent: int = FREQUENT, separator: str = ""
) -> Shortlist:
    """Return the shortlist of a corpus of *pairs*.

    Args:
        candidates: how many subwords each subword of the source has, at most, besides itself and those that are always
            possible
        frequent: how many of the most frequent subwords of the target are always possible
        separator: the separator of documents, which is a word, and always possible; "": there are no documents
    """
    counts: dict[str, Counter[str]] = collections.defaultdict(collections.Counter)
    occurrences: Counter[str] = collections.Counter()
    for source, target, links in align(pairs, find_aligner()):
        occurrences.update(target)
        for i, j in of_whole_words(source, target, links, separator):
            counts[source[i]][target[j]] += 1
    possible = dict.fromkeys([*(token for token, _ in occurrences.most_common(frequent)), *filter(None, [separator])])
    best: dict[str, Tokens] = {}
    for word in sorted({*counts, *occurrences}):
        others = (token for token, _ in counts[word].most_common() if token != word and token not in possible)
        itself = [word] if word in occurrences and word not in possible else []  # many names are only copied
        best[word] = [*itertools.islice(others, candidates), *itself]
    return Shortlist(list(possible), {word: targets for word, targets in best.items() if targets})
