"""Binary data sets: those that fairseq-preprocess writes in several processes, and those of ``--dataset-impl huffman``.

These functions replace fairseq's; the table in ``patches/table.py`` says why.
"""

import functools
from typing import Any

from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

_merge_file_ = MMapIndexedDatasetBuilder.merge_file_


@functools.wraps(_merge_file_)
def merge_file_(self: Any, another_file: str) -> None:
    before = len(self._sizes)
    _merge_file_(self, another_file)
    self._sizes[before:] = map(int, self._sizes[before:])  # sums of NumPy's 32-bit integers overflow


def without_padding(self: Any, bits: Any) -> Any:
    """Return *bits* before the last 1, with which the padding of a Huffman code begins."""
    return bits[: bits.to01().rindex("1")]
