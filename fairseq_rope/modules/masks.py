"""Masks of attention's scores, in the form that torch's kernels need, and on which side padding is.

Shapes: T target positions, S source positions (keys), B batch.
"""

import math

import torch
from torch import Tensor

# What is added to the score of a padded key. It is not minus infinity, so that a row with only padding (the first rows
# of a left-padded target) stays finite and no NaN reaches the gradients. It fits into float16.
PAD_SCORE = -3e4


def mask_scores(attn_mask: Tensor, like: Tensor, keys: int) -> Tensor:
    """Return what *attn_mask* adds to the scores of queries *like* (…, T, D): (T, S), S = *keys*, in their type.

    *attn_mask* is (T, S), numbers or booleans, which are true where attention is forbidden. If it is empty, a query
    attends to earlier positions and itself, and T = S.
    """
    if attn_mask.numel() == 0:
        return torch.full((keys, keys), -math.inf, dtype=like.dtype, device=like.device).triu(1)
    if attn_mask.dtype == torch.bool:
        return torch.zeros_like(attn_mask, dtype=like.dtype).masked_fill(attn_mask, -math.inf)
    return attn_mask.to(like.dtype)


def pad_scores(key_padding_mask: Tensor, like: Tensor) -> Tensor:
    """Return the number that is added to the scores of each key: (B, 1, 1, S) in the type of *like*.

    For a padded key it is ``PAD_SCORE``, so its weight is 0.
    """
    is_pad = key_padding_mask.to(torch.bool).unsqueeze(1).unsqueeze(2)
    return torch.zeros_like(is_pad, dtype=like.dtype).masked_fill(is_pad, PAD_SCORE)


def aligned(mask: Tensor) -> Tensor:
    """Return *mask* (…, S) in memory whose rows begin at multiples of 8 numbers.

    torch's memory-efficient kernel would copy another mask in each layer (``preprocess_mask`` in torch's
    ``aten/src/ATen/native/transformers/attention.cpp``).
    """
    if mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1]):
        return mask
    rows = mask.new_zeros(*mask.shape[:-1], -(-mask.size(-1) // 8) * 8)[..., : mask.size(-1)]
    return rows.copy_(mask)


def word_follows_padding(key_padding_mask: Tensor) -> Tensor:
    """Return whether a word follows padding in any row of *key_padding_mask* (B, S): a tensor of one boolean."""
    is_pad = key_padding_mask.to(torch.bool)
    return (is_pad[:, :-1] & ~is_pad[:, 1:]).any()


def is_right_padded(key_padding_mask: Tensor) -> bool:
    """Return whether all padding of *key_padding_mask* (B, S) is on the right (on a GPU, a device synchronisation)."""
    return not bool(word_follows_padding(key_padding_mask))


def assert_right_padded(key_padding_mask: Tensor) -> None:
    """Let the device raise an error if padding of *key_padding_mask* (B, S) is not on the right, without a wait."""
    message = "--left-pad-target is False, but a target has padding on the left, or the word <pad>"
    torch._assert_async(~word_follows_padding(key_padding_mask), message)
