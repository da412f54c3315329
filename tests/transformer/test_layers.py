"""Layers that are kept, layers of a subclass, and checkpoints that lack parameters of positions."""

import copy
from argparse import Namespace

import pytest
import torch
from fairseq.models import build_model
from omegaconf import OmegaConf

from fairseq_rope.checkpoints import CheckpointError
from fairseq_rope.transformer.meaning import refuse_other_model
from tests.models import ENCODING_OPTIONS, batch, teacher_forced


@pytest.mark.parametrize("name", ["t5", "deberta"])
def test_a_decoder_with_layers_of_another_kind_loads_its_weights(build, name):
    """fairseq inserts such layers into the finished decoder with --base-layers, which need several processes."""
    saved, loaded = build(**ENCODING_OPTIONS[name]), build(**ENCODING_OPTIONS[name])
    for model in (saved, loaded):
        model.decoder.layers.insert(1, torch.nn.Linear(2, 3))
    state = {key: torch.full_like(value, 0.5) for key, value in saved.state_dict().items()}
    loaded.load_state_dict(dict(state), strict=True)
    for key, value in loaded.state_dict().items():
        assert torch.equal(value, state[key]) or key.endswith(".version"), key


@pytest.mark.parametrize("name", ["rope", "t5", "shaw"])
@pytest.mark.parametrize("to_keep", ["3,2", "1,3,0"])
def test_the_options_that_a_pruned_model_saves_describe_it(build, name, to_keep):
    """fairseq saves a pruned model with the number of its layers, and without the numbers of those that were kept."""
    options = {**ENCODING_OPTIONS[name], "encoder_layers": 4}
    layers_to_keep = {"encoder_layers_to_keep": to_keep, "decoder_layers_to_keep": "0,1"}
    whole, kept = build(**options), build(**options, **layers_to_keep)
    saved = Namespace(arch="transformer_rope_tiny", **options, **layers_to_keep)
    kept.load_state_dict(whole.state_dict(), strict=True, model_cfg=saved)
    assert saved.encoder_layers_to_keep is None
    vars(saved).update(encoder_layers=len(to_keep.split(",")), decoder_layers=2)  # as build_model in a training
    again = build(**vars(saved))
    again.load_state_dict(kept.state_dict(), strict=True)
    resumed = build(**options, **layers_to_keep)  # with the flags that pruned it
    flags = Namespace(arch="transformer_rope_tiny", **options, **layers_to_keep)
    refuse_other_model("last.pt", Namespace(**vars(saved)), flags, is_meant=False)
    resumed.load_state_dict(kept.state_dict(), strict=True, model_cfg=flags)
    numbers = sorted(map(int, to_keep.split(",")))
    whole.encoder.layers = torch.nn.ModuleList(whole.encoder.layers[number] for number in numbers)
    (source, lengths), target = batch([9, 4], left_pad=True), batch([5, 5], left_pad=False)[0]
    expected, *others = (teacher_forced(model, source, lengths, target) for model in (whole, kept, again, resumed))
    for actual in others:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_layers_to_keep_that_a_checkpoint_lacks_are_refused(build):
    sizes = {"arch": "transformer_rope", "position_encoding": "rope"}
    own = Namespace(**sizes, encoder_layers_to_keep="0,4")
    with pytest.raises(CheckpointError, match="--encoder-layers-to-keep 0,4: a.pt has only the layers 0 to 3 of "):
        refuse_other_model("a.pt", Namespace(**sizes, encoder_layers=4), own, is_meant=True)


@pytest.mark.parametrize("arch", ["transformer_rope_tiny", "transformer_rope_align"])
def test_one_side_is_pruned_and_the_other_stays_whole(build, arch):
    """fairseq's pruning would remove all layers of the other side."""
    whole = build(arch, encoder_layers=4)
    kept = build(arch, encoder_layers=4, encoder_layers_to_keep="0,3")
    saved = Namespace(arch=arch, encoder_layers_to_keep="0,3")
    kept.load_state_dict(whole.state_dict(), strict=True, model_cfg=saved)
    assert (saved.encoder_layers_to_keep, saved.decoder_layers_to_keep) == (None, None)
    assert torch.equal(kept.encoder.layers[1].fc1.weight, whole.encoder.layers[3].fc1.weight)
    assert torch.equal(kept.decoder.layers[1].fc1.weight, whole.decoder.layers[1].fc1.weight)


def test_a_hydra_configuration_with_a_list_is_pruned_and_saved_with_its_sizes(task):
    config = OmegaConf.create({"_name": "transformer_rope", "encoder_layers_to_keep": [0, 2], "decoder_layers": 2})
    OmegaConf.set_struct(config, True)
    whole = build_model(OmegaConf.create({"_name": "transformer_rope", "encoder_layers": 3, "decoder_layers": 2}), task)
    kept = build_model(config, task)
    kept.load_state_dict(whole.state_dict(), strict=True, model_cfg=config)
    assert (config.encoder_layers, config.decoder_layers, config.encoder_layers_to_keep) == (2, 2, None)
    assert torch.equal(kept.encoder.layers[1].fc1.weight, whole.encoder.layers[2].fc1.weight)


def test_a_subclass_can_build_more_layers_than_its_configuration_has(build):
    encoder = build(**ENCODING_OPTIONS["rope"], encoder_layers=2).encoder
    more = encoder.build_encoder_layer(encoder.cfg)
    assert more.self_attn.position is encoder.layers[0].self_attn.position


@pytest.mark.parametrize("block", [{}, {"ffn_type": "glu", "scale_glu_width": True}])
def test_a_subclass_can_give_a_layer_an_inner_width_of_its_own(build, block):
    """As in fairseq, whose layers read the cfg that build_encoder_layer gives them."""
    encoder = build(**block).encoder
    cfg = copy.deepcopy(encoder.cfg)
    cfg.encoder.ffn_embed_dim = 144
    layer = encoder.build_encoder_layer(cfg)
    assert layer.fc2.in_features == (96 if block else 144)
    cfg.encoder.attention_heads = 1
    with pytest.raises(ValueError, match="a layer with 1 heads and width 64: all layers of the encoder have 2 heads"):
        encoder.build_encoder_layer(cfg)
