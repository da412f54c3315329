"""Rotary position embedding: positions to angles, angles to tables, tables to a rotation.

Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864, section 3.2.2 and the
element-wise form of section 3.4.2 (equation 34).

The d_r rotating dimensions of a head are read as d_r/2 points in the plane. At position m, pair i rotates by the angle
m * theta_i, with theta_i = base^(-2i/d_r):

    x_1' = x_1 cos(m theta_i) - x_2 sin(m theta_i)
    x_2' = x_1 sin(m theta_i) + x_2 cos(m theta_i)

A rotation keeps norms. The product of a query at position m and a key at position n depends on m - n alone. So
attention depends on relative positions, and nothing is added to the embeddings.

The *layout* says which two components are a pair: (2i, 2i+1) if it is ``interleaved``, as in the paper, and
(i, i + d_r/2) if it is ``half``, as in GPT-NeoX, LLaMA and Hugging Face. The two are the same up to a permutation of
the rows of the query and key projections.

Shapes: T positions, d_r rotating dimensions, D the dimension of the head (d_r = fraction * D).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .interface import PositionEncoding
from .rope_options import BASE, FRACTION, LAYOUTS, OPTIONS, rotary_dim
from .scaling import RopeScaling
from .sharing import current_pass

__all__ = ["BASE", "LAYOUTS", "RotaryEmbedding", "frequencies", "rotary_dim", "rotary_tables", "rotate", "turnings"]


def frequencies(dim: int, base: float = BASE) -> Tensor:
    """Return theta_i = base^(-2i/d_r) of all pairs: float64 (d_r / 2)."""
    pair = torch.arange(dim // 2, dtype=torch.float64, device="cpu")  # also if the model is built on "meta"
    return torch.pow(base, -2.0 * pair / dim)


def rotary_tables(
    length: int, theta: Tensor, device: torch.device, offset: int = 0, factor: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return cos(m theta_i) and sin(m theta_i), times *factor*, for *length* positions m = *offset*, *offset* + 1, …

    The results are two float32 tensors (T, d_r / 2). The angle is computed in float64. At position 100,000 the error
    of a float32 angle is up to 4e-3 radians, and in bfloat16 neighbouring positions above 256 are the same number.
    *theta* are the :func:`frequencies`.
    """
    position = torch.arange(offset, offset + length, dtype=torch.float64, device=device)
    angle = position.unsqueeze(1) * theta.to(device).unsqueeze(0)  # (T, d_r / 2)
    return angle.cos().float() * factor, angle.sin().float() * factor


def turnings(cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Return the factors that rotate by the angles of *cos* and *sin* (…, T, d_r / 2), and those that rotate back.

    For the interleaved layout, each is the complex numbers cos ± i sin, (…, T, d_r / 2). For the half layout, each is
    the cosines and the signed sines of all components, (2, …, T, d_r).
    """
    if interleaved:
        return torch.complex(cos, sin), torch.complex(cos, -sin)
    cosines, sines = torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)
    return torch.stack([cosines, sines]), torch.stack([cosines, -sines])


def turn(x: Tensor, turning: Tensor) -> Tensor:
    """Return *x* (..., T, d_r), float32 or float64, rotated by the factors *turning* of :func:`turnings`."""
    if turning.is_complex() and torch.compiler.is_compiling():  # torch's compiler has no complex numbers
        (cos, sin), (x_1, x_2) = (pairs.unbind(-1) for pairs in (torch.view_as_real(turning), x.unflatten(-1, (-1, 2))))
        return torch.stack([x_1 * cos - x_2 * sin, x_1 * sin + x_2 * cos], dim=-1).flatten(-2)
    if turning.is_complex():  # a pair is a complex number, and cos + i sin rotates it
        if x.stride(-1) != 1 or any(n % 2 for n in (*x.stride()[:-1], x.storage_offset())):
            x = x.contiguous()  # complex numbers must begin at even offsets
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))  # (..., T, d_r / 2)
        return torch.view_as_real(pairs * turning).flatten(-2)  # (..., T, d_r)
    cosines, sines = turning[0], turning[1]  # (T, d_r)
    half = x.size(-1) // 2
    turned = x * cosines  # (..., T, d_r)
    turned[..., :half].addcmul_(x[..., half:], sines[..., :half])
    turned[..., half:].addcmul_(x[..., :half], sines[..., half:])
    return turned


class _Turn(torch.autograd.Function):
    """:func:`turn`, whose gradient turns back. That of torch's ``view_as_real`` would copy the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, turning: Tensor, back: Tensor) -> Tensor:
        ctx.save_for_backward(turning, back)
        return turn(x, turning)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        turning, back = ctx.saved_tensors
        return _Turn.apply(grad, back, turning), None, None


def rotate(x: Tensor, turning: Tensor, back: Tensor) -> Tensor:
    """Return *x* (..., T, D) with every pair of its first d_r dimensions rotated; the others pass through unchanged.

    The result is a new tensor of the shape and type of *x*. 16-bit input is rotated in float32, because products with
    bfloat16 tables are too inexact. float64 input is rotated in float64.

    Args:
        turning, back: the factors of the T positions (:func:`turnings`)
    """
    dim = turning.size(-1) * (2 if turning.is_complex() else 1)  # d_r
    rotating = x if x.size(-1) == dim else x[..., :dim]  # (..., T, d_r)
    wide = rotating if x.dtype == torch.float64 else rotating.float()
    has_gradient = x.requires_grad and torch.is_grad_enabled()
    if has_gradient and not (torch.jit.is_tracing() or torch.compiler.is_compiling()):  # they know no such function
        turned = _Turn.apply(wide, turning, back).to(x.dtype)
    else:
        turned = turn(wide, turning).to(x.dtype)
    return turned if x.size(-1) == dim else torch.cat([turned, x[..., dim:]], dim=-1)


class RotaryEmbedding(PositionEncoding):
    """Rotates queries and keys by their positions; holds the tables, and no parameters.

    The tables are plain attributes, not buffers. So ``.half()`` and ``.bfloat16()`` leave them in float32, and the
    state dict, which fairseq's averaging compares, does not contain them.

    Args:
        head_dim: D, the dimension of one attention head
        base: theta_i = base^(-2i / d_r)
        layout: "interleaved" or "half"
        fraction: the fraction of the head that rotates; the rest passes through unchanged
        scaling: the value of ``--rope-scaling``: other frequencies, for inputs longer than those of training

    Raises:
        ValueError: an argument has a value that is not allowed
    """

    options = OPTIONS

    def __init__(
        self,
        head_dim: int,
        base: float = BASE,
        layout: str = LAYOUTS[0],
        fraction: float = FRACTION,
        scaling: str | Mapping[str, Any] = "",
    ) -> None:
        super().__init__()
        if not (math.isfinite(base) and base > 1.0):
            raise ValueError(f"--rope-base {base}: must be a finite number above 1")
        self.head_dim = head_dim
        self.dim = rotary_dim(head_dim, fraction)
        self.base = float(base)
        self.layout = layout
        self.interleaved = LAYOUTS.index(layout) == 0  # a ValueError for another layout
        self.scaling = RopeScaling(scaling) if scaling else None
        self.theta = frequencies(self.dim, self.base)  # (d_r / 2)
        self.attention_factor, self.depends_on_length = 1.0, False
        if self.scaling is not None:
            self.scaling.refuse_dimensions(self.dim, head_dim)
            self.attention_factor = self.scaling.attention_factor()
            self.depends_on_length = self.scaling.depends_on_length
            if not self.depends_on_length:
                self.theta = self.scaling.frequencies(self.theta, self.base)
        # cos and sin, each (length so far, d_r / 2); one attribute, for threads that share a model
        self._tables = (torch.empty(0), torch.empty(0))

    @classmethod
    def build(cls, side: str, embed_dim: int, heads: int, **options: Any) -> "RotaryEmbedding":
        # the argument of the option rope_base is base
        return cls(embed_dim // heads, **{name.partition("_")[2]: value for name, value in options.items()})

    def tables(self, offset: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos and sin of positions *offset* … *offset* + *length* - 1: two float32 tensors (length, d_r / 2).

        With a scaling, they are multiplied by its attention factor.
        """
        if self.depends_on_length:
            if torch.jit.is_tracing():
                raise RuntimeError("--rope-scaling: torch.jit.trace does not support dynamic and longrope")
            return self._tables_of_length(offset, length, device)
        cos, sin = self._tables
        if cos.size(0) < offset + length or cos.device != device:
            with torch.inference_mode(False):  # else a later training step could not use them
                cos, sin = self._longer_tables(offset + length, device)
            self._tables = (cos, sin)
        return cos[offset : offset + length], sin[offset : offset + length]

    def _longer_tables(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        size = 256
        while size < length:
            size *= 2  # doubled, so that step-by-step decoding computes tables rarely
        return rotary_tables(size, self.theta, device, factor=self.attention_factor)

    def _tables_of_length(self, offset: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        assert self.scaling is not None
        if self.theta.device != device:  # copied once, because a copy is a device synchronisation
            self.theta = self.theta.to(device)
        theta = self.scaling.frequencies_of_pass(self.theta, self.base, offset + length)
        return rotary_tables(length, theta, device, offset, self.attention_factor)

    def turnings(self, offset: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the :func:`turnings` of positions *offset* … *offset* + *length* - 1. Layers share them."""
        return current_pass().shared(
            ("turnings", self, offset, length, device),
            lambda: turnings(*self.tables(offset, length, device), self.interleaved),
        )

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Return *x* (..., T, D), queries or keys, rotated as positions *offset*, *offset* + 1, ….

        In step-by-step decoding, *offset* is the number of keys already in the cache.
        """
        return rotate(x, *self.turnings(offset, x.size(-2), x.device))

    def queries_and_keys(self, q: Tensor, k: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Return queries *q* (..., H, T, D) and keys *k* (..., G, T, D), rotated together as :meth:`forward` does."""
        turned = self(torch.cat([q, k], dim=-3), offset)  # (..., H + G, T, D)
        turned_q, turned_k = turned.split([q.size(-3), k.size(-3)], dim=-3)
        return turned_q, turned_k
