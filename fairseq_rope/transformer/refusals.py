"""What our models refuse: options that contradict each other, or that our self-attention does not support."""

import difflib
from argparse import Namespace
from collections.abc import Iterable, Mapping
from typing import Any

from ..checkpoints import option_value
from ..errors import InputError, flag_of
from ..positions import DEFAULT, ENCODINGS, PositionEncoding
from ..positions.t5 import T5Bias
from .flags import OF_FEATURES, of_encodings, users_of
from .options import ModelOptions, SideOptions, flag_of_side, used_options


def refuse_encodings(args: Any, names: Mapping[str, str]) -> None:
    """Raise an InputError if a side cannot have its encoding in *names*, or *args* has an option of another one."""
    for side, name in names.items():
        if side not in ENCODINGS[name].sides:
            (other,) = ENCODINGS[name].sides
            if other not in names:
                flag = flag_of_side(args, "position_encoding", side)
                raise InputError(f"{flag} {name}: is for the {other} only, which this model lacks; use {DEFAULT}")
            raise InputError(
                f"{flag_of_side(args, 'position_encoding', side)} {name}: is for the {other} only; use "
                f"--{side}-position-encoding {DEFAULT} --{other}-position-encoding {name}"
            )
    used = used_options(args, names)
    for name in of_encodings():
        value, users = option_value(args, name), users_of(name)
        if name not in used and not (value is None or value is False or value == ""):
            encodings = " and ".join(f"{encoding} ({side})" for side, encoding in names.items())
            raise InputError(
                f"{flag_of(name)} {value}: is not used by the position encoding{'s'[: len(names) - 1]} {encodings}, "
                f"but by {' and '.join(users)}"
            )
    absolute = [side for side in names if ENCODINGS[names[side]].absolute]
    if absolute and option_value(args, "no_token_positional_embeddings"):
        raise InputError(
            "--no-token-positional-embeddings contradicts the position encoding "
            f"{names[absolute[0]]} of the {absolute[0]}; drop the flag, or use --position-encoding none"
        )


def refuse_unknown_names(names: Iterable[str], known: Iterable[str], place: str = "model") -> None:
    """Raise an InputError for the first of *names*, keys of a configuration, that is not *known*."""
    known_names = sorted(known)
    for name in names:
        if name not in known_names:
            nearest = difflib.get_close_matches(name, known_names, n=1, cutoff=0.5)
            hint = f"; the nearest name is {place}.{nearest[0]}" if nearest else ""
            raise InputError(f"{place}.{name}: neither fairseq nor fairseq-rope has an option of this name{hint}")


def refuse_what_cannot_work(args: Namespace, options: ModelOptions) -> None:
    """Raise a ValueError with one sentence if our self-attention does not support an option in *args*."""
    if option_value(args, "cross_self_attention"):
        raise ValueError(
            "--cross-self-attention has no meaning with positions in self-attention: its keys are the encoder's output "
            "followed by the prefix, which share no positions; drop the flag"
        )
    if getattr(args, "full_context_alignment", False) and "encoder" not in options.decoder.encoding_class.sides:
        raise ValueError(
            f"--full-context-alignment: lets the decoder see later words, and the position encoding "
            f"{options.decoder.encoding} is for earlier ones only; drop one of the two"
        )
    for side in options.sides:
        scaling = side.position.get("rope_scaling")
        if scaling and scaling.depends_on_length and not options.has_both_sides and side.side == "decoder":
            raise ValueError(
                f"{scaling.flag} {scaling.text}: the frequencies of {scaling.rope_type} depend on the length of the "
                "source, and a language model has none; use another rope_type"
            )
        if scaling and option_value(args, "checkpoint_activations") and scaling.depends_on_length:
            # a layer that is computed again does not know the length of the source
            raise ValueError(
                f"{scaling.flag} {scaling.text}: does not work with --checkpoint-activations, because the frequencies "
                f"of {scaling.rope_type} depend on the length of the source; drop one of the two"
            )
    if options.has_both_sides:
        refuse_output(args, options.decoder)
    refuse_unused_features(options)
    refuse_unused_buckets(options)
    refuse_heads(options)
    for side in options.sides:
        refuse_other_attention(side)
        if side.is_linear:
            refuse_with_linear_attention(args, side, options.attention_length_scaling)
    heads = options.values.get("cross_kv_heads")
    if heads and getattr(args, "no_cross_attention", False):
        raise ValueError(f"--cross-kv-heads {heads}: has no use with --no-cross-attention; drop one of the two")
    if any(side.scale_glu_width for side in options.sides) and all(side.ffn_type != "glu" for side in options.sides):
        raise ValueError("--scale-glu-width: is for gated feed-forward layers; add --ffn-type glu, or drop the flag")


def refuse_output(args: Namespace, decoder: SideOptions) -> None:
    """Raise a ValueError with one sentence if the output of a translation model cannot have the weights of its input.

    With tied weights, fairseq does not project the output to another width.
    """
    has_cutoff = bool(option_value(args, "adaptive_softmax_cutoff"))
    if has_cutoff and option_value(args, "tie_adaptive_weights"):
        raise ValueError("--tie-adaptive-weights: needs --adaptive-input, which translation models lack; drop the flag")
    shared = [] if has_cutoff else ["share_decoder_input_output_embed", "share_all_embeddings", "merge_src_tgt_embed"]
    name = next((name for name in (*shared, "tie_adaptive_weights") if option_value(args, name)), None)
    width = option_value(args, "decoder_output_dim")
    if name is not None and isinstance(width, int) and width != decoder.embed_dim:  # not "${model.decoder.embed_dim}"
        raise ValueError(
            f"{flag_of(name)}: --decoder-output-dim {width} must be equal to --decoder-embed-dim {decoder.embed_dim}"
        )


def refuse_heads(options: ModelOptions) -> None:
    """Raise a ValueError with one sentence if a number of heads leaves a remainder."""
    rows: list[tuple[str, int, str, int]] = []
    for side in options.sides:
        heads = f"{side.side}-attention-heads"
        rows.append((heads, side.heads, f"{side.side}-embed-dim", side.embed_dim))
        rows.append((f"{side.side}-kv-heads", side.kv_heads, heads, side.heads))
    if options.has_both_sides:
        rows.append(("cross-kv-heads", options.cross_kv_heads, "decoder-attention-heads", options.decoder.heads))
    for flag, number, divided_flag, divided in rows:
        if number < 1 or divided % number:
            raise ValueError(f"--{flag} {number}: must divide --{divided_flag} {divided} without remainder")


def refuse_other_attention(side: SideOptions) -> None:
    """Raise a ValueError with one sentence if a flag of fairseq asks for other positions or another attention."""
    name = side.side
    if side.learned_pos and side.encoding != "learned":
        raise ValueError(
            f"--{name}-learned-pos asks for learned absolute positions, but the {name}'s position encoding is "
            f"{side.encoding}; drop the flag, or use --{name}-position-encoding learned"
        )
    if side.xformers_att_config:
        raise ValueError(
            f"--{name}-xformers-att-config {side.xformers_att_config}: xFormers' attention has no position encodings; "
            "drop the flag"
        )


def refuse_unused_features(options: ModelOptions) -> None:
    """Raise a ValueError with one sentence if there are options of features that the attention does not have."""
    for name, option in OF_FEATURES.items():
        needs_favor, value = name != "feature_map", options.values[name]
        used = any(side.uses_favor if needs_favor else side.is_linear for side in options.sides)
        if value != option.default and not used:
            needed = "--feature-map favor" if needs_favor else "linear attention"
            raise ValueError(f"{flag_of(name)} {value}: is used with {needed} only; drop the flag")


def refuse_unused_buckets(options: ModelOptions) -> None:
    """Raise a ValueError with one sentence if there are options of T5's bias, and ``tupe`` leaves it out."""
    with_buckets = [side.position for side in options.sides if T5Bias.options.keys() <= side.position.keys()]
    if not all(position.get("tupe_absolute_only") for position in with_buckets):
        return
    for name, option in T5Bias.options.items():
        value = options.values.get(name, option.default)
        if value != option.default:
            raise ValueError(f"{flag_of(name)} {value}: has no use with --tupe-absolute-only; drop one of the two")


def refuse_with_linear_attention(args: Namespace, side: SideOptions, length_scaling: float) -> None:
    """Raise a ValueError with one sentence if linear attention cannot have the positions of *side*."""
    flag = f"{flag_of_side(args, 'attention_type', side.side)} linear"
    of_side = [name for name, cls in ENCODINGS.items() if side.side in cls.sides]
    possible = [name for name in of_side if not ENCODINGS[name].overrides("bias", "values")]
    if side.encoding not in possible:
        raise ValueError(
            f"{flag}: computes no scores of pairs, which the {side.side}'s position encoding {side.encoding} changes; "
            f"use one of {', '.join(possible)}"
        )
    if length_scaling:
        raise ValueError(f"--attention-length-scaling {length_scaling}: is for softmax; drop it, or {flag}")


def refuse_position(cfg: Any, side: SideOptions, position: PositionEncoding) -> None:
    """Raise a ValueError with one sentence if the attention or the training of *cfg* cannot have *position*."""
    scaling, factor = getattr(position, "scaling", None), getattr(position, "attention_factor", 1.0)
    if side.is_linear and scaling and factor != 1.0:
        raise ValueError(
            f"{scaling.flag} {scaling.text}: multiplies scores by {factor:.6g}², and linear attention has no scores; "
            'add "attention_factor": 1'
        )
    # With activation checkpointing, the gradient of a shared parameter comes from each layer in a backward pass of its
    # own, and torch's DistributedDataParallel accepts one gradient of a parameter.
    world_size, backend = (option_value(cfg, name) for name in ("distributed_world_size", "ddp_backend"))
    several = (world_size or 1) > 1 and backend in ("pytorch_ddp", "c10d")
    shares_parameters = side.encoding_class.shared and any(True for _ in position.parameters())
    shares_parameters = shares_parameters or bool(side.encoding_class.shared_parameters)
    if several and shares_parameters and cfg.checkpoint_activations:
        flag = "--offload-activations" if cfg.offload_activations else "--checkpoint-activations"
        raise ValueError(
            f"{flag}: needs --ddp-backend legacy_ddp with the position encoding {side.encoding}, whose parameters all "
            f"layers share; add the flag, or drop {flag}"
        )
