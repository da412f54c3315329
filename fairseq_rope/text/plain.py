"""Whether text is plain: signs of tokenisation and subwords, and undoing them."""

import re
from collections.abc import Iterable, Sequence

from ..errors import InputError
from .subwords import BYTES, MARKS, undo_subwords

# Moses' tokeniser writes these for | ' " [ ], and with -a for a hyphen; the compound split writes the last.
_ESCAPES = re.compile(r"&(?:apos|quot|#124|#91|#93);|@-@|##AT##")
# Text with markup contains the first of these too, mostly text about software.
_ENTITIES = re.compile(r"&(?:amp|lt|gt|apos|quot|#\d+);|@-@|##AT##")
_BLANK = re.compile(r"\A\s*\Z")
_STOP = re.compile(r"[.,](?:\s|$)")
_STOP_APART = re.compile(r"\s[.,](?:\s|$)")


def _matching(pattern: re.Pattern[str], lines: Sequence[str]) -> list[int]:
    """Return the numbers, from 1, of the lines that match the pattern."""
    return [number for number, line in enumerate(lines, 1) if pattern.search(line)]


def _first_if_common(pattern: re.Pattern[str], lines: Sequence[str]) -> int:
    """Return the number of the first line that matches the pattern if 1 line in 20 does; else 0."""
    numbers = _matching(pattern, lines)
    return numbers[0] if numbers and 20 * len(numbers) >= len(lines) else 0


def looks_subworded(lines: Sequence[str]) -> int:
    """Return the first line with marks of BPE or SentencePiece if 1 line in 20 has them; else 0."""
    return _first_if_common(MARKS, lines)


def looks_tokenised(lines: Sequence[str]) -> int:
    """Return the first line that looks tokenised if the whole text does; else 0.

    The text looks tokenised if at least half of the lines with a full stop or comma at the end of a word have
    a space before one (99% of them in tokenised newstest2014, 0.1% of them in plain newstest2014), or if 1
    line in 20 has an escape of Moses (10% of tokenised German lines, 28% of English ones; no plain line).
    """
    apart = 2 * len(_matching(_STOP_APART, lines)) >= len(_matching(_STOP, lines))
    return (apart and _first_if_common(_STOP_APART, lines)) or _first_if_common(_ESCAPES, lines)


def check_plain(name: str, lines: Sequence[str], is_reference: bool) -> list[str]:
    """Return warnings about lines of the file *name* that may not be plain text.

    Raises:
        InputError: the text looks BPE'd, or it is the reference and looks tokenised
    """
    line = looks_subworded(lines)
    if line:
        raise InputError(f"{name}, line {line}: looks BPE'd (@@ or ▁); plain, detokenised text is expected")
    line = looks_tokenised(lines)
    if line and is_reference:
        signs = "a space before a full stop or comma, or escapes like &quot; and @-@"
        must = "the reference must be plain text as published"
        raise InputError(f"{name}, line {line}: looks tokenised ({signs}); {must}")
    warnings = []
    marks = {"with marks of BPE (@@ or ▁)": MARKS, "with bytes of SentencePiece (<0xE2>)": BYTES}
    marks["that are empty"] = _BLANK
    if line:
        warnings.append(f"{name}, line {line}: looks tokenised, and is scored unchanged; give detokenised text")
    else:
        marks["with escapes like &amp; or @-@"] = _ENTITIES
    for what, pattern in marks.items():
        numbers = _matching(pattern, lines)
        if numbers:
            warnings.append(f"{name}: lines {what}: {len(numbers)} of {len(lines)}, the first is line {numbers[0]}")
    return warnings


def undo_preprocessing(lines: Sequence[str], lang: str, hypotheses: Iterable[str] = ()) -> tuple[list[str], list[str]]:
    """Return the lines without marks of subwords and Moses' tokenisation, and the names of the undone steps.

    *hypotheses* are those of :func:`undo_subwords`.
    """
    from sacremoses import MosesDetokenizer

    lines, step = undo_subwords(lines, hypotheses)
    undone = [step] if step else []
    if looks_tokenised(lines):
        moses = MosesDetokenizer(lang)
        lines = [moses.detokenize(line.split()) for line in lines]
        undone.append("Moses tokens")
    return lines, undone
