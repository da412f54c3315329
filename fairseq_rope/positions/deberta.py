"""DeBERTa's disentangled attention: content meets position in both directions.

He et al. 2020, "DeBERTa: Decoding-enhanced BERT with Disentangled Attention", arXiv:2006.03654, equations 2 to 4;
RoFormer (arXiv:2104.09864), equation 10. With P (2k, C) a learned vector for each clipped distance:

    score_ij = (q_i · k_j + q_i · K_r[d(i, j)] + k_j · Q_r[d(j, i)]) / sqrt(3 D),    K_r = P W_kr,    Q_r = P W_qr
    d(i, j) = 0 if i - j <= -k,    2k - 1 if i - j >= k,    i - j + k otherwise

Hugging Face's ``modeling_deberta_v2.py`` has d(i, j) in the third term, too; here it is as in the paper.

All layers of a side share P. W_kr and W_qr are those of one layer. With ``share_projections``, they are the weights of
the layer's own projections of keys and queries, without their biases, as in RoFormer's equation. The projections here
have no biases, as in the paper. Its absolute positions, at the end of the network, are for masked language models.

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
        deberta_share_projections: whether P is projected by the layer's own projections
    """

    options = {
        "deberta_max_distance": Option(64, "largest distance with its own vector; larger ones use the same"),
        "deberta_share_projections": Option(False, "vectors of distances are projected as queries and keys are"),
    }
    shared = False
    shared_parameters = ("relative_embeddings",)
    bias_reads_keys = True

    def __init__(
        self, embed_dim: int, heads: int, deberta_max_distance: int = 64, deberta_share_projections: bool = False
    ) -> None:
        super().__init__()
        if deberta_max_distance < 1:
            raise ValueError(f"--deberta-max-distance {deberta_max_distance}: must be at least 1")
        self.largest, self.head_dim = deberta_max_distance, embed_dim // heads
        self.scaling = (3 * self.head_dim) ** -0.5
        self.relative_embeddings = nn.Parameter(torch.empty(2 * self.largest, embed_dim))
        self.key_projection: nn.Parameter | None = None
        self.query_projection: nn.Parameter | None = None
        if not deberta_share_projections:  # not nn.Linear, whose weights fairseq's RoBERTa draws again
            self.key_projection = nn.Parameter(torch.empty(embed_dim, embed_dim))
            self.query_projection = nn.Parameter(torch.empty(embed_dim, embed_dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.relative_embeddings, std=self.relative_embeddings.size(1) ** -0.5)
        for projection in (self.key_projection, self.query_projection):
            if projection is not None:
                nn.init.xavier_uniform_(projection)

    @classmethod
    def build(cls, side: str, embed_dim: int, heads: int, **options: Any) -> "DeBERTa":
        return cls(embed_dim, heads, **options)

    def queries_and_keys(self, q: Tensor, k: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        return q / math.sqrt(3.0), k

    def attach(self, attention: Any) -> None:
        self._attention = (attention,)

    def projected(self, weight: Tensor) -> Tensor:
        """Return P times *weight* (N * D, C), for each of its N heads: (N, 2k, D)."""
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
        relative_keys, relative_queries = (self.projected(weight).to(q.dtype) for weight in self.weights())
        relative_keys = for_each_head(relative_keys.unsqueeze(0), heads)  # (1, H, 2k, D)
        relative_queries = for_each_head(relative_queries.unsqueeze(0), heads)
        k = for_each_head(k, heads)  # (B, H, S, D)
        with_keys = torch.matmul(q * self.scaling, relative_keys.transpose(2, 3))  # (B, H, T, 2k)
        with_queries = torch.matmul(k * self.scaling, relative_queries.transpose(2, 3))  # (B, H, S, 2k)
        content_to_position = with_keys.gather(3, of_query.expand(batch, heads, -1, -1))  # (B, H, T, S)
        position_to_content = with_queries.gather(3, of_key.expand(batch, heads, -1, -1))  # (B, H, S, T)
        return content_to_position + position_to_content.transpose(2, 3)

    def weights(self) -> tuple[Tensor, Tensor]:
        """Return W_kr and W_qr, each (C, C); with shared projections and G heads of keys, W_kr is (G * D, C)."""
        if self.key_projection is not None and self.query_projection is not None:
            return self.key_projection, self.query_projection
        (attention,) = self._attention  # its projections can be replaced, for example by quantised ones
        key, query = attention.k_proj.weight, attention.q_proj.weight
        return (key().dequantize(), query().dequantize()) if callable(key) else (key, query)
