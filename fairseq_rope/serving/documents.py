"""Cutting a text of documents into the segments that are translated together."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from ..errors import InputError, warn
from ..text.segments import segments
from .exported_folder import TranslateError

Segment = list[list[str]]  # sentences of tokens


def segments_of(
    chunks: Iterable[Sequence[str]],
    tokens_of: Callable[[str, int], list[str]],
    longest: int,
    tokens: int,
    separator: str,
) -> Iterator[list[Segment]]:
    """Yield for each of *chunks* of lines the segments that are complete.

    A blank line is a segment with one sentence without tokens. After an error of *chunks*, or a line that cannot
    be translated, the segments of the lines before it are yielded, and then the error is raised.

    Args:
        tokens_of: returns the tokens of a line; the second argument is its number, for messages
        longest, tokens: the number of tokens in the longest source that is translated, and in training's segments
    """
    complete: list[Segment] = []
    sentences: Segment = []  # of this document, not yet in a complete segment
    failure: Exception | None = None
    number = 0

    def cut() -> list[Segment]:
        lengths = [len(sentence) for sentence in sentences]
        return [sentences[part.start : part.stop] for part in segments(lengths, lambda: min(tokens, longest))]

    try:
        for lines in chunks:
            for line in lines:
                number += 1
                sentence = tokens_of(line, number)
                if separator in sentence:
                    use = "which this model uses as the separator of sentences"
                    raise TranslateError(f"line {number} contains {separator}, {use}: remove it")
                if len(sentence) > tokens:
                    longer = f"more than the longest segments that the model was trained on, {tokens}"
                    warn("translate", f"line {number} has {len(sentence)} tokens, {longer}")
                if sentence:
                    sentences.append(sentence)
                else:
                    complete += [*cut(), [[]]]
                    sentences = []
            *others, sentences = cut() or [[]]  # the next line may be part of the last segment
            yield complete + others
            complete = []
    except (InputError, OSError) as error:
        failure = error
    yield complete + cut()
    if failure is not None:
        raise failure
