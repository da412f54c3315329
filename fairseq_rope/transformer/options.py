"""The options of our models, and one reading of them.

:func:`read` reads the command line, a configuration of hydra or the options of a checkpoint. All other modules use the
attributes of the objects that it returns. A flag of one side, such as ``--encoder-attention-type``, replaces the flag
of both sides; a switch of one side adds to it (:func:`of_side`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fairseq.models.transformer import TransformerConfig

from ..checkpoints import option as option_of
from ..errors import InputError
from ..positions import DEFAULT, ENCODINGS, PositionEncoding
from ..positions.cross_attention import OPTIONS as OF_CROSS_ATTENTION
from ..positions.interface import SIDES, Option
from .layer_numbers import WITHOUT_POSITIONS, numbers_of
from .sides import of_sides, sides_of


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


def natural_number(value: Any, flag: str, largest: int = 2**31 - 1, step: int = 1) -> int:
    """Return *value*; raise a ValueError if it is not a multiple of *step* from 0 to *largest*."""
    if type(value) is not int or not 0 <= value <= largest or value % step:
        kind = "an integer" if step == 1 else "an even integer"
        raise ValueError(f"{flag} {value}: must be {kind} from 0 to {largest}")
    return value


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
CROSS_ATTENTION = {
    "cross_attention_positions": Option(
        "none",
        "in cross-attention: none, or rope, where positions of the target continue those of the source",
        one_of("none", "rope"),
    )
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
# Options that also have a flag for each side. Checkpoints of version 0.1.0 can contain the other options of
# OF_BOTH_BLOCKS for each side: these are read, and have no flags.
WITH_SIDES = ("position_encoding", "rope_scaling", "attention_type")


def flag_of(name: str) -> str:
    """Return the flag of the option *name*."""
    return f"--{name.replace('_', '-')}"


def of_each_side(options: Mapping[str, Option]) -> dict[str, Option]:
    """Return the options of each side that replace *options*: "encoder_attention_type", …."""
    return {
        f"{side}_{name}": Option(None if default else default, f"that of the {side}; default: {flag_of(name)}", read)
        for name, (default, _, read, _) in options.items()
        for side in SIDES
    }


def _with_sides(options: Mapping[str, Option]) -> dict[str, Option]:
    return {**options, **of_each_side({name: option for name, option in options.items() if name in WITH_SIDES})}


OF_POSITIONS = _with_sides({"position_encoding": Option(DEFAULT, "position encoding of both sides")})
# options of attention and of the block around it, with any encoding
OF_BLOCK = {"attention_length_scaling": LENGTH_SCALING, **_with_sides(OF_BOTH_BLOCKS), **KV_HEADS, **OF_FEATURES}
OF_BLOCK.update({**WITHOUT_POSITIONS, **CROSS_ATTENTION})


def of_encodings(sides: Sequence[str] = SIDES) -> dict[str, Option]:
    """Return the options of all encodings on these *sides*, also of those that a user dir has added."""
    used = ((encoding, side) for encoding in ENCODINGS.values() for side in sides if side in encoding.sides)
    return _with_sides({name: option for encoding, side in used for name, option in encoding.options_of(side).items()})


def users_of(name: str) -> list[str]:
    """Return the encodings that use the option *name*, which can be that of a side; [] if it is no encoding's."""
    names = (name, name.partition("_")[2])
    return [user for user, encoding in ENCODINGS.items() if any(each in encoding.options for each in names)]


KINDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def value_of(args: Any, name: str, option: Option) -> Any:
    """Return the value of the option *name* in *args*, or its default; raise an InputError if it is not allowed."""
    value, flag = option_of(args, name), flag_of(name)
    value = option.default if value is None else value
    if value is None:
        return None
    if option.read is not None:
        try:
            return option.read(value, flag)
        except ValueError as error:
            raise InputError(str(error)) from None
    kind = str if option.default is None else type(option.default)
    if not isinstance(value, (float, int) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
        raise InputError(f"{flag} {value}: must be {KINDS.get(kind, kind.__name__)}")
    return value


def values_of(args: Any, options: Mapping[str, Option]) -> dict[str, Any]:
    """Return the values of *options* in *args*, with those of each side's block that *args* has."""
    flags = {name: option for name, option in of_each_side(OF_BOTH_BLOCKS).items() if name not in options}
    given = {name: option for name, option in flags.items() if option_of(args, name) is not None}
    return {name: value_of(args, name, option) for name, option in {**options, **given}.items()}


def of_side(values: Mapping[str, Any], name: str, side: str) -> Any:
    """Return the value of the option *name* for *side*: that of the side if it is given, and of both sides if not."""
    return values.get(f"{side}_{name}") or values.get(name)


def flag_of_side(args: Any, name: str, side: str) -> str:
    """Return the flag in *args* that gives *side* its value of the option *name*."""
    return flag_of(f"{side}_{name}" if option_of(args, f"{side}_{name}") else name)


def inner_width(width: int) -> int:
    """Return two thirds of *width*, rounded up to a multiple of 8: gated layers have three matrices, not two."""
    return -(-2 * width // 24) * 8


@dataclass(frozen=True)
class SideOptions:
    """The options of one side."""

    side: str  # "encoder" or "decoder"
    encoding: str  # a key of ENCODINGS
    position: Mapping[str, Any]  # the options of the encoding, as its ``build`` needs them
    embed_dim: int
    heads: int
    kv_heads: int  # as many as heads if no other number is given
    ffn_embed_dim: int  # without the scale of gated layers
    norm_type: str
    ffn_type: str
    scale_glu_width: bool
    attention_type: str
    qk_norm: bool
    no_projection_bias: bool
    feature_map: str
    favor_features: int  # 0: D ln D
    favor_seed: int
    learned_pos: bool  # fairseq's flag
    xformers_att_config: str | None
    layers: int
    layers_to_keep: str | None  # fairseq's flag
    layers_without_positions: str  # as given by the flag

    @property
    def kept_layers(self) -> list[int]:
        """The numbers that the layers of the model have in the model that was trained."""
        kept = self.layers_to_keep
        return sorted(int(number) for number in kept.split(",")) if kept else list(range(self.layers))

    @property
    def without_positions(self) -> list[int]:
        """The numbers of the layers without positions, in the model that was trained."""
        return numbers_of(self.layers_without_positions, max([self.layers, *(n + 1 for n in self.kept_layers)]))

    @property
    def encoding_class(self) -> type[PositionEncoding]:
        return ENCODINGS[self.encoding]

    @property
    def is_linear(self) -> bool:
        return self.attention_type == "linear"

    @property
    def uses_favor(self) -> bool:
        return self.is_linear and self.feature_map == "favor"

    @property
    def head_dim(self) -> int:
        return self.embed_dim // self.heads

    @property
    def features(self) -> int:
        """The dimensions of a head that positions rotate: D, or favor's features, whose default is D ln D."""
        if not self.uses_favor:
            return self.head_dim
        return self.favor_features or max(8, math.ceil(self.head_dim * math.log(self.head_dim) / 8) * 8)

    @property
    def ffn_width(self) -> int:
        is_scaled = self.scale_glu_width and self.ffn_type == "glu"
        return inner_width(self.ffn_embed_dim) if is_scaled else self.ffn_embed_dim


@dataclass(frozen=True)
class ModelOptions:
    """The options of a model."""

    sides: tuple[SideOptions, ...]  # encoder and decoder, or the only one
    cross_kv_heads: int  # as many as heads of the decoder if no other number is given
    attention_length_scaling: float
    cross_position: Mapping[str, Any] | None  # the options of RoPE in cross-attention; None without it
    values: Mapping[str, Any]  # the values of all flags of our models that are used, by name

    @property
    def encoder(self) -> SideOptions:
        return next(each for each in self.sides if each.side == "encoder")

    @property
    def decoder(self) -> SideOptions:
        return next(each for each in self.sides if each.side == "decoder")

    @property
    def has_both_sides(self) -> bool:
        return len(self.sides) == len(SIDES)

    def meaning(self, layers: Mapping[str, Sequence[int]] | None = None) -> dict[str, Any]:
        """Return what decides what the same weights compute, by the names of the options.

        *layers* are the layers of each side that are used, with the numbers that they have in training; by default all
        that the model has.
        """
        values: dict[str, Any] = {f"{each.side}_position_encoding": each.encoding for each in self.sides}
        given = [(name, each.encoding_class.options[name]) for each in self.sides for name in each.position]
        for name in dict.fromkeys(name for name, option in given if not option.in_training_only):
            by_side = {each.side: each.position[name] for each in self.sides if name in each.position}
            values[name] = one_value({side: getattr(value, "text", value) for side, value in by_side.items()})
        values["cross_attention_positions"] = "none" if self.cross_position is None else "rope"
        values.update(self.cross_position or {})
        for each in self.sides:
            used = (layers or {}).get(each.side, each.kept_layers)
            numbers = [number for number in each.without_positions if number in used]
            values[f"{each.side}_layers_without_positions"] = ",".join(map(str, numbers))
        values["attention_length_scaling"] = self.attention_length_scaling
        for name in OF_BOTH_BLOCKS:
            if name in WITH_SIDES:
                values.update({f"{each.side}_{name}": getattr(each, name) for each in self.sides})
            else:
                values[name] = one_value({each.side: getattr(each, name) for each in self.sides})
        heads = {f"{each.side}_kv_heads": (each.kv_heads, each.heads) for each in self.sides}
        if self.has_both_sides:
            heads["cross_kv_heads"] = (self.cross_kv_heads, self.decoder.heads)
        values.update({name: 0 if number == all_heads else number for name, (number, all_heads) in heads.items()})
        if any(each.is_linear for each in self.sides):
            values["feature_map"] = self.sides[0].feature_map
        with_favor = [each for each in self.sides if each.uses_favor]
        if with_favor:
            values["favor_features"] = one_value({each.side: each.features for each in with_favor})
            values["favor_seed"] = with_favor[0].favor_seed
        return values


def one_value(by_side: Mapping[str, Any]) -> Any:
    """Return the value that all sides have in common, or a text with the value of each."""
    if len(set(by_side.values())) == 1:
        return next(iter(by_side.values()))
    return ", ".join(f"{value} ({side})" for side, value in by_side.items())


def used_options(args: Any, encodings: Mapping[str, str]) -> dict[str, Option]:
    """Return the options that the *encodings* of the two sides and cross-attention use, with the flags of each side."""
    used = [(side, option) for side, name in encodings.items() for option in ENCODINGS[name].options_of(side)]
    used += [("cross", option) for option in OF_CROSS_ATTENTION if rotates_cross_attention(args)]
    names = [name for side, option in used for name in (option, f"{side}_{option}")]
    flags = of_encodings()
    return {name: flags[name] for name in names if name in flags}


def rotates_cross_attention(args: Any) -> bool:
    """Return whether cross-attention in *args*, options of any model, has RoPE."""
    return is_ours(args) and option_of(args, "cross_attention_positions") == "rope"


def encodings_of(args: Any) -> dict[str, str]:
    """Return the name of each side's encoding in *args*, which can be options of fairseq's own models.

    Checkpoints of our oldest version have no option for the encoding, and are rotary. An encoding that does not exist
    raises an InputError.
    """
    if is_ours(args):
        values = {name: option_of(args, name) for name in OF_POSITIONS}
        given = {side: of_side(values, "position_encoding", side) for side in sides_of(args)}
        names = {side: DEFAULT if name is None else str(name) for side, name in given.items()}
        for side, name in names.items():
            if name not in ENCODINGS:
                flag = flag_of_side(args, "position_encoding", side)
                own = "if your own user dir adds it, give that as --user-dir"
                raise InputError(f"{flag} {name}: must be one of {', '.join(ENCODINGS)}; {own}")
        return names
    if option_of(args, "no_token_positional_embeddings"):
        return dict.fromkeys(sides_of(args), "none")
    return {side: "learned" if option_of(args, f"{side}_learned_pos") else "sinusoidal" for side in sides_of(args)}


def is_ours(args: Any) -> bool:
    """Return whether *args* are options of our models, and not of fairseq's."""
    return any(option_of(args, name) is not None for name in ("rope_base", *OF_POSITIONS))


def read(args: Any) -> ModelOptions:
    """Return the options in *args*, a namespace or configuration of the command line, hydra or a checkpoint.

    Missing options have their default values. The models of fairseq have none of our options, whatever *args* contains.
    A value that is not allowed raises an InputError.
    """
    encodings = encodings_of(args)
    used = of_sides({**used_options(args, encodings), **OF_BLOCK}, list(encodings))
    values = values_of(args if is_ours(args) else {}, used)
    sides = tuple(_side(args, side, name, values) for side, name in encodings.items())
    return ModelOptions(
        sides=sides,
        cross_kv_heads=values.get("cross_kv_heads") or sides[-1].heads,
        attention_length_scaling=values["attention_length_scaling"],
        cross_position={n: values[n] for n in OF_CROSS_ATTENTION} if rotates_cross_attention(args) else None,
        values=values,
    )


def _side(args: Any, side: str, encoding: str, values: Mapping[str, Any]) -> SideOptions:
    defaults = TransformerConfig()

    def size(name: str) -> Any:
        value = option_of(args, f"{side}_{name}")
        return getattr(getattr(defaults, side), name) if value is None else value

    return SideOptions(
        side=side,
        encoding=encoding,
        position={name: of_side(values, name, side) for name in ENCODINGS[encoding].options_of(side)},
        embed_dim=size("embed_dim"),
        heads=size("attention_heads"),
        kv_heads=values[f"{side}_kv_heads"] or size("attention_heads"),
        ffn_embed_dim=size("ffn_embed_dim"),
        **{name: of_side(values, name, side) for name in OF_BOTH_BLOCKS},
        **{name: values[name] for name in OF_FEATURES},
        learned_pos=bool(size("learned_pos")),
        xformers_att_config=size("xformers_att_config"),
        layers=size("layers"),
        layers_to_keep=size("layers_to_keep"),
        layers_without_positions=values[f"{side}_layers_without_positions"],
    )


def options_of(cfg: TransformerConfig) -> ModelOptions:
    """Return the options of the model that *cfg* describes: those that ``build_model`` has read, or read here."""
    given = vars(cfg).get("model_options")
    return given if isinstance(given, ModelOptions) else read(cfg)
