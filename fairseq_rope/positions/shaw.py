"""Relative position representations: a vector for each distance, learned or a sinusoid, added to keys and to values.

Shaw et al. 2018, "Self-Attention with Relative Position Representations", arXiv:1803.02155, equations 3 and 4:

    e_ij = q_i (k_j + a^K_ij)^T / sqrt(D),    z_i = sum_j alpha_ij (v_j + a^V_ij),    a_ij = w[clip(j - i, -k, k)]

The vectors are those of one layer, and its heads share them. Wei et al. 2019, "NEZHA: Neural Contextualized
Representation for Chinese Language Understanding", arXiv:1909.00204, section 3.1, has fixed ones instead: a^K_ij and
a^V_ij are the sinusoid of clip(j - i, -k, k), which :func:`.transformer_xl.sinusoids` computes with D places.

Shapes: B batch, H heads, T queries, S keys, D head dimension, k the largest distance.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .interface import Option, PositionEncoding, by_distance, distances
from .transformer_xl import sinusoids


class Shaw(PositionEncoding):
    """Adds q · a^K to the scores and the weighted a^V to the output.

    Args:
        head_dim: D
        max_relative_positions: k, at least 1 (otherwise a ValueError is raised); larger distances count as k
    """

    options = {"max_relative_positions": Option(16, "largest distance with its own vectors; larger ones use the same")}
    shared = False

    def __init__(self, head_dim: int, max_relative_positions: int = 16) -> None:
        super().__init__()
        if max_relative_positions < 1:
            raise ValueError(f"--max-relative-positions {max_relative_positions}: must be at least 1")
        self.largest = max_relative_positions
        self.scaling = head_dim**-0.5
        self.make_vectors(head_dim)

    def make_vectors(self, head_dim: int) -> None:
        """Set ``relative_position_keys`` and ``relative_position_values``, each (2k + 1, D): those of -k … k."""
        self.relative_position_keys = nn.Parameter(torch.empty(2 * self.largest + 1, head_dim))
        self.relative_position_values = nn.Parameter(torch.empty(2 * self.largest + 1, head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.xavier_uniform_(self.relative_position_keys)
        nn.init.xavier_uniform_(self.relative_position_values)

    @classmethod
    def build(cls, side: str, embed_dim: int, heads: int, **options: Any) -> "Shaw":
        return cls(embed_dim // heads, **options)

    def rows(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return the row of the tables for each query and key: (T, S), clip(j - i, -k, k) + k."""
        difference = by_distance(distances(queries, keys, device), queries)
        return difference.clamp(-self.largest, self.largest) + self.largest

    def bias(self, q: Tensor, k: Tensor, padding: Tensor | None) -> Tensor | None:
        products = torch.matmul(q * self.scaling, self.relative_position_keys.to(q.dtype).t())  # (B, H, T, 2k + 1)
        rows = self.rows(q.size(2), k.size(2), q.device)  # (T, S)
        return products.gather(3, rows.expand(q.size(0), q.size(1), -1, -1))

    def values(self, weights: Tensor) -> Tensor | None:
        batch, heads, queries, keys = weights.shape
        rows = self.rows(queries, keys, weights.device).expand_as(weights)
        wide = weights if weights.dtype == torch.float64 else weights.float()  # sums of many small weights
        by_row = wide.new_zeros([batch, heads, queries, 2 * self.largest + 1]).scatter_add(3, rows, wide)
        return torch.matmul(by_row.to(weights.dtype), self.relative_position_values.to(weights.dtype))


class Nezha(Shaw):
    """Adds the sinusoid of each distance to keys and values. It has no parameters."""

    def make_vectors(self, head_dim: int) -> None:
        vectors = sinusoids(torch.arange(-self.largest, self.largest + 1), head_dim)
        self.register_buffer("relative_position_keys", vectors, persistent=False)
        self.register_buffer("relative_position_values", vectors, persistent=False)

    def reset_parameters(self) -> None:
        pass

    def _apply(self, *args: Any, **kwargs: Any) -> "Nezha":
        """Do what Module does to move the vectors, and compute them if the model was built on "meta"."""
        had_none = self.relative_position_keys.is_meta
        super()._apply(*args, **kwargs)
        device, dtype = self.relative_position_keys.device, self.relative_position_keys.dtype
        if had_none and device.type != "meta":
            with device:
                self.make_vectors(self.relative_position_keys.size(1))
            self.to(dtype)
        return self
