"""ALiBi: each head subtracts from a score the distance of the two positions, times the slope of the head.

Press et al. 2022, "Train Short, Test Long: Attention with Linear Biases Enables Input Length Extrapolation",
arXiv:2108.12409. The paper has decoders only. In an encoder, the distance is |i - j| (``symmetric``), or is half a
position smaller for keys after the query (``asymmetric``), so that the two directions differ.

Shapes: H heads, L distances.
"""

import math
from typing import Any

import torch
from torch import Tensor

from .interface import DistanceBias, Option

TYPES = ("symmetric", "asymmetric")


def slopes(heads: int) -> list[float]:
    """Return the slope of each head: 2^(-8/H), its square, …, if H is a power of 2.

    For another H, the slopes of the next smaller power of 2 come first, and then every second one of the next larger
    power of 2, as in the paper's code.
    """
    power = 2 ** math.floor(math.log2(heads))
    first = [2.0 ** (-8.0 * (n + 1) / power) for n in range(power)]
    between = [2.0 ** (-4.0 * (2 * n + 1) / power) for n in range(heads - power)]
    return first + between


class ALiBi(DistanceBias):
    """Adds -slope * distance to the scores; no parameters.

    Args:
        heads: H
        alibi_type: "symmetric" or "asymmetric", which differ for keys after the query
    """

    options = {
        "alibi_type": Option(
            TYPES[0],
            "distance of a later key, in the encoder: symmetric = as before the query, asymmetric = 0.5 less",
            TYPES,
        )
    }

    def __init__(self, heads: int, alibi_type: str = TYPES[0]) -> None:
        super().__init__()
        self.slope = torch.tensor(slopes(heads), dtype=torch.float32, device="cpu")  # float32 also in 16-bit models
        self.less = 0.5 * TYPES.index(alibi_type)

    @classmethod
    def options_of(cls, side: str) -> dict[str, Option]:
        return cls.options if side == "encoder" else {}

    @classmethod
    def build(cls, side: str, embed_dim: int, heads: int, **options: Any) -> "ALiBi":
        return cls(heads, **options)

    def by_distance(self, distance: Tensor) -> Tensor:
        """Return the bias of each head at *distance* = j - i (L): float32 (H, L)."""
        length = distance.abs() - self.less * (distance > 0)
        if self.slope.device != distance.device:  # copied once, because a copy is a device synchronisation
            self.slope = self.slope.to(distance.device)
        return -self.slope.unsqueeze(1) * length
