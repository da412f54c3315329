"""The named architectures: for each of fairseq's transformer for translation, its rotary twin.

Sizes are not repeated here: each twin calls fairseq's own architecture function.
"""

from argparse import Namespace
from typing import Callable

from fairseq.models import ARCH_CONFIG_REGISTRY, register_model_architecture

from fairseq_rope.transformer import rope_architecture

# rotary name -> the fairseq architecture that gives the sizes
ARCHITECTURES = {
    "transformer_rope": "transformer",
    "transformer_rope_tiny": "transformer_tiny",
    "transformer_rope_iwslt_de_en": "transformer_iwslt_de_en",
    "transformer_rope_wmt_en_de": "transformer_wmt_en_de",
    "transformer_rope_vaswani_wmt_en_de_big": "transformer_vaswani_wmt_en_de_big",
    "transformer_rope_vaswani_wmt_en_fr_big": "transformer_vaswani_wmt_en_fr_big",
    "transformer_rope_wmt_en_de_big": "transformer_wmt_en_de_big",
    "transformer_rope_wmt_en_de_big_t2t": "transformer_wmt_en_de_big_t2t",
}


def _rotary_twin(fairseq_arch: str) -> Callable[[Namespace], None]:
    def architecture(args: Namespace) -> None:
        ARCH_CONFIG_REGISTRY[fairseq_arch](args)
        rope_architecture(args)

    return architecture


for _name, _fairseq_arch in ARCHITECTURES.items():
    register_model_architecture("transformer_rope", _name)(_rotary_twin(_fairseq_arch))
