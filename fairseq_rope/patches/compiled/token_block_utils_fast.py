"""``fairseq.data.token_block_utils_fast`` in NumPy: a text of sentences is divided into blocks of tokens."""

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


def _get_slice_indices_fast(sizes: Integers, break_mode: str, block_size: int, document_sep_len: int) -> Integers:
    """Return the first token of each block and the one after its last, (blocks, 2), for *sizes* (sentences,).

    The arguments are those of ``fairseq.data.TokenBlockDataset``.
    """
    if break_mode is None or break_mode == "none":
        if block_size < 0:
            raise ValueError("negative dimensions are not allowed")  # as fairseq's
        total = int(sizes.sum())
        starts = np.arange(0, total, block_size, dtype=np.int64)
        return np.stack([starts, np.minimum(starts + block_size, total)], axis=1)
    if break_mode == "eos":
        ends = sizes.cumsum()
        return np.stack([ends - sizes, ends], axis=1)
    if break_mode == "complete":
        return _complete_sentences(sizes, block_size, separator=None, shortest=1)
    if break_mode == "complete_doc":
        return _complete_sentences(sizes, block_size, separator=document_sep_len, shortest=2)
    raise ValueError("Invalid break_mode: " + break_mode)


def _complete_sentences(sizes: Integers, block_size: int, separator: int | None, shortest: int) -> Integers:
    """Return the blocks of whole sentences, (blocks, 2).

    A sentence of *separator* tokens ends a document, and belongs to no block. Blocks below *shortest* tokens are
    left out.
    """
    blocks = []
    start = size = 0
    for length in sizes.tolist():
        if length == separator:
            blocks.append((start, start + size))
            start, size = start + size + length, 0
        elif size == 0 or size + length <= block_size:
            size += length
        else:
            blocks.append((start, start + size))
            start, size = start + size, length
    blocks.append((start, start + size))
    found = np.array(blocks, dtype=np.int64)
    return found[found[:, 1] - found[:, 0] >= shortest]


def _get_block_to_dataset_index_fast(sizes: Integers, slice_indices: Integers) -> Integers:
    """Return the first sentence of each block, the block's first token in it, and its last sentence, (blocks, 3)."""
    sentence_ends = sizes.cumsum()
    first, offset = _seek(sentence_ends, sizes, slice_indices[:, 0])
    last, _ = _seek(sentence_ends, sizes, slice_indices[:, 1] - 1)
    empty = slice_indices[:, 1] <= slice_indices[:, 0]
    return np.stack([first, offset, np.where(empty, first, last)], axis=1)


def _seek(sentence_ends: Integers, sizes: Integers, tokens: Integers) -> tuple[Integers, Integers]:
    """Return the sentence of each token, and its place in it. A token after an end is the first one of what follows.

    What follows can be an empty sentence, as in fairseq.
    """
    sentence = np.searchsorted(sentence_ends, tokens)
    at_end = (sentence < len(sizes)) & (sentence_ends[np.minimum(sentence, len(sizes) - 1)] == tokens) & (tokens > 0)
    sentence = sentence + at_end
    before = np.concatenate([[0], sentence_ends])[sentence]
    return sentence, tokens - before
