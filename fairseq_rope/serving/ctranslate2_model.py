"""The model of a checkpoint in CTranslate2's terms: its specification with the weights."""

import copy
from typing import TYPE_CHECKING, Any

from .ctranslate2_support import (
    ACTIVATIONS,
    attentions_of,
    has_frequency_factors,
    is_bias_of_distance,
    key_value_heads,
    linear_of,
    position_of,
    position_of_side,
    scaling_of,
)
from .exported_folder import INT8, ExportError

if TYPE_CHECKING:
    from fairseq.data import Dictionary

# Tokens, with the end, for which sinusoids and biases of distances are exported: CTranslate2 reads them from tables.
# In models without tables, fairseq-rope translate has a similar limit (LONGEST_LINE).
POSITIONS = 4096
NO_ROTATION = 1e30  # a frequency that is divided by this number is 0
# The largest weight in int8: 7 bits, with the sign. x86-64 CPUs without VNNI add two products of a weight and an
# activation (up to 255) in 16 bits, and cut a larger sum to 32,767: 2 * 255 * 127 is larger, and 2 * 255 * 63 is not.
LARGEST_INT8 = 63


def to_spec(model: Any, source: "Dictionary", target: "Dictionary") -> Any:
    """Return CTranslate2's ``TransformerSpec`` of *model* (eval mode, float32, CPU), with copies of its weights."""
    from ctranslate2.converters import fairseq as fairseq_converter
    from ctranslate2.specs import transformer_spec

    model = copy.deepcopy(model).requires_grad_(False)  # quantisation changes weights in place
    encoder, decoder = model.encoder, model.decoder
    activation = ACTIVATIONS[model.cfg.activation_fn]
    encoder_spec = transformer_spec.TransformerEncoderSpec(**_arguments(encoder, model.cfg.encoder, activation))
    projections = {"project_in": decoder.project_in_dim, "project_out": decoder.project_out_dim}
    of_decoder = _arguments(decoder, model.cfg.decoder, activation)
    of_decoder["project_in_out"] = any(module is not None for module in projections.values())
    # The attention of translate --replace-unk is the mean of all heads, as in fairseq.
    of_decoder["alignment_heads"] = decoder.layers[-1].encoder_attn.num_heads
    decoder_spec = transformer_spec.TransformerDecoderSpec(**of_decoder)
    for spec, side in ((encoder_spec, encoder), (decoder_spec, decoder)):
        embeddings = spec.embeddings[0] if isinstance(spec.embeddings, list) else spec.embeddings
        fairseq_converter.set_embeddings(embeddings, side.embed_tokens)
        spec.scale_embeddings = side.embed_scale
        if side.embed_positions is not None:
            spec.position_encodings.encodings = _positions(side.embed_positions)
        for name in ("layer_norm", "layernorm_embedding"):
            if getattr(side, name) is not None:
                _set_norm(getattr(spec, name), getattr(side, name))
        for layer_spec, layer in zip(spec.layer, side.layers):
            _set_position(layer_spec.self_attention, position_of(layer), bidirectional=side is encoder)
            _scale_queries(layer)
            _set_layer(layer_spec, layer)
    fairseq_converter.set_linear(decoder_spec.projection, decoder.output_projection)
    for name, module in projections.items():
        if module is not None:
            fairseq_converter.set_linear(getattr(decoder_spec, name), module)
        elif hasattr(decoder_spec, name):  # the specification has both or neither
            delattr(decoder_spec, name)
    spec = transformer_spec.TransformerSpec(encoder_spec, decoder_spec)
    spec.register_source_vocabulary(words(source))
    spec.register_target_vocabulary(words(target))
    spec.config.decoder_start_token = spec.config.eos_token
    spec.config.add_source_eos = True
    # Without a number, CTranslate2 uses those of the modules: 1e-5 in layer norms, 1e-6 in RMSNorms.
    spec.config.layer_norm_epsilon = None
    return spec


def _arguments(side: Any, cfg: Any, activation: str) -> dict[str, Any]:
    """Return the arguments of CTranslate2's specification of *side*, an encoder or decoder; *cfg* is its part."""
    from ctranslate2.specs import common_spec

    from ..modules.norms import RMSNorm

    layer = side.layers[0]
    arguments = {
        "rms_norm": isinstance(layer.final_layer_norm, RMSNorm),
        "ffn_glu": len(linear_of(layer.fc1)) == 2,
        "qk_norm": getattr(layer.self_attn, "q_norm", None) is not None,
        "num_layers": len(side.layers),
        "num_heads": cfg.attention_heads,
        "pre_norm": cfg.normalize_before,
        "no_final_norm": side.layer_norm is None,
        "activation": getattr(common_spec.Activation, activation),
        "layernorm_embedding": side.layernorm_embedding is not None,
    }
    if any(key_value_heads(attention) != attention.num_heads for attention in attentions_of(layer)):
        arguments["num_heads_kv"] = key_value_heads(layer.self_attn)  # _set_layer sets that of each attention
    return {**arguments, **_position_arguments(side)}


def _position_arguments(side: Any) -> dict[str, Any]:
    """Return the arguments of CTranslate2's specification that are about the positions of *side*."""
    from ctranslate2.specs.attention_spec import RotaryScalingType

    from ..positions.rotary import RotaryEmbedding
    from ..positions.shaw import Shaw

    position = position_of_side(side)
    if is_bias_of_distance(position):
        return {"relative_attention_bias": True}
    if isinstance(position, Shaw):
        return {"relative_position": True}
    if not isinstance(position, RotaryEmbedding):
        if side.embed_positions is not None:
            return {}
        # CTranslate2 adds sinusoids to a model without positions, but not if it rotates, here by angles of 0.
        linear = {"rotary_scaling_type": RotaryScalingType.Linear, "rotary_scaling_factor": NO_ROTATION}
        return {"rotary_dim": 2, **linear}
    scaling, dim, base = scaling_of(position), position.dim, position.base
    arguments = {"rotary_dim": dim, "rotary_interleave": position.interleaved, "rotary_base": base}
    if has_frequency_factors(position):
        arguments["rotary_scaling_type"] = RotaryScalingType.Su
    elif scaling is not None and scaling.rope_type == "linear":
        factor = scaling.values["factor"]
        arguments.update(rotary_scaling_type=RotaryScalingType.Linear, rotary_scaling_factor=factor)
    elif scaling is not None:  # ntk
        arguments["rotary_base"] = scaling.larger_base(base, dim)
    return arguments


def _set_layer(spec: Any, layer: Any) -> None:
    """Set the weights of *layer* in CTranslate2's specification of a layer."""
    import numpy as np
    from ctranslate2.converters import fairseq as fairseq_converter

    names = (("self_attention", "self_attn_layer_norm"), ("attention", "encoder_attn_layer_norm"))
    for attention, (spec_name, norm_name) in zip(attentions_of(layer), names):
        attention_spec, norm = getattr(spec, spec_name), getattr(layer, norm_name)
        is_self = attention is layer.self_attn
        fairseq_converter.set_multi_head_attention(attention_spec, attention, self_attention=is_self)
        _set_norm(attention_spec.layer_norm, norm)
        if hasattr(attention_spec, "num_heads_kv"):
            attention_spec.num_heads_kv = np.int32(key_value_heads(attention))
        for name in ("q_norm", "k_norm"):
            head_norm = getattr(attention, name, None)
            if head_norm is not None:
                _set_norm(getattr(attention_spec, name), head_norm)
            elif hasattr(attention_spec, name):  # of cross-attention, which has none
                delattr(attention_spec, name)
    first, *gated = linear_of(layer.fc1)
    fairseq_converter.set_linear(spec.ffn.linear_0, first)
    if gated:
        fairseq_converter.set_linear(spec.ffn.linear_0_noact, *gated)
    fairseq_converter.set_linear(spec.ffn.linear_1, layer.fc2)
    _set_norm(spec.ffn.layer_norm, layer.final_layer_norm)


def _set_norm(spec: Any, norm: Any) -> None:
    spec.gamma = norm.weight.numpy()
    if getattr(norm, "bias", None) is not None:
        spec.beta = norm.bias.numpy()


def _set_position(spec: Any, position: Any, bidirectional: bool) -> None:
    """Set the parameters of *position* in CTranslate2's specification of a self-attention."""
    import numpy as np

    from ..positions.rotary import frequencies
    from ..positions.shaw import Shaw

    if is_bias_of_distance(position):
        spec.relative_attention_bias = _bias_table(position, bidirectional)
        spec.relative_attention_max_distance = np.int32(2 * POSITIONS)
    elif isinstance(position, Shaw):
        spec.relative_position_keys = position.relative_position_keys.numpy()
        spec.relative_position_values = position.relative_position_values.numpy()
    elif has_frequency_factors(position):
        factors = frequencies(position.dim, position.base) / position.theta
        factors = factors.clamp(max=NO_ROTATION).float().numpy()
        # CTranslate2 uses one of the two, by the length of the input.
        spec.rotary_scaling_short_factor = spec.rotary_scaling_long_factor = factors


def _scale_queries(layer: Any) -> None:
    """Multiply the query projection of *layer* by the square of the attention factor of its RoPE scaling.

    RoPE multiplies rotated queries and rotated keys by this factor, which CTranslate2 does not do. If a norm follows
    the projection, its weight is multiplied instead.
    """
    attention, position = layer.self_attn, position_of(layer)
    if scaling_of(position) is not None and position.attention_factor != 1.0:
        scaled = attention.q_proj if attention.q_norm is None else attention.q_norm
        for parameter in scaled.parameters():
            heads = parameter.unflatten(0, (-1, attention.head_dim))
            heads[:, : position.dim] *= position.attention_factor**2


def _bias_table(position: Any, bidirectional: bool) -> Any:
    """Return the bias at each distance below POSITIONS, as a table of T5's buckets: (buckets, heads).

    If a direction has 2 * POSITIONS buckets, then CTranslate2 gives each distance below POSITIONS a bucket of its own.
    The other buckets are for larger distances; they have the bias of the largest of these distances.
    """
    import torch

    past = -torch.arange(2 * POSITIONS).clamp(max=POSITIONS - 1)
    distance = torch.cat([past, -past]) if bidirectional else past
    return position.by_distance(distance).t().contiguous().numpy()


def _positions(embedding: Any) -> Any:
    """Return the vectors of all learnt positions, or of POSITIONS or more sinusoidal positions."""
    from fairseq.modules import SinusoidalPositionalEmbedding

    first = embedding.padding_idx + 1
    if isinstance(embedding, SinusoidalPositionalEmbedding):
        count = first + _count(embedding)
        return embedding.get_embedding(count, embedding.embedding_dim, embedding.padding_idx)[first:].numpy()
    return embedding.weight.detach()[first:].numpy()


def _count(embedding: Any) -> int:
    """Return the number of vectors that :func:`_positions` returns."""
    from fairseq.modules import SinusoidalPositionalEmbedding

    first = embedding.padding_idx + 1
    if isinstance(embedding, SinusoidalPositionalEmbedding):
        return max(POSITIONS, len(embedding.weights) - first)
    return len(embedding.weight) - first


def quantize(spec: Any, quantization: str) -> None:
    """Convert the weights of *spec* to the type *quantization*, and save equal ones only once.

    CTranslate2's own conversion uses all 8 bits in int8: a row is multiplied by 127 / its largest absolute value and
    rounded (``LayerSpec.optimize`` in ``ctranslate2/specs/model_spec.py``). This one multiplies it by LARGEST_INT8.
    """
    if quantization in INT8:
        spec.optimize()  # equal weights become names of the first one
        _quantize_layer(spec)
    else:
        spec.optimize(quantization=None if quantization == "float32" else quantization)


def _quantize_layer(spec: Any) -> None:
    """Quantise each weight of *spec* and the layers in it that has a scale."""
    import numpy as np
    from ctranslate2.specs.model_spec import NumpyVariable

    for name, value in list(vars(spec).items()):
        if hasattr(spec, f"{name}_scale") and not isinstance(value, str):
            weight = value.numpy()
            scale = np.float32(LARGEST_INT8) / np.abs(weight).max(axis=1, keepdims=True, initial=np.float32(1e-30))
            setattr(spec, name, NumpyVariable(np.rint(weight * scale).astype(np.int8)))
            setattr(spec, f"{name}_scale", NumpyVariable(scale[:, 0]))
        for layer in value if isinstance(value, list) else [value]:
            if hasattr(layer, "optimize"):
                _quantize_layer(layer)


def words(dictionary: "Dictionary") -> list[str]:
    """Return the entries of *dictionary* under CTranslate2's names; raise an ExportError if two have the same."""
    names = ["<blank>" if word == dictionary.pad_word else word for word in dictionary.symbols]
    repeated = next((word for word in names if names.count(word) > 1), None) if len(set(names)) < len(names) else None
    if repeated is not None:
        twice = f"its dictionary has the word {repeated} twice (CTranslate2 calls padding <blank>)"
        raise ExportError(f"{twice}, and CTranslate2 would use only one of them")
    return names


def position_limits(model: Any) -> dict[str, int | None]:
    """Return the setting ``positions``: the number of tokens, with the end, that have positions; None: any number."""
    limits: dict[str, int | None] = {}
    for name, side in (("source", model.encoder), ("target", model.decoder)):
        if side.embed_positions is not None:
            limits[name] = _count(side.embed_positions)
        else:
            limits[name] = POSITIONS if is_bias_of_distance(position_of_side(side)) else None
    return limits
