"""The flags of our models: one table, and the configuration class that fairseq makes its parser of.

A flag of one side, such as ``--encoder-attention-type``, replaces the flag of both sides (:func:`.options.side_value`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, make_dataclass
from typing import Any, Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models.transformer import TransformerConfig

from ..errors import flag_of
from ..positions import DEFAULT, ENCODINGS
from ..positions.interface import SIDES, Option


def length_scaling(value: Any, flag: str) -> float:
    """Return *value*, an average length; raise a ValueError if it is neither 0 nor above 1."""
    if type(value) not in (int, float) or not (value == 0 or 1 < value < math.inf):
        raise ValueError(f"{flag} {value}: must be a number above 1, or 0")
    return float(value)


# options of the block that both sides have
BOTH_BLOCK_OPTIONS = {
    "norm_type": Option("layer", "layer norm (layer), or RMSNorm without mean and bias (rms)", ("layer", "rms")),
    "ffn_type": Option(
        "mlp", "feed-forward layers: fc2(act(fc1(x))) (mlp), or fc2(act(gate(x)) * up(x)) (glu)", ("mlp", "glu")
    ),
    "scale_glu_width": Option(False, "gated layers have 2/3 of the inner width, which keeps the number of parameters"),
    "attention_type": Option("softmax", "self-attention: softmax, or linear in the length", ("softmax", "linear")),
    "qk_norm": Option(False, "RMSNorm of each head's queries and keys of self-attention"),
    "no_projection_bias": Option(False, "no biases in attention's projections and in feed-forward layers"),
}
KV_HEAD_OPTIONS = {
    f"{name}_kv_heads": Option(
        0,
        f"number of heads of keys and values in {where}; 0: as many as heads of queries, 1: multi-query attention",
        range(2**16),
    )
    for name, where in (*((side, f"self-attention of the {side}") for side in SIDES), ("cross", "cross-attention"))
}
FEATURE_OPTIONS = {
    "feature_map": Option(
        "elu1", "of linear attention: elu(x) + 1, or favor, random features for softmax", ("elu1", "favor")
    ),
    "favor_features": Option(0, "number of favor's features of a head of D, even; 0: D ln D", range(0, 2**16 + 1, 2)),
    "favor_seed": Option(0, "seed of favor's random vectors"),
}
# options that also have a flag for each side
WITH_SIDES = ("position_encoding", "rope_scaling", "attention_type")


def _with_sides(options: Mapping[str, Option]) -> dict[str, Option]:
    """Return *options*, with those of each side that replace them: "encoder_attention_type", …."""
    of_one_side = {
        f"{side}_{name}": option._replace(
            default=None if option.default else option.default, help=f"that of the {side}; default: {flag_of(name)}"
        )
        for name, option in options.items()
        if name in WITH_SIDES
        for side in SIDES
    }
    return {**options, **of_one_side}


POSITION_OPTIONS = _with_sides({"position_encoding": Option(DEFAULT, "position encoding of all sides")})
# options of attention and of the block around it, with any encoding
BLOCK_OPTIONS = {
    "attention_length_scaling": Option(
        0.0,
        "average number of tokens of a training sentence: queries of self- and cross-attention are multiplied by "
        "ln(number of keys) / ln(this number); 0: they are not",
        read=length_scaling,
    ),
    **_with_sides(BOTH_BLOCK_OPTIONS),
    **KV_HEAD_OPTIONS,
    **FEATURE_OPTIONS,
}


def encoding_options(sides: Sequence[str] = SIDES) -> dict[str, Option]:
    """Return the options of all encodings on these *sides*, also of those that a user dir has added.

    Raises:
        ValueError: two encodings have different options of one name
    """
    options: dict[str, Option] = {}
    for encoding, side in ((one, side) for one in ENCODINGS.values() for side in sides if side in one.sides):
        for name, option in encoding.options_of(side).items():
            known = options.setdefault(name, option)
            if option._replace(help="") != known._replace(help=""):
                raise ValueError(f"two position encodings have different options {name}: give one another name")
    return _with_sides(options)


def used_options(encodings: Mapping[str, str]) -> dict[str, Option]:
    """Return the options of a model whose sides have these *encodings*: those of its positions and of its block."""
    used = [(side, option) for side, name in encodings.items() for option in ENCODINGS[name].options_of(side)]
    names = {name for side, option in used for name in (option, f"{side}_{option}")}
    options = {name: option for name, option in encoding_options().items() if name in names}
    return options_of_sides({**options, **BLOCK_OPTIONS}, list(encodings))


def options_of_sides(options: Mapping[str, Option], sides: Sequence[str]) -> dict[str, Option]:
    """Return those of *options* that a model with these *sides* has; cross-attention needs both."""
    missing = () if len(sides) == len(SIDES) else tuple(f"{side}_" for side in ("cross", *SIDES) if side not in sides)
    return {name: option for name, option in options.items() if not name.startswith(missing)}


def all_flags(sides: Sequence[str] = SIDES) -> dict[str, Option]:
    """Return the options that our models with these *sides* add to fairseq's."""
    flags = {**POSITION_OPTIONS, **BLOCK_OPTIONS, **encoding_options(sides)}
    with_names = f"{flags['position_encoding'].help}: one of {', '.join(ENCODINGS)}"
    flags["position_encoding"] = Option(DEFAULT, with_names)
    return options_of_sides(flags, sides)


def config_class(base: type[FairseqDataclass] = TransformerConfig, sides: Sequence[str] = SIDES) -> Any:
    """Return fairseq's configuration *base* with :func:`all_flags`, and with the activation swish, which it omits."""
    text_or_none = Optional[str]  # noqa: UP045  fairseq reads no types of the form str | None
    activations = ChoiceEnum(list(dict.fromkeys([*utils.get_available_activation_fns(), "swish"])))
    activation: Any = field(default="relu", metadata={"help": "activation function to use"})
    compiles: Any = field(default=False, metadata={"help": "compile the layers for training with torch.compile"})
    fields: list[Any] = [("activation_fn", activations, activation)]
    fields += [("compile", bool, compiles)] if len(sides) == len(SIDES) else []
    fields += [
        (name, type(default) if default is not None else text_or_none, field(default=default, metadata={"help": text}))
        for name, (default, text, *_) in all_flags(sides).items()
    ]
    return make_dataclass("TransformerRopeConfig", fields, bases=(base,))
