"""Linear layers for trainings in 16 bits on CPUs, whose matrix products have few different sizes.

In 16 bits, torch multiplies by oneDNN, which generates code for each size of a product and keeps the code for the last
1,024 sizes. Batches of sentences have hundreds of sizes, and a layer has three products for each. For a model of 5
million parameters on a CPU with AMX, generating code took half as long as the products, and a training needed 4 GB.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def with_few_sizes(rows: int) -> int:
    """Return *rows* or a larger number: a multiple of 16 or, above 256, one of 8 steps up to each power of 2."""
    step = max(16, 1 << max(0, (rows - 1).bit_length() - 4))
    return -(-rows // step) * step


def _padded(x: Tensor) -> Tensor:
    """Return *x* (rows, C) with rows of zeros up to :func:`with_few_sizes`."""
    rows = x.size(0)
    more = with_few_sizes(rows) - rows
    if not more:
        return x
    padded = x.new_empty(rows + more, x.size(1))
    padded[:rows] = x
    padded[rows:] = 0
    return padded


class _Product(torch.autograd.Function):
    """Returns *x* (rows, C) times *weight* (C, D), plus *bias* (D) if it is not None."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        of_x, of_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if of_weight else None, weight if of_x else None)
        product = F.linear(_padded(x), weight.t(), bias)
        return product.resize_(x.size(0), product.size(1))  # not a view, which others could not change in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        padded = _padded(grad)
        return (
            (padded @ weight.t())[: grad.size(0)] if of_x else None,
            (padded.t() @ _padded(x)).t() if of_weight else None,
            grad.sum(0) if of_bias else None,
        )


class Linear(nn.Linear):
    """torch's linear layer, with products of few different sizes in 16 bits on CPUs."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the projection (…, D) of *input* (…, C)."""
        is_narrow = input.device.type == "cpu" and input.dtype in (torch.bfloat16, torch.float16)
        if not is_narrow or self.weight.dtype != input.dtype or torch.jit.is_tracing() or torch.compiler.is_compiling():
            return super().forward(input)
        rows = input.reshape(-1, input.size(-1))
        # A view keeps the values that quant noise replaces in weight.data before the next product.
        product = cast(Tensor, _Product.apply(rows, self.weight.t(), self.bias))
        return product.view(*input.shape[:-1], self.weight.size(0))


def replace_linear_layers(model: nn.Module) -> None:
    """Make all plain linear layers of *model* :class:`Linear`. Their weights, names and hooks stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
