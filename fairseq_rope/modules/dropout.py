"""Dropout with the same distribution as torch's, whose random numbers take less time on CPUs.

torch draws a number for each element. Here one number of 64 bits decides about four elements. The mask is of int8 and
not boolean, because torch's kernels for boolean tensors on CPUs (comparison, conversion, ``torch.where``) handle one
element at a time.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from fairseq.modules import FairseqDropout
from torch import Tensor

from .overrides import hooked

_STEPS = 1 << 16  # values of the 16 bits that decide about an element
MOST = 1 - 1 / _STEPS  # 16 bits cannot represent this probability and larger ones


def keep_mask(shape: torch.Size, p: float) -> Tensor:
    """Return an int8 tensor of *shape* on the CPU whose elements are 0 with probability *p* < MOST, and 1 otherwise.

    Sixteen bits can only give multiples of 1/65536. So one of the two multiples next to *p* is drawn for the whole
    tensor, such that the mean probability is *p*. The numbers are those of torch's generator and repeat with its seed.
    """
    exact = p * _STEPS
    dropped = int(exact) + int(torch.rand(()).item() < exact - int(exact))
    count = shape.numel()
    bits = torch.empty((count + 3) // 4, dtype=torch.int64).random_(-(2**63), None)
    keep = torch.empty(count, dtype=torch.int8)
    return torch.ge(bits.view(torch.int16)[:count], dropped - _STEPS // 2, out=keep).view(shape)


class _Dropout(torch.autograd.Function):
    """Returns x / (1 - p) for kept elements and 0 for the others, and the gradient in the same way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor, p: float) -> Tensor:
        ctx.save_for_backward(keep)
        ctx.p = p
        return keep.to(x.dtype).mul_(x).mul_(1.0 / (1.0 - p))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Dropout.apply(grad, *ctx.saved_tensors, ctx.p), None, None


class Dropout(FairseqDropout):
    """``fairseq/modules/fairseq_dropout.py``, with :func:`keep_mask` on CPUs."""

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        if self.p > 0 and (self.training or self.apply_during_inference):
            plain = x.device.type != "cpu" or not x.is_contiguous() or self.p >= MOST
            if not (plain or torch.jit.is_tracing() or torch.compiler.is_compiling()):
                return cast(Tensor, _Dropout.apply(x, keep_mask(x.shape, self.p), self.p))
            return F.dropout(x, p=self.p, training=True, inplace=inplace)
        return x


class ResidualInPlace:
    """For fairseq's layers: adds the residual in place to the output of dropout, which their forward reads only there.

    A subclass with a forward of its own can read it again.
    """

    def residual_connection(self, x: Tensor, residual: Tensor) -> Tensor:
        """Return *x*, the output of dropout, plus *residual*, which has the same shape."""
        dropout = cast(Any, self).dropout_module
        is_new = dropout.training and dropout.p > 0 and type(dropout) is Dropout and not hooked(dropout)
        if is_new and x.dtype == residual.dtype and _has_fairseqs_forward(self):
            return x.add_(residual)
        return residual + x


def _has_fairseqs_forward(layer: Any) -> bool:
    return bool(type(layer).forward.__module__ == "fairseq.modules.transformer_layer")
