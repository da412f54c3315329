"""A pytest plugin for fairseq's own tests: transformer_rope takes the transformer's place.

Used by test_fairseq_suite.py as ``pytest -p in_place_of_transformer`` in a process of its own. With
FAIRSEQ_TRANSFORMER=stock the transformer stays, for the comparison. In both cases the reproducibility
tests, which train a convolutional model, train a transformer, and the models of width 8 have 2 heads:
their 8 heads of one dimension have nothing to rotate.
"""

import os
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace

import fairseq.models.transformer
import pytest
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY

from fairseq_rope.attention import RotaryMultiheadAttention
from fairseq_rope.rotary import RotaryEmbedding
from fairseq_rope.transformer import TransformerRopeModel


class AttentionAsFairseqBuildsIt(RotaryMultiheadAttention):
    """Rotary attention behind the constructor of fairseq's MultiheadAttention."""

    def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, **_: object) -> None:
        super().__init__(embed_dim, num_heads, RotaryEmbedding(embed_dim // num_heads), dropout)


def put_in_place_of(old: str, new: str) -> None:
    """Let ``--arch OLD`` build what ``--arch NEW`` builds."""
    for registry in (ARCH_MODEL_REGISTRY, ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY):
        registry[old] = registry[new]


def with_heads_that_can_rotate(architecture: Callable[[Namespace], None]) -> Callable[[Namespace], None]:
    def narrow(args: Namespace) -> None:
        for side in ("encoder", "decoder"):
            if getattr(args, f"{side}_embed_dim", None) == 8:
                setattr(args, f"{side}_attention_heads", 2)
        architecture(args)

    return narrow


if os.environ["FAIRSEQ_TRANSFORMER"] == "rotary":
    for _old in list(ARCH_MODEL_REGISTRY):
        _new = _old.replace("transformer", "transformer_rope")
        if _new != _old and _new in ARCH_MODEL_REGISTRY:
            put_in_place_of(_old, _new)
    MODEL_REGISTRY["transformer"] = TransformerRopeModel
    fairseq.models.transformer.TransformerModel = TransformerRopeModel
put_in_place_of("fconv_iwslt_de_en", "transformer_tiny")
for _name, _architecture in list(ARCH_CONFIG_REGISTRY.items()):
    ARCH_CONFIG_REGISTRY[_name] = with_heads_that_can_rotate(_architecture)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Give rotary attention to the tests of attention: in their own names, since TorchScript looks
    fairseq's class up in its module when it compiles cross-attention."""
    if os.environ["FAIRSEQ_TRANSFORMER"] == "rotary":
        for name in ("MultiheadAttention", "multihead_attention"):
            if hasattr(item.module, name):
                stand_in = SimpleNamespace(MultiheadAttention=AttentionAsFairseqBuildsIt)
                setattr(item.module, name, getattr(stand_in, name, stand_in))
