"""RMSNorm, which normalises without mean and bias: ``--norm-type rms`` and ``--qk-norm``."""

import torch
from torch import Tensor, nn


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + *eps*) * *weight*, with the mean over the last dimension of *x*.

    torch computes it in float32 (float64 if *x* is), and the result has the type of *x*.
    """
    return torch.rms_norm(x, [x.size(-1)], weight, eps)


class RMSNorm(nn.Module):
    """Root mean square layer normalisation of the last dimension: no mean is subtracted, and there is no bias.

    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467. The epsilon is that of LLaMA.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)
