"""One step of the decoder in a search: the operations of its layers, bound to their weights.

With few rows, calling a module takes longer than its smaller operations. A bound step computes the result of
``fairseq/modules/transformer_layer.py`` for one token of each hypothesis, without gradients, dropout and attention
weights. A decoder that needs more is called as fairseq calls it: for example with quantisation noise,
``--retain-dropout``, ``--print-alignment``, overridden methods or hooks. Steps are bound at the start of each search,
so that a search uses the current weights.

Shapes: B rows (N sentences of K hypotheses), H heads, D head dimension, C = H * D.
"""

from typing import Any, Callable, List, Optional

import torch
import torch.nn.functional as F
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor, nn

from ..attention import CrossAttention, SelfAttention
from ..dropout import DROPOUT, Dropout, ResidualInPlace
from ..overrides import CALL, has_methods, hooked, is_plain, is_plain_linear, methods_of
from ..positions import PositionEncoding
from ..positions.rotary import RotaryEmbedding
from ..positions.xpos import XPos
from .cache import Beams

Step = Callable[[Tensor, Beams], Tensor]  # (B, C) -> (B, C)

# The methods that a step replaces.
LAYER = {**methods_of(TransformerDecoderLayerBase, *CALL), **methods_of(ResidualInPlace, "residual_connection")}
ATTENTION = (
    *(*CALL, "_attend", "_scaled_by_length", "_score_mask", "_shared_mask", "_split_heads"),
    *("reorder_incremental_state", "_get_input_buffer", "_set_input_buffer", "_append_prev_key_padding_mask"),
)
PARTS = {
    SelfAttention: methods_of(SelfAttention, *ATTENTION, "_mask", "_with_bias", "_position_values"),
    CrossAttention: methods_of(CrossAttention, *ATTENTION),
    RotaryEmbedding: methods_of(RotaryEmbedding, *CALL, "queries_and_keys"),
    XPos: methods_of(XPos, *CALL, "queries_and_keys"),
    nn.LayerNorm: methods_of(nn.LayerNorm, *CALL),
    Dropout: DROPOUT,
}


def bind(layer: Any) -> Optional[Step]:
    """Return the step of a decoder *layer*; None if the layer does more than a step computes."""
    if not has_methods(layer, LAYER) or hooked(layer):
        return None  # a wrapper (FSDP), overridden methods, or a hook
    self_attn, cross_attn = layer.self_attn, layer.encoder_attn
    if not (_is_part(self_attn, SelfAttention) and _is_part(cross_attn, CrossAttention)):
        return None
    linear_layers = [*_projections(self_attn), *_projections(cross_attn), layer.fc1, layer.fc2]
    norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
    if not (
        all(is_plain_linear(module) and module.bias is not None for module in linear_layers)
        and all(_is_part(norm, nn.LayerNorm) for norm in norms)
        and _is_part(layer.dropout_module, Dropout)
        and _is_part(layer.activation_dropout_module, Dropout)
        and _can_step(self_attn.position)
        and self_attn.average_length == cross_attn.average_length == 0.0
        and all(getattr(layer, name) is None for name in ("attn_ln", "c_attn", "ffn_layernorm", "w_resid"))
        and not any(m.training or getattr(m, "apply_during_inference", False) for m in layer.modules())
        and not (layer.need_attn or layer.onnx_trace)
    ):
        return None

    heads, dim, position = self_attn.num_heads, self_attn.head_dim, self_attn.position
    rotates = isinstance(position, RotaryEmbedding)
    changes = not rotates and _overrides(position, "queries_and_keys")
    biases = _overrides(position, "bias")
    cross_heads, cross_dim = cross_attn.num_heads, cross_attn.head_dim
    qkv_weight, qkv_bias = self_attn.joined_projections()
    out, cross_q, cross_out, fc1, fc2 = (
        (m.weight, m.bias) for m in (self_attn.out_proj, cross_attn.q_proj, cross_attn.out_proj, layer.fc1, layer.fc2)
    )
    self_norm, cross_norm, final_norm = ((n.normalized_shape, n.weight, n.bias, n.eps) for n in norms)
    activation, pre_norm = layer.activation_fn, layer.normalize_before
    linear, layer_norm, attend = F.linear, torch.layer_norm, F.scaled_dot_product_attention

    def step(x: Tensor, beams: Beams) -> Tensor:
        rows, sentences, beam = x.size(0), beams.sentences, beams.beam

        y = layer_norm(x, *self_norm) if pre_norm else x
        qkv = linear(y, qkv_weight, qkv_bias)  # (B, 3 * C)
        if rotates:
            turn_in_place(qkv.narrow(1, 0, 2 * heads * dim), beams.numbers(position, x.device))
        qkv = qkv.view(sentences, beam, 3, heads, dim).permute(2, 0, 3, 1, 4)
        q, new = qkv[0], qkv[1:]  # (N, H, K, D), (2, N, H, K, D)
        mask = beams.mask_with_bias(position, q) if biases else beams.mask
        if changes:
            q, k = beams.turned(position, q, new[0])
            new = torch.stack([k, new[1]])
        k, v = beams.append(self_attn, new)  # each (N, H, n * K, D)
        y = attend(q, k, v, attn_mask=mask)  # (N, H, K, D)
        x = linear(y.transpose(1, 2).reshape(rows, heads * dim), *out).add_(x)
        if not pre_norm:
            x = layer_norm(x, *self_norm)

        y = layer_norm(x, *cross_norm) if pre_norm else x
        q = linear(y, *cross_q).view(sentences, beam, cross_heads, cross_dim).transpose(1, 2)
        k, v = beams.source[cross_attn]  # each (N, H, S, D)
        y = attend(q, k, v, attn_mask=beams.source_mask)
        x = linear(y.transpose(1, 2).reshape(rows, cross_heads * cross_dim), *cross_out).add_(x)
        if not pre_norm:
            x = layer_norm(x, *cross_norm)

        y = layer_norm(x, *final_norm) if pre_norm else x
        x = linear(activation(linear(y, *fc1)), *fc2).add_(x)
        return x if pre_norm else layer_norm(x, *final_norm)

    return step


def bind_all(layers: nn.ModuleList) -> Optional[List[Step]]:
    """Return the steps of all *layers*; None unless all of them can be bound."""
    if autocasts():
        return None
    steps = []
    for layer in layers:
        step = bind(layer)
        if step is None:
            return None
        steps.append(step)
    return steps


def _can_step(position: Any) -> bool:
    """Return whether a step can compute *position*."""
    if isinstance(position, RotaryEmbedding):  # the step turns pairs of neighbours, which must lie within a head
        return any(_is_part(position, cls) for cls in (RotaryEmbedding, XPos)) and position.head_dim % 2 == 0
    return isinstance(position, PositionEncoding) and not position.explicit_weights and not hooked(position)


def _overrides(position: PositionEncoding, method: str) -> bool:
    own, inherited = getattr(position, method), getattr(PositionEncoding, method)
    return getattr(own, "__func__", own) is not inherited


def _is_part(module: Any, cls: type) -> bool:
    return is_plain(module, cls, PARTS[cls])


def _projections(attention: Any) -> List[nn.Module]:
    return [attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj]


def turn_in_place(qk: Tensor, numbers: Tensor) -> None:
    """Rotate queries and keys *qk* (B, 2 * C), in which pairs are neighbours, by *numbers* (1 or 2, 1, D / 2)."""
    pairs = qk.unflatten(1, (2, -1, numbers.size(-1), 2))  # (B, 2, H, D / 2, 2)
    if qk.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(numbers)
    else:
        wide = pairs if qk.dtype == torch.float64 else pairs.float()
        pairs.copy_(torch.view_as_real(torch.view_as_complex(wide) * numbers))


def autocasts() -> bool:
    """Return whether torch chooses the types of operations (``--amp``)."""
    try:
        return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    except TypeError:  # torch < 2.4 has one function for each
        return torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled()
