"""Subwords of subword-nmt (``Ta@@ sche``) and SentencePiece (``▁Ta sche``): their marks, and their models."""

import contextlib
import io
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

from ..errors import InputError

# The file names of subword models, by the method's name in fairseq's --bpe. Data folders of the recipes and
# exported folders use the same names.
SUBWORDS = {"subword_nmt": "bpecodes", "sentencepiece": "sentencepiece.bpe.model"}
# A separate word "@@" occurs in plain text.
MARKS = re.compile(r"[^\s@]@@(?:\s|$)|\u2581")
# A model of SentencePiece with byte_fallback writes a character without a piece as pieces for its bytes in UTF-8.
BYTES = re.compile("(?:<0x[0-9A-F]{2}>)+")


def without_bpe(line: str) -> str:
    """Return a line with the subwords of subword-nmt joined to words, as fairseq joins them."""
    return (line + " ").replace("@@ ", "").rstrip()


def bytes_as_text(text: str) -> str:
    """Return *text* with pieces for bytes (``<0xE2><0x82><0xAC>``) replaced by what they encode (``€``).

    As in SentencePiece, each byte that is not part of a character becomes U+FFFD.
    """

    def decoded(match: re.Match[str]) -> str:
        characters = bytes.fromhex(match[0].replace("<0x", "").replace(">", "")).decode("utf-8", "surrogateescape")
        return re.sub("[\udc80-\udcff]", "\ufffd", characters)

    return BYTES.sub(decoded, text)


def text_of_pieces(pieces: Iterable[str], processor: Any = None) -> str:
    """Return the pieces of SentencePiece joined to plain text, in one line.

    *processor* is the SentencePieceProcessor of their model. It removes control symbols and applies the denormalisation
    of the model. Without it, the result is the same for models that have neither. As in fairseq, ``<unk>`` remains, and
    the text neither begins nor ends with a blank.
    """
    if processor is None:
        runs = groupby(pieces, lambda piece: BYTES.fullmatch(piece) is not None)
        text = "".join(bytes_as_text("".join(run)) if is_bytes else "".join(run) for is_bytes, run in runs)
    else:
        # SentencePiece replaces its own <unk> by ⁇, but not two parts that are no pieces.
        parts = [part for piece in pieces for part in (("<unk", ">") if piece == "<unk>" else (piece,))]
        text = processor.decode(parts)
    # SentencePiece leaves the ▁ of pieces that it does not know.
    return re.sub("[\u2581\r\n]", " ", text).strip()


def undo_subwords(lines: Sequence[str], hypotheses: Iterable[str] = ()) -> tuple[list[str], str | None]:
    """Return the lines without marks of subwords, and what was undone: SentencePiece, its bytes, BPE or None.

    At least half of the lines that are not blank contain ▁ if they consist of pieces. Pieces for bytes remain where
    fairseq joined pieces without their model. They are replaced if *hypotheses*, the lines before fairseq detokenised
    them, have them too.
    """
    filled = [line for line in lines if line.strip()]
    if filled and 2 * sum("\u2581" in line for line in filled) >= len(filled):
        return [text_of_pieces(line.split(" ")) for line in lines], "SentencePiece"
    if any(MARKS.search(line) for line in lines):
        return [without_bpe(line) for line in lines], "BPE"
    if any(BYTES.search(line) for line in lines) and any(BYTES.search(line) for line in hypotheses):
        return [bytes_as_text(line) for line in lines], "bytes of SentencePiece"
    return list(lines), None


def read_bpe(path: str) -> Any:
    """Return the ``BPE`` of subword-nmt for a file of codes; raise an InputError if it is not one."""
    from subword_nmt.apply_bpe import BPE

    printed = io.StringIO()
    codes = io.TextIOWrapper(io.BytesIO(_contents(path)), encoding="utf-8", newline="\n")
    try:
        with contextlib.redirect_stderr(printed):
            return BPE(codes)
    except (ValueError, SystemExit) as error:  # subword-nmt prints the line and exits
        line = re.search(r"invalid (line \d+)", printed.getvalue())
        reason = f"{line.group(1)} is not two subwords" if line else error
        raise InputError(f"{path}: cannot be read as a file of BPE codes ({reason})") from None


def read_sentencepiece(path: str) -> Any:
    """Return the SentencePieceProcessor of a model; raise an InputError if the file is not one."""
    from sentencepiece import SentencePieceProcessor

    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(_contents(path))
    except RuntimeError:
        raise InputError(f"{path}: cannot be read as a sentencepiece model") from None
    return processor


def _contents(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
