"""Layers whose self-attention has no positions: which ones, what they compute, and checkpoints with other ones."""

import copy
import logging
from argparse import Namespace

import pytest
import torch
from fairseq.models import build_model
from omegaconf import OmegaConf

from fairseq_rope.checkpoints import CheckpointError, Reading, reading_for
from fairseq_rope.transformer.layer_numbers import numbers_of, read_layers
from fairseq_rope.transformer.meaning import refuse_other_model
from tests.models import ENCODING_OPTIONS, batch, teacher_forced

GIVEN = [
    ("0,4", 6, [0, 4], "0,4"),
    (" 4 , 0", 6, [0, 4], "0,4"),
    (0, 6, [0], "0"),
    ([2, 1], 6, [1, 2], "1,2"),
    ("every 4th", 12, [3, 7, 11], "every 4th"),
    ("every 2nd", 3, [1], "every 2nd"),
    ("every 3", 3, [2], "every 3"),
    ("", 6, [], ""),
]


@pytest.mark.parametrize("given, layers, numbers, text", GIVEN)
def test_layers_are_numbers_or_every_nth(given, layers, numbers, text):
    assert read_layers(given, "--flag") == text and numbers_of(text, layers) == numbers


def without_positions(attention, x, causal):
    """The output (T, C) of *attention* for one sentence *x* (T, C), in float64, with no positions."""

    def heads(projection):
        y = x @ projection.weight.double().T + projection.bias.double()
        return y.view(len(x), attention.num_heads, -1).transpose(0, 1)  # (H, T, D)

    q, k, v = map(heads, (attention.q_proj, attention.k_proj, attention.v_proj))
    scores = q @ k.transpose(1, 2) / attention.head_dim**0.5
    if causal:
        scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    y = (scores.softmax(2) @ v).transpose(0, 1).reshape(len(x), -1)
    return y @ attention.out_proj.weight.double().T + attention.out_proj.bias.double()


@pytest.mark.parametrize(
    "name", ["rope", "alibi", "t5", "kerple", "shaw", "nezha", "transformer-xl", "deberta", "tupe", "xpos"]
)
def test_the_layers_named_have_no_positions_and_the_others_have_theirs(build, name):
    lists = {"encoder_layers_without_positions": "0,3", "decoder_layers_without_positions": "every 2nd"}
    model = build(encoder_layers=4, decoder_layers=4, **ENCODING_OPTIONS[name], **lists).double()
    x = torch.randn(5, 64).double()
    for side, expected in ((model.encoder, [0, 3]), (model.decoder, [1, 3])):
        causal, found = side is model.decoder, []
        mask = torch.full((5, 5), float("-inf")).triu(1).double() if causal else None
        for number, layer in enumerate(side.layers):
            attention = layer.self_attn
            output = attention(x[:, None], None, None, attn_mask=mask)[0][:, 0]
            if torch.allclose(output, without_positions(attention, x, causal), atol=1e-12):
                found.append(number)
                assert not any(True for _ in attention.position.parameters())
        assert found == expected
        others = {id(layer.self_attn.position) for number, layer in enumerate(side.layers) if number not in expected}
        assert len(others) == (2 if name in ("shaw", "nezha", "transformer-xl", "deberta") else 1)


@pytest.mark.parametrize("name", ["rope", "t5", "shaw"])
def test_layers_to_keep_count_the_layers_of_the_trained_model(build, name):
    options = {**ENCODING_OPTIONS[name], "encoder_layers": 4, "encoder_layers_without_positions": "every 2nd"}
    layers_to_keep = {"encoder_layers_to_keep": "3,2", "decoder_layers_to_keep": "0,1"}
    whole, kept = build(**options), build(**options, **layers_to_keep)
    given = Namespace(arch="transformer_rope_tiny", **layers_to_keep)
    kept.load_state_dict(whole.state_dict(), strict=True, model_cfg=given)
    whole.encoder.layers = whole.encoder.layers[2:]
    (source, lengths), target = batch([9, 4], left_pad=True), batch([5, 5], left_pad=False)[0]
    outputs = [teacher_forced(model, source, lengths, target) for model in (whole, kept)]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


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
@pytest.mark.parametrize(
    "without, to_keep, left", [("every 2nd", "3,2", "1"), ("0,3", "1,3,0", "0,2"), ("0", "1,2", "")]
)
def test_the_options_that_a_pruned_model_saves_describe_it(build, name, without, to_keep, left):
    """fairseq saves a pruned model with the number of its layers, and without the numbers of those that were kept."""
    options = {**ENCODING_OPTIONS[name], "encoder_layers": 4, "encoder_layers_without_positions": without}
    layers_to_keep = {"encoder_layers_to_keep": to_keep, "decoder_layers_to_keep": "0,1"}
    whole, kept = build(**options), build(**options, **layers_to_keep)
    saved = Namespace(arch="transformer_rope_tiny", **options, **layers_to_keep)
    kept.load_state_dict(whole.state_dict(), strict=True, model_cfg=saved)
    assert (saved.encoder_layers_to_keep, saved.encoder_layers_without_positions) == (None, left)
    vars(saved).update(encoder_layers=len(to_keep.split(",")), decoder_layers=2)  # as build_model in a training
    again = build(**vars(saved))
    again.load_state_dict(kept.state_dict(), strict=True)
    resumed = build(**options, **layers_to_keep)  # with the flags that pruned it
    flags = Namespace(arch="transformer_rope_tiny", **options, **layers_to_keep)
    refuse_other_model("last.pt", Namespace(**vars(saved)), flags, is_meant=False)
    resumed.load_state_dict(kept.state_dict(), strict=True, model_cfg=flags)
    assert flags.encoder_layers_without_positions == left
    (source, lengths), target = batch([9, 4], left_pad=True), batch([5, 5], left_pad=False)[0]
    expected, *others = (teacher_forced(model, source, lengths, target) for model in (kept, again, resumed))
    for actual in others:
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_layers_to_keep_that_a_checkpoint_lacks_are_refused(build):
    sizes = {"arch": "transformer_rope", "position_encoding": "rope"}
    own = Namespace(**sizes, encoder_layers_to_keep="0,4")
    with pytest.raises(CheckpointError, match="--encoder-layers-to-keep 0,4: a.pt has only the layers 0 to 3 of "):
        refuse_other_model("a.pt", Namespace(**sizes, encoder_layers=4), own, is_meant=True)
    with pytest.raises(ValueError, match="every 2nd: --encoder-layers-to-keep 3,1 keeps no layer with positions"):
        build(encoder_layers=4, encoder_layers_without_positions="every 2nd", encoder_layers_to_keep="3,1")


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


def test_a_list_of_layers_to_keep_prunes_too(build):
    """fairseq-train makes a list of this flag of the transformer, and fairseq's own model then fails."""
    kept = build(encoder_layers=4, encoder_layers_to_keep=[0, 2], decoder_layers_to_keep=[1])
    assert (len(kept.encoder.layers), len(kept.decoder.layers)) == (2, 1)


@pytest.mark.parametrize(
    "trained, own, to_keep, same",
    [
        ("every 2nd", "every 2nd", "0,1", True),
        ("every 2nd", "every 2nd", "1,3", True),
        ("every 2nd", "every 2nd", "0,2", True),
        ("every 2nd", "1,3", "3,2", True),
        ("every 2nd", "1", "0,1", True),  # the other layers are dropped
        ("0,3", "0,3", "3", True),
        ("every 2nd", "every 3rd", "0,1", False),
        ("every 2nd", "every 3rd", "0,3", False),
        ("", "every 2nd", "0,1", False),
        ("every 2nd", "", "1", False),
        ("every 2nd", "every 2nd", None, True),
        ("every 2nd", "every 3rd", None, False),
    ],
)
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_start_is_reported_if_the_layers_that_are_kept_differ(caplog, side, trained, own, to_keep, same):
    layers = len(to_keep.split(",")) if to_keep else 4  # fairseq sets this number
    sizes = {"arch": "transformer_rope", "encoder_layers": 4, "decoder_layers": 4, "position_encoding": "rope"}
    of_checkpoint = Namespace(**sizes, **{f"{side}_layers_without_positions": trained})
    given = {f"{side}_layers": layers, f"{side}_layers_to_keep": to_keep, f"{side}_layers_without_positions": own}
    with caplog.at_level(logging.WARNING, "fairseq_rope"):
        refuse_other_model("start.pt", of_checkpoint, Namespace(**{**sizes, **given}), is_meant=True)
    messages = [record.getMessage() for record in caplog.records]
    assert (messages == []) is same
    assert same or f"--{side}-layers-without-positions" in messages[0]


@pytest.mark.parametrize(
    "name, own",
    [
        *[("rope", ""), ("t5", "relative_attention_bias"), ("shaw", "position_keys")],
        ("deberta", "key_projection"),  # with a table that layers share, and projections of their own
    ],
)
@pytest.mark.parametrize("trained, new", [("", "0"), ("0", ""), ("0", "1")])
def test_a_training_can_start_from_a_checkpoint_with_other_layers(build, name, own, trained, new, caplog):
    lists = [{"encoder_layers_without_positions": layers} for layers in (trained, new)]
    checkpoint, model = (build(encoder_layers=3, **ENCODING_OPTIONS[name], **layers) for layers in lists)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with caplog.at_level(logging.WARNING, "fairseq_rope"), reading_for(Reading(["start.pt"])):
        model.load_state_dict({key: value.clone() for key, value in checkpoint.state_dict().items()}, strict=True)
    after, loaded = model.state_dict(), checkpoint.state_dict()
    assert not any(f"encoder.layers.{new}.self_attn.position" in key for key in after)
    started = set(after) - set(loaded)
    for key, value in after.items():
        if key not in started:
            assert torch.equal(value, loaded[key]), key
        elif name == "shaw" or "_projection" in key:
            assert f"encoder.layers.{trained}." in key and torch.equal(value, before[key])
        else:  # layers share the numbers of the checkpoint
            assert torch.equal(value, loaded[key.replace("layers.0", "layers.2")])
    messages = " ".join(record.getMessage() for record in caplog.records)
    assert (f"dropped encoder.layers.{new}.self" in messages) is (name in ("shaw", "deberta") and new != "")
    assert (f"has no encoder.layers.{trained}.self" in messages) is (name in ("shaw", "deberta") and trained != "")
    assert "relative_embeddings" not in messages, "a shared table is neither lost nor new"
    if own and trained:  # a training that resumes needs all parameters
        with (
            reading_for(Reading(["resumed.pt"], resumes=True)),
            pytest.raises(RuntimeError, match=f"Missing key.*{own}"),
        ):
            model.load_state_dict(checkpoint.state_dict(), strict=True)


def test_shared_parameters_move_to_other_layers_if_no_layer_has_positions_in_both_models(build):
    lists = [{"encoder_layers_without_positions": layers} for layers in ("0,1", "2")]
    checkpoint, model = (build(encoder_layers=3, **ENCODING_OPTIONS["t5"], **layers) for layers in lists)
    with reading_for(Reading(["start.pt"])):
        model.load_state_dict(checkpoint.state_dict(), strict=True)
    (trained,) = checkpoint.encoder.layers[2].self_attn.position.parameters()
    for number in (0, 1):
        (started,) = model.encoder.layers[number].self_attn.position.parameters()
        assert torch.equal(started, trained)


def test_a_subclass_can_build_more_layers_than_its_configuration_has(build):
    encoder = build(**ENCODING_OPTIONS["rope"], encoder_layers=2, encoder_layers_without_positions="0").encoder
    more = encoder.build_encoder_layer(encoder.cfg)
    assert more.self_attn.position is encoder.layers[1].self_attn.position


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


def test_a_training_with_projections_of_positions_can_start_from_one_that_shares_those_of_words(build, caplog):
    checkpoint = build(position_encoding="deberta", deberta_share_projections=True).state_dict()
    model = build(position_encoding="deberta")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with caplog.at_level(logging.WARNING, "fairseq_rope"), reading_for(Reading(["start.pt"])):
        model.load_state_dict({key: value.clone() for key, value in checkpoint.items()}, strict=True)
    for key, value in model.state_dict().items():
        assert torch.equal(value, checkpoint[key] if key in checkpoint else before[key]), key
    (of_encoder, _) = [record.getMessage() for record in caplog.records]
    assert "encoder.layers.0.self_attn.position.key_projection" in of_encoder and "new values" in of_encoder
