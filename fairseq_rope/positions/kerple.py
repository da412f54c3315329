"""KERPLE: a bias that falls with the logarithm of the distance, with two learned numbers for each head.

Chi et al. 2022, "KERPLE: Kernelized Relative Positional Embedding for Length Extrapolation", arXiv:2205.09921, the
logarithmic variant: -r1 * ln(1 + r2 * |i - j|), with r1 and r2 of at least 0.01. All layers share them.

Shapes: H heads, L distances.
"""

from typing import Any

import torch
from torch import Tensor, nn

from .interface import DistanceBias

SMALLEST = 0.01


def at_least_smallest(parameter: Tensor) -> Tensor:
    """Return max(*parameter*, SMALLEST), whose gradient reaches a parameter that is too small and can raise it."""
    return parameter + (parameter.clamp(min=SMALLEST) - parameter).detach()


class Kerple(DistanceBias):
    """Adds -r1 * ln(1 + r2 * |i - j|) to the scores of H heads; r1 starts uniform in (0, 2), r2 in (0, 1)."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.r1 = nn.Parameter(torch.empty(heads))
        self.r2 = nn.Parameter(torch.empty(heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.r1, 0.0, 2.0)
        nn.init.uniform_(self.r2, 0.0, 1.0)

    @classmethod
    def build(cls, side: str, embed_dim: int, heads: int, **options: Any) -> "Kerple":
        return cls(heads)

    def by_distance(self, distance: Tensor) -> Tensor:
        """Return the bias of each head at *distance* = j - i (L): (H, L)."""
        # not in 16 bits, in which r2 * |i - j| can be infinite
        wide = (r.to(torch.promote_types(r.dtype, torch.float32)) for r in (self.r1, self.r2))
        r1, r2 = (at_least_smallest(r).unsqueeze(1) for r in wide)
        return -r1 * torch.log1p(r2 * distance.abs())
