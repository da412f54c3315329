"""Binary data of ``--dataset-impl huffman``."""

from typing import Any

from ..registry import replaces


@replaces(
    "fairseq.data.huffman.huffman_coder.HuffmanCoder._unpad",
    prevents="an unreadable error",
    until="fairseq calls bitarray.find in place of util.rindex",
)
def without_padding(self: Any, bits: Any) -> Any:
    """Return *bits* before the last 1, with which the padding of a Huffman code begins.

    Data of --dataset-impl huffman cannot be read: bitarray 3 has no util.rindex.
    """
    return bits[: bits.to01().rindex("1")]
