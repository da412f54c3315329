"""One step of the decoder in a search: the operations of its layers, bound to their weights.

With few rows, calling modules costs more time than the smaller of their operations. What is bound here
computes what ``fairseq/modules/transformer_layer.py`` does for one token of each hypothesis, without
gradients, dropout and weights of attention. A decoder of which that is not enough, for example with
quantisation noise, ``--retain-dropout`` or ``--print-alignment``, is called as fairseq calls it.

Shapes: B rows (N sentences of K hypotheses), H heads, D head dimension, C = H * D.
"""

from typing import Any, Callable, List, Optional, Tuple

import torch
import torch.nn.functional as F
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor, nn

from .attention import CrossAttention, Kept, RotaryMultiheadAttention, hooked, is_plain_linear
from .beams import Beams
from .dropout import ResidualInPlace
from .rotary import RotaryEmbedding

Step = Callable[[Tensor, Tensor, Beams], Tensor]  # (B, C), the encoder's output (S, N, C) -> (B, C)


def bind(layer: nn.Module) -> Optional[Step]:
    """The step of a decoder *layer*; None if it has more to it than can be bound."""
    if getattr(type(layer), "forward", None) is not TransformerDecoderLayerBase.forward:
        return None  # a wrapper (FSDP), or a layer of somebody's own
    self_attn, cross_attn = layer.self_attn, layer.encoder_attn
    if type(self_attn) is not RotaryMultiheadAttention or type(cross_attn) is not CrossAttention:
        return None
    linear_layers = [*_projections(self_attn), *_projections(cross_attn), layer.fc1, layer.fc2]
    norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
    if not (
        all(map(is_plain_linear, linear_layers))
        and all(type(norm) is nn.LayerNorm for norm in norms)
        and all(getattr(layer, name) is None for name in ("attn_ln", "c_attn", "ffn_layernorm", "w_resid"))
        and type(layer).residual_connection is ResidualInPlace.residual_connection
        and type(self_attn.rotary) is RotaryEmbedding
        and self_attn.head_dim % 2 == 0  # pairs of neighbours lie within a head
        and not any(
            hooked(m) or m.training or getattr(m, "apply_during_inference", False) for m in layer.modules()
        )
        and not (layer.need_attn or layer.onnx_trace)
    ):
        return None

    heads, dim, rotary = self_attn.num_heads, self_attn.head_dim, self_attn.rotary
    cross_heads, cross_dim = cross_attn.num_heads, cross_attn.head_dim
    qkv_weight, qkv_bias = self_attn.joined_projections()
    out, cross_q, cross_out, fc1, fc2 = (
        (m.weight, m.bias)
        for m in (self_attn.out_proj, cross_attn.q_proj, cross_attn.out_proj, layer.fc1, layer.fc2)
    )
    self_norm, cross_norm, final_norm = ((n.normalized_shape, n.weight, n.bias, n.eps) for n in norms)
    activation, pre_norm = layer.activation_fn, layer.normalize_before
    linear, layer_norm, attend = F.linear, torch.layer_norm, F.scaled_dot_product_attention

    def step(x: Tensor, encoder_out: Tensor, beams: Beams) -> Tensor:
        rows, sentences, beam = x.size(0), beams.sentences, beams.beam

        y = layer_norm(x, *self_norm) if pre_norm else x
        qkv = linear(y, qkv_weight, qkv_bias)  # (B, 3 * C)
        turn_in_place(qkv.narrow(1, 0, 2 * heads * dim), beams.numbers(rotary, x.device))
        qkv = qkv.view(sentences, beam, 3, heads, dim).permute(2, 0, 3, 1, 4)
        k, v = beams.append(self_attn, qkv[1:])  # each (N, H, n * K, D)
        y = attend(qkv[0], k, v, attn_mask=beams.mask)  # (N, H, K, D)
        x = linear(y.transpose(1, 2).reshape(rows, heads * dim), *out).add_(x)
        if not pre_norm:
            x = layer_norm(x, *self_norm)

        y = layer_norm(x, *cross_norm) if pre_norm else x
        q = linear(y, *cross_q).view(sentences, beam, cross_heads, cross_dim).transpose(1, 2)
        if cross_attn not in beams.source:
            beams.source[cross_attn] = cross_attn.keys_and_values(encoder_out)
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
    """The steps of all *layers*; None unless all of them can be bound."""
    if autocasts():
        return None
    steps = []
    for layer in layers:
        step = bind(layer)
        if step is None:
            return None
        steps.append(step)
    return steps


def _projections(attention: Any) -> List[nn.Module]:
    return [attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj]


def turn_in_place(qk: Tensor, numbers: Tensor) -> None:
    """Rotate queries and keys *qk* (B, 2 * C), in which pairs are neighbours, in place."""
    pairs = qk.unflatten(1, (-1, numbers.size(0), 2))  # (B, 2 * H, D / 2, 2)
    if qk.dtype == torch.float32:
        torch.view_as_complex(pairs).mul_(numbers)
    else:
        wide = pairs if qk.dtype == torch.float64 else pairs.float()
        pairs.copy_(torch.view_as_real(torch.view_as_complex(wide) * numbers))


def autocasts() -> bool:
    """Whether torch chooses the types of operations here (``--amp``)."""
    try:
        return torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    except TypeError:  # torch < 2.4 asks for each in its own way
        return torch.is_autocast_enabled() or torch.is_autocast_cpu_enabled()


class PackedLinear:
    """``nn.Linear`` without bias whose weight is packed for oneDNN, as torch's compiler packs it.

    The projection onto the vocabulary reads its weight once for a few rows: packed, at about twice the speed
    (37,000 words, 4 rows). The packed copy is kept until the weight changes.
    """

    def __init__(self) -> None:
        self._packed = Kept()
        self.forget = self._packed.forget

    def __call__(self, module: nn.Module, x: Tensor) -> Optional[Tensor]:
        """What *module* makes of *x*; None where nothing can be packed, and the module has to be called."""
        weight = getattr(module, "weight", None)
        if (
            torch.is_grad_enabled()
            or type(module) is not nn.Linear
            or module.bias is not None
            or hooked(module)
            or not (weight.device.type == "cpu" and weight.dtype == x.dtype == torch.float32)
            or weight.is_inference()  # which nothing tells whether it has changed
            or autocasts()
            or not torch.backends.mkldnn.is_available()
        ):
            return None
        packed = self._packed.of([weight], lambda: _packed(weight.detach()))
        if packed is None:
            return None
        return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), ()


def _packed(weight: Tensor) -> Optional[Tensor]:
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight)
    except (AttributeError, RuntimeError, TypeError):  # not in this build of torch
        return None
