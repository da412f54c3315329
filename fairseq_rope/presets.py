"""The named architectures: for each of fairseq's transformers for translation, its rotary twin.

Sizes are not repeated here: each twin calls fairseq's own architecture function. A twin's name is
fairseq's, with ``transformer`` become ``transformer_rope``.
"""

from argparse import Namespace
from typing import Callable

from fairseq.models import ARCH_CONFIG_REGISTRY, register_model_architecture

from . import align, multilingual  # noqa: F401  they register their models
from .transformer import rope_architecture

# our model -> the architectures of fairseq that give it their sizes
ARCHITECTURES = {
    "transformer_rope": (
        "transformer",
        "transformer_tiny",
        "transformer_iwslt_de_en",
        "transformer_wmt_en_de",
        "transformer_vaswani_wmt_en_de_big",
        "transformer_vaswani_wmt_en_fr_big",
        "transformer_wmt_en_de_big",
        "transformer_wmt_en_de_big_t2t",
    ),
    "transformer_rope_align": ("transformer_align", "transformer_wmt_en_de_big_align"),
    "multilingual_transformer_rope": ("multilingual_transformer", "multilingual_transformer_iwslt_de_en"),
}


def _rotary_twin(fairseq_arch: str) -> Callable[[Namespace], None]:
    fairseq_architecture = ARCH_CONFIG_REGISTRY[fairseq_arch]

    def architecture(args: Namespace) -> None:
        fairseq_architecture(args)
        rope_architecture(args)

    return architecture


for _model, _fairseq_archs in ARCHITECTURES.items():
    for _fairseq_arch in _fairseq_archs:
        _name = _fairseq_arch.replace("transformer", "transformer_rope")
        register_model_architecture(_model, _name)(_rotary_twin(_fairseq_arch))
