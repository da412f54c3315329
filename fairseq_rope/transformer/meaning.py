"""What makes two checkpoints the same model: everything that decides what the same weights compute.

Weights of other shapes do not load, so only the options that change the function are compared: those of our models
(:meth:`.ModelOptions.meaning`), and the fields of fairseq's ``TransformerConfig`` below, by the names of their flags.
"""

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fairseq.models.transformer import TransformerConfig

from ..checkpoints import CheckpointError
from ..checkpoints import option as option_of
from .defaults import complete
from .options import flag_of, is_ours, read

logger = logging.getLogger(__name__)
DEFAULTS = TransformerConfig()
# Two models that differ in one of these compute different outputs with the same weights, or use different weights of
# the checkpoint.
FUNCTION = (
    "activation_fn",
    *("encoder_attention_heads", "decoder_attention_heads", "encoder_normalize_before", "decoder_normalize_before"),
    *("no_scale_embedding", "layernorm_embedding", "cross_self_attention", "adaptive_softmax_cutoff"),
    *("quant_noise_scalar", "encoder_xformers_att_config", "decoder_xformers_att_config"),
    # With shared weights, the checkpoint has one tensor under several names.
    *("share_all_embeddings", "share_decoder_input_output_embed", "merge_src_tgt_embed"),
    *("tie_adaptive_weights", "tie_adaptive_proj"),
)
# Options of fairseq's transformer_align, multilingual_transformer and roberta, which change the function.
OF_OTHER_MODELS = (
    *("alignment_heads", "alignment_layer", "full_context_alignment"),
    *("share_encoder_embeddings", "share_decoder_embeddings", "share_encoders", "share_decoders"),
    *("untie_weights_roberta", "pooler_activation_fn"),
)
# Options that say how to read the weights, which with another value cannot even be a start, and what to do instead
OF_WEIGHTS = {
    "rope_layout": ", or convert the checkpoint first: python -m fairseq_rope convert-layout",
    "favor_seed": "",
}


class Difference(NamedTuple):
    """An option that differs between two models."""

    name: str
    flag: str
    first: Any
    second: Any


def _completed(given: Any) -> Any:
    """Return the options *given* with the defaults of our models."""
    options = complete(given)
    return given if options is None else options


def meaning(given: Any, layers: Mapping[str, Sequence[int]] | None = None) -> dict[str, Any]:
    """Return what decides what the same weights compute, by the names of options; equal models have equal dicts.

    *given* are the options of a model on the command line, of hydra or in a checkpoint, also of fairseq's own models.
    If only some layers of a side are used, *layers* has their numbers. Raises the InputError of :func:`.options.read`.
    """
    options = _completed(given)
    values = read(options).meaning(layers)
    if not is_ours(options):  # the encodings alone: our block and scalings are not there
        values = {name: value for name, value in values.items() if name.endswith("position_encoding")}
    for name in (*FUNCTION, *OF_OTHER_MODELS):
        value = option_of(options, name)
        value = getattr(DEFAULTS, name, None) if value is None else value
        values[name] = None if value is False else value
    cutoff = values["adaptive_softmax_cutoff"]  # "8,16" on the command line, and a list in a configuration
    values["adaptive_softmax_cutoff"] = ",".join(re.findall(r"\d+", str(cutoff or ""))) or None
    values["quant_noise_scalar"] = bool(values["quant_noise_scalar"]) or None  # quantised in evaluation with any amount
    if values["share_all_embeddings"] or values["merge_src_tgt_embed"]:
        values["share_decoder_input_output_embed"] = True
    return values


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Return in which options two :func:`meaning` differ, the position encodings first."""
    names = [name for name, value in first.items() if name in second and value != second[name]]
    return [Difference(name, flag_of(name), first[name], second[name]) for name in names]


def in_words(different: Iterable[Difference]) -> str:
    """Return "with --FLAG FIRST, not SECOND" for each difference, and "with" and "without" for switches."""
    parts = []
    for _, flag, *values in different:
        one, other = (_given(flag, value) for value in values)
        with_value = f"with {flag} "
        parts.append(f"{one}, not {other.removeprefix(with_value) if one.startswith(with_value) else other}")
    return " and ".join(parts)


def _given(flag: str, value: Any) -> str:
    if value is None or value is False or value == "":
        return f"without {flag}"
    return f"with {flag}" if value is True else f"with {flag} {value}"


def refuse_other_model(path: str, trained: Any, own: Any, is_meant: bool) -> None:
    """Refuse or report that a training continues from another model than its own.

    *trained* are the options of the model in the checkpoint *path*, and *own* those of the training. If *is_meant*, the
    user has said that the training is a new one, and one warning is logged.

    Raises:
        CheckpointError: the models are different, and this is not meant, or the weights could not be used
    """
    if trained is None:  # a checkpoint without options
        return
    # With --encoder-layers-to-keep, the layers that are dropped do not count.
    layers = {side.side: side.kept_layers for side in read(_completed(own)).sides if side.layers_to_keep}
    different = differences(meaning(trained, layers), meaning(own, layers))
    unreadable = [each for each in different if each.name in OF_WEIGHTS]
    if unreadable or (different and not is_meant):
        first = (unreadable or different)[0]
        start = f", or start another training from it, in another --save-dir, with --finetune-from-model {path}"
        way_out = OF_WEIGHTS.get(first.name, start)
        raise CheckpointError(f"{path} was trained {in_words([first])}; use the same value{way_out}")
    if different:
        logger.warning(f"{path} was trained {in_words(different)}: its weights are the start of another model")
