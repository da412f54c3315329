"""Segments: consecutive sentences of one document in one line, with a separator between them.

A line with several sentences gives a model context. The recipes train on such lines, and ``fairseq-rope translate
--documents`` translates them. A sentence here is a line of the text, which can also be a paragraph.
"""

from collections.abc import Callable, Sequence
from typing import Any

# A token between two sentences. Moses' tokeniser, subword-nmt and sentencepiece keep this character as one token, and
# the detokenisers write it back.
SEPARATOR = "‖"
# In a data folder: an object with "tokens", the number of tokens in the longest segments, and "separator".
FILE = "segments.json"


def segments(lengths: Sequence[int], limit: Callable[[], int]) -> list[range]:
    """Return the sentences of each segment of a document with sentences of *lengths* tokens, as ranges of indices.

    A segment contains as many sentences as fit. A sentence that does not fit is a segment alone. *limit* returns the
    number of tokens that the next segment may have, with its separators.
    """
    ranges: list[range] = []
    begin = 0
    while begin < len(lengths):
        end, tokens, most = begin + 1, lengths[begin], limit()
        while end < len(lengths) and tokens + 1 + lengths[end] <= most:
            tokens += 1 + lengths[end]
            end += 1
        ranges.append(range(begin, end))
        begin = end
    return ranges


def joined(sentences: Sequence[Sequence[str]], separator: str = SEPARATOR) -> list[str]:
    """Return the tokens of a segment: those of its *sentences*, with *separator* between two."""
    tokens = list(sentences[0])
    for sentence in sentences[1:]:
        tokens += [separator, *sentence]
    return tokens


def divided(tokens: Sequence[str], count: int, separator: str = SEPARATOR) -> tuple[list[list[str]], bool]:
    """Return *count* sentences of a translated segment, whose source has as many, and whether it has exactly *count*.

    If it has fewer, the last ones are empty. If it has more, the last one contains the rest, without separators.
    """
    sentences: list[list[Any]] = [[]]
    for token in tokens:
        if token == separator:
            sentences.append([])
        else:
            sentences[-1].append(token)
    same = len(sentences) == count
    rest = [token for sentence in sentences[count - 1 :] for token in sentence]
    sentences = [*sentences[: count - 1], rest]
    return sentences + [[] for _ in range(count - len(sentences))], same
