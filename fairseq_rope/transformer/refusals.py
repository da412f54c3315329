"""What our models refuse: options with which a model would silently be another one than the user asked for."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from ..checkpoints import option_value
from ..errors import InputError, flag_of
from ..positions import ENCODINGS
from ..positions.scaling import RopeScaling
from ..positions.t5 import T5Bias
from .flags import BLOCK_OPTIONS, encoding_options, used_options
from .options import ModelOptions, SideOptions, flag_of_side, model_sides


def refuse_encodings(args: Any, names: Mapping[str, str]) -> None:
    """Raise an InputError if a side cannot have its encoding in *names*, or *args* has an option of another one."""
    for side, name in names.items():
        flag, encoding = flag_of_side(args, "position_encoding", side), ENCODINGS[name]
        if side not in encoding.sides:
            raise InputError(f"{flag} {name}: is for the {' and '.join(encoding.sides)} only, not for the {side}")
        if encoding.absolute and option_value(args, "no_token_positional_embeddings"):
            raise InputError(f"--no-token-positional-embeddings: contradicts {flag} {name}; drop one of the two")
        if name != "learned" and option_value(args, f"{side}_learned_pos"):
            raise InputError(
                f"--{side}-learned-pos: contradicts {flag} {name}; use --{side}-position-encoding learned instead"
            )
    used = used_options(names)
    for name in encoding_options():
        value = option_value(args, name)
        if name not in used and not (value is None or value is False or value == ""):
            encodings = " and ".join(f"{encoding} ({side})" for side, encoding in names.items())
            raise InputError(f"{flag_of(name)} {value}: is not used by the position encodings {encodings}")


def refuse_contradictions(args: Namespace, options: ModelOptions) -> None:
    """Raise a ValueError if our self-attention would ignore an option in *args*, or compute something else with it."""
    if option_value(args, "cross_self_attention"):
        raise ValueError(
            "--cross-self-attention: its keys, the encoder's output and the prefix, share no positions; drop the flag"
        )
    if option_value(args, "full_context_alignment") and "encoder" not in options.decoder.encoding_class.sides:
        raise ValueError(
            f"--full-context-alignment: lets the decoder see later words, and the position encoding "
            f"{options.decoder.encoding} is for earlier ones only; drop one of the two"
        )
    sides = options.sides
    has_use = {
        "attention_length_scaling": not any(side.is_linear for side in sides),
        "feature_map": any(side.is_linear for side in sides),
        **dict.fromkeys(("favor_features", "favor_seed"), any(side.uses_favor for side in sides)),
        "cross_kv_heads": not option_value(args, "no_cross_attention"),
    }
    for name in T5Bias.options:
        has_use[name] = any(name in side.position and not side.position.get("tupe_absolute_only") for side in sides)
    for name, is_used in has_use.items():
        value, default = options.values.get(name), {**BLOCK_OPTIONS, **T5Bias.options}[name].default
        if value not in (None, default) and not is_used:
            raise ValueError(f"{flag_of(name)} {value}: would have no effect with the other options; drop it")
    heads_of = {f"{side.side}_kv_heads": side.heads for side in sides}
    for name, heads in {**heads_of, "cross_kv_heads": sides[-1].heads}.items():
        number = options.values.get(name)
        if number and heads % number:
            raise ValueError(f"{flag_of(name)} {number}: must divide the number of attention heads, {heads}")
    for side in sides:
        refuse_side(args, side)


def refuse_side(args: Namespace, side: SideOptions) -> None:
    """Raise a ValueError if the attention of *side* cannot have its positions."""
    xformers = option_value(args, f"{side.side}_xformers_att_config")
    if xformers:
        raise ValueError(f"--{side.side}-xformers-att-config {xformers}: xFormers' attention has no position encodings")
    if side.is_linear and side.encoding_class.overrides("bias", "values"):
        linear = flag_of_side(args, "attention_type", side.side)
        raise ValueError(f"{linear} linear: computes no scores of pairs, which {side.encoding} changes")
    given = side.position.get("rope_scaling")
    if given:
        scaling, flag = RopeScaling(given), f"{flag_of_side(args, 'rope_scaling', side.side)} {given}"
        if scaling.depends_on_length and side.side == "decoder" and model_sides(args) == ("decoder",):
            raise ValueError(f"{flag}: depends on the length of the source, and a language model has none")
        if side.is_linear and scaling.attention_factor() != 1.0:
            raise ValueError(f'{flag}: multiplies scores, which linear attention lacks; add "attention_factor": 1')
