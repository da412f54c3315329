"""Every named architecture, compared with fairseq's architecture of the same name."""

from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_INV_REGISTRY, build_model
from omegaconf import OmegaConf

from fairseq_rope.modules.feed_forward import GatedLinear
from fairseq_rope.modules.norms import RMSNorm
from fairseq_rope.transformer.flags import BLOCK_OPTIONS

SIZES = ["", "_tiny", "_iwslt_de_en", "_wmt_en_de", "_vaswani_wmt_en_de_big", "_vaswani_wmt_en_fr_big"]
SIZES += ["_wmt_en_de_big", "_wmt_en_de_big_t2t"]
# an architecture, or the first part of its name -> encodings of encoder and decoder
ENCODINGS = {
    "transformer_rope": ("rope", "rope"),
    "transformer_nope": ("none", "none"),
    "transformer_shape": ("shape", "shape"),
    "transformer_alibi": ("alibi", "alibi"),
    "transformer_t5": ("t5", "t5"),
    "transformer_shaw": ("shaw", "shaw"),
    "transformer_nezha": ("nezha", "nezha"),
    "transformer_deberta": ("deberta", "deberta"),
    "transformer_tupe": ("tupe", "tupe"),
    "transformer_xl_positions": ("transformer-xl", "transformer-xl"),
    "transformer_kerple": ("kerple", "kerple"),
    "transformer_xpos": ("rope", "xpos"),
}
# an architecture with the block of LLaMA -> the architecture of fairseq with its sizes
LLAMAS = {"transformer_rope_llama": "transformer_wmt_en_de", "transformer_rope_llama_big": "transformer_wmt_en_de_big"}
TRANSLATION = [f"transformer_rope{size}" for size in SIZES]
NAMES = {
    "transformer_rope": [*TRANSLATION, *(name for name in ENCODINGS if name != "transformer_rope"), *LLAMAS],
    "transformer_rope_align": ["transformer_rope_align", "transformer_rope_wmt_en_de_big_align"],
    "multilingual_transformer_rope": ["multilingual_transformer_rope", "multilingual_transformer_rope_iwslt_de_en"],
}
ROPE = {"rope_base": 10000.0, "rope_layout": "interleaved", "rope_fraction": 1.0}
OPTIONS = {
    "rope": ROPE,
    "shape": {"shape_max_shift": 500},
    "alibi": {"alibi_type": "symmetric"},
    "t5": {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128},
    "shaw": {"max_relative_positions": 16},
    "nezha": {"max_relative_positions": 16},
    "tupe": {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 128, "tupe_absolute_only": False},
    "deberta": {"deberta_max_distance": 64},
    "xpos": {**ROPE, "xpos_scale_base": 512.0},
}


@pytest.mark.parametrize("model", list(NAMES))
def test_every_architecture_is_registered_under_its_name(model):
    assert sorted(ARCH_MODEL_INV_REGISTRY[model]) == sorted(NAMES[model])


@pytest.mark.parametrize("name", [name for names in NAMES.values() for name in names if name not in LLAMAS])
def test_every_option_is_that_of_fairseqs_architecture_or_of_the_position_encoding(name):
    prefix = next((prefix for prefix in ENCODINGS if prefix in name), None)
    encoder, decoder = ENCODINGS[prefix]
    ours, stock = Namespace(), Namespace()
    ARCH_CONFIG_REGISTRY[name](ours)
    ARCH_CONFIG_REGISTRY[name.replace(prefix, "transformer")](stock)
    chosen = {name: vars(ours).pop(name) for name in list(vars(ours)) if name.endswith("position_encoding")}
    for side, encoding in (("encoder", encoder), ("decoder", decoder)):
        assert (chosen[f"{side}_position_encoding"] or chosen["position_encoding"]) == encoding
    added = {**OPTIONS.get(encoder, {}), **OPTIONS.get(decoder, {})}
    added["no_token_positional_embeddings"] = encoder != "shape"
    added["attention_length_scaling"] = 0.0
    added.update((name, option.default) for name, option in BLOCK_OPTIONS.items())
    if encoder == "rope":
        added.update(rope_scaling="", encoder_rope_scaling="")
    if decoder == "rope":
        added.update(rope_scaling="", decoder_rope_scaling="")
    assert vars(ours) == {**vars(stock), **added}


@pytest.mark.parametrize("name", list(LLAMAS))
def test_the_block_of_llama_has_fairseqs_sizes_and_as_many_parameters(build, task, name):
    ours, stock = Namespace(), Namespace()
    ARCH_CONFIG_REGISTRY[name](ours)
    ARCH_CONFIG_REGISTRY[LLAMAS[name]](stock)
    block = {"encoder_normalize_before": True, "decoder_normalize_before": True, "activation_fn": "swish"}
    block.update(norm_type="rms", ffn_type="glu", scale_glu_width=True, no_projection_bias=True)
    added = {"no_token_positional_embeddings": True, "attention_length_scaling": 0.0, **ROPE}
    added.update((key, option.default) for key, option in BLOCK_OPTIONS.items())
    added.update(position_encoding="rope", encoder_position_encoding=None, decoder_position_encoding=None)
    added.update(rope_scaling="", encoder_rope_scaling="", decoder_rope_scaling="")
    assert vars(ours) == {**vars(stock), **added, **block}
    with torch.device("meta"):
        models = [build(name), build(LLAMAS[name]), build_model(OmegaConf.create({"_name": name}), task)]
    counts = [sum(parameter.numel() for parameter in model.parameters()) for model in models]
    assert counts[0] == pytest.approx(counts[1], rel=0.01) and counts[0] == counts[2]
    for layer in (*models[0].encoder.layers, *models[0].decoder.layers):
        assert type(layer.fc1) is GatedLinear and layer.fc1.activation_fn is torch.nn.functional.silu
        assert type(layer.final_layer_norm) is RMSNorm and layer.normalize_before
        assert not any(key.endswith("bias") for key, _ in layer.named_parameters())


def test_the_block_of_llama_can_have_fairseqs_feed_forward_layers(build):
    with torch.device("meta"):
        model = build("transformer_rope_llama", ffn_type="mlp")
    assert model.encoder.layers[0].fc1.out_features == 2048


@pytest.mark.parametrize("model, number", [("transformer_lm", 21), ("roberta", 4)])
def test_sizes_of_models_of_one_side_are_fairseqs(model, number):
    names = [
        name
        for name in ARCH_CONFIG_REGISTRY
        if name.startswith(model) and name.replace(model, f"{model}_rope") in ARCH_CONFIG_REGISTRY
    ]
    assert len(names) == number
    for name in names:
        ours, stock = Namespace(arch=name.replace(model, f"{model}_rope")), Namespace()
        ARCH_CONFIG_REGISTRY[ours.arch](ours)
        ARCH_CONFIG_REGISTRY[name](stock)
        different = {key for key, value in vars(stock).items() if vars(ours)[key] != value}
        assert different <= {"encoder_learned_pos", "decoder_learned_pos", "no_token_positional_embeddings"}
        assert not any(key.startswith("decoder_" if model == "roberta" else "encoder_") for key in vars(ours))
        assert ours.position_encoding == "rope"


def test_flags_override_the_architectures_sizes():
    args = Namespace(encoder_layers=3, rope_base=500.0)
    ARCH_CONFIG_REGISTRY["transformer_rope_tiny"](args)
    assert (args.encoder_layers, args.decoder_layers, args.rope_base) == (3, 2, 500.0)
