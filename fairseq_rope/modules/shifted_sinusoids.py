"""fairseq's sinusoids, whose positions begin at a random number in training: ``--position-encoding shape``.

Kiyono et al. 2021, "SHAPE: Shifted Absolute Position Embedding for Transformers", arXiv:2109.05644, section 3.
"""

from typing import Any

import torch
from fairseq import utils
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor


class ShiftedSinusoidalEmbedding(SinusoidalPositionalEmbedding):
    """fairseq's SinusoidalPositionalEmbedding that in training adds one random integer to the positions of a sentence.

    The integers are uniform in 0 … *max_shift*, and come from torch's generator of the device of the tokens, which
    fairseq seeds before each update. In evaluation and in a search, nothing is added.

    Args:
        positions: the length of the longest sentence for which a table is computed in advance
        dim: C
        padding_idx: the token that has no position
        max_shift: the largest shift
    """

    weights: Tensor  # (rows, C); row padding_idx + n is for word n, the first is word 1

    def __init__(self, positions: int, dim: int, padding_idx: int, max_shift: int) -> None:
        super().__init__(dim, padding_idx, init_size=padding_idx + 1 + positions + max_shift)
        self.max_shift = max_shift

    def _apply(self, *args: Any, **kwargs: Any) -> "ShiftedSinusoidalEmbedding":
        """Do what Module does to move the table, and compute it if the model was built on "meta"."""
        had_none = self.weights.is_meta
        super()._apply(*args, **kwargs)
        if had_none and not self.weights.is_meta:
            table = self.get_embedding(self.weights.size(0), self.embedding_dim, self.padding_idx)
            self.weights = table.to(self.weights)
        return self

    def forward(
        self,
        input: Tensor,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        timestep: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Return the vectors of the tokens *input* (B, T): (B, T, C), in a search (B, 1, C)."""
        batch, length = input.size()
        needed = self.padding_idx + 1 + length + (self.max_shift if self.training else 0)
        if needed > self.weights.size(0):
            table = self.get_embedding(needed, self.embedding_dim, self.padding_idx)
            self.weights = table.to(self.weights)
        if incremental_state is not None:
            return self.weights[self.padding_idx + length].expand(batch, 1, -1)
        rows = utils.make_positions(input, self.padding_idx)  # (B, T)
        if self.training:
            shift = torch.randint(0, self.max_shift + 1, [batch, 1], device=input.device)
            rows = rows + shift * input.ne(self.padding_idx)
        return self.weights.index_select(0, rows.view(-1)).view(batch, length, self.embedding_dim).detach()
