"""One step of the decoder in a search: the operations of its layers, bound to their weights.

With few rows, calling a module takes longer than its smaller operations. A bound step computes the result of
``fairseq/modules/transformer_layer.py`` for one token of each hypothesis, without gradients, dropout and attention
weights. A decoder that needs more is called as fairseq calls it: for example with quantisation noise,
``--retain-dropout``, ``--print-alignment``, a subclass, or hooks. Steps are bound at the start of each search,
so that a search uses the current weights.

Shapes: B rows (N sentences of K hypotheses), H heads, G heads of keys and values, D head dimension, C = H * D.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..modules.attention import CrossAttention, SelfAttention
from ..modules.dropout import Dropout
from ..modules.feed_forward import GatedLinear
from ..modules.masks import aligned
from ..modules.norms import LAYER_NORMS, RMSNorm
from ..modules.overrides import hooked, is_exactly, is_plain_linear
from ..positions import PositionEncoding
from ..positions.rotary import RotaryEmbedding
from ..positions.xpos import XPos
from ..transformer.layers import DecoderLayer
from .cache import Beams
from .rotation import joined_projections, norm_weights, turn_in_place

Step = Callable[[Tensor, Beams], Tensor]  # (B, C) -> (B, C)


def _can_bind(layer: Any) -> bool:
    """Return whether a step computes all that the decoder *layer* does."""
    if not is_exactly(layer, DecoderLayer):
        return False  # a wrapper (FSDP), a subclass, or a hook
    self_attn, cross_attn = layer.self_attn, layer.encoder_attn
    if not (is_exactly(self_attn, SelfAttention) and is_exactly(cross_attn, CrossAttention)):
        return False
    linear_layers = [*_projections(self_attn), *_projections(cross_attn), layer.fc2]
    linear_layers += [layer.fc1.gate, layer.fc1.up] if is_exactly(layer.fc1, GatedLinear) else [layer.fc1]
    norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
    head_norms = [norm for norm in (self_attn.q_norm, self_attn.k_norm) if norm is not None]
    return bool(
        all(is_plain_linear(module) for module in linear_layers)
        and len({projection.bias is None for projection in _projections(self_attn)[:3]}) == 1
        and all(is_exactly(norm, *LAYER_NORMS, RMSNorm) for norm in norms)
        and len(head_norms) in (0, 2)
        and all(is_exactly(norm, RMSNorm) for norm in head_norms)
        and is_exactly(layer.dropout_module, Dropout)
        and is_exactly(layer.activation_dropout_module, Dropout)
        and _can_step(self_attn.position)
        and self_attn.average_length == cross_attn.average_length == 0.0
        and all(getattr(layer, name) is None for name in ("attn_ln", "c_attn", "ffn_layernorm", "w_resid"))
        and not any(m.training or getattr(m, "apply_during_inference", False) for m in layer.modules())
        and not (layer.need_attn or layer.onnx_trace)
    )


def bind(layer: Any) -> Step | None:
    """Return the step of a decoder *layer*; None if the layer does more than a step computes."""
    if not _can_bind(layer):
        return None
    self_attn, cross_attn = layer.self_attn, layer.encoder_attn
    norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
    heads, dim, position = self_attn.num_heads, self_attn.head_dim, self_attn.position
    kv_heads = self_attn.k_proj.weight.size(0) // dim
    rotates = isinstance(position, RotaryEmbedding)
    changes = not rotates and position.overrides("queries_and_keys")
    biases = position.overrides("bias")
    cross_heads, cross_dim = cross_attn.num_heads, cross_attn.head_dim
    qkv_weight, qkv_bias = joined_projections(self_attn)
    head_norm_weights = norm_weights(self_attn)
    out, cross_q, cross_out, fc2 = (
        (m.weight, m.bias) for m in (self_attn.out_proj, cross_attn.q_proj, cross_attn.out_proj, layer.fc2)
    )
    self_norm, cross_norm, final_norm = map(_norm, norms)
    hidden, activation, pre_norm = _first_linear(layer.fc1), layer.activation_fn, layer.normalize_before
    linear = F.linear

    def step(x: Tensor, beams: Beams) -> Tensor:
        rows, sentences, beam = x.size(0), beams.sentences, beams.beam

        y = self_norm(x) if pre_norm else x
        qkv = linear(y, qkv_weight, qkv_bias)  # (B, C + 2 * G * D)
        if head_norm_weights:
            by_head = qkv.unflatten(1, (-1, dim))
            for part, weight in zip((by_head[:, :heads], by_head[:, heads : heads + kv_heads]), head_norm_weights):
                part.copy_(F.rms_norm(part, (dim,), weight, self_attn.q_norm.eps))
        if rotates:
            turn_in_place(qkv.narrow(1, 0, (heads + kv_heads) * dim), beams.rotation(position, x), heads)
        q = qkv.narrow(1, 0, heads * dim).view(sentences, beam, heads, dim).transpose(1, 2)  # (N, H, K, D)
        new = qkv.narrow(1, heads * dim, 2 * kv_heads * dim)
        new = new.view(sentences, beam, 2, kv_heads, dim).permute(2, 0, 3, 1, 4)  # (2, N, G, K, D)
        unturned = q
        if changes:
            q, k = beams.turned(position, q, new[0])
            new = torch.stack([k, new[1]])
        mask = beams.mask_with_bias(position, unturned, kv_heads) if biases else beams.mask
        if x.dtype is torch.float16:  # a hypothesis with a key or value that overflowed gets no score, as in fairseq
            largest = torch.linalg.vector_norm(new, torch.inf, dim=(0, 2, 4))  # (N, K)
            x = torch.add(x, largest.view(rows, 1), alpha=0)  # 0 times infinity is not a number
        k, v = beams.append(self_attn, new)  # each (N, G, n * K, D)
        y = attend(q, k, v, beams.mask_of_groups(mask, heads // kv_heads))  # (N, H, K, D)
        x = linear(y.transpose(1, 2).reshape(rows, heads * dim), *out).add_(x)
        if not pre_norm:
            x = self_norm(x)

        y = cross_norm(x) if pre_norm else x
        q = linear(y, *cross_q).view(sentences, beam, cross_heads, cross_dim).transpose(1, 2)
        k, v = beams.source[cross_attn]  # each (N, G, S, D)
        y = attend(q, k, v, beams.source_mask)
        x = linear(y.transpose(1, 2).reshape(rows, cross_heads * cross_dim), *cross_out).add_(x)
        if not pre_norm:
            x = cross_norm(x)

        y = final_norm(x) if pre_norm else x
        x = linear(activation(hidden(y)), *fc2).add_(x)
        return x if pre_norm else final_norm(x)

    return step


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Return the attention of *q* (N, H, K, D) to *k* and *v* (N, G, S, D): (N, H, K, D).

    Heads that share keys and values are further queries of one head, so that no key is copied. *mask* broadcasts to
    (N, G, H / G * K, S).
    """
    if q.size(1) != k.size(1):
        grouped = attend(q.unflatten(1, (k.size(1), -1)).flatten(2, 3), k, v, mask)
        return grouped.unflatten(2, (-1, q.size(2))).flatten(1, 2)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask if q.device.type == "cpu" or mask is None else aligned(mask)
    )


def _norm(norm: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that computes *norm*, a LayerNorm or RMSNorm."""
    shape, weight, eps = norm.normalized_shape, norm.weight, norm.eps
    if isinstance(norm, RMSNorm):
        return lambda x: F.rms_norm(x, shape, weight, eps)
    bias, layer_norm = norm.bias, torch.layer_norm
    return lambda x: layer_norm(x, shape, weight, bias, eps)


def _first_linear(fc1: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that computes *fc1*, a linear or gated layer."""
    linear = F.linear
    if not isinstance(fc1, GatedLinear):
        weight, bias = fc1.weight, fc1.bias
        return lambda x: linear(x, weight, bias)
    gate, up, activation = (fc1.gate.weight, fc1.gate.bias), (fc1.up.weight, fc1.up.bias), fc1.activation_fn
    return lambda x: activation(linear(x, *gate)).mul_(linear(x, *up))


def bind_all(layers: nn.ModuleList) -> list[Step] | None:
    """Return the steps of all *layers*; None unless all of them can be bound."""
    if autocasts():
        return None
    steps = [step for step in map(bind, layers) if step is not None]
    return steps if len(steps) == len(layers) else None


def _can_step(position: Any) -> bool:
    """Return whether a step can compute *position*."""
    if isinstance(position, RotaryEmbedding):  # the step turns pairs of neighbours, which must lie within a head
        return is_exactly(position, RotaryEmbedding, XPos) and position.head_dim % 2 == 0
    if not isinstance(position, PositionEncoding) or hooked(position):
        return False
    return not (position.overrides("values") or position.bias_reads == "keys")


def _projections(attention: Any) -> list[nn.Module]:
    return [attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj]


def autocasts() -> bool:
    """Return whether torch chooses the types of operations (``--amp``)."""
    return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
