"""The sides that a model has: encoder and decoder, or one of the two."""

from collections.abc import Mapping, Sequence
from typing import Any

from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY, FairseqEncoderModel, FairseqLanguageModel

from ..checkpoints import option_value
from ..positions.interface import SIDES, Option

# the models with one side: fairseq's, and ours
ONE_SIDED = {
    **{"transformer_lm": "decoder", "transformer_lm_rope": "decoder"},
    **{"roberta": "encoder", "roberta_rope": "encoder"},
}


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


def options_of_sides(options: Mapping[str, Option], sides: Sequence[str]) -> dict[str, Option]:
    """Return those of *options* that a model with these *sides* has; cross-attention needs both."""
    missing = () if len(sides) == len(SIDES) else tuple(f"{side}_" for side in ("cross", *SIDES) if side not in sides)
    return {name: option for name, option in options.items() if not name.startswith(missing)}
