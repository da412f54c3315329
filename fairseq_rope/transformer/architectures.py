"""The named architectures: for each of fairseq's transformers, a twin with another position encoding.

Sizes are not repeated here: each twin calls fairseq's own architecture function. The name of a twin is
fairseq's, in which ``transformer_rope`` replaces ``transformer``. ``transformer_rope_llama`` also has another block.
Most other encodings have one name, such as ``transformer_alibi``. Only ``roberta_rope_small`` has sizes of its own.
"""

from argparse import Namespace
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_INV_REGISTRY, register_model_architecture
from omegaconf import DictConfig

from ..checkpoints import current_reading
from . import align, language_model, multilingual, roberta  # noqa: F401  they register their models
from .defaults import PARTS, flatten_parts, option_dict, refuse_unknown_options, set_defaults
from .options import model_name

# the models with one side: fairseq's, and ours
ONE_SIDED = {
    **{"transformer_lm": "decoder", "transformer_lm_rope": "decoder"},
    **{"roberta": "encoder", "roberta_rope": "encoder"},
}
# our model -> the architectures of fairseq that give it their sizes
ARCHITECTURES = {
    "transformer_rope": (
        *("transformer", "transformer_tiny", "transformer_iwslt_de_en", "transformer_wmt_en_de"),
        *("transformer_vaswani_wmt_en_de_big", "transformer_vaswani_wmt_en_fr_big"),
        *("transformer_wmt_en_de_big", "transformer_wmt_en_de_big_t2t"),
    ),
    "transformer_rope_align": ("transformer_align", "transformer_wmt_en_de_big_align"),
    "multilingual_transformer_rope": ("multilingual_transformer", "multilingual_transformer_iwslt_de_en"),
    "transformer_lm_rope": tuple(ARCH_MODEL_INV_REGISTRY["transformer_lm"]),
    "roberta_rope": ("roberta", "roberta_prenorm", "roberta_base", "roberta_large"),
}
# an architecture of transformer_rope with the sizes of fairseq's transformer -> its position encodings
ENCODINGS_OF = {
    "transformer_nope": {"position_encoding": "none"},
    "transformer_shape": {"position_encoding": "shape"},
    "transformer_alibi": {"position_encoding": "alibi"},
    "transformer_t5": {"position_encoding": "t5"},
    "transformer_shaw": {"position_encoding": "shaw"},
    "transformer_nezha": {"position_encoding": "nezha"},
    "transformer_xl_positions": {"position_encoding": "transformer-xl"},
    "transformer_tupe": {"position_encoding": "tupe"},
    "transformer_deberta": {"position_encoding": "deberta"},
    "transformer_kerple": {"position_encoding": "kerple"},
    "transformer_xpos": {"position_encoding": "rope", "decoder_position_encoding": "xpos"},
}
# an architecture of transformer_rope with another block -> the architecture of fairseq that gives it its sizes
BLOCKS = {"transformer_rope_llama": "transformer_wmt_en_de", "transformer_rope_llama_big": "transformer_wmt_en_de_big"}
# RoBERTa for CPUs
SMALL = {"encoder_layers": 4, "encoder_embed_dim": 128, "encoder_ffn_embed_dim": 512, "encoder_attention_heads": 4}
# the block of LLaMA (Touvron et al. 2023, arXiv:2302.13971)
LLAMA = {
    **{"encoder_normalize_before": True, "decoder_normalize_before": True, "norm_type": "rms"},
    **{"ffn_type": "glu", "scale_glu_width": True, "activation_fn": "swish", "no_projection_bias": True},
}
NONE: Mapping[str, Any] = MappingProxyType({})


def _register(
    arch: str, model: str, fairseq_arch: str, encodings: Mapping[str, str] = NONE, block: Mapping[str, Any] = NONE
) -> None:
    """Register *arch* of *model*, a twin of *fairseq_arch*, for flags and fairseq-hydra-train.

    An architecture calls ``getattr(args, option, default)``. fairseq's git main needs OmegaConf 2.0, whose DictConfig
    returns None there for every option that is not set, so that no model could be built. This function therefore
    passes a Namespace, and sets ``base_layers``, which fairseq's trainer reads in the same way. This can go when no
    fairseq needs OmegaConf < 2.1.
    """
    fairseq_architecture = ARCH_CONFIG_REGISTRY[fairseq_arch]

    def architecture(args: Namespace | DictConfig) -> None:
        if not isinstance(args, Namespace) and current_reading() is None:  # a checkpoint can have any options
            refuse_unknown_options(args, model, fairseq_arch)
        filled = args if isinstance(args, Namespace) else Namespace(**{"base_layers": 0, **option_dict(args)})
        only_side = ONE_SIDED.get(model)
        if only_side:
            if model_name(filled) is None:
                filled.arch = arch
            learned_pos = f"{only_side}_learned_pos"  # on by default in fairseq's roberta and gpt3
            setattr(filled, learned_pos, getattr(filled, learned_pos, False))
        for option, value in block.items():
            setattr(filled, option, getattr(filled, option, value))
        fairseq_architecture(filled)
        set_defaults(filled, **encodings)
        if filled is not args:
            flatten_parts(vars(filled))
            for part in PARTS:
                args.pop(part, None)
            args.update(vars(filled))

    register_model_architecture(model, arch)(architecture)


def twin_of(fairseq_arch: str) -> str:
    """Return the name of the rotary twin of fairseq's architecture *fairseq_arch*."""
    old = next((name for name in ONE_SIDED if fairseq_arch.startswith(name)), "transformer")
    return fairseq_arch.replace(old, f"{old}_rope")


for _model, _fairseq_archs in ARCHITECTURES.items():
    for _fairseq_arch in _fairseq_archs:
        _register(twin_of(_fairseq_arch), _model, _fairseq_arch)
_register("roberta_rope_small", "roberta_rope", "roberta", block=SMALL)
for _arch, _encodings in ENCODINGS_OF.items():
    _register(_arch, "transformer_rope", "transformer", _encodings)
for _arch, _fairseq_arch in BLOCKS.items():
    _register(_arch, "transformer_rope", _fairseq_arch, block=LLAMA)
