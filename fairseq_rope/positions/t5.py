"""T5's relative attention bias: a learned number for each head and each bucket of distances, shared by all layers.

Raffel et al. 2020, arXiv:1910.10683, section 2.1; ``transformers/models/t5/modeling_t5.py``,
``_relative_position_bucket``. Half of the buckets hold one distance each. The others hold ranges that grow
logarithmically up to the maximum distance, and the last one holds all larger distances. An encoder has half of its
buckets for keys after the query. Scores are divided by sqrt(D) as in all encodings here; T5 itself does not divide.

Shapes: H heads, L distances, C the width.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .interface import DistanceBias, Option


def first_distances(buckets: int, max_distance: int) -> list[int]:
    """Return the first distance of each of the *buckets* of one direction, ascending.

    The comparison is of integers, so that no rounding of logarithms moves a distance into another bucket.
    """
    exact = buckets // 2
    ranges = buckets - exact

    def first_of(k: int) -> int:  # range k begins at exact * (max_distance / exact)^(k / ranges)
        bound = max_distance**k * exact ** (ranges - k)
        first = round(exact * (max_distance / exact) ** (k / ranges))
        while first**ranges < bound:
            first += 1
        while (first - 1) ** ranges >= bound:
            first -= 1
        return first

    return [*range(exact), *(first_of(k) for k in range(ranges))]


class T5Bias(DistanceBias):
    """Adds a learned bias to the scores, by head and bucket of distances.

    Args:
        heads: H
        embed_dim: C; the bias starts normal with standard deviation C^-0.5
        bidirectional: whether keys after the query have buckets of their own (encoder)
        relative_attention_num_buckets: all buckets of a head
        relative_attention_max_distance: the distance from which all are in the last bucket

    Numbers that allow no such buckets raise a ValueError.
    """

    options = {
        "relative_attention_num_buckets": Option(32, "buckets of distances, in the encoder for both directions"),
        "relative_attention_max_distance": Option(128, "the distance from which all are in the last bucket"),
    }

    def __init__(
        self,
        heads: int,
        embed_dim: int,
        bidirectional: bool,
        relative_attention_num_buckets: int = 32,
        relative_attention_max_distance: int = 128,
    ) -> None:
        super().__init__()
        buckets, max_distance = relative_attention_num_buckets, relative_attention_max_distance
        if buckets < 4 or buckets % 2:
            raise ValueError(f"--relative-attention-num-buckets {buckets}: must be an even number of at least 4")
        if max_distance <= buckets // 2:
            raise ValueError(
                f"--relative-attention-max-distance {max_distance}: must be larger than {buckets // 2}, half of "
                "--relative-attention-num-buckets"
            )
        self.bidirectional = bidirectional
        self.one_direction = buckets // 2 if bidirectional else buckets
        self.first_distances = torch.tensor(first_distances(self.one_direction, max_distance), device="cpu")
        self.relative_attention_bias = nn.Parameter(torch.empty(buckets, heads))
        self.deviation = embed_dim**-0.5
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.relative_attention_bias, std=self.deviation)

    @classmethod
    def build(cls, side: str, embed_dim: int, heads: int, **options: Any) -> "T5Bias":
        return cls(heads, embed_dim, bidirectional=side == "encoder", **options)

    def buckets(self, distance: Tensor) -> Tensor:
        """Return the bucket of each *distance* = j - i, a tensor of integers."""
        if self.first_distances.device != distance.device:  # copied once, because a copy is a device synchronisation
            self.first_distances = self.first_distances.to(distance.device)
        first = self.first_distances
        if not self.bidirectional:
            return torch.bucketize((-distance).clamp(min=0), first, right=True) - 1
        after = (distance > 0) * self.one_direction
        return torch.bucketize(distance.abs(), first, right=True) - 1 + after

    def by_distance(self, distance: Tensor) -> Tensor:
        """Return the bias of each head at *distance* = j - i (L): (H, L)."""
        table = self.relative_attention_bias
        wide = table if table.dtype == torch.float64 else table.float()  # the gradient of a row is a sum of many
        return wide[self.buckets(distance)].t()
