"""Text of SentencePiece's pieces.

These functions replace fairseq's; the table in ``patches/table.py`` says why.
"""

import functools
from typing import Any

from fairseq.data import data_utils
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE

from ..text.subwords import text_of_pieces

_decode, _post_process = SentencepieceBPE.decode, data_utils.post_process


class Joined(str):
    """Text that :func:`post_process` made of *pieces*, which :func:`decode` does not take for pieces."""

    pieces: list[str]


@functools.wraps(_decode)
def decode(self: Any, x: str) -> str:
    return text_of_pieces(x.pieces if isinstance(x, Joined) else x.split(" "), self.sp)


@functools.wraps(_post_process)
def post_process(sentence: str, symbol: str) -> Any:
    if symbol != "sentencepiece":
        return _post_process(sentence, symbol)
    pieces = sentence.split(" ")
    joined = Joined(text_of_pieces(pieces))
    joined.pieces = pieces
    return joined
