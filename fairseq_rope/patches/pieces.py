"""Text of SentencePiece's pieces."""

from typing import Any

from fairseq.data import data_utils
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE

from ..text.subwords import text_of_pieces
from .registry import replaces

_decode, _post_process = SentencepieceBPE.decode, data_utils.post_process


class Joined(str):
    """Text that :func:`post_process` made of *pieces*, which :func:`decode` does not take for pieces."""

    pieces: list[str]


@replaces(
    "fairseq.data.encoders.sentencepiece_bpe.SentencepieceBPE.decode",
    prevents="wrong results",
    until="fairseq decodes pieces with SentencePiece",
    wraps=_decode,
)
def decode(self: Any, x: str) -> str:
    """Return the text of pieces.

    fairseq joins the pieces of SentencePiece itself. So the characters of a model with byte_fallback come out as
    <0xE2><0x82><0xAC>, and its control symbols as text. With --remove-bpe sentencepiece too, the D- lines lack all
    blanks. Here SentencePiece itself converts the pieces to text; <unk> remains, as in fairseq.
    """
    return text_of_pieces(x.pieces if isinstance(x, Joined) else x.split(" "), self.sp)


@replaces("fairseq.*.post_process", prevents="wrong results", until="fairseq decodes bytes", wraps=_post_process)
def post_process(sentence: str, symbol: str) -> Any:
    """Return *sentence* with its subwords joined.

    --remove-bpe sentencepiece joins pieces without their model. Here it also turns pieces for bytes into characters.
    """
    if symbol != "sentencepiece":
        return _post_process(sentence, symbol)
    pieces = sentence.split(" ")
    joined = Joined(text_of_pieces(pieces))
    joined.pieces = pieces
    return joined
