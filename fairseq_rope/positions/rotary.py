"""Rotary position embedding: positions to angles, angles to tables, tables to a rotation.

Su et al. 2021, "RoFormer: Enhanced Transformer with Rotary Position Embedding", arXiv:2104.09864,
section 3.2.2 and the element-wise form of section 3.4.2 (equation 34).

A head of dimension d is read as d/2 points in the plane. At position m, pair i turns by the angle
m * theta_i, with theta_i = base^(-2i/d):

    x_1' = x_1 cos(m theta_i) - x_2 sin(m theta_i)
    x_2' = x_1 sin(m theta_i) + x_2 cos(m theta_i)

A rotation keeps norms, and the product of a query turned by m and a key turned by n depends on
m - n alone: attention sees relative positions, and nothing is added to the embeddings.

Which two components make a pair is the *layout*: ``interleaved`` pairs (2i, 2i+1), as the paper
does; ``half`` pairs (i, i + d/2), as GPT-NeoX, LLaMA and Hugging Face do. The two are the same up to
a permutation of the rows of the query and key projections.

Shapes: T positions, d_r rotating dimensions, D the dimension of the head (d_r = fraction * D).
"""

import math
from typing import Any, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .interface import Option, PositionEncoding

# The defaults are the paper's.
BASE = 10000.0
LAYOUTS = ("interleaved", "half")  # the first is the default
FRACTION = 1.0


def rotary_dim(head_dim: int, fraction: float = FRACTION) -> int:
    """The number of leading dimensions of a head that rotate, d_r = fraction * head_dim.

    Raises:
        ValueError: *fraction* is outside (0, 1], or d_r is not an even integer of at least 2.
    """
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"--rope-fraction {fraction}: the fraction of the head that rotates must be in (0, 1]")
    exact = fraction * head_dim
    dim = round(exact)
    if dim < 2 or dim % 2 != 0 or not math.isclose(exact, dim, rel_tol=1e-6):
        raise ValueError(
            f"--rope-fraction {fraction} of a head of {head_dim} dimensions leaves {exact:g} to rotate; "
            "it must be an even integer, since dimensions rotate in pairs"
        )
    return dim


def rotary_tables(length: int, dim: int, base: float, device: torch.device) -> Tuple[Tensor, Tensor]:
    """cos(m theta_i) and sin(m theta_i) for positions m < *length*: two float32 tensors (T, d_r / 2).

    The angle is computed in float64: at position 100,000 a float32 angle is off by up to 4e-3
    radians, and in bfloat16 neighbouring positions above 256 are the same number.
    """
    pair = torch.arange(dim // 2, dtype=torch.float64, device=device)
    theta = torch.pow(base, -2.0 * pair / dim)  # (d_r / 2)
    position = torch.arange(length, dtype=torch.float64, device=device)
    angle = position.unsqueeze(1) * theta.unsqueeze(0)  # (T, d_r / 2)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Turn every pair of the last dimension of *x* by the angle of its position.

    Args:
        x: (..., T, d_r)
        cos, sin: (T, d_r / 2), float32
        interleaved: pair (2i, 2i+1) if true, (i, i + d_r/2) if false

    Returns:
        A new tensor of the shape and type of *x*. 16-bit input is rotated in float32: products of
        bfloat16 tables lose the angle. float64 input is rotated in float64.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    if interleaved:
        pairs = wide.unflatten(-1, [-1, 2])  # (..., T, d_r / 2, 2)
        x1, x2 = pairs[..., 0], pairs[..., 1]
        turned = torch.stack([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1).flatten(-2)
    else:
        x1, x2 = wide.chunk(2, dim=-1)  # each (..., T, d_r / 2)
        turned = torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1)
    return turned.to(x.dtype)


# -- the same in fewer passes ----------------------------------------------------------------------


def _rotate_at_once(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """:func:`rotate` of float32 or float64, in fewer passes over *x*, whose strides the result has.

    A pair of neighbours is a complex number, and to turn it is to multiply it by cos + i sin.
    """
    if interleaved:
        if x.stride(-1) != 1 or any(n % 2 for n in (*x.stride()[:-1], x.storage_offset())):
            x = x.contiguous()  # complex numbers lie at even places
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * torch.complex(cos, sin)).flatten(-2)
    turned = x * torch.cat([cos, cos], dim=-1)
    (x1, x2), (y1, y2) = x.chunk(2, dim=-1), turned.chunk(2, dim=-1)
    y1.addcmul_(x2, sin, value=-1)
    y2.addcmul_(x1, sin)
    return turned


class _Rotation(torch.autograd.Function):
    """:func:`_rotate_at_once` and its gradient, which is the gradient of the output turned back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate_at_once(x, cos, sin, interleaved)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _Rotation.apply(grad, cos, -sin, ctx.interleaved), None, None, None


def turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """:func:`rotate`, by the fastest way where it is called."""
    # Complex numbers, and a function with a gradient of its own, are not for what traces or compiles a
    # model; a compiler fuses the plain formula by itself.
    if torch.jit.is_tracing() or is_compiling():
        return rotate(x, cos, sin, interleaved)
    wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
    if x.requires_grad and torch.is_grad_enabled():
        turned = _Rotation.apply(wide, cos, sin, interleaved)
    else:
        turned = _rotate_at_once(wide, cos, sin, interleaved)
    return turned if wide is x else turned.to(x.dtype)


def is_compiling() -> bool:
    """Whether ``torch.compile`` reads what runs."""
    return hasattr(torch, "compiler") and getattr(torch.compiler, "is_compiling", bool)()


class RotaryEmbedding(PositionEncoding):
    """Rotates queries and keys by their positions; holds the tables, and no parameters.

    The tables are plain attributes, not buffers: ``.half()`` and ``.bfloat16()`` leave them float32,
    and the state dict, which fairseq's averaging compares, does not know them. They are renewed when
    a longer sequence or another device asks for it.

    Args:
        head_dim: D, the dimension of one attention head
        base: theta_i = base^(-2i / d_r)
        layout: "interleaved" or "half"
        fraction: the fraction of the head that rotates; the rest passes through unchanged

    Raises:
        ValueError: *layout*, *base* or *fraction* is not one of the allowed values.
    """

    options = {
        "rope_base": Option(BASE, "base of the rotation's angles, theta_i = base^(-2i/d)"),
        "rope_layout": Option(
            LAYOUTS[0],
            "which dimensions of a head rotate together: interleaved = (2i, 2i+1), as the RoFormer paper; half = "
            "(i, i + d/2), as GPT-NeoX and LLaMA",
        ),
        "rope_fraction": Option(FRACTION, "fraction of each head's dimensions that rotates, in (0, 1]"),
    }

    def __init__(self, head_dim: int, base: float = BASE, layout: str = LAYOUTS[0], fraction: float = FRACTION) -> None:
        super().__init__()
        if layout not in LAYOUTS:
            raise ValueError(f"--rope-layout {layout}: must be one of {', '.join(LAYOUTS)}")
        if not (math.isfinite(base) and base > 1.0):
            raise ValueError(f"--rope-base {base}: must be a finite number above 1")
        self.head_dim = head_dim
        self.dim = rotary_dim(head_dim, fraction)
        self.base = float(base)
        self.layout = layout
        self.interleaved = layout == "interleaved"
        # cos and sin, each (length so far, d_r / 2); one attribute, for threads that share a model
        self._tables = (torch.empty(0), torch.empty(0))

    @classmethod
    def build(cls, side: str, embed_dim: int, heads: int, **options: Any) -> "RotaryEmbedding":
        return cls(embed_dim // heads, options["rope_base"], options["rope_layout"], options["rope_fraction"])

    def extra_repr(self) -> str:
        return f"dim={self.dim} of {self.head_dim}, base={self.base:g}, layout={self.layout}"

    def _longer_tables(self, length: int, device: torch.device) -> Tuple[Tensor, Tensor]:
        size = 256
        while size < length:
            size *= 2  # doubled, so that step-by-step decoding computes tables rarely
        return rotary_tables(size, self.dim, self.base, device)

    def tables(self, offset: int, length: int, device: torch.device) -> Tuple[Tensor, Tensor]:
        """cos and sin of positions *offset* … *offset* + *length* - 1: two float32 tensors (length, d_r / 2)."""
        cos, sin = self._tables
        # TorchScript knows == between devices, not !=.
        if cos.size(0) < offset + length or not cos.device == device:
            if torch.jit.is_scripting():
                cos, sin = self._longer_tables(offset + length, device)
            else:
                # Tables made under inference_mode could not be used in a later training step.
                with torch.inference_mode(False):
                    cos, sin = self._longer_tables(offset + length, device)
            self._tables = (cos, sin)
        return cos[offset : offset + length], sin[offset : offset + length]

    def rotated(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first d_r dimensions of *x* (..., T, D) by *cos* and *sin* (T, d_r / 2)."""
        turning = x if self.dim == self.head_dim else x[..., : self.dim]
        if torch.jit.is_scripting():
            turned = rotate(turning, cos, sin, self.interleaved)
        else:
            turned = turn(turning, cos, sin, self.interleaved)
        if self.dim == self.head_dim:
            return turned
        return torch.cat([turned, x[..., self.dim :]], dim=-1)

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Rotate *x* (..., T, D), queries or keys, as positions *offset*, *offset* + 1, ….

        In step-by-step decoding, *offset* is the number of keys already in the cache. The result is a new tensor of
        the shape and type of *x*.
        """
        cos, sin = self.tables(offset, x.size(-2), x.device)
        return self.rotated(x, cos, sin)

    def queries_and_keys(self, q: Tensor, k: Tensor, offset: int) -> Tuple[Tensor, Tensor]:
        if not torch.jit.is_scripting():
            return self(q, offset), self(k, offset)
        return self.forward(q, offset), self.forward(k, offset)

    def numbers(self, position: int, device: torch.device) -> Tensor:
        """Return the complex numbers (1, 1, D / 2) by which pairs of neighbours turn at *position*.

        The first dimension is for queries and keys, the second for heads. Past the fraction, the numbers are 1.
        """
        cos, sin = self.tables(position, 1, device)
        rest = (self.head_dim - self.dim) // 2
        return F.pad(torch.complex(cos, sin), (0, rest), value=1.0).unsqueeze(0)
