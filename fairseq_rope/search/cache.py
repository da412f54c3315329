"""The cache of a beam search, in which keys and values are not moved after each step.

After each step of a search, every hypothesis continues from one hypothesis of the same sentence. fairseq's
attention then copies all keys and values of all layers into the new order, and copies them again to append
the next ones (``fairseq/modules/multihead_attention.py``). Here the hypotheses of a sentence share one cache.
Each hypothesis attends to the whole cache, and a mask, the same for all layers, selects the keys of this
hypothesis. Only the mask is copied after a step.

When a sentence ends, the last sentence moves to its place, so that the remaining sentences stay adjacent in
memory. From then on the rows of the cache and those of the caller are in different orders.

Shapes: N sentences, K hypotheses of each (the beam), N * K rows, H heads, D head dimension, n tokens so far,
S source positions. Keys and values have G heads, which can be fewer than H.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..modules.masks import PAD_SCORE, aligned
from ..positions import PositionEncoding
from ..positions.rotary import RotaryEmbedding
from .rotation import rotation_at

FIRST_CAPACITY = 32  # steps; doubled when it is full, so that the mean cost of a step is constant


class Beams:
    """The state of one beam search of one model.

    Args and attributes:
        sentences: N, as an attribute the number of those that have not ended
        beam: K
        steps: one function for each decoder layer (:func:`~fairseq_rope.search.step.bind`)
        source: keys and values of cross-attention by layer, each (N, G, S, D)
        source_mask: (N, 1, 1, S), added to the scores of cross-attention; None if no source is padded
        packed: the packed weight of the projection onto the vocabulary; None if the module must be called
        states (argument only): the output of the encoder (S, N, C)
        source_length (attribute only): S
        position (attribute only): the position of the token of this step
        mask (attribute only): (N, 1, K, n * K), added to the scores of self-attention
        rows (attribute only): (N * K), the cache's row for each row of the caller; None while both orders are the same
    """

    def __init__(
        self,
        sentences: int,
        beam: int,
        steps: list[Any],
        source: dict[Any, tuple[Tensor, ...]],
        source_mask: Tensor | None,
        packed: Tensor | None,
        states: Tensor,
    ) -> None:
        self.source_length = states.size(0)
        self.sentences, self.beam, self.position = sentences, beam, -1
        self.steps, self.source, self.source_mask, self.packed = steps, source, source_mask, packed
        self.rows: Tensor | None = None
        self._slots = list(range(sentences))  # the place of each of the caller's sentences
        self._cache: dict[Any, Tensor] = {}  # by layer: keys and values (2, N, G, capacity * K, D)
        self._of_step: dict[Any, Tensor] = {}  # results that the layers share in this step
        self._scores = states.new_full((sentences * beam, FIRST_CAPACITY * beam), float("-inf"))

    def begin_step(self, is_pad: Tensor) -> None:
        """Add a place for one more token of each hypothesis. *is_pad* (N * K): whether the token is padding."""
        self.position += 1
        self._of_step.clear()
        begin, end = self.position * self.beam, (self.position + 1) * self.beam
        if end > self._scores.size(1):
            capacity = self._scores.size(1)
            self._scores = F.pad(self._scores, (0, capacity), value=float("-inf"))
            for layer in self._cache:  # one after the other, so that only one is in memory twice
                self._cache[layer] = F.pad(self._cache[layer], (0, 0, 0, capacity))
        scores = self._scores.view(self.sentences, self.beam, -1)
        scores_of_pads = is_pad.view(self.sentences, self.beam) * PAD_SCORE
        scores[:, :, begin:end].diagonal(dim1=1, dim2=2).copy_(scores_of_pads)
        self.mask = scores[:, None, :, :end]

    def arranged(self, x: Tensor) -> Tensor:
        """Return *x* (N * K, …) with its rows reordered from the caller's order to the cache's."""
        return x if self.rows is None else torch.empty_like(x).index_copy_(0, self.rows, x)

    def rotation(self, rotary: RotaryEmbedding, x: Tensor) -> Tensor:
        """Return :func:`rotation_at` this step for the type of *x*; layers with the same encoding share it."""
        if rotary not in self._of_step:
            self._of_step[rotary] = rotation_at(rotary, self.position, x.dtype, x.device)
        return self._of_step[rotary]

    def mask_with_bias(self, position: PositionEncoding, q: Tensor, kv_heads: int) -> Tensor:
        """Return ``mask`` plus the bias of *position*, if any, for queries *q* (N, H, K, D): (N, H, K, n * K).

        *kv_heads* is the number of heads G of the keys.
        """
        if position in self._of_step:
            return self._of_step[position]
        q = self.rows_of(q)
        # has the shape of the keys, and any computation with it is an error: the bias does not read keys
        of_keys = torch.empty((q.size(0), kv_heads, self.position + 1, q.size(3)), dtype=q.dtype, device="meta")
        bias = position.bias(q, of_keys, None)  # (1 or N * K, H, 1, n)
        mask = self.mask
        if bias is not None:
            by_hypothesis = bias.unflatten(0, (-1, self.beam if bias.size(0) > 1 else 1)).transpose(1, 2).squeeze(3)
            mask = mask + by_hypothesis.repeat_interleave(self.beam, dim=3)  # a key of each hypothesis at each step
        if position.shares_bias():
            mask = self._of_step[position] = self._for_all_layers(mask)
        return mask

    def mask_of_groups(self, mask: Tensor, group: int) -> Tensor:
        """Return *mask* (N, 1 or H, K, n * K) for *group* heads that share keys: (N, 1 or G, H / G * K, n * K)."""
        if group == 1:
            return mask
        key = (mask, group)
        if key in self._of_step:
            return self._of_step[key]
        is_one = mask.size(1) == 1  # for all heads
        grouped = mask.repeat(1, 1, group, 1) if is_one else mask.unflatten(1, (-1, group)).flatten(2, 3)
        if mask is self.mask or any(mask is shared for shared in self._of_step.values()):  # else it is of one layer
            grouped = self._of_step[key] = self._for_all_layers(grouped)
        return grouped

    @staticmethod
    def _for_all_layers(mask: Tensor) -> Tensor:
        """Return *mask* in memory that the kernels of a GPU take without a copy in each layer."""
        return mask if mask.device.type == "cpu" else aligned(mask)

    def turned(self, position: PositionEncoding, q: Tensor, k: Tensor) -> list[Tensor]:
        """Return queries (N, H, K, D) and keys (N, G, K, D) of this step as *position* changes them."""
        turned = position.queries_and_keys(self.rows_of(q), self.rows_of(k), self.position)
        return [x.squeeze(2).unflatten(0, (-1, self.beam)).transpose(1, 2) for x in turned]

    @staticmethod
    def rows_of(x: Tensor) -> Tensor:
        """Return *x* (N, H, K, D) with a row for each hypothesis and one position: (N * K, H, 1, D)."""
        return x.transpose(1, 2).flatten(0, 1).unsqueeze(2)

    def append(self, layer: Any, new: Tensor) -> tuple[Tensor, ...]:
        """Cache *new* (2, N, G, K, D) for *layer*; return its keys and values so far, each (N, G, n * K, D).

        Numbers that overflowed are cached as 0, so that they do not reach the other hypotheses of the sentence: the
        mask is added to the scores, and weights of 0 are multiplied by the values.
        """
        if layer not in self._cache:
            two, sentences, heads, _, dim = new.shape
            self._cache[layer] = new.new_empty((two, sentences, heads, self._scores.size(1), dim))
        begin, end = self.position * self.beam, (self.position + 1) * self.beam
        buffer = self._cache[layer]
        torch.nan_to_num(new, 0.0, 0.0, 0.0, out=buffer[:, :, :, begin:end])
        return buffer[:, :, :, :end].unbind(0)

    def reorder(self, new_order: Tensor) -> None:
        """Let row i continue from row new_order[i] of the last step, both in the caller's order.

        Raises a ValueError if *new_order* does not keep the K rows of a sentence together.
        """
        rows = new_order.tolist()
        remaining = [row // self.beam for row in rows[:: self.beam]]
        repeated = [sentence for sentence in remaining for _ in range(self.beam)]
        if [row // self.beam for row in rows] != repeated or len(set(remaining)) < len(remaining):
            raise ValueError(
                "this search continues a hypothesis of another sentence, which the fast search cannot do: set the "
                "environment variable FAIRSEQ_ROPE_FAST_SEARCH to 0"
            )
        origin = new_order if self.rows is None else self.rows[new_order]
        if remaining != list(range(self.sentences)):
            self._keep(remaining)
            rows = [slot * self.beam + hypothesis for slot in self._slots for hypothesis in range(self.beam)]
            self.rows = on_device(rows, new_order.device)
        self._scores = self._scores.index_select(0, self.arranged(origin))

    def _keep(self, remaining: list[int]) -> None:
        """Keep the caller's sentences *remaining*, in that order, and drop the others."""
        self.sentences = len(remaining)
        slots = [self._slots[sentence] for sentence in remaining]
        places = sorted(set(range(len(remaining))) - set(slots))
        sources = [slot for slot in slots if slot >= len(remaining)]
        to = dict(zip(sources, places))
        self._slots = [to.get(slot, slot) for slot in slots]
        free, moved = on_device([*places, *sources], self._scores.device).chunk(2)
        end = (self.position + 1) * self.beam
        for layer, buffer in self._cache.items():
            buffer[:, free, :, :end] = buffer[:, moved, :, :end]
            self._cache[layer] = buffer[:, : len(remaining)]
        for layer, keys_and_values in self.source.items():
            for buffer in keys_and_values:
                buffer[free] = buffer[moved]
            self.source[layer] = tuple(buffer[: len(remaining)] for buffer in keys_and_values)
        if self.source_mask is not None:
            self.source_mask[free] = self.source_mask[moved]
            self.source_mask = self.source_mask[: len(remaining)]


def on_device(numbers: list[int], device: torch.device) -> Tensor:
    """Return a tensor of *numbers* on *device*, without a device synchronisation."""
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)
