"""The options of our models.

:func:`read` reads the command line, a configuration of hydra or the options of a checkpoint. All other modules use the
attributes of the objects that it returns. ``flags.py`` has the table of the flags.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY, FairseqEncoderModel, FairseqLanguageModel
from fairseq.models.transformer import TransformerConfig

from ..checkpoints import option_value
from ..errors import InputError, flag_of
from ..positions import DEFAULT, ENCODINGS, PositionEncoding
from ..positions.interface import SIDES, Option
from .flags import BOTH_BLOCK_OPTIONS, FEATURE_OPTIONS, POSITION_OPTIONS, used_options

KINDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def model_name(options: Any) -> str | None:
    """Return the model's name in *options*: "transformer_rope" for ``--arch transformer_rope_tiny``."""
    arch = option_value(options, "arch") or option_value(options, "_name")
    return ARCH_MODEL_NAME_REGISTRY.get(arch, arch)


def model_sides(args: Any) -> tuple[str, ...]:
    """Return the sides of the model that *args* name: encoder and decoder, or the only one.

    The class decides, because a user dir can register a subclass of a language model under a name of its own.
    """
    model = MODEL_REGISTRY.get(model_name(args), object)
    for side, kind in (("decoder", FairseqLanguageModel), ("encoder", FairseqEncoderModel)):
        if issubclass(model, kind):
            return (side,)
    return SIDES


def value_of(args: Any, name: str, option: Option) -> Any:
    """Return the value of the option *name* in *args*, or its default; raise a ValueError if it is not allowed."""
    value, flag = option_value(args, name), flag_of(name)
    value = option.default if value is None else value
    if value is None:
        return None
    if option.read is not None:
        return option.read(value, flag)
    kind = str if option.default is None else type(option.default)
    if not isinstance(value, (float, int) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
        raise InputError(f"{flag} {value}: must be {KINDS.get(kind, kind.__name__)}")
    choices = option.choices
    if choices and value not in choices:
        allowed = choices if isinstance(choices, range) else ", ".join(choices)
        raise InputError(f"{flag} {value}: must be one of {allowed}")
    return value


def side_value(values: Mapping[str, Any], name: str, side: str) -> Any:
    """Return the value of the option *name* for *side*: that of the side if it is given, and of both sides if not."""
    return values.get(f"{side}_{name}") or values.get(name)


def flag_of_side(args: Any, name: str, side: str) -> str:
    """Return the flag in *args* that gives *side* its value of the option *name*."""
    return flag_of(f"{side}_{name}" if option_value(args, f"{side}_{name}") else name)


def is_pruned(layers: int | None, layers_to_keep: str) -> bool:
    """Return whether *layers*, the number of those in a checkpoint, are the layers to keep: no other layer is there."""
    return layers == len(layers_to_keep.split(","))


@dataclass(frozen=True)
class SideOptions:
    """The options of one side."""

    side: str  # "encoder" or "decoder"
    encoding: str  # a key of ENCODINGS
    position: Mapping[str, Any]  # the options of the encoding, as its ``build`` needs them
    embed_dim: int
    heads: int
    kv_heads: int  # as many as heads if no other number is given
    norm_type: str
    ffn_type: str
    scale_glu_width: bool
    attention_type: str
    qk_norm: bool
    no_projection_bias: bool
    feature_map: str
    favor_features: int  # 0: D ln D
    favor_seed: int
    layers: int
    layers_to_keep: str | None  # fairseq's flag

    @property
    def kept_layers(self) -> list[int]:
        """The numbers that the layers of the model have in the model that was trained."""
        numbers = self.layers_to_keep.split(",") if self.layers_to_keep else range(self.layers)
        return sorted(int(number) for number in numbers)

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


@dataclass(frozen=True)
class ModelOptions:
    """The options of a model."""

    sides: tuple[SideOptions, ...]  # encoder and decoder, or the only one
    cross_kv_heads: int  # as many as heads of the decoder if no other number is given
    attention_length_scaling: float
    values: Mapping[str, Any]  # the values of all options of our models that are used, by name

    @property
    def encoder(self) -> SideOptions:
        return next(side for side in self.sides if side.side == "encoder")

    @property
    def decoder(self) -> SideOptions:
        return next(side for side in self.sides if side.side == "decoder")

    @property
    def has_both_sides(self) -> bool:
        return len(self.sides) == len(SIDES)


def encodings_of(args: Any) -> dict[str, str]:
    """Return the name of each side's encoding in *args*, which can be options of fairseq's own models.

    Checkpoints of our oldest version have no option for the encoding, and are rotary. An encoding that does not exist
    raises an InputError.
    """
    sides = model_sides(args)
    if not is_ours(args):
        if option_value(args, "no_token_positional_embeddings"):
            return dict.fromkeys(sides, "none")
        return {side: "learned" if option_value(args, f"{side}_learned_pos") else "sinusoidal" for side in sides}
    values = {name: option_value(args, name) for name in POSITION_OPTIONS}
    names: dict[str, Any] = {side: side_value(values, "position_encoding", side) for side in sides}
    names = {side: DEFAULT if name is None else name for side, name in names.items()}
    for side, name in names.items():
        if name not in ENCODINGS:
            own = "if your own user dir adds it, give that as --user-dir"
            flag = flag_of_side(args, "position_encoding", side)
            raise InputError(f"{flag} {name}: must be one of {', '.join(ENCODINGS)}; {own}")
    return names


def is_ours(args: Any) -> bool:
    """Return whether *args* are options of our models, and not of fairseq's."""
    return any(option_value(args, name) is not None for name in ("rope_base", *POSITION_OPTIONS))


def read(args: Any) -> ModelOptions:
    """Return the options in *args*, a namespace or configuration of the command line, hydra or a checkpoint.

    Missing options have their default values. The models of fairseq have none of our options, whatever *args* contains.
    A value that is not allowed raises a ValueError.
    """
    encodings, ours = encodings_of(args), args if is_ours(args) else {}
    values = {name: value_of(ours, name, option) for name, option in used_options(encodings).items()}
    sides = tuple(_side(args, side, name, values) for side, name in encodings.items())
    return ModelOptions(
        sides=sides,
        cross_kv_heads=values.get("cross_kv_heads") or sides[-1].heads,
        attention_length_scaling=values["attention_length_scaling"],
        values=values,
    )


def _side(args: Any, side: str, encoding: str, values: Mapping[str, Any]) -> SideOptions:
    defaults = TransformerConfig()

    def size(name: str) -> Any:
        value = option_value(args, f"{side}_{name}")
        return getattr(getattr(defaults, side), name) if value is None else value

    return SideOptions(
        side=side,
        encoding=encoding,
        position={name: side_value(values, name, side) for name in ENCODINGS[encoding].options_of(side)},
        embed_dim=size("embed_dim"),
        heads=size("attention_heads"),
        kv_heads=values[f"{side}_kv_heads"] or size("attention_heads"),
        **{name: side_value(values, name, side) for name in BOTH_BLOCK_OPTIONS},
        **{name: values[name] for name in FEATURE_OPTIONS},
        layers=size("layers"),
        layers_to_keep=size("layers_to_keep"),
    )
