"""TUPE: positions meet positions, apart from the words, in one bias that all layers share.

Ke et al. 2020, "Rethinking Positional Encoding in Language Pre-training", arXiv:2006.15595, equations 7, 8, 10
and 11; RoFormer (arXiv:2104.09864), equation 9. With p_i a learned vector of position i, after a layer norm of its own:

    score_ij = (q_i · k_j + (p_i U_Q) · (p_j U_K)) / sqrt(2 D) + b_bucket(j - i)

b is T5's bias (``t5.py``); TUPE-A leaves it out (``tupe_absolute_only``). A position counts words, not padding, as that
of fairseq's learned embeddings. The paper's equation 9 is about [CLS] of BERT, and left out.

Shapes: B batch, H heads, T queries, S keys, D head dimension, C = H * D, L the number of positions.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .interface import Option, PositionEncoding
from .t5 import T5Bias


class Tupe(PositionEncoding):
    """Adds the products of projected positions to the scores, and T5's bias; divides the first two by sqrt(2 D).

    Args:
        embed_dim: C; the vectors of positions start normal with standard deviation C^-0.5
        heads: H
        bidirectional: whether keys after the query have buckets of their own (encoder)
        positions: L; longer sentences raise a ValueError
        tupe_absolute_only: without T5's bias
        buckets: the options of T5's bias, which raise a ValueError as there
    """

    options = {"tupe_absolute_only": Option(False, "TUPE-A: no T5 bias"), **T5Bias.options}
    has_limit = True
    bias_reads = ""

    def __init__(
        self,
        embed_dim: int,
        heads: int,
        bidirectional: bool,
        positions: int,
        tupe_absolute_only: bool = False,
        **buckets: int,
    ) -> None:
        super().__init__()
        self.heads, self.scaling = heads, (2 * (embed_dim // heads)) ** -0.5
        self.position_embeddings = nn.Parameter(torch.empty(positions, embed_dim))
        self.position_norm = nn.LayerNorm(embed_dim)
        self.position_query_projection = nn.Parameter(torch.empty(embed_dim, embed_dim))  # U_Q
        self.position_key_projection = nn.Parameter(torch.empty(embed_dim, embed_dim))  # U_K
        self.relative = None if tupe_absolute_only else T5Bias(heads, embed_dim, bidirectional, **buckets)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.position_embeddings, std=self.position_embeddings.size(1) ** -0.5)
        nn.init.xavier_uniform_(self.position_query_projection)
        nn.init.xavier_uniform_(self.position_key_projection)
        if self.relative is not None:
            self.relative.reset_parameters()

    @classmethod
    def build(cls, side: str, embed_dim: int, heads: int, **options: Any) -> "Tupe":
        return cls(embed_dim, heads, side == "encoder", **options)

    def queries_and_keys(self, q: Tensor, k: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        return q * 0.5**0.5, k

    def bias(self, q: Tensor, k: Tensor, padding: Tensor | None) -> Tensor | None:
        queries, keys = q.size(2), k.size(2)
        if padding is None:
            scores = self.products(keys - queries, keys).unsqueeze(0)  # (1, H, T, S)
        else:
            position = ((padding == 0).long().cumsum(dim=1) - 1).clamp(min=0)  # (B, S)
            is_long = keys > self.position_embeddings.size(0)  # if so, max() is a device synchronisation
            products = self.products(0, int(position.max()) + 1 if is_long else keys)
            of_query = position[:, keys - queries :]
            # The gradient of a product is a sum over sentences, which 16 bits cannot hold.
            wide = products if products.dtype == torch.float64 else products.float()
            scores = wide[:, of_query.unsqueeze(2), position.unsqueeze(1)].transpose(0, 1)  # (B, H, T, S)
        if self.relative is not None:
            relative = self.relative.bias(q, k, padding)
            scores = scores if relative is None else scores + relative
        return scores.to(q.dtype)

    def products(self, first: int, length: int) -> Tensor:
        """Return the products of positions from *first* with all, up to *length*: (H, *length* - *first*, *length*)."""
        limit = self.position_embeddings.size(0)
        if length > limit:
            raise ValueError(f"a sentence has {length} tokens, and --position-encoding tupe has {limit} positions")
        vectors = self.position_norm(self.position_embeddings[:length])  # (S, C)
        of_queries = F.linear(vectors[first:], self.position_query_projection * self.scaling)
        of_keys = F.linear(vectors, self.position_key_projection)
        by_head = (x.unflatten(1, (self.heads, -1)).transpose(0, 1) for x in (of_queries, of_keys))  # (H, S, D)
        queries, keys = by_head
        return torch.matmul(queries, keys.transpose(1, 2))
