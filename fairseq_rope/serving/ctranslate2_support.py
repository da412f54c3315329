"""Which models of fairseq and of this plugin CTranslate2 supports, and what their layers are made of."""

from typing import Any

from .exported_folder import ExportError

# fairseq's names of activation functions, and CTranslate2's
ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "gelu_accurate": "GELUTanh", "gelu_fast": "GELUTanh", "swish": "SWISH"}
# attributes of the layers of NormFormer, and fairseq's flags for them
NORMFORMER = {"attn_ln": "scale-attn", "c_attn": "scale-heads", "ffn_layernorm": "scale-fc", "w_resid": "scale-resids"}


def position_of(layer: Any) -> Any:
    """Return the position encoding of a layer's self-attention; None in fairseq's own layers."""
    return getattr(layer.self_attn, "position", None)


def position_of_side(side: Any) -> Any:
    """Return the position encoding of *side*, an encoder or decoder: that of its first layer."""
    return position_of(side.layers[0])


def is_bias_of_distance(position: Any) -> bool:
    """Return whether *position* adds a bias that depends on the distance alone, and that all layers share."""
    from ..positions import DistanceBias

    return isinstance(position, DistanceBias) and position.shared and not position.absolute


def is_supported(position: Any) -> bool:
    """Return whether CTranslate2 supports the encoding *position*."""
    from ..positions import ENCODINGS

    supported = [ENCODINGS[name] for name in ("none", "sinusoidal", "shape", "learned", "rope", "shaw", "nezha")]
    return position is None or type(position) in supported or is_bias_of_distance(position)


def scaling_of(position: Any) -> Any:
    """Return the RopeScaling of *position*; None if it has none, or if its frequencies are the usual ones."""
    from ..positions.rotary import RotaryEmbedding

    scaling = position.scaling if isinstance(position, RotaryEmbedding) else None
    return None if scaling is None or scaling.rope_type == "default" else scaling


def has_frequency_factors(position: Any) -> bool:
    """Return whether CTranslate2 needs a factor for each frequency of *position*, as in its "Su" scaling."""
    scaling = scaling_of(position)
    return scaling is not None and scaling.rope_type in ("yarn", "llama3", "proportional")


def name_of(position: Any) -> str:
    """Return the name of *position* in ``--position-encoding``, or that of its class if it has none there."""
    from ..positions import ENCODINGS

    names = (name for name, encoding in ENCODINGS.items() if encoding is type(position))
    return next(names, type(position).__name__)


def linear_of(fc1: Any) -> list[Any]:
    """Return the linear layers of the first part of a feed-forward layer: two of a gated one, else *fc1* itself."""
    from ..modules.feed_forward import GatedLinear

    return [fc1.gate, fc1.up] if isinstance(fc1, GatedLinear) else [fc1]


def attentions_of(layer: Any) -> list[Any]:
    """Return the self-attention of *layer*, and its cross-attention if it has one."""
    cross_attn = getattr(layer, "encoder_attn", None)
    return [layer.self_attn] if cross_attn is None else [layer.self_attn, cross_attn]


def key_value_heads(attention: Any) -> int:
    """Return the number of heads of keys and values of *attention*."""
    return int(attention.k_proj.out_features // attention.head_dim)


def refuse_unsupported(model: Any, path: str, quantization: str) -> None:
    """Raise an ExportError that names the first option of *model* that CTranslate2 does not support."""
    what = unsupported(model, quantization)
    if what is not None:
        raise ExportError(f"--path {path}: {what}, which CTranslate2 does not support")


def unsupported(model: Any, quantization: str) -> str | None:
    """Return what CTranslate2 does not support of *model* with weights in *quantization*, or None."""
    from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase, TransformerModelBase

    if not isinstance(model, TransformerModelBase):
        return f"it is a {type(model).__name__}, not a transformer_rope or transformer"
    encoder, decoder, cfg = model.encoder, model.decoder, model.cfg
    if not isinstance(encoder, TransformerEncoderBase) or not isinstance(decoder, TransformerDecoderBase):
        return f"its encoder is a {type(encoder).__name__}, its decoder a {type(decoder).__name__}"
    if not len(encoder.layers) or not len(decoder.layers):
        return "its encoder or decoder has no layers"
    sides, layers = {"encoder": encoder, "decoder": decoder}, [*encoder.layers, *decoder.layers]
    flags = {
        "adaptive-softmax-cutoff": decoder.adaptive_softmax is not None,
        "no-cross-attention": cfg.no_cross_attention,
        "cross-self-attention": cfg.cross_self_attention,
        "base-layers": cfg.base_layers,
        "attention-length-scaling": getattr(cfg, "attention_length_scaling", 0.0),
        f"activation-fn {cfg.activation_fn}": cfg.activation_fn not in ACTIVATIONS,
        "quant-noise-pq": any(side.quant_noise is not None for side in sides.values()),  # a layer after the embeddings
        **{f"{name}-xformers-att-config": getattr(getattr(cfg, name), "xformers_att_config", None) for name in sides},
        **{flag: any(getattr(layer, part, None) is not None for layer in layers) for part, flag in NORMFORMER.items()},
    }
    for flag, is_set in flags.items():
        if is_set:
            return f"it has --{flag}"
    parts = (
        unsupported_part(layer, position_of_side(side), name, quantization)
        for name, side in sides.items()
        for layer in side.layers
    )
    return next(filter(None, parts), None)


def unsupported_part(layer: Any, encoding: Any, side: str, quantization: str) -> str | None:
    """Return what CTranslate2 does not support of *layer*, or None; *encoding* is the position encoding of the side."""
    from torch import nn

    from ..modules.linear_attention import LinearSelfAttention

    attentions, position = attentions_of(layer), position_of(layer)
    linear = [*linear_of(layer.fc1), layer.fc2]
    for attention in attentions:
        linear += [attention.q_proj, attention.k_proj, attention.v_proj, attention.out_proj]
    if not all(type(module) is nn.Linear for module in linear):
        return f"layers of its {side} are quantised"
    if any(attention.bias_k is not None or attention.add_zero_attn for attention in attentions):
        return "its attention has extra keys"
    if isinstance(layer.self_attn, LinearSelfAttention):
        return f"its {side} has --attention-type linear"
    if not is_supported(position):
        return f"its {side} has the position encoding {name_of(position)}"
    if type(position) is not type(encoding):
        return f"layers of its {side} have different position encodings"
    scaling = scaling_of(position)
    if scaling is None:
        return None
    with_scaling = f"its {side} has --rope-scaling of the type {scaling.rope_type}"
    if scaling.depends_on_length:
        return with_scaling
    if has_frequency_factors(position) and quantization in ("float16", "bfloat16"):
        # It stores the factors of the frequencies in 16 bits and reads them as 32 bits.
        return f"{with_scaling} with --quantization {quantization}"
    return None
