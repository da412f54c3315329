"""Every named architecture, compared with fairseq's architecture of the same name."""

from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_INV_REGISTRY

TRANSLATION = ["transformer_rope", "transformer_rope_tiny", "transformer_rope_iwslt_de_en"] + [
    f"transformer_rope_{name}"
    for name in ("wmt_en_de", "vaswani_wmt_en_de_big", "vaswani_wmt_en_fr_big", "wmt_en_de_big", "wmt_en_de_big_t2t")
]
NAMES = {
    "transformer_rope": TRANSLATION,
    "transformer_rope_align": ["transformer_rope_align", "transformer_rope_wmt_en_de_big_align"],
    "multilingual_transformer_rope": ["multilingual_transformer_rope", "multilingual_transformer_rope_iwslt_de_en"],
}


@pytest.mark.parametrize("model", list(NAMES))
def test_every_architecture_is_registered_under_its_name(model):
    assert sorted(ARCH_MODEL_INV_REGISTRY[model]) == sorted(NAMES[model])


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names])
def test_every_option_equals_that_of_fairseqs_architecture(name):
    ours, stock = Namespace(), Namespace()
    ARCH_CONFIG_REGISTRY[name](ours)
    ARCH_CONFIG_REGISTRY[name.replace("_rope", "")](stock)
    added = {"rope_base": 10000.0, "rope_layout": "interleaved", "rope_fraction": 1.0}
    assert vars(ours) == {**vars(stock), **added, "no_token_positional_embeddings": True}


@pytest.mark.parametrize("name", TRANSLATION)
def test_the_model_has_the_shapes_of_fairseqs_model(build, name):
    with torch.device("meta"):  # needs no memory for the weights
        ours, stock = build(name), build(name.replace("_rope", ""))
    described = []
    for model in (ours, stock):
        layers = [*model.encoder.layers, *model.decoder.layers]
        dropouts = ("dropout_module", "activation_dropout_module", "self_attn.dropout_module")
        described.append(
            (
                {key: tuple(value.shape) for key, value in model.state_dict().items()},
                [(layer.self_attn.num_heads, layer.normalize_before) for layer in layers],
                [layer.get_submodule(name).p for layer in layers for name in dropouts],
            )
        )
    assert described[0] == described[1]


def test_flags_override_the_architectures_sizes():
    args = Namespace(encoder_layers=3, rope_base=500.0)
    ARCH_CONFIG_REGISTRY["transformer_rope_tiny"](args)
    assert (args.encoder_layers, args.decoder_layers, args.rope_base) == (3, 2, 500.0)
