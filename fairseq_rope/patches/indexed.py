"""Binary data that several processes of fairseq-preprocess write."""

from typing import Any

from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder

from .registry import replaces

_merge_file_ = MMapIndexedDatasetBuilder.merge_file_


@replaces(
    "fairseq.data.indexed_dataset.MMapIndexedDatasetBuilder.merge_file_",
    prevents="wrong results",
    until="fairseq adds up Python's integers",
    wraps=_merge_file_,
)
def merge_file_(self: Any, another_file: str) -> None:
    """Append another file, and add up its lengths as Python's integers.

    With --workers, fairseq-preprocess adds up the lengths of sentences in 32 bits with NumPy 2. From 2 GiB of a
    language on (a billion tokens), the places of sentences in the file are then wrong, after a warning only.
    fairseq-preprocess needs --user-dir for this; the recipes give it.
    """
    before = len(self._sizes)
    _merge_file_(self, another_file)
    self._sizes[before:] = map(int, self._sizes[before:])  # sums of NumPy's 32-bit integers overflow
