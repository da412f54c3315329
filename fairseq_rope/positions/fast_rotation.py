"""The rotation of :func:`~fairseq_rope.positions.rotary.rotate` in fewer passes over its input, and its gradient.

A pair of neighbours is a complex number, and a rotation multiplies it by cos + i sin. The *turning* of a table is what
its rotation needs: for the interleaved layout these numbers, (T, d_r / 2); for the half layout the cosines and the
signed sines of all components, (2, T, d_r).
"""

from typing import Any

import torch
from torch import Tensor

from .sharing import current_pass


def turnings(cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return the turning of *cos* and *sin* (T, d_r / 2), and that of the inverse rotation, for the gradient."""
    if interleaved:
        return torch.complex(cos, sin), torch.complex(cos, -sin)
    cosines, sines = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    return torch.stack([cosines, sines]), torch.stack([cosines, -sines])


def rotate_at_once(x: Tensor, turning: Tensor, interleaved: bool) -> Tensor:
    """Return ``rotate`` of float32 or float64. The result has the strides of *x*."""
    if interleaved:
        if x.stride(-1) != 1 or any(n % 2 for n in (*x.stride()[:-1], x.storage_offset())):
            x = x.contiguous()  # complex numbers must begin at even offsets
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turning).flatten(-2)
    cosines, sines = turning[0], turning[1]
    half = x.size(-1) // 2
    turned = x * cosines
    turned[..., :half].addcmul_(x[..., half:], sines[..., :half])
    turned[..., half:].addcmul_(x[..., :half], sines[..., half:])
    return turned


class _Rotation(torch.autograd.Function):
    """:func:`rotate_at_once` and its gradient: the gradient of the output, rotated back."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, turning: Tensor, back: Tensor, interleaved: bool) -> Tensor:
        return rotate_at_once(x, turning, interleaved)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, turning, back, ctx.interleaved = inputs
        ctx.save_for_backward(turning, back)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        turning, back = ctx.saved_tensors
        return _Rotation.apply(grad, back, turning, ctx.interleaved), None, None, None


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Return ``rotate`` of *x* of any type; without the autograd function if *x* needs no gradient.

    Layers that turn by the same *cos* and *sin* in a forward pass share what is computed from these.
    """
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    turning, back = current_pass().shared("turning", (interleaved, cos, sin), lambda: turnings(cos, sin, interleaved))
    if x.requires_grad and torch.is_grad_enabled():
        turned = _Rotation.apply(wide, turning, back, interleaved)
    else:
        turned = rotate_at_once(wide, turning, interleaved)
    return turned if wide is x else turned.to(x.dtype)
