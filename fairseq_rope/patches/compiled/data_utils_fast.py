"""``fairseq.data.data_utils_fast`` in Python: sentences are divided into batches of limited size."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.int64]


def batch_by_size_vec(
    indices: Integers, num_tokens_vec: Integers, max_tokens: int, max_sentences: int, bsz_mult: int
) -> list[Integers]:
    """Return *indices* (sentences,) divided into batches of consecutive sentences.

    ``num_tokens_vec`` (sentences,) has the length of each sentence. A batch has at most ``max_tokens`` tokens, padding
    included, and at most ``max_sentences`` sentences (0 or less: no limit). Its number of sentences is below
    ``bsz_mult`` or a multiple of it, except for the sentences between the last such number and the limit, which are a
    batch of their own if they do not fit into the next one, and except for the last batch.
    """
    if len(indices) == 0:
        return []
    lengths = num_tokens_vec.tolist()
    assert max_tokens <= 0 or max(lengths) <= max_tokens, f"Sentences lengths should not exceed max_tokens={max_tokens}"
    token_limit = max_tokens if max_tokens > 0 else max(lengths) * len(lengths)
    sentence_limit = max_sentences if max_sentences > 0 else len(lengths)

    ends: list[int] = []  # of the finished batches
    # The current batch has the sentences from start to end; the tail has those from end on. The tail joins the batch
    # when both together have a permitted number of sentences.
    start = end = longest = longest_in_tail = 0
    for position, length in enumerate(lengths, 1):
        if length > longest_in_tail:
            longest_in_tail = length
        sentences = position - start
        joined = longest_in_tail if longest_in_tail > longest else longest
        if sentences > sentence_limit or sentences * joined > token_limit:
            # The batch is finished, and the tail begins the next one. A tail above the limit is a batch of its own.
            if longest_in_tail * (position - end) > token_limit:
                ends.append(end)
                end = position - 1
                longest_in_tail = length
            ends.append(end)
            start, end, longest, longest_in_tail = end, position, longest_in_tail, 0
        elif sentences < bsz_mult or sentences % bsz_mult == 0:
            end, longest, longest_in_tail = position, joined, 0
    if end != len(lengths):
        ends.append(end)
    return np.split(indices, ends)


def batch_by_size_fn(
    indices: Integers, num_tokens_fn: Callable[[int], int], max_tokens: int, max_sentences: int, bsz_mult: int
) -> list[Integers]:
    """Do what :func:`batch_by_size_vec` does, with a function that returns the length of a sentence."""
    lengths = np.fromiter(map(num_tokens_fn, indices.tolist()), np.int64, len(indices))
    return batch_by_size_vec(indices, lengths, max_tokens, max_sentences, bsz_mult)


def batch_fixed_shapes_fast(
    indices: Integers, num_tokens_fn: Callable[[int], int], fixed_shapes_sorted: Integers
) -> list[list[int]]:
    """Return *indices* (sentences,) divided into batches that fit into the fixed shapes.

    ``fixed_shapes_sorted`` (shapes, 2) has a number of sentences and a number of tokens in each row. A batch grows
    while a shape is left that holds its sentences, each as long as the longest. Shapes that were too small are not
    tried again for this batch.
    """
    all_shapes = fixed_shapes_sorted.tolist()
    batches: list[list[int]] = []
    batch: list[int] = []
    shapes, longest = all_shapes, 0
    for index in indices.tolist():
        length = num_tokens_fn(index)
        longest = max(longest, length)
        fitting = (n for n, (sentences, tokens) in enumerate(shapes) if len(batch) < sentences and longest <= tokens)
        first = next(fitting, -1)
        if first == -1:
            batches.append(batch)
            # As in fairseq, the length of the sentence that begins a batch does not count towards its longest one.
            shapes, batch, longest = all_shapes, [], 0
        else:
            shapes = shapes[first:]
        batch.append(index)
    return [*batches, batch] if batch else batches
