"""The first part of a gated feed-forward layer: ``--ffn-type glu``.

Shapes: C the width of a side of the model, F the inner width of its feed-forward layers.
"""

from collections.abc import Callable

from torch import Tensor, nn


class GatedLinear(nn.Module):
    """The first part of a gated feed-forward layer, in the place of ``fc1``: activation(gate(x)) * up(x).

    Shazeer 2020, "GLU Variants Improve Transformer", arXiv:2002.05202.

    Args:
        gate, up: linear layers from C to F
        activation_fn: the activation of ``--activation-fn``
    """

    def __init__(self, gate: nn.Linear, up: nn.Linear, activation_fn: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.gate, self.up = gate, up
        self.activation_fn = activation_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.activation_fn(self.gate(x)) * self.up(x)


def identity(x: Tensor) -> Tensor:
    """Return *x*: the activation between a :class:`GatedLinear` and ``fc2``."""
    return x
