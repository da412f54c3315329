"""A pytest plugin for fairseq's own tests, used by test_fairseq_suite.py as ``pytest -p fairseq_with``.

FAIRSEQ_WITH selects what is tested:

- ``nothing``: fairseq alone, with its compiled modules (``benchmarks/fairseq_alone``). torch is told that ``Namespace``
  is safe, so that checkpoints load.
- ``plugin``: fairseq's models, with the plugin loaded from its copy in the current folder.
- ``transformer_rope``: the plugin's models in place of fairseq's transformer, transformer_lm and roberta.
- ``transformer``: the reference for ``transformer_rope``. In both, the reproducibility tests train a transformer
  instead of a convolutional model, and models of width 8 and 12 have 2 heads, because a head of an odd number of
  dimensions cannot rotate.

Language models and RoBERTa are narrow in all of them, so that the tests take less time.
"""

import os
from argparse import Namespace
from collections.abc import Callable
from types import SimpleNamespace

import fairseq.models.transformer
import pytest
import quick_hydra  # noqa: F401  hydra remembers what it composes
import torch
from fairseq.models import (
    ARCH_CONFIG_REGISTRY,
    ARCH_MODEL_NAME_REGISTRY,
    ARCH_MODEL_REGISTRY,
    MODEL_DATACLASS_REGISTRY,
    MODEL_REGISTRY,
)
from fairseq.utils import import_user_module

MODE = os.environ["FAIRSEQ_WITH"]
if MODE in ("plugin", "transformer_rope"):
    import_user_module(Namespace(user_dir="fairseq_rope"))
    assert "transformer_rope_tiny" in ARCH_MODEL_REGISTRY
else:
    import_user_module(Namespace(user_dir=os.environ["FAIRSEQ_ALONE"]))
    torch.serialization.add_safe_globals([Namespace])


def put_in_place_of(old: str, new: str) -> None:
    """Make ``--arch OLD`` build the model of ``--arch NEW``."""
    for registry in (ARCH_MODEL_REGISTRY, ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY):
        registry[old] = registry[new]


def with_heads_that_can_rotate(architecture: Callable[[Namespace], None]) -> Callable[[Namespace], None]:
    def narrow(args: Namespace) -> None:
        for side in ("encoder", "decoder"):
            if getattr(args, f"{side}_embed_dim", None) in (8, 12):
                setattr(args, f"{side}_attention_heads", 2)
        architecture(args)

    return narrow


def with_width_64(architecture: Callable[[Namespace], None], side: str) -> Callable[[Namespace], None]:
    def narrow(args: Namespace) -> None:
        sizes = {"embed_dim": 64, "ffn_embed_dim": 64, "layers": 2, "attention_heads": 2}
        own = {f"{side}_{name}": size for name, size in sizes.items()}
        vars(args).update({**own, **vars(args)})
        architecture(args)

    return narrow


if MODE == "transformer_rope":
    from fairseq_rope.modules.attention import SelfAttention
    from fairseq_rope.positions.rotary import RotaryEmbedding
    from fairseq_rope.transformer import TransformerRopeModel
    from fairseq_rope.transformer.architectures import ARCHITECTURES, twin_of

    class AttentionAsFairseqBuildsIt(SelfAttention):
        """Rotary attention with the constructor of fairseq's MultiheadAttention."""

        def __init__(self, embed_dim: int, num_heads: int, dropout: float = 0.0, **_: object) -> None:
            super().__init__(embed_dim, num_heads, RotaryEmbedding(embed_dim // num_heads), dropout)

    for _old in [arch for archs in ARCHITECTURES.values() for arch in archs]:
        put_in_place_of(_old, twin_of(_old))
    MODEL_REGISTRY["transformer"] = TransformerRopeModel
    del MODEL_DATACLASS_REGISTRY["transformer_lm"]  # ours has none
    fairseq.models.transformer.TransformerModel = TransformerRopeModel
if MODE in ("transformer_rope", "transformer"):
    put_in_place_of("fconv_iwslt_de_en", "transformer_tiny")
    for _name, _architecture in list(ARCH_CONFIG_REGISTRY.items()):
        ARCH_CONFIG_REGISTRY[_name] = with_heads_that_can_rotate(_architecture)
for _name, _side in (("transformer_lm", "decoder"), ("roberta_base", "encoder")):
    ARCH_CONFIG_REGISTRY[_name] = with_width_64(ARCH_CONFIG_REGISTRY[_name], _side)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Make the tests of attention use rotary attention.

    Only the names in the test's module are replaced. TorchScript compiles cross-attention with the class in fairseq's
    own module.
    """
    if MODE == "transformer_rope":
        for name in ("MultiheadAttention", "multihead_attention"):
            if hasattr(item.module, name):
                replacement = SimpleNamespace(MultiheadAttention=AttentionAsFairseqBuildsIt)
                setattr(item.module, name, getattr(replacement, name, replacement))
