"""Fits the parts that the options of the block name into the layers that fairseq builds."""

import copy
from typing import Any

from fairseq.models.transformer import TransformerConfig
from fairseq.modules.quant_noise import quant_noise
from torch import nn
from torch.nn import functional as F

from ..modules.feed_forward import GatedLinear, identity
from ..modules.norms import LAYER_NORMS, RMSNorm
from .encodings import own_random_numbers
from .options import SideOptions


def inner_width(width: int) -> int:
    """Return two thirds of *width*, rounded up to a multiple of 8: gated layers have three matrices, not two."""
    return -(-2 * width // 24) * 8


def with_inner_width(cfg: TransformerConfig, side: SideOptions) -> TransformerConfig:
    """Return the *cfg* of a layer with the inner width of its feed-forward part, which may be scaled.

    Raises a ValueError if a subclass gives the layer other heads or another width than the *side* has.
    """
    sizes = copy.copy(getattr(cfg, side.side))
    if (sizes.attention_heads, sizes.embed_dim) != (side.heads, side.embed_dim):
        raise ValueError(
            f"a layer with {sizes.attention_heads} heads and width {sizes.embed_dim}: all layers of the {side.side} "
            f"have {side.heads} heads and width {side.embed_dim}, for which its positions are made"
        )
    if side.scale_glu_width and side.ffn_type == "glu":
        sizes.ffn_embed_dim = inner_width(sizes.ffn_embed_dim)
    scaled = copy.copy(cfg)
    setattr(scaled, side.side, sizes)
    return scaled


def fit_norms(module: nn.Module, side: SideOptions) -> None:
    """Replace the norms of *module*, a layer or a side, by those that the options of the *side* name."""
    if side.norm_type == "rms":
        children: dict[str, Any] = dict(module.named_children())
        for name, norm in children.items():
            if isinstance(norm, LAYER_NORMS):
                setattr(module, name, RMSNorm(norm.weight.numel()))


def fit_layer(layer: Any, side: SideOptions) -> None:
    """Replace the norms and the feed-forward part of fairseq's *layer* by those that the options of the *side* name.

    fairseq has built the layer, so that the other parameters start with the same numbers as without this.
    """
    fit_norms(layer, side)
    if layer.activation_fn is nn.SiLU:  # what fairseq returns for swish: the class in place of the function
        layer.activation_fn = F.silu
    linear_layers = [layer.fc1, layer.fc2]
    if side.ffn_type == "glu":
        with own_random_numbers(stream=1):
            up = nn.Linear(layer.fc1.in_features, layer.fc1.out_features)
        up = quant_noise(up, layer.quant_noise, layer.quant_noise_block_size)
        linear_layers.append(up)
        layer.fc1 = GatedLinear(layer.fc1, up, layer.activation_fn)
        layer.activation_fn = identity
    if side.no_projection_bias:
        drop_biases(*linear_layers)


def fit_attention(attention: Any, side: SideOptions, kv_heads: int) -> None:
    """Change the projections of fairseq's *attention* to those that the options of the *side* name."""
    if kv_heads != side.heads:
        attention.keep_key_value_heads(kv_heads)
    if side.no_projection_bias:
        drop_biases(attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj)
    if side.qk_norm and attention.self_attention:
        attention.q_norm, attention.k_norm = RMSNorm(attention.head_dim), RMSNorm(attention.head_dim)


def drop_biases(*linear_layers: Any) -> None:
    """Remove the biases of *linear_layers*."""
    for linear in linear_layers:
        linear.register_parameter("bias", None)
