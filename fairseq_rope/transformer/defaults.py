"""Completes the options of a model: the defaults of its architecture, of fairseq and of its position encodings."""

from argparse import Namespace
from collections.abc import Mapping
from typing import Any, cast

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.models.roberta.model import base_architecture as fairseq_roberta_architecture
from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig, QuantNoiseConfig
from fairseq.models.transformer.transformer_legacy import base_architecture as fairseq_base_architecture
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from ..checkpoints import flags_of_model, option_value
from ..errors import InputError
from ..positions import ENCODINGS
from ..positions.interface import SIDES
from .flags import OF_BLOCK, OF_POSITIONS
from .options import ModelOptions, encodings_of, read, used_options
from .refusals import refuse_encodings, refuse_unknown_names
from .sides import model_sides, options_of_sides

NESTED: dict[str, Any] = {"encoder": EncDecBaseConfig, "decoder": DecoderConfig, "quant_noise": QuantNoiseConfig}


def option_dict(args: DictConfig) -> dict[str, Any]:
    """Return the options of a configuration, with references to others resolved."""
    options = cast(dict[Any, Any], OmegaConf.to_container(args, resolve=True))
    return {str(name): value for name, value in options.items()}


def as_namespace(args: Namespace | DictConfig) -> Namespace:
    """Return the options of the command line, or of fairseq-hydra-train, as a namespace.

    A nested ``encoder:``, ``decoder:`` or ``quant_noise:`` overrides the architecture, as with fairseq's transformer.
    Layers to keep become text.
    """
    if isinstance(args, Namespace):
        flat = args
    else:
        options = option_dict(args)
        parts = {part: options.pop(part, None) for part in NESTED}
        flat = Namespace(**options)
        for part, nested in parts.items():
            vars(flat).update(options_of_part(part, nested))
    for name in (f"{side}_layers_to_keep" for side in SIDES):
        numbers = getattr(flat, name, None)
        if isinstance(numbers, list):  # of a flag of the transformer; fairseq's pruning needs the text
            setattr(flat, name, ",".join(map(str, numbers)) or None)
        elif isinstance(numbers, int):  # of a YAML file with one layer
            setattr(flat, name, str(numbers))
    return flat


def options_of_part(part: str, nested: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the options that *nested*, a *part* of a YAML file, gives, also by its defaults, by their flat names."""
    if nested is None:
        return {}
    return {f"{part}_{name}": value for name, value in vars(NESTED[part](**nested)).items() if name != "_name"}


def flatten(args: DictConfig) -> None:
    """Give the options in the parts of *args* their flat names, which fairseq reads, saves and overrides."""
    options = option_dict(args)
    for part in NESTED:
        if args.pop(part, None) is not None:
            args.update(options_of_part(part, options[part]))


def save_in_configuration(args: Namespace | DictConfig, built: Namespace) -> None:
    """Copy into *args* what a checkpoint must have and :func:`as_namespace`'s *built* got while the model was built.

    fairseq's own models change the configuration that is saved. Without it, the sizes would depend on other programs.
    """
    if isinstance(args, DictConfig):
        with open_dict(args):
            of_sides = (f"{side}_layers{kept}" for side in SIDES for kept in ("", "_to_keep"))
            for name in (*of_sides, "max_positions", "max_target_positions"):
                if hasattr(built, name):
                    args[name] = getattr(built, name)


def refuse_unknown_options(args: DictConfig, model: str, fairseq_arch: str) -> None:
    """Raise an InputError if *args* has an option that neither *model* nor the architecture *fairseq_arch* declares.

    hydra does not refuse such options, because it composes the configuration before it knows the model.
    """
    sizes = Namespace()
    ARCH_CONFIG_REGISTRY[fairseq_arch](sizes)
    dataclass = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY[fairseq_arch])
    fields = getattr(dataclass, "__dataclass_fields__", ())  # some are flags of the task
    flags = flags_of_model(model) | flags_of_model(str(option_value(args, "_name")))  # a subclass can have more
    refuse_unknown_names(args, {"_name", "arch", *NESTED, *fields, *flags, *vars(sizes)})
    is_filled = option_value(args, "base_layers") is not None  # by an architecture, which sets it, so with defaults
    for name, config in NESTED.items():
        if option_value(args, name) is None:
            continue
        refuse_unknown_names(args[name], config.__dataclass_fields__, f"model.{name}")
        for option, value in options_of_part(name, option_dict(args)[name]).items():
            if not is_filled and option_value(args, option) not in (None, value):
                inside = f"model.{name}.{option.removeprefix(f'{name}_')}"
                raise InputError(f"model.{option}: there is also a part model.{name}; write {inside} there instead")


def set_defaults(args: Namespace, **encodings: str) -> ModelOptions:
    """Set the options that *args* lacks: fairseq's base sizes, the position encodings and their options.

    *encodings* are those of the architecture, by the names of options. Returns the options, as read from *args*.
    Raises the InputErrors of :func:`.read` and :func:`.refuse_encodings`.
    """
    sides = model_sides(args)
    defaults = {name: option.default for name, option in options_of_sides(OF_POSITIONS, sides).items()}
    if getattr(args, "position_encoding", None) is None:  # else the user's choice for both sides counts
        defaults.update(encodings)
    for name, default in defaults.items():
        if getattr(args, name, None) is None:
            setattr(args, name, default)
    names = encodings_of(args)
    refuse_encodings(args, names)
    args.no_token_positional_embeddings = not any(ENCODINGS[name].absolute for name in names.values())
    FAIRSEQ_DEFAULTS[sides](args)
    options = read(args)
    for name, option in options_of_sides({**used_options(args, names), **OF_BLOCK}, sides).items():
        value = options.values[name]
        # read() is called again with what is stored here. Text that it returns is the usual form of what was given.
        if option.read is not None and not isinstance(value, str) and not hasattr(value, "text"):
            value = getattr(args, name, None)
        setattr(args, name, option.default if value is None else getattr(value, "text", value))
    return options


def set_language_model_defaults(args: Namespace) -> None:
    """Set the options that *args* lacks to the defaults of fairseq's transformer_lm."""
    for name, option in TransformerLanguageModelConfig.__dataclass_fields__.items():
        if not str(option.default).startswith("${"):  # an option of the task
            setattr(args, name, getattr(args, name, option.default))
    if args.offload_activations:
        args.checkpoint_activations = True


def set_roberta_defaults(args: Namespace) -> None:
    """Set the options that *args* lacks to the defaults of fairseq's roberta, without learned positions."""
    args.encoder_learned_pos = getattr(args, "encoder_learned_pos", False)
    fairseq_roberta_architecture(args)


# the sides of a model -> what sets fairseq's defaults of such a model
FAIRSEQ_DEFAULTS: dict[Any, Any] = {
    ("decoder",): set_language_model_defaults,
    ("encoder",): set_roberta_defaults,
    SIDES: fairseq_base_architecture,
}


def complete(options: Any) -> Namespace | None:
    """Return a copy of the *options* of a model, with its architecture's defaults; None if there are none."""
    if not (isinstance(options, (Namespace, dict)) or OmegaConf.is_config(options)):
        return None
    fill = ARCH_CONFIG_REGISTRY.get(option_value(options, "arch") or option_value(options, "_name"))
    if isinstance(options, Namespace):
        completed = Namespace(**vars(options))
    elif fill:  # from a YAML file, perhaps nested
        completed = as_namespace(OmegaConf.create(options))
    else:
        completed = Namespace(**options)
    if fill:
        fill(completed)
    return completed
