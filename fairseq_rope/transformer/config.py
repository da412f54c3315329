"""The options of our models: their defaults, and which values are refused."""

import math
from argparse import Namespace
from dataclasses import field, make_dataclass
from typing import Any, Dict, Optional, Type, Union, cast

from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig, QuantNoiseConfig
from fairseq.models.transformer.transformer_legacy import base_architecture as fairseq_base_architecture
from omegaconf import DictConfig, OmegaConf

from ..errors import InputError
from ..patches.loading import option as option_of
from ..positions import DEFAULT, ENCODINGS, PositionEncoding
from ..positions.interface import SIDES, Option
from ..positions.scaling import RopeScaling


def length_scaling(value: Any) -> float:
    """Return *value*, an average length; raise a ValueError if it is neither 0 nor above 1."""
    if type(value) not in (int, float) or not (value == 0 or 1 < value < math.inf):
        raise ValueError(f"--attention-length-scaling {value}: must be a number above 1, or 0")
    return float(value)


# options of self- and cross-attention with any encoding
OF_ATTENTION = {
    "attention_length_scaling": Option(
        0.0,
        "average number of tokens of a training sentence: queries of self- and cross-attention are multiplied by "
        "ln(number of keys) / ln(this number); 0: they are not",
        length_scaling,
    )
}


def all_options() -> Dict[str, Option]:
    """Return the options of all encodings."""
    return {name: option for encoding in ENCODINGS.values() for name, option in encoding.options.items()}


def config_class() -> Type[TransformerConfig]:
    """Return fairseq's configuration with the choice of an encoding and the options of each one in ``ENCODINGS``."""
    choices = {"position_encoding": Option(DEFAULT, f"position encoding of both sides: one of {', '.join(ENCODINGS)}")}
    for side in SIDES:
        choices[f"{side}_position_encoding"] = Option(None, f"that of the {side}; default: --position-encoding")
    options = [
        (name, type(default) if default is not None else Optional[str], field(default=default, metadata={"help": text}))
        for name, (default, text, _) in {**choices, **OF_ATTENTION, **all_options()}.items()
    ]
    return make_dataclass("TransformerRopeConfig", options, bases=(TransformerConfig,))


def encoding_name(args: Any, side: str) -> str:
    """Return the name of the position encoding of *side*; checkpoints without the option are rotary."""
    given = (option_of(args, f"{side}_position_encoding"), option_of(args, "position_encoding"), DEFAULT)
    return next(name for name in given if name is not None)


def encodings_of(args: Any) -> Dict[str, Type[PositionEncoding]]:
    """Return the class of each side's encoding."""
    return {side: ENCODINGS[encoding_name(args, side)] for side in SIDES}


def used_options(args: Any) -> Dict[str, Option]:
    """Return the options that the two sides' encodings use."""
    return {name: option for side, one in encodings_of(args).items() for name, option in one.options_of(side).items()}


def position_options(args: Any) -> Dict[str, Any]:
    """Return the encoding of each side in *args*, by "SIDE_position_encoding", and the options that the two use.

    *args* are options on the command line or in a checkpoint, also of fairseq's own transformer.
    """
    if option_of(args, "position_encoding") is None and option_of(args, "rope_base") is None:
        absent = option_of(args, "no_token_positional_embeddings")
        learned = {side: option_of(args, f"{side}_learned_pos") for side in SIDES}
        names = {
            f"{side}_position_encoding": "none" if absent else "learned" if learned[side] else "sinusoidal"
            for side in SIDES
        }
        return {**names, **{name: option.default for name, option in OF_ATTENTION.items()}}
    names = {f"{side}_position_encoding": encoding_name(args, side) for side in SIDES}
    options = {**used_options(args), **OF_ATTENTION}
    return {**names, **{name: value_of(args, name, option) for name, option in options.items()}}


def value_of(args: Any, name: str, option: Option) -> Any:
    """Return the value of the option *name* in *args*, or its default.

    Raises:
        InputError: the value is not allowed
    """
    value, kind = option_of(args, name), type(option.default)
    if value is None:
        return option.default
    if option.read is not None:
        try:
            return option.read(value)
        except ValueError as error:
            raise InputError(str(error)) from None
    if not isinstance(value, (float, int) if kind is float else kind) or isinstance(value, bool) != (kind is bool):
        raise InputError(f"--{name.replace('_', '-')} {value}: must be {KINDS.get(kind, kind.__name__)}")
    return value


KINDS = {int: "an integer", float: "a number", str: "text", bool: "true or false"}


def option_dict(args: DictConfig) -> Dict[str, Any]:
    """Return the options of a configuration, with references to others resolved."""
    return {
        str(name): value for name, value in cast(Dict[Any, Any], OmegaConf.to_container(args, resolve=True)).items()
    }


def as_namespace(args: Union[Namespace, DictConfig]) -> Namespace:
    """Return the options as a namespace, as the command line gives them.

    fairseq-hydra-train gives a DictConfig. TransformerConfig.from_namespace would copy only the fields that
    it declares, and not those of positions. A nested ``encoder:``, ``decoder:`` or ``quant_noise:``
    overrides the architecture, as with fairseq's transformer.
    """
    if isinstance(args, Namespace):
        return args
    flat = Namespace(**option_dict(args))
    nested = {"encoder": EncDecBaseConfig, "decoder": DecoderConfig, "quant_noise": QuantNoiseConfig}
    for name, config in nested.items():
        given = vars(flat).pop(name, None)
        if given is not None:
            for option, value in vars(config(**given)).items():
                setattr(flat, f"{name}_{option}", value)
    return flat


def set_defaults(args: Union[Namespace, DictConfig], **encodings: str) -> None:
    """Set the options that *args* lacks: fairseq's base sizes, the position encodings and their options.

    Args:
        encodings: the architecture's position_encoding, encoder_position_encoding and decoder_position_encoding

    Raises:
        InputError: an encoding does not exist or cannot be used on its side, or an option of another one is given
    """
    defaults = {"position_encoding": DEFAULT, **{f"{side}_position_encoding": None for side in SIDES}}
    if getattr(args, "position_encoding", None) is None:  # else the user's choice for both sides counts
        defaults.update(encodings)
    for option, default in defaults.items():
        setattr(args, option, getattr(args, option, default))
    refuse_encodings(args)
    for option, value in position_options(args).items():
        if option not in defaults:
            setattr(args, option, value)
    absolute = [side for side, encoding in encodings_of(args).items() if encoding.absolute]
    if absolute and getattr(args, "no_token_positional_embeddings", False):
        raise InputError(
            "--no-token-positional-embeddings contradicts the position encoding "
            f"{encoding_name(args, absolute[0])} of the {absolute[0]}; drop the flag, or use --position-encoding none"
        )
    args.no_token_positional_embeddings = not absolute
    fairseq_base_architecture(args)


def refuse_encodings(args: Union[Namespace, DictConfig]) -> None:
    """Raise an InputError if *args* has an unknown encoding, or an option that its encodings do not use."""
    names = {side: encoding_name(args, side) for side in SIDES}
    for side, name in names.items():
        given = option_of(args, f"{side}_position_encoding") is not None
        flag = f"--{side}-position-encoding" if given else "--position-encoding"
        if name not in ENCODINGS:
            raise InputError(f"{flag} {name}: must be one of {', '.join(ENCODINGS)}")
        if side not in ENCODINGS[name].sides:
            other = next(other for other in SIDES if other in ENCODINGS[name].sides)
            raise InputError(
                f"{flag} {name}: is for the {other} only; use --{side}-position-encoding {DEFAULT} "
                f"--{other}-position-encoding {name}"
            )
    used = {**used_options(args), **OF_ATTENTION}
    for name, option in {**all_options(), **OF_ATTENTION}.items():
        value = getattr(args, name, None)
        if name in used:
            value_of(args, name, option)
        elif not (value is None or value is False or value == ""):
            users = [name_of for name_of, encoding in ENCODINGS.items() if name in encoding.options]
            raise InputError(
                f"--{name.replace('_', '-')} {value}: is not used by the position encodings {names['encoder']} "
                f"(encoder) and {names['decoder']} (decoder), but by {' and '.join(users)}"
            )


def refuse_what_cannot_work(args: Union[Namespace, DictConfig]) -> None:
    """Raise a ValueError with one sentence if our self-attention does not support an option in *args*."""
    if args.cross_self_attention:
        raise ValueError(
            "--cross-self-attention has no meaning with positions in self-attention: its keys are the encoder's output "
            "followed by the prefix, which share no positions; drop the flag"
        )
    if getattr(args, "full_context_alignment", False) and "encoder" not in encodings_of(args)["decoder"].sides:
        raise ValueError(
            f"--full-context-alignment: lets the decoder see later words, and the position encoding "
            f"{encoding_name(args, 'decoder')} is for earlier ones only; drop one of the two"
        )
    for name, text in position_options(args).items():
        if name.endswith("rope_scaling") and text and args.checkpoint_activations:
            scaling = RopeScaling(text, f"--{name.replace('_', '-')}")
            if scaling.depends_on_length:  # a layer that is computed again does not know the length of the source
                raise ValueError(
                    f"{scaling.flag} {text}: does not work with --checkpoint-activations, because the frequencies of "
                    f"{scaling.rope_type} depend on the length of the source; drop one of the two"
                )
    for side in SIDES:
        heads, width = getattr(args, f"{side}_attention_heads"), getattr(args, f"{side}_embed_dim")
        if heads < 1 or width % heads:
            raise ValueError(
                f"--{side}-attention-heads {heads}: must divide --{side}-embed-dim {width} without remainder"
            )
        name = encoding_name(args, side)
        if getattr(args, f"{side}_learned_pos") and name != "learned":
            raise ValueError(
                f"--{side}-learned-pos asks for learned absolute positions, but the {side}'s position encoding is "
                f"{name}; drop the flag, or use --{side}-position-encoding learned"
            )
        if getattr(args, f"{side}_xformers_att_config", None):
            raise ValueError(
                f"--{side}-xformers-att-config {getattr(args, f'{side}_xformers_att_config')}: xFormers' "
                "attention has no position encodings; drop the flag"
            )
