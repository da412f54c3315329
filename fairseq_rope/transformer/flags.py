"""The flags of our models: one table, and the configuration class that fairseq makes its parser of.

A flag of one side, such as ``--encoder-attention-type``, replaces the flag of both sides (:func:`.options.side_value`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import field, make_dataclass
from functools import partial
from typing import Any, Optional

from fairseq import utils
from fairseq.dataclass import ChoiceEnum, FairseqDataclass
from fairseq.models.transformer import TransformerConfig

from ..errors import flag_of
from ..positions import DEFAULT, ENCODINGS
from ..positions.interface import SIDES, Option, natural_number
from .sides import options_of_sides


def length_scaling(value: Any, flag: str) -> float:
    """Return *value*, an average length; raise a ValueError if it is neither 0 nor above 1."""
    if type(value) not in (int, float) or not (value == 0 or 1 < value < math.inf):
        raise ValueError(f"{flag} {value}: must be a number above 1, or 0")
    return float(value)


def one_of(*choices: str) -> Any:
    """Return a function for ``Option.read`` that allows only *choices*."""

    def read(value: Any, flag: str) -> str:
        if value not in choices:
            raise ValueError(f"{flag} {value}: must be one of {', '.join(choices)}")
        return str(value)

    return read


LENGTH_SCALING = Option(
    0.0,
    "average number of tokens of a training sentence: queries of self- and cross-attention are multiplied by "
    "ln(number of keys) / ln(this number); 0: they are not",
    length_scaling,
)
# options of the block that both sides have
OF_BOTH_BLOCKS = {
    "norm_type": Option("layer", "layer norm (layer), or RMSNorm without mean and bias (rms)", one_of("layer", "rms")),
    "ffn_type": Option(
        "mlp", "feed-forward layers: fc2(act(fc1(x))) (mlp), or fc2(act(gate(x)) * up(x)) (glu)", one_of("mlp", "glu")
    ),
    "scale_glu_width": Option(False, "gated layers have 2/3 of the inner width, which keeps the number of parameters"),
    "attention_type": Option(
        "softmax", "self-attention: softmax, or linear in the length", one_of("softmax", "linear")
    ),
    "qk_norm": Option(False, "RMSNorm of each head's queries and keys of self-attention"),
    "no_projection_bias": Option(False, "no biases in attention's projections and in feed-forward layers"),
}
KV_HEADS = {
    f"{name}_kv_heads": Option(
        0,
        f"number of heads of keys and values in {where}; 0: as many as heads of queries, 1: multi-query attention",
        natural_number,
    )
    for name, where in (*((side, f"self-attention of the {side}") for side in SIDES), ("cross", "cross-attention"))
}
OF_FEATURES = {
    "feature_map": Option(
        "elu1", "of linear attention: elu(x) + 1, or favor, random features for softmax", one_of("elu1", "favor")
    ),
    "favor_features": Option(
        0, "number of favor's features of a head of D, even; 0: D ln D", partial(natural_number, largest=2**16, step=2)
    ),
    "favor_seed": Option(0, "seed of favor's random vectors", natural_number),
}
# options that also have a flag for each side
WITH_SIDES = ("position_encoding", "rope_scaling", "attention_type")


def _with_sides(options: Mapping[str, Option]) -> dict[str, Option]:
    """Return *options*, with those of each side that replace them: "encoder_attention_type", …."""
    of_one_side = {
        f"{side}_{name}": Option(
            None if option.default else option.default, f"that of the {side}; default: {flag_of(name)}", option.read
        )
        for name, option in options.items()
        if name in WITH_SIDES
        for side in SIDES
    }
    return {**options, **of_one_side}


OF_POSITIONS = _with_sides({"position_encoding": Option(DEFAULT, "position encoding of both sides")})
# options of attention and of the block around it, with any encoding
OF_BLOCK = {"attention_length_scaling": LENGTH_SCALING, **_with_sides(OF_BOTH_BLOCKS), **KV_HEADS, **OF_FEATURES}


def of_encodings(sides: Sequence[str] = SIDES) -> dict[str, Option]:
    """Return the options of all encodings on these *sides*, also of those that a user dir has added.

    Raises:
        ValueError: two encodings have different options of one name
    """
    used = ((user, encoding, side) for user, encoding in ENCODINGS.items() for side in sides if side in encoding.sides)
    options, owners = dict[str, Option](), dict[str, str]()
    for user, encoding, side in used:
        for name, option in encoding.options_of(side).items():
            known, owner = options.setdefault(name, option), owners.setdefault(name, user)
            if (option.default, option.read) != (known.default, known.read):
                raise ValueError(f"{user} and {owner} have different options {name}: give one of them another name")
    return _with_sides(options)


def users_of(name: str) -> list[str]:
    """Return the encodings that use the option *name*, which can be that of a side; [] if it is no encoding's.

    "alibi in the encoder" is an encoding that uses it there only.
    """
    users, of_side = [], [side for side in SIDES if name.startswith(f"{side}_")]
    for user, encoding in ENCODINGS.items():
        using = [side for side in SIDES if name in encoding.options_of(side)]
        using = using or [side for side in of_side if name.partition("_")[2] in encoding.options_of(side)]
        if using:
            users.append(user if len(using) == len(SIDES) else f"{user} in the {using[0]}")
    return users


def all_flags(sides: Sequence[str] = SIDES) -> dict[str, Option]:
    """Return the options that our models with these *sides* add to fairseq's."""
    where = f"of {'both sides' if len(sides) == len(SIDES) else f'the {sides[0]}'}"
    both = Option(DEFAULT, f"position encoding {where}: one of {', '.join(ENCODINGS)}")
    return options_of_sides({**OF_POSITIONS, "position_encoding": both, **OF_BLOCK, **of_encodings(sides)}, sides)


def config_class(base: type[FairseqDataclass] = TransformerConfig, sides: Sequence[str] = SIDES) -> Any:
    """Return fairseq's configuration *base* with :func:`all_flags`, and with the activation swish, which it omits."""
    text_or_none = Optional[str]  # noqa: UP045  fairseq reads no types of the form str | None
    activations = ChoiceEnum(list(dict.fromkeys([*utils.get_available_activation_fns(), "swish"])))
    activation: Any = field(default="relu", metadata={"help": "activation function to use"})
    fields: list[Any] = [("activation_fn", activations, activation)]
    fields += [
        (name, type(default) if default is not None else text_or_none, field(default=default, metadata={"help": text}))
        for name, (default, text, *_) in all_flags(sides).items()
    ]
    return make_dataclass("TransformerRopeConfig", fields, bases=(base,))
