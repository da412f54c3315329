"""Decoding with a :class:`.Beams`: the beginning of a search, and the scores of the next words.

Shapes: N sentences, K hypotheses of each (the beam), B = N * K rows, S source positions, C the width, V words.
"""

from typing import Any

import torch
from fairseq.modules import LearnedPositionalEmbedding, SinusoidalPositionalEmbedding
from torch import Tensor

from ..modules.masks import aligned, pad_scores
from ..modules.overrides import is_exactly
from ..modules.shifted_sinusoids import ShiftedSinusoidalEmbedding
from ..positions.sharing import forward_pass
from ..transformer.decoder import Decoder
from .cache import Beams
from .projection import PackedProjection, project_packed
from .step import bind_all

# those that a step can call
EMBEDDINGS = (type(None), SinusoidalPositionalEmbedding, ShiftedSinusoidalEmbedding, LearnedPositionalEmbedding)


def begin(decoder: Any, encoder_out: dict[str, list[Tensor]], beam: int, projection: PackedProjection) -> Beams | None:
    """Return the state of a search with *beam* hypotheses a sentence; None if fairseq must call *decoder*.

    *encoder_out* has a row for each sentence. *projection* packs the weight of the projection onto the vocabulary.
    """
    if (
        not is_exactly(decoder, Decoder)
        or torch.is_grad_enabled()
        or type(decoder.embed_positions) not in EMBEDDINGS
        or decoder.layers.training  # then LayerDrop drops layers
    ):
        return None
    steps = bind_all(decoder.layers)
    if steps is None:
        return None
    states = encoder_out["encoder_out"][0].contiguous()  # (S, N, C)
    masks = encoder_out["encoder_padding_mask"]
    mask = pad_scores(masks[0], states) if masks and masks[0].any() else None
    if mask is not None and mask.device.type != "cpu":
        mask = aligned(mask)  # once, and not in each layer
    source: dict[Any, tuple[Tensor, ...]] = {}  # keys and values, each (N, G, S, D), contiguous
    for attention in (layer.encoder_attn for layer in decoder.layers):
        projected = attention.k_proj(states), attention.v_proj(states)
        source[attention] = tuple(attention._split_heads(x).contiguous() for x in projected)
    packed = projection.packed_weight(decoder.output_projection) if decoder.adaptive_softmax is None else None
    return Beams(states.size(1), beam, steps, source, mask, packed, states)


def log_probabilities(model: Any, tokens: Tensor, beams: Beams, temperature: float) -> Tensor:
    """Return the logarithms of *model*'s probabilities of the word after *tokens* (B, n): (B, V).

    Logits are divided by *temperature* first.
    """
    features = last_features(model.decoder, tokens, beams)
    if beams.packed is None or features.dtype != torch.float32:
        logits = model.decoder.output_layer(features)
    else:
        logits = project_packed(features, beams.packed)
    output = (logits.div_(temperature), {"attn": [None]})
    scores: Tensor = model.get_normalized_probs(output, log_probs=True, sample=None)
    return scores[:, -1]


def last_features(decoder: Any, tokens: Tensor, beams: Beams) -> Tensor:
    """Return what fairseq's ``extract_features_scriptable`` returns for the last of *tokens* (B, n): (B, 1, C).

    All modules except the layers are called as there.
    """
    last = tokens[:, -1:].contiguous()
    x = decoder.embed_scale * decoder.embed_tokens(last)
    if decoder.quant_noise is not None:
        x = decoder.quant_noise(x)
    if decoder.project_in_dim is not None:
        x = decoder.project_in_dim(x)
    if decoder.embed_positions is not None:
        x = x + decoder.embed_positions(tokens, incremental_state={})[:, -1:]
    if decoder.layernorm_embedding is not None:
        x = decoder.layernorm_embedding(x)
    x = decoder.dropout_module(x)  # (B, 1, C)
    beams.begin_step(beams.arranged(last.squeeze(1).eq(decoder.padding_idx)))
    x = beams.arranged(x.squeeze(1))
    with forward_pass(beams.source_length):
        for step in beams.steps:
            x = step(x, beams)
    x = x if beams.rows is None else x.index_select(0, beams.rows)
    if decoder.layer_norm is not None:
        x = decoder.layer_norm(x)
    x = x.unsqueeze(1)
    return x if decoder.project_out_dim is None else decoder.project_out_dim(x)
