"""The named architectures: for each of fairseq's transformers for translation, its rotary twin.

Sizes are not repeated here: each twin calls fairseq's own architecture function. A twin's name is
fairseq's, with ``transformer`` become ``transformer_rope``.
"""

from argparse import Namespace
from typing import Callable, Union

from fairseq.models import ARCH_CONFIG_REGISTRY, register_model_architecture
from omegaconf import DictConfig, OmegaConf

from . import align, multilingual  # noqa: F401  they register their models
from .config import rope_architecture

# our model -> the architectures of fairseq that give it their sizes
ARCHITECTURES = {
    "transformer_rope": (
        *("transformer", "transformer_tiny", "transformer_iwslt_de_en", "transformer_wmt_en_de"),
        *("transformer_vaswani_wmt_en_de_big", "transformer_vaswani_wmt_en_fr_big"),
        *("transformer_wmt_en_de_big", "transformer_wmt_en_de_big_t2t"),
    ),
    "transformer_rope_align": ("transformer_align", "transformer_wmt_en_de_big_align"),
    "multilingual_transformer_rope": ("multilingual_transformer", "multilingual_transformer_iwslt_de_en"),
}


def _rotary_twin(fairseq_arch: str) -> Callable[[Union[Namespace, DictConfig]], None]:
    """The architecture function of *fairseq_arch*'s twin, for flags and for fairseq-hydra-train.

    An architecture asks ``getattr(args, option, default)``. The DictConfig of OmegaConf 2.0, which fairseq's
    git main needs, answers None there for every option that is left open, and no model could be built. So
    a Namespace is asked in its place, and ``base_layers``, which fairseq's trainer asks for in that way,
    is filled in. Can go when no fairseq needs OmegaConf < 2.1.
    """
    fairseq_architecture = ARCH_CONFIG_REGISTRY[fairseq_arch]

    def architecture(args: Union[Namespace, DictConfig]) -> None:
        filled = args
        if OmegaConf.is_config(args):
            filled = Namespace(**{"base_layers": 0, **OmegaConf.to_container(args, resolve=True)})
        fairseq_architecture(filled)
        rope_architecture(filled)
        if filled is not args:
            for option, value in vars(filled).items():
                setattr(args, option, value)

    return architecture


for _model, _fairseq_archs in ARCHITECTURES.items():
    for _fairseq_arch in _fairseq_archs:
        _name = _fairseq_arch.replace("transformer", "transformer_rope")
        register_model_architecture(_model, _name)(_rotary_twin(_fairseq_arch))
