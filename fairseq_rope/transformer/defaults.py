"""Completes the options of a model: the defaults of its architecture, of fairseq and of its position encodings."""

from argparse import Namespace
from collections.abc import Iterable
from typing import Any, cast

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, MODEL_DATACLASS_REGISTRY
from fairseq.models.roberta.model import base_architecture as fairseq_roberta_architecture
from fairseq.models.transformer.transformer_config import DecoderConfig, EncDecBaseConfig, QuantNoiseConfig
from fairseq.models.transformer.transformer_legacy import base_architecture as fairseq_base_architecture
from fairseq.models.transformer_lm import TransformerLanguageModelConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from ..checkpoints import flags_of_model, option_value
from ..errors import InputError, nearest
from ..positions import ENCODINGS
from ..positions.interface import SIDES
from .flags import POSITION_OPTIONS, options_of_sides
from .options import ModelOptions, encodings_of, model_sides, read
from .refusals import refuse_encodings

# the parts that a YAML file of fairseq's transformer can have
PARTS: dict[str, Any] = {"encoder": EncDecBaseConfig, "decoder": DecoderConfig, "quant_noise": QuantNoiseConfig}


def option_dict(args: DictConfig) -> dict[str, Any]:
    """Return the options of a configuration, with references to others resolved."""
    options = cast(dict[Any, Any], OmegaConf.to_container(args, resolve=True))
    return {str(name): value for name, value in options.items()}


def flatten_parts(options: dict[str, Any]) -> None:
    """Replace the parts in *options* by the flat names of all options of the part."""
    for part, config in PARTS.items():
        nested = options.pop(part, None)
        if nested is not None:
            values = vars(config(**nested)).items()
            options.update({f"{part}_{name}": value for name, value in values if name != "_name"})


def as_namespace(args: Namespace | DictConfig) -> Namespace:
    """Return the options of the command line, or of fairseq-hydra-train, as a namespace.

    A nested ``encoder:``, ``decoder:`` or ``quant_noise:`` overrides the architecture, as with fairseq's transformer.
    Layers to keep become text, which fairseq's pruning needs.
    """
    if not isinstance(args, Namespace):
        args = Namespace(**option_dict(args))
        flatten_parts(vars(args))
    for name in (f"{side}_layers_to_keep" for side in SIDES):
        numbers = getattr(args, name, None)  # a list of a flag of fairseq's, or one number of a YAML file
        if isinstance(numbers, (list, int)):
            setattr(args, name, ",".join(map(str, numbers if isinstance(numbers, list) else [numbers])) or None)
    return args


def save_options(config: Namespace | DictConfig, built: Namespace) -> None:
    """Copy the sizes of *built*, with which a model was built, into its *config* of hydra, which fairseq saves."""
    if isinstance(config, DictConfig):
        sizes = [f"{side}_layers{kept}" for side in SIDES for kept in ("", "_to_keep")]
        with open_dict(config):
            for name in {*sizes, "max_positions", "max_target_positions"} & vars(built).keys():
                config[name] = getattr(built, name)


def refuse_unknown_options(args: DictConfig, model: str, fairseq_arch: str) -> None:
    """Raise an InputError if *args* has an option that neither *model* nor the architecture *fairseq_arch* declares.

    hydra does not refuse such options, because it composes the configuration before it knows the model.
    """
    sizes = Namespace()
    ARCH_CONFIG_REGISTRY[fairseq_arch](sizes)
    dataclass = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY[fairseq_arch])
    fields = getattr(dataclass, "__dataclass_fields__", ())  # some are flags of the task
    flags = flags_of_model(model) | flags_of_model(str(option_value(args, "_name")))  # a subclass can have more
    parts = PARTS if model_sides({"arch": model}) == SIDES else {}
    _refuse_unknown_names(args, {"_name", "arch", *parts, *fields, *flags, *vars(sizes)}, "model")
    for part in (part for part in parts if option_value(args, part) is not None):
        names = PARTS[part].__dataclass_fields__
        _refuse_unknown_names(args[part], names, f"model.{part}")
        twice = next((name for name in names if f"{part}_{name}" in args), None)
        if twice:
            raise InputError(f"model.{part}_{twice}: there is also a part model.{part}; write it there")


def _refuse_unknown_names(names: Iterable[Any], known: Iterable[str], place: str) -> None:
    """Raise an InputError for the first of *names*, keys of a configuration, that is not *known*."""
    known_names = sorted(set(known))
    for name in names:
        if name not in known_names:
            hint = nearest(str(name), known_names)
            raise InputError(f"{place}.{name}: neither fairseq nor fairseq-rope has an option of this name{hint}")


def set_defaults(args: Namespace, **encodings: str) -> ModelOptions:
    """Set the options that *args* lacks: fairseq's base sizes, the position encodings and their options.

    *encodings* are those of the architecture, by the names of options. Returns the options, as read from *args*.
    Raises the errors of :func:`.read` and :func:`.refuse_encodings`.
    """
    sides = model_sides(args)
    defaults = {name: option.default for name, option in options_of_sides(POSITION_OPTIONS, sides).items()}
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
    vars(args).update(options.values)
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
    """Return a copy of the *options* of a model, with its architecture's defaults.

    It returns None if there are none, and for the configuration of a model that is built, which is complete.
    """
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
