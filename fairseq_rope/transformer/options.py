"""The options of our models: one reading of them.

:func:`read` reads the command line, a configuration of hydra or the options of a checkpoint. All other modules use the
attributes of the objects that it returns. ``flags.py`` has the table of the flags.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fairseq.models.transformer import TransformerConfig

from ..checkpoints import option_value
from ..errors import InputError, flag_of
from ..positions import DEFAULT, ENCODINGS, PositionEncoding
from ..positions.interface import SIDES, Option
from .flags import OF_BLOCK, OF_BOTH_BLOCKS, OF_FEATURES, OF_POSITIONS, of_encodings
from .sides import model_sides, options_of_sides

KINDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def value_of(args: Any, name: str, option: Option) -> Any:
    """Return the value of the option *name* in *args*, or its default; raise an InputError if it is not allowed."""
    value, flag = option_value(args, name), flag_of(name)
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
    """Return the values of *options* in *args*."""
    return {name: value_of(args, name, option) for name, option in options.items()}


def side_value(values: Mapping[str, Any], name: str, side: str) -> Any:
    """Return the value of the option *name* for *side*: that of the side if it is given, and of both sides if not."""
    return values.get(f"{side}_{name}") or values.get(name)


def flag_of_side(args: Any, name: str, side: str) -> str:
    """Return the flag in *args* that gives *side* its value of the option *name*."""
    return flag_of(f"{side}_{name}" if option_value(args, f"{side}_{name}") else name)


def numbers_of_kept_layers(layers_to_keep: str) -> list[int]:
    """Return the numbers, in the model that was trained, of the layers that fairseq's pruning keeps."""
    return sorted(int(number) for number in layers_to_keep.split(","))


def is_pruned(layers: int | None, layers_to_keep: str) -> bool:
    """Return whether *layers*, the number of those in a checkpoint, are the layers to keep: no other layer is there."""
    return layers == len(numbers_of_kept_layers(layers_to_keep))


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

    @property
    def kept_layers(self) -> list[int]:
        """The numbers that the layers of the model have in the model that was trained."""
        return numbers_of_kept_layers(self.layers_to_keep) if self.layers_to_keep else list(range(self.layers))

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
    def scales_width(self) -> bool:
        """Whether the inner width of a gated feed-forward part is :func:`inner_width`."""
        return self.scale_glu_width and self.ffn_type == "glu"


@dataclass(frozen=True)
class ModelOptions:
    """The options of a model."""

    sides: tuple[SideOptions, ...]  # encoder and decoder, or the only one
    cross_kv_heads: int  # as many as heads of the decoder if no other number is given
    attention_length_scaling: float
    values: Mapping[str, Any]  # the values of all flags of our models that are used, by name

    @property
    def encoder(self) -> SideOptions:
        return next(side for side in self.sides if side.side == "encoder")

    @property
    def decoder(self) -> SideOptions:
        return next(side for side in self.sides if side.side == "decoder")

    @property
    def has_both_sides(self) -> bool:
        return len(self.sides) == len(SIDES)


def used_options(args: Any, encodings: Mapping[str, str]) -> dict[str, Option]:
    """Return the options that the *encodings* of the two sides use, with the flags of each side."""
    used = [(side, option) for side, name in encodings.items() for option in ENCODINGS[name].options_of(side)]
    names = [name for side, option in used for name in (option, f"{side}_{option}")]
    flags = of_encodings()
    return {name: flags[name] for name in names if name in flags}


def encodings_of(args: Any) -> dict[str, str]:
    """Return the name of each side's encoding in *args*, which can be options of fairseq's own models.

    Checkpoints of our oldest version have no option for the encoding, and are rotary. An encoding that does not exist
    raises an InputError.
    """
    if is_ours(args):
        values = {name: option_value(args, name) for name in OF_POSITIONS}
        chosen = {side: side_value(values, "position_encoding", side) for side in model_sides(args)}
        names = {side: DEFAULT if name is None else str(name) for side, name in chosen.items()}
        for side, name in names.items():
            if name not in ENCODINGS:
                flag = flag_of_side(args, "position_encoding", side)
                own = "if your own user dir adds it, give that as --user-dir"
                raise InputError(f"{flag} {name}: must be one of {', '.join(ENCODINGS)}; {own}")
        return names
    if option_value(args, "no_token_positional_embeddings"):
        return dict.fromkeys(model_sides(args), "none")
    return {
        side: "learned" if option_value(args, f"{side}_learned_pos") else "sinusoidal" for side in model_sides(args)
    }


def is_ours(args: Any) -> bool:
    """Return whether *args* are options of our models, and not of fairseq's."""
    return any(option_value(args, name) is not None for name in ("rope_base", *OF_POSITIONS))


def read(args: Any) -> ModelOptions:
    """Return the options in *args*, a namespace or configuration of the command line, hydra or a checkpoint.

    Missing options have their default values. The models of fairseq have none of our options, whatever *args* contains.
    A value that is not allowed raises an InputError.
    """
    encodings = encodings_of(args)
    used = options_of_sides({**used_options(args, encodings), **OF_BLOCK}, list(encodings))
    values = values_of(args if is_ours(args) else {}, used)
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
        **{name: side_value(values, name, side) for name in OF_BOTH_BLOCKS},
        **{name: values[name] for name in OF_FEATURES},
        learned_pos=bool(size("learned_pos")),
        xformers_att_config=size("xformers_att_config"),
        layers=size("layers"),
        layers_to_keep=size("layers_to_keep"),
    )


def model_options(cfg: TransformerConfig) -> ModelOptions:
    """Return the options of the model that *cfg* describes: those that ``build_model`` has read, or read here."""
    options = vars(cfg).get("model_options")
    return options if isinstance(options, ModelOptions) else read(cfg)
