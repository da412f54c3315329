"""The rotation of the queries and keys of one step of a search, in place, and weights whose pairs are neighbours.

Shapes: B rows, C the width, H heads, G heads of keys and values, D head dimension.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..modules.attention import SelfAttention
from ..positions.rotary import RotaryEmbedding
from ..positions.xpos import XPos


def joined_projections(attention: SelfAttention) -> tuple[Tensor, Tensor | None]:
    """Return the joined weight (C + 2 * G * D, C) and bias of the projections to queries, keys and values.

    They are copies without gradient. With both layouts, pairs that rotate together are neighbours in queries and
    keys. This changes no score, because the dimensions of queries and keys have the same order.
    """
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    weight = torch.cat([neighbours(attention, q.weight), neighbours(attention, k.weight), v.weight]).detach()
    if q.bias is None:
        return weight, None
    return weight, torch.cat([neighbours(attention, q.bias), neighbours(attention, k.bias), v.bias]).detach()


def norm_weights(attention: SelfAttention) -> list[Tensor]:
    """Return the weights of ``q_norm`` and ``k_norm``, if any, in the order of :func:`joined_projections`."""
    norms = [norm for norm in (attention.q_norm, attention.k_norm) if norm is not None]
    return [neighbours(attention, weight).detach() for norm in norms for weight in norm.parameters()]


def neighbours(attention: SelfAttention, x: Tensor) -> Tensor:
    """Return *x* (H * D, …) with the rows of each head ordered so that pairs that rotate are neighbours."""
    position = attention.position
    if not isinstance(position, RotaryEmbedding) or position.interleaved:
        return x
    heads = x.unflatten(0, (-1, attention.head_dim))
    turning, rest = heads.split([position.dim, attention.head_dim - position.dim], dim=1)
    pairs = turning.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat([pairs, rest], dim=1).flatten(0, 1)


def rotation_at(rotary: RotaryEmbedding, position: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return the complex numbers (1 or 2, 1, D / 2) that rotate pairs of neighbours at *position*.

    The first dimension is for queries and keys, if these have different numbers; the second is for heads. For
    dimensions that do not rotate, the numbers are 1. Raises the ValueError of :meth:`.XPos.refuse_too_far`.
    """
    if isinstance(rotary, XPos):
        rotary.refuse_too_far(position + 1, dtype)
        q_cos, q_sin, k_cos, k_sin = rotary.scaled_tables(position, 1, device)
        numbers = torch.stack([torch.complex(q_cos, q_sin), torch.complex(k_cos, k_sin)])
    else:
        cos, sin = rotary.tables(position, 1, device)
        numbers = torch.complex(cos, sin).unsqueeze(0)
    return F.pad(numbers, (0, (rotary.head_dim - rotary.dim) // 2), value=1.0)


def turn_in_place(qk: Tensor, numbers: Tensor, heads: int) -> None:
    """Rotate the neighbouring pairs of *qk* (B, (H + G) * D), with H = *heads*, by *numbers* (1 or 2, 1, D / 2)."""
    pairs = qk.unflatten(1, (-1, numbers.size(-1), 2))  # (B, H + G, D / 2, 2)
    if numbers.size(0) == 2:  # those of queries and those of keys
        kv_heads = pairs.size(1) - heads
        numbers = torch.cat([numbers[0].expand(heads, -1), numbers[1].expand(kv_heads, -1)])
    else:
        numbers = numbers[0]
    if qk.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(numbers)
    else:
        wide = pairs if qk.dtype == torch.float64 else pairs.float()
        pairs.copy_(torch.view_as_real(torch.view_as_complex(wide) * numbers))
