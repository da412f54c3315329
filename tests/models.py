"""Models for tests: tables of their options, inputs for them, and functions on models."""

import torch

from fairseq_rope.positions import ENCODINGS

PAD, EOS = 1, 2

# -- options of models: name -> arguments of the fixture build() ---------------------------------------

FOUR_HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
LLAMA = {
    **{"encoder_normalize_before": True, "decoder_normalize_before": True, "norm_type": "rms", "ffn_type": "glu"},
    **{"scale_glu_width": True, "activation_fn": "swish", "no_projection_bias": True},
}
BLOCK_OPTIONS = {
    "rms": {"norm_type": "rms", "layernorm_embedding": True},
    "swiglu": {"ffn_type": "glu", "activation_fn": "swish"},
    "no biases": {"no_projection_bias": True},
    "two heads of keys": {**FOUR_HEADS, "encoder_kv_heads": 2, "decoder_kv_heads": 2},
    "multi-query": {**FOUR_HEADS, "encoder_kv_heads": 1, "decoder_kv_heads": 1, "cross_kv_heads": 1},
    "qk norm": {"qk_norm": True, "rope_layout": "half", "rope_fraction": 0.5},
    "llama": LLAMA,
    "all": {**LLAMA, **FOUR_HEADS, "encoder_kv_heads": 2, "decoder_kv_heads": 2, "cross_kv_heads": 1, "qk_norm": True},
}
LINEAR = {"attention_type": "linear"}
FAVOR = {**LINEAR, "feature_map": "favor", "favor_features": 12}
LINEAR_ATTENTION_OPTIONS = {
    "elu1": LINEAR,
    "favor": {**FAVOR, **FOUR_HEADS, "encoder_kv_heads": 2, "decoder_kv_heads": 1, "qk_norm": True},
    "half": {**LINEAR, "rope_layout": "half", "rope_fraction": 0.5, "norm_type": "rms", "no_projection_bias": True},
    "no positions": {**LINEAR, "position_encoding": "none"},
    "sinusoids": {**FAVOR, "position_encoding": "sinusoidal"},
    "xpos": {**LINEAR, "encoder_position_encoding": "rope", "decoder_position_encoding": "xpos"},
    "the decoder only": {"decoder_attention_type": "linear"},
}
ENCODING_OPTIONS = {
    **{name: {"position_encoding": name} for name in ENCODINGS if name != "xpos"},
    "xpos": {"encoder_position_encoding": "rope", "decoder_position_encoding": "xpos"},
}
MODELS = {
    **ENCODING_OPTIONS,
    **BLOCK_OPTIONS,
    **{f"linear, {name}": options for name, options in LINEAR_ATTENTION_OPTIONS.items()},
    "half": {"rope_layout": "half", "rope_fraction": 0.5},
    "a fraction, another base": {"rope_fraction": 0.25, "rope_base": 500.0},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 6}},
    "proportional": {"rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}},
    "one side scaled": {"encoder_rope_scaling": {"rope_type": "linear", "factor": 3}},
    "scaled by length": {"attention_length_scaling": 5.0},
    "pre-norm": {"encoder_normalize_before": True, "decoder_normalize_before": True},
    "normalised embeddings": {"layernorm_embedding": True, "no_scale_embedding": True},
    "normformer": {"scale_attn": True, "scale_fc": True, "scale_resids": True},
    "gelu": {"activation_fn": "gelu"},
    "other heads": {"decoder_attention_heads": 4, "encoder_attention_heads": 1},
    "another width": {"encoder_embed_dim": 32, "decoder_input_dim": 48, "decoder_output_dim": 48},
    "odd heads": {**FOUR_HEADS, "encoder_embed_dim": 20, "decoder_embed_dim": 20, "rope_fraction": 0.8},
}


# -- inputs and functions ------------------------------------------------------------------------------


def batch(lengths, left_pad, seed=0):
    """Token ids (B, T) with end of sentence, padded to the longest sentence; and the lengths."""
    torch.manual_seed(seed)
    longest = max(lengths)
    tokens = torch.full((len(lengths), longest), PAD)
    for row, length in zip(tokens, lengths, strict=True):
        sentence = torch.cat([torch.randint(4, 44, (length - 1,)), torch.tensor([EOS])])
        row[slice(longest - length, None) if left_pad else slice(length)] = sentence
    return tokens, torch.tensor(lengths)


def teacher_forced(model, source, lengths, target):
    """The scores of each word of *target* after the words before it."""
    previous = target.roll(1, dims=1)
    previous[:, 0] = EOS
    return model(source, lengths, previous)[0]


def with_different_norms(model):
    """*model* with norms that differ in each dimension, as after a training."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.rand_like(parameter) - 0.5)
    return model


def is_of_positions(name):
    """Whether a parameter or buffer of this *name* belongs to the position encoding."""
    return "embed_positions" in name or ".position." in name
