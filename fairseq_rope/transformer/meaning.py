"""What makes two checkpoints the same model: everything that decides what the same weights compute.

Weights of other shapes do not load, so only the options that change the function are compared: those of our models
(:func:`meaning_of`), and the fields of fairseq's ``TransformerConfig`` below, by the names of their flags.
"""

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from fairseq.models.transformer import TransformerConfig

from ..checkpoints import CheckpointError, option_value
from ..errors import flag_of
from .defaults import complete
from .flags import BOTH_BLOCK_OPTIONS, WITH_SIDES
from .options import ModelOptions, encodings_of, is_ours, is_pruned, read

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
OTHER_MODEL_OPTIONS = (
    *("alignment_heads", "alignment_layer", "full_context_alignment"),
    *("share_encoder_embeddings", "share_decoder_embeddings", "share_encoders", "share_decoders"),
    *("untie_weights_roberta", "pooler_activation_fn"),
)
# Options that say how to read the weights, which with another value cannot even be a start, and what to do instead
WEIGHT_OPTIONS = {
    "rope_layout": ", or convert the checkpoint first: python -m fairseq_rope convert-layout",
    "favor_seed": "",
}
IN_TRAINING_ONLY = ("shape_max_shift",)  # options of encodings that do not change what a trained model computes


class Difference(NamedTuple):
    """An option that differs between two models."""

    name: str
    flag: str
    first: Any
    second: Any


def meaning_of(options: ModelOptions) -> dict[str, Any]:
    """Return what decides what the same weights compute, by the names of the options."""
    values: dict[str, Any] = {f"{side.side}_position_encoding": side.encoding for side in options.sides}
    for name in dict.fromkeys(name for side in options.sides for name in side.position if name not in IN_TRAINING_ONLY):
        values[name] = one_value({side.side: side.position[name] for side in options.sides if name in side.position})
    values["attention_length_scaling"] = options.attention_length_scaling
    for name in BOTH_BLOCK_OPTIONS:
        if name in WITH_SIDES:
            values.update({f"{side.side}_{name}": getattr(side, name) for side in options.sides})
        else:
            values[name] = getattr(options.sides[0], name)
    heads = {f"{side.side}_kv_heads": (side.kv_heads, side.heads) for side in options.sides}
    if options.has_both_sides:
        heads["cross_kv_heads"] = (options.cross_kv_heads, options.decoder.heads)
    values.update({name: 0 if number == all_heads else number for name, (number, all_heads) in heads.items()})
    if any(side.is_linear for side in options.sides):
        values["feature_map"] = options.sides[0].feature_map
    with_favor = [side for side in options.sides if side.uses_favor]
    if with_favor:
        values["favor_features"] = one_value({side.side: side.features for side in with_favor})
        values["favor_seed"] = with_favor[0].favor_seed
    return values


def one_value(by_side: Mapping[str, Any]) -> Any:
    """Return the value that all sides have in common, or a text with the value of each."""
    first, *others = by_side.values()
    if all(value == first for value in others):
        return first
    return ", ".join(f"{value} ({side})" for side, value in by_side.items())


def _completed(options: Any) -> Any:
    """Return *options* with the defaults of our models."""
    completed = complete(options)
    return options if completed is None else completed


def meaning(options: Any) -> dict[str, Any]:
    """Return what decides what the same weights compute, by the names of options; equal models have equal dicts.

    *options* are those of a model on the command line, of hydra or in a checkpoint, also of fairseq's own models.
    Raises the errors of :func:`.options.read`.
    """
    options = _completed(options)
    if is_ours(options):
        values = meaning_of(read(options))
    else:  # the encodings alone: our block and scalings are not there, and the layers can be those of convolutions
        values = {f"{side}_position_encoding": encoding for side, encoding in encodings_of(options).items()}
    for name in (*FUNCTION, *OTHER_MODEL_OPTIONS):
        value = option_value(options, name)
        value = getattr(DEFAULTS, name, None) if value is None else value
        values[name] = None if value is False else value
    cutoff = values["adaptive_softmax_cutoff"]  # "8,16" on the command line, and a list in a configuration
    values["adaptive_softmax_cutoff"] = ",".join(re.findall(r"\d+", str(cutoff or ""))) or None
    values["quant_noise_scalar"] = bool(values["quant_noise_scalar"]) or None  # quantised in evaluation with any amount
    if values["share_all_embeddings"] or values["merge_src_tgt_embed"]:
        values["share_decoder_input_output_embed"] = True
    return values


def option_differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[Difference]:
    """Return in which options two :func:`meaning` differ, the position encodings first."""
    names = [name for name, value in first.items() if name in second and value != second[name]]
    return [Difference(name, flag_of(name), first[name], second[name]) for name in names]


def describe(different: Iterable[Difference]) -> str:
    """Return "with --FLAG FIRST, not SECOND" for each difference, and "with" and "without" for switches."""
    parts = []
    for _, flag, *values in different:
        first, second = (_with_flag(flag, value) for value in values)
        with_value = f"with {flag} "
        parts.append(f"{first}, not {second.removeprefix(with_value) if first.startswith(with_value) else second}")
    return " and ".join(parts)


def _with_flag(flag: str, value: Any) -> str:
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
    trained, own = (_completed(options) for options in (trained, own))
    for side in (side for side in read(own).sides if side.layers_to_keep):
        of_checkpoint = option_value(trained, f"{side.side}_layers")
        is_whole = isinstance(of_checkpoint, int) and not is_pruned(of_checkpoint, str(side.layers_to_keep))
        if is_whole and max(side.kept_layers) >= of_checkpoint:
            flag = f"--{side.side}-layers-to-keep {side.layers_to_keep}"
            raise CheckpointError(f"{flag}: {path} has only the layers 0 to {of_checkpoint - 1} of the {side.side}")
    different = option_differences(meaning(trained), meaning(own))
    unreadable = [difference for difference in different if difference.name in WEIGHT_OPTIONS]
    if unreadable or (different and not is_meant):
        first = (unreadable or different)[0]
        start = f", or start another training from it, in another --save-dir, with --finetune-from-model {path}"
        way_out = WEIGHT_OPTIONS.get(first.name, start)
        raise CheckpointError(f"{path} was trained {describe([first])}; use the same value{way_out}")
    if different:
        logger.warning(f"{path} was trained {describe(different)}: its weights are the start of another model")
