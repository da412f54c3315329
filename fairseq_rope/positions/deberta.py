"""DeBERTa's disentangled attention: content meets position in both directions.

He et al. 2020, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", arXiv:2006.03654, equations 2 to 4;
RoFormer (arXiv:2104.09864), equation 10. With P (2k, C) a learned vector for each clipped distance:

    score_ij = (q_i · k_j + q_i · K_r[d(i, j)] + k_j · Q_r[d(j, i)]) / sqrt(3 D),    K_r = P W_kr,    Q_r = P W_qr
    d(i, j) = 0 if i - j <= -k,    2k - 1 if i - j >= k,    i - j + k otherwise

Hugging Face's ``modeling_deberta_v2.py`` has d(i, j) in the third term, too; here it is as in the paper.

All layers of a side share P. W_kr and W_qr are those of one layer, and have no biases, as in the paper. (In RoFormer's
equation, they are the layer's own projections of keys and queries.) The paper's absolute positions, at the end of the
network, are for masked language models.

Shapes: B batch, H heads, G heads of keys, T queries, S keys, D head dimension, C = H * D, k the largest distance.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .interface import Option, PositionEncoding, by_distance, distances, for_each_head


class DeBERTa(PositionEncoding):
    """Adds q · K_r and k · Q_r to the scores, and divides all three terms by sqrt(3 D).

    Args:
        embed_dim: C; P starts normal with standard deviation C^-0.5
        heads: H
        deberta_max_distance: k, at least 1 (otherwise a ValueError is raised); larger distances count as k
    """

    options = {"deberta_max_distance": Option(64, "largest distance with its own vector; larger ones use the same")}
    shared = False
    shared_parameters = ("relative_embeddings",)
    bias_reads = "keys"

    def __init__(self, embed_dim: int, heads: int, deberta_max_distance: int = 64) -> None:
        super().__init__()
        if deberta_max_distance < 1:
            raise ValueError(f"--deberta-max-distance {deberta_max_distance}: must be at least 1")
        self.largest, self.head_dim = deberta_max_distance, embed_dim // heads
        self.scaling = (3 * self.head_dim) ** -0.5
        self.relative_embeddings = nn.Parameter(torch.empty(2 * self.largest, embed_dim))
        # not nn.Linear, whose weights fairseq's RoBERTa draws again
        self.key_projection = nn.Parameter(torch.empty(embed_dim, embed_dim))  # W_kr
        self.query_projection = nn.Parameter(torch.empty(embed_dim, embed_dim))  # W_qr
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.relative_embeddings, std=self.relative_embeddings.size(1) ** -0.5)
        nn.init.xavier_uniform_(self.key_projection)
        nn.init.xavier_uniform_(self.query_projection)

    @classmethod
    def build(cls, side: str, embed_dim: int, heads: int, **options: Any) -> "DeBERTa":
        return cls(embed_dim, heads, **options)

    def queries_and_keys(self, q: Tensor, k: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        return q / math.sqrt(3.0), k

    def projected(self, weight: Tensor) -> Tensor:
        """Return P times *weight* (C, C) for each head: (H, 2k, D)."""
        return F.linear(self.relative_embeddings, weight).unflatten(1, (-1, self.head_dim)).transpose(0, 1)

    def rows(self, queries: int, keys: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return d(i, j) of each query i and key j, (T, S), and d(j, i), (S, T)."""
        difference = -by_distance(distances(queries, keys, device), queries)  # i - j, (T, S)
        of_query, of_key = (
            (distance + self.largest).clamp(0, 2 * self.largest - 1) for distance in (difference, -difference.t())
        )
        return of_query, of_key

    def bias(self, q: Tensor, k: Tensor, padding: Tensor | None) -> Tensor | None:
        batch, heads, queries, keys = q.size(0), q.size(1), q.size(2), k.size(2)
        of_query, of_key = self.rows(queries, keys, q.device)
        relative_keys = self.projected(self.key_projection).to(q.dtype)  # (H, 2k, D)
        relative_queries = self.projected(self.query_projection).to(q.dtype)
        k = for_each_head(k, heads)  # (B, H, S, D)
        with_keys = torch.matmul(q * self.scaling, relative_keys.transpose(1, 2))  # (B, H, T, 2k)
        with_queries = torch.matmul(k * self.scaling, relative_queries.transpose(1, 2))  # (B, H, S, 2k)
        content_to_position = with_keys.gather(3, of_query.expand(batch, heads, -1, -1))  # (B, H, T, S)
        position_to_content = with_queries.gather(3, of_key.expand(batch, heads, -1, -1))  # (B, H, S, T)
        return content_to_position + position_to_content.transpose(2, 3)
