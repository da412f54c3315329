"""fairseq's classes of layer norms, and RMSNorm, without mean and bias: ``--norm-type rms`` and ``--qk-norm``."""

from typing import Any

from fairseq.modules import LayerNorm
from torch import nn

LAYER_NORMS: Any = (nn.LayerNorm, type(LayerNorm(1)))  # with apex, fairseq's norm has another class on a GPU


class RMSNorm(nn.RMSNorm):
    """torch's RMSNorm of the last dimension: x / sqrt(mean(x²) + *eps*) * weight. There is no mean and no bias.

    Zhang and Sennrich 2019, "Root Mean Square Layer Normalization", arXiv:1910.07467. The epsilon is that of LLaMA.
    """

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__(dim, eps)
