"""Transformer-XL's relative positions: sinusoids of the distance, projected, meet the queries.

Dai et al. 2019, "Transformer-XL: Attentive Language Models beyond a Fixed-Length Context", arXiv:1901.02860, section
3.3; RoFormer (arXiv:2104.09864), equation 7. With R_n the sinusoid of distance n = i - j (Vaswani et al. 2017: sines
at even and cosines at odd places), and u, v learned vectors:

    score_ij = ((q_i + u) · k_j + (q_i + v) · W_R R_(i - j)) / sqrt(D)

W_R, u and v are those of one layer. Names of parameters are those of fairseq's
``espnet_multihead_attention.py::RelPositionMultiHeadedAttention``.

Shapes: B batch, H heads, T queries, S keys, D head dimension, C = H * D.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from .interface import PositionEncoding, distances
from .sharing import current_pass


def sinusoids(distance: Tensor, dim: int) -> Tensor:
    """Return the sinusoid of each *distance* i - j (L): float32 (L, *dim*), sines at even, cosines at odd places."""
    pair = torch.arange(0, dim, 2, dtype=torch.float64, device=distance.device)
    rate = torch.exp(pair * (-math.log(10000.0) / dim))
    angle = distance.to(torch.float64).unsqueeze(1) * rate  # (L, dim / 2)
    return torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1)[:, :dim].to(torch.float32)


class TransformerXL(PositionEncoding):
    """Adds u to the queries and (q + v) · W_R R / sqrt(D) to the scores.

    Args:
        embed_dim: C
        heads: H
    """

    shared = False

    def __init__(self, embed_dim: int, heads: int) -> None:
        super().__init__()
        self.heads, self.head_dim = heads, embed_dim // heads
        self.scaling = self.head_dim**-0.5
        self.linear_pos = nn.Linear(embed_dim, embed_dim, bias=False)
        self.pos_bias_u = nn.Parameter(torch.empty(heads, self.head_dim))
        self.pos_bias_v = nn.Parameter(torch.empty(heads, self.head_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.linear_pos.reset_parameters()
        for parameter in (self.linear_pos.weight, self.pos_bias_u, self.pos_bias_v):
            nn.init.xavier_uniform_(parameter)

    @classmethod
    def build(cls, side: str, embed_dim: int, heads: int, **options: Any) -> "TransformerXL":
        return cls(embed_dim, heads)

    def queries_and_keys(self, q: Tensor, k: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        return q + self.pos_bias_u.unsqueeze(1).to(q.dtype), k

    def _sinusoids(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Return the sinusoid of each i - j, from S - 1 down to 1 - T: (S + T - 1, C). Layers share them."""
        dim, distance = self.heads * self.head_dim, -distances(queries, keys, device)
        numbers = current_pass().shared(("sinusoids", queries, keys, dim, device), lambda: sinusoids(distance, dim))
        return numbers.to(self.pos_bias_u.dtype)  # linear_pos can be quantised

    def bias(self, q: Tensor, k: Tensor, padding: Tensor | None) -> Tensor | None:
        queries, keys = q.size(2), k.size(2)
        projected = self.linear_pos(self._sinusoids(queries, keys, q.device))  # (S + T - 1, C)
        projected = projected.view(-1, self.heads, self.head_dim).permute(1, 2, 0)  # (H, D, S + T - 1)
        with_v = (q + self.pos_bias_v.unsqueeze(1).to(q.dtype)) * self.scaling
        scores = torch.matmul(with_v, projected.to(q.dtype))  # (B, H, T, S + T - 1)
        if queries == 1:
            return scores
        # Row t needs the columns T - 1 - t … T - 1 - t + S - 1. In rows that are one column shorter, they are aligned.
        width = keys + queries - 2
        aligned = scores.flatten(2)[:, :, queries - 1 : queries - 1 + queries * width]
        return aligned.view(q.size(0), self.heads, queries, width)[:, :, :, :keys]
