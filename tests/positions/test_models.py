"""Whole models with each position encoding: beside fairseq's, from one seed, in searches, from other checkpoints."""

import logging
import math
import random
import threading
from argparse import ArgumentParser, Namespace
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, product

import numpy
import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY, build_model
from fairseq.sequence_generator import SequenceGenerator
from omegaconf import OmegaConf
from torch import nn

from fairseq_rope.errors import InputError
from fairseq_rope.modules.attention import SelfAttention
from fairseq_rope.positions import ENCODINGS, Option, PositionEncoding
from fairseq_rope.positions.sharing import forward_pass
from fairseq_rope.transformer import TransformerRopeModel
from fairseq_rope.transformer.encodings import _kind
from fairseq_rope.transformer.options import read
from tests.commands import train
from tests.models import ENCODING_OPTIONS, PAD, batch, is_of_positions, teacher_forced
from tests.searches import assert_same, assert_scores_of_the_full_pass, fast, search, search_both_ways, sentences

LEARNED = ("t5", "shaw", "transformer-xl", "deberta", "tupe", "kerple", "learned")  # those with parameters


# -- the same start ----------------------------------------------------------------------------------


DRAWN_AGAIN = ("learned", "transformer-xl")  # RoBERTa draws the values of all linear layers and embeddings again
START = {
    "transformer_rope_tiny": list(ENCODING_OPTIONS),
    "transformer_lm_rope": list(ENCODING_OPTIONS),
    "roberta_rope": [name for name in ENCODING_OPTIONS if name not in ("xpos", *DRAWN_AGAIN)],
}


@pytest.mark.parametrize("arch", list(START))
def test_all_other_parameters_start_the_same_from_the_same_seed(build, arch):
    sizes = {"encoder_embed_dim": 64, "encoder_attention_heads": 2, "decoder_embed_dim": 64}
    started, random_states = {}, {}
    for name in START[arch]:
        for draws, seed in ((torch, 7), (numpy.random, 7), (random, 7)):
            (getattr(draws, "manual_seed", None) or draws.seed)(seed)
        options = ENCODING_OPTIONS[name] if arch == "transformer_rope_tiny" else {"position_encoding": name}
        started[name] = build(arch, **sizes, **options).state_dict()
        random_states[name] = (torch.rand(4).tolist(), numpy.random.rand(), random.random())
    for name, state in started.items():
        state = {key: value for key, value in state.items() if not key.endswith("_float_tensor")}  # of older fairseqs
        others = {key for key in state if not is_of_positions(key)}
        assert others == started["none"].keys()
        assert all(torch.equal(state[key], started["none"][key]) for key in others), name
        assert any(is_of_positions(key) for key in state) is (name in LEARNED), name
    # so batches, dropout and all that is drawn later are the same
    assert all(state == random_states["none"] for state in random_states.values())


@pytest.mark.parametrize("name", LEARNED)
def test_parameters_of_positions_are_drawn_from_numbers_of_their_own(build, name):
    sizes = {"encoder_attention_heads": 8, "decoder_attention_heads": 8}

    def built(seed):
        torch.manual_seed(seed)
        return dict(build(position_encoding=name, **sizes).named_parameters())  # a shared parameter once

    state = built(7)
    drawn = {key: value.detach().flatten()[-8:] for key, value in state.items() if value.numel() >= 8}
    drawn = {key: value for key, value in drawn.items() if value.std() > 0}  # no biases and norms
    own = [key for key in drawn if is_of_positions(key)]
    assert len(own) >= 2, "encoder and decoder"
    for one, other in combinations(drawn, 2):
        if is_of_positions(one) or is_of_positions(other):
            correlation = torch.corrcoef(torch.stack([drawn[one], drawn[other]]))[0, 1]
            assert abs(float(correlation)) < 0.9999, (one, other)
    again, another = built(7), built(8)
    assert all(torch.equal(again[key], state[key]) for key in own)
    assert not any(torch.equal(another[key], state[key]) for key in own)


@pytest.mark.parametrize("name, key", [("t5", "attention_bias"), ("deberta", "embeddings"), ("tupe", "embeddings")])
def test_tables_of_positions_start_with_the_deviation_of_fairseqs_embeddings(build, name, key):
    torch.manual_seed(1)
    sizes = {
        f"{side}_{size}": n
        for side in ("encoder", "decoder")
        for size, n in (("embed_dim", 64), ("attention_heads", 8))
    }
    model = build(position_encoding=name, **sizes)
    tables = [value for path, value in model.named_parameters() if is_of_positions(path) and path.endswith(key)]
    assert len(tables) == 2
    for table in tables:
        assert table.numel() >= 256 and float(table.detach().std()) == pytest.approx(64**-0.5, rel=0.2)
        assert abs(float(table.detach().mean())) < 0.03


def test_kerples_parameters_start_in_the_ranges_of_its_paper(build):
    """r1 from 0 to 2, r2 from 0 to 1: arXiv:2205.09921, the logarithmic variant."""
    drawn = {"r1": [], "r2": []}
    for seed in range(40):
        torch.manual_seed(seed)
        for path, value in build(position_encoding="kerple").named_parameters():
            if is_of_positions(path):
                drawn[path.rpartition(".")[2]] += value.detach().flatten().tolist()
    for name, most in (("r1", 2.0), ("r2", 1.0)):
        assert 0 <= min(drawn[name]) < 0.1 * most and 0.9 * most < max(drawn[name]) <= most


# -- beside fairseq's own transformer ----------------------------------------------------------------

FAIRSEQS = {
    "sinusoidal": {},
    "learned": {"encoder_learned_pos": True, "decoder_learned_pos": True},
    "none": {"no_token_positional_embeddings": True},
}


@pytest.mark.parametrize("name", [*FAIRSEQS, "shape"])
def test_absolute_positions_are_those_of_fairseqs_transformer(build, task, name, monkeypatch):
    sizes = {"max_source_positions": 30, "max_target_positions": 30}
    ours, stock = build(position_encoding=name, **sizes), build("transformer_tiny", **FAIRSEQS.get(name, {}), **sizes)
    assert {key: value.shape for key, value in ours.state_dict().items()} == {
        key: value.shape for key, value in stock.state_dict().items()
    }
    ours.load_state_dict(stock.state_dict())
    source, lengths = batch([9, 4, 6], left_pad=True)
    target, _ = batch([8, 5, 3], left_pad=False, seed=1)
    losses = []
    for model in (ours, stock):
        scores = teacher_forced(model, source, lengths, target).log_softmax(2)
        losses.append(-scores.gather(2, target.unsqueeze(2)).squeeze(2)[target != PAD].sum())
        losses[-1].backward()
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=0)
    gradients = [{key: value.grad for key, value in model.named_parameters()} for model in (ours, stock)]
    assert gradients[0].keys() == gradients[1].keys()
    for key, gradient in gradients[1].items():
        torch.testing.assert_close(gradients[0][key], gradient, rtol=1e-4, atol=1e-4, msg=key)

    fast(ours), fast(stock)
    ours.load_state_dict(stock.state_dict())  # fast() made an end more likely in both
    for beam in (1, 4):
        found = [
            SequenceGenerator([model], task.target_dictionary, beam_size=beam, max_len_a=1, max_len_b=5).generate(
                [model], {"net_input": {"src_tokens": source, "src_lengths": lengths}}
            )
            for model in (ours, stock)
        ]
        assert_same(*found)


def test_shape_takes_a_batch_without_sentences(build):
    embedding = build(position_encoding="shape").encoder.embed_positions
    for is_training in (True, False):
        assert embedding.train(is_training)(torch.zeros(0, 5, dtype=torch.int64)).shape == (0, 5, 64)


@pytest.mark.parametrize("name", ["sinusoidal", "shape", "learned"])
def test_vectors_of_absolute_positions_are_added_to_the_embeddings(build, name):
    model, (source, _) = build(position_encoding=name), batch([9, 4], left_pad=True)
    for side in (model.encoder, model.decoder):
        if name == "learned":
            vectors = side.embed_positions.weight.double().tolist()
            pad_row, deviation = side.embed_positions.weight[PAD], side.embed_positions.weight[PAD + 1 :].std()
            assert not bool(pad_row.any()) and deviation.item() == pytest.approx(64**-0.5, rel=0.05)
        else:
            vectors = [sinusoid(n, 64).tolist() if n != PAD else [0.0] * 64 for n in range(20)]
        got = side.embed_positions(source)
        for row, column in product(*map(range, source.shape)):
            word = int((source[row, : column + 1] != PAD).sum())  # the first is word 1
            expected = torch.tensor(vectors[PAD + word if source[row, column] != PAD else PAD])
            torch.testing.assert_close(got[row, column], expected, atol=1e-6, rtol=0)
    words = model.encoder.embed_tokens(source) * 8.0
    embedded, _ = model.encoder.forward_embedding(source)
    torch.testing.assert_close(embedded, words + model.encoder.embed_positions(source))


def sinusoid(position, dim):
    """fairseq's sinusoid in float64: sines before cosines, and an exponent over d / 2 - 1."""
    angles = [position * 10000 ** (-t / (dim // 2 - 1)) for t in range(dim // 2)]
    return torch.tensor([math.sin(angle) for angle in angles] + [math.cos(angle) for angle in angles])


@pytest.mark.parametrize("left_pad", [True, False])
def test_shape_adds_one_number_to_the_positions_of_a_sentence_in_training(build, left_pad):
    model = build(position_encoding="shape", shape_max_shift=3, max_source_positions=9, max_target_positions=9)
    source, lengths = batch([9, 4] * 50, left_pad)
    table = torch.stack([sinusoid(PAD + 1 + n, 64) for n in range(20)])

    def shifts(side):
        """The number that *side* adds to the positions of each sentence; all its words have the same."""
        found = []
        for tokens, vectors in zip(source, side.embed_positions(source), strict=True):
            words = vectors[tokens != PAD]
            close = [torch.allclose(words, table[shift : shift + len(words)], atol=1e-5) for shift in range(4)]
            assert sum(close) == 1
            found.append(close.index(True))
            assert not bool(vectors[tokens == PAD].any())
        return found

    sides = (model.encoder, model.decoder)
    assert [shifts(side) for side in sides] == [[0] * 100] * 2
    model.train()
    torch.manual_seed(3)
    encoder, decoder = (shifts(side) for side in sides)
    for side in (encoder, decoder):
        assert all(8 < side.count(shift) < 45 for shift in range(4)), "uniform in 0 … 3"
    assert 8 < sum(one == other for one, other in zip(encoder, decoder, strict=True)) < 45, "independent"
    torch.manual_seed(3)
    assert [shifts(side) for side in sides] == [encoder, decoder]
    assert [side.embed_positions.weights.size(0) for side in sides] == [PAD + 1 + 9 + 3] * 2, (
        "large enough from the beginning"
    )
    source = torch.full((100, 15), 7)  # longer than --max-source-positions
    assert set(shifts(model.encoder)) == {0, 1, 2, 3}


# -- attention in whole models -----------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ENCODING_OPTIONS))
def test_layers_share_one_encoding_or_have_one_each(build, name):
    model = build(**ENCODING_OPTIONS[name])
    for side in (model.encoder, model.decoder):
        positions = {id(layer.self_attn.position) for layer in side.layers}
        assert len(positions) == (2 if name in ("shaw", "nezha", "transformer-xl", "deberta") else 1)
    assert model.encoder.layers[0].self_attn.position is not model.decoder.layers[0].self_attn.position


def test_the_search_notices_an_encoding_that_somebody_has_changed(build):
    model, sample = fast(build(position_encoding="alibi")), sentences()
    before = search_both_ways(model, sample)
    position = model.decoder.layers[0].self_attn.position
    position.slope = -5 * position.slope
    after = search_both_ways(model, sample)
    with pytest.raises(AssertionError):
        assert_same(after, before)
    position.register_forward_hook(lambda *_: None)
    search_both_ways(model, sample, bound=False)


def test_threads_that_train_share_no_bias_and_no_gradient(build):
    """One thread enters its forward pass in the middle of the other's, and leaves it when the other is through."""
    model = build(position_encoding="t5", dropout=0.0).train()
    events = {name: threading.Event() for name in ("inside", "done")}
    source, lengths = batch([5, 5], left_pad=True)  # no padding: both threads have the same masks, which are None
    bias = model.encoder.layers[0].self_attn.position.relative_attention_bias
    inner, results = ThreadPoolExecutor(1), []

    def gradient():
        states = model.encoder(source, lengths)["encoder_out"][0]
        return torch.autograd.grad(states.square()[0].sum(), bias)[0]

    def after_first_layer(*_):
        if threading.current_thread() is threading.main_thread():
            results.append(inner.submit(gradient))
            assert events["inside"].wait(60)
        else:
            events["inside"].set()
            assert events["done"].wait(60)

    expected = gradient()
    model.encoder.layers[0].register_forward_hook(after_first_layer)
    try:
        outer = gradient()
    finally:
        events["done"].set()
    torch.testing.assert_close(outer, expected)
    torch.testing.assert_close(results[0].result(60), expected)


# -- checkpoints of other encodings ------------------------------------------------------------------


@pytest.mark.parametrize("name", [*LEARNED, "sinusoidal"])
@pytest.mark.parametrize("before", ["sinusoidal", "learned", "t5", "shaw"])
def test_a_checkpoint_of_another_encoding_is_fitted_aloud(build, before, name, caplog):
    checkpoint = build(**ENCODING_OPTIONS[before]).state_dict()
    if before == "sinusoidal":  # as fairseq 0.12 writes it
        checkpoint.update({f"{side}.embed_positions._float_tensor": torch.zeros(1) for side in ("encoder", "decoder")})
    torch.manual_seed(9)
    model = build(**ENCODING_OPTIONS[name])
    start = {key: value.clone() for key, value in model.state_dict().items()}
    with caplog.at_level(logging.WARNING, "fairseq_rope"):
        model.load_state_dict({key: value.clone() for key, value in checkpoint.items()}, strict=True)
    messages = [record.getMessage() for record in caplog.records]
    for key, value in model.state_dict().items():
        if not key.endswith("_float_tensor"):
            assert torch.equal(value, (checkpoint if before == name or not is_of_positions(key) else start)[key]), key
    if before == name:
        assert messages == []
        return
    for side in ("encoder", "decoder"):
        dropped = [m for m in messages if m.startswith(f"dropped {side}.")]
        new = [m for m in messages if m.startswith(f"the checkpoint has no {side}.")]
        assert len(dropped) == 1 and len(new) == (name != "sinusoidal"), messages
        assert all(f"this model's {side} has the position encoding {name}" in m for m in dropped + new)


def test_no_two_encodings_have_a_parameter_of_the_same_name(build):
    """Otherwise, a training that starts from the one would read it as the other's."""
    of_encodings = {name: build(position_encoding=name).state_dict() for name in LEARNED}
    for one, other in combinations(of_encodings, 2):
        common = of_encodings[one].keys() & of_encodings[other].keys()
        assert not any(is_of_positions(key) for key in common), (one, other)


PARTS = {
    "t5": "encoder.layers.1.self_attn.position.relative_attention_bias",
    "shaw": "decoder.layers.1.self_attn.position.relative_position_keys",
    "transformer-xl": "decoder.layers.0.self_attn.position.pos_bias_u",
    "kerple": "encoder.layers.0.self_attn.position.r2",
    "tupe": "encoder.layers.1.self_attn.position.position_key_projection",
    "deberta": "encoder.layers.1.self_attn.position.key_projection",
}


@pytest.mark.parametrize("name", list(PARTS))
def test_a_checkpoint_that_lacks_some_parameters_of_its_encoding_is_refused(build, name):
    model = build(**ENCODING_OPTIONS[name])
    state = dict(model.state_dict())
    del state[PARTS[name]]
    with pytest.raises(RuntimeError, match=f"Missing key.*{PARTS[name]}"):
        model.load_state_dict(state, strict=True)


def test_options_of_an_older_version_are_rotary(task):
    rotation = {"rope_base": 500.0, "rope_layout": "half", "rope_fraction": 0.5}
    for side in read(Namespace(arch="transformer_rope", **rotation)).sides:
        assert (side.encoding, side.position) == ("rope", {**rotation, "rope_scaling": ""})
        assert (side.norm_type, side.attention_type, side.kv_heads) == ("layer", "softmax", 8)
    for name, options in FAIRSEQS.items():
        assert read(Namespace(arch="transformer", **options)).encoder.encoding == name
    older = Namespace(rope_layout="half", encoder_embed_dim=64, decoder_embed_dim=64)
    model = TransformerRopeModel.build_model(older, task)
    assert {layer.self_attn.position.layout for layer in (*model.encoder.layers, *model.decoder.layers)} == {"half"}
    assert model.encoder.embed_positions is None and model.decoder.embed_positions is None


# -- options -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [32, 0])
def test_a_mix_of_encodings_uses_the_options_of_both_and_refuses_the_others(build, value):
    sides = {"encoder_position_encoding": "t5", "decoder_position_encoding": "shaw"}
    model = build(**sides, relative_attention_num_buckets=8, max_relative_positions=3)
    assert model.encoder.layers[0].self_attn.position.relative_attention_bias.shape == (8, 2)
    assert model.decoder.layers[0].self_attn.position.relative_position_keys.shape == (7, 32)
    with pytest.raises(InputError, match=rf"--rope-base {value}: is not used"):
        build(**sides, rope_base=value)


SIZES = {"embed_dim": 64, "ffn_embed_dim": 64, "attention_heads": 2}


def test_the_parts_of_a_yaml_file_become_the_options_that_fairseq_reads_and_overrides(task):
    kept = {"layers": 4, "layers_to_keep": [0, 2], **SIZES}
    parts = {"encoder": kept, "decoder": {"layers": 1, **SIZES}, "quant_noise": {"scalar": 0.5}}
    cfg = OmegaConf.create({"_name": "transformer_rope", **parts})
    model = build_model(cfg, task)
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (2, 1)
    assert not {*parts} & {*cfg}
    # of fairseq's checkpoints: the number of layers that are left, and the numbers of those in training
    assert (cfg.encoder_layers, cfg.encoder_layers_to_keep, cfg.quant_noise_scalar) == (2, "0,2", 0.5)
    twice = OmegaConf.create({"_name": "transformer_rope", **parts, "encoder_layers": 2})
    with pytest.raises(InputError, match=r"^model\.encoder_layers: there is also a part model\.encoder; write "):
        build_model(twice, task)
    alone = OmegaConf.create({"_name": "transformer_rope", "encoder": SIZES})
    ARCH_CONFIG_REGISTRY["transformer_rope"](alone)
    assert (alone.encoder_embed_dim, alone.decoder_embed_dim) == (64, 512), "as with fairseq's transformer"
    first = build_model(OmegaConf.create({"_name": "transformer_rope_tiny", "decoder_layers_to_keep": 0}), task)
    assert len(first.decoder.layers) == 1


def test_a_hydra_config_and_a_named_architecture_choose_the_encoding(build, task):
    sizes = {"embed_dim": 64, "ffn_embed_dim": 64, "layers": 2, "attention_heads": 2}  # those of transformer_tiny
    tiny = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sizes.items()}
    t5 = OmegaConf.create({"_name": "transformer_t5", **tiny, "relative_attention_num_buckets": 8})
    t5 = build_model(t5, task)
    flags = {"position_encoding": "t5", "relative_attention_num_buckets": 8}
    for model in (t5, build_model(OmegaConf.create({"_name": "transformer_rope_tiny", **flags}), task)):
        assert model.state_dict().keys() == build(**flags).state_dict().keys()
        for layer in (*model.encoder.layers, *model.decoder.layers):
            assert layer.self_attn.position.relative_attention_bias.shape == (8, 2)
    with pytest.raises(ValueError, match="--rope-base 500.0: is not used"):
        build_model(OmegaConf.create({"_name": "transformer_t5", "rope_base": 500.0}), task)


class Nearness(PositionEncoding):
    """A user's encoding: subtracts a learned multiple of the distance to the power of an option, and shrinks keys."""

    options = {"nearness_power": Option(1.0, "the power of the distance")}

    def __init__(self, heads, nearness_power):
        super().__init__()
        self.power, self.weight = nearness_power, nn.Parameter(torch.rand(heads))

    @classmethod
    def build(cls, side, embed_dim, heads, **options):
        return cls(heads, **options)

    def queries_and_keys(self, q, k, offset):
        position = torch.arange(offset, offset + k.size(2), dtype=k.dtype)
        return q, k * (1.0 - 0.5 * (position % 2)).unsqueeze(1)

    def bias(self, q, k, padding):
        key = torch.arange(k.size(2), dtype=q.dtype)
        distance = (key[k.size(2) - q.size(2) :].unsqueeze(1) - key).abs() ** self.power
        return (-self.weight[:, None, None] * distance).unsqueeze(0).to(q.dtype)


def test_an_encoding_of_a_user_gets_its_flag_trains_and_is_searched(data_bin, tmp_path, monkeypatch, build):
    monkeypatch.setitem(ENCODINGS, "nearness", Nearness)
    parser = ArgumentParser()
    TransformerRopeModel.add_args(parser)
    assert parser.parse_args(["--nearness-power", "0.5"]).nearness_power == 0.5
    assert "nearness" in parser.format_help()
    with pytest.raises(InputError, match="--nearness-power 0.5: is not used"):
        build(nearness_power=0.5)
    train(data_bin, tmp_path, "--position-encoding", "nearness", "--nearness-power", 0.5)
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "checkpoint_last.pt")])
    position = model.decoder.layers[1].self_attn.position
    assert type(position) is Nearness and position.power == 0.5 and not bool((position.weight == 0.5).any())
    torch.manual_seed(3)
    model, sample = fast(build(position_encoding="nearness")), sentences((7, 7, 7))
    assert_scores_of_the_full_pass(model, sample, search_both_ways(model, sample))


class Gated(PositionEncoding):
    """A bias that reads the queries, as in CoPE (arXiv:2405.18719): each query has its own measure of distance."""

    def bias(self, q, k, padding):
        key = torch.arange(k.size(2), dtype=q.dtype)
        distance = (key[k.size(2) - q.size(2) :].unsqueeze(1) - key).abs()
        return -torch.sigmoid(4 * q.sum(-1, keepdim=True)) * distance


class Weighted(PositionEncoding):
    """Adds to the output how far the attention looks back."""

    def values(self, weights):
        key = torch.arange(weights.size(3), dtype=weights.dtype)
        return weights @ key.unsqueeze(1) / 10


@pytest.mark.parametrize("encoding", [Gated, Weighted])
def test_a_bias_of_queries_and_added_values_are_those_of_each_layer_without_further_attributes(
    monkeypatch, build, encoding
):
    outputs, sample = [], sentences((7, 7, 7))
    for shared in (True, False):
        monkeypatch.setitem(ENCODINGS, "own", type("Own", (encoding,), {"shared": shared}))
        torch.manual_seed(3)
        model = fast(build(position_encoding="own", encoder_layers=2, decoder_layers=2))
        searched = search_both_ways(model, sample, bound=encoding is not Weighted)
        assert_scores_of_the_full_pass(model, sample, searched)
        target = torch.arange(4, 25).view(3, 7)
        outputs.append(model(**sample["net_input"], prev_output_tokens=target)[0])
    torch.testing.assert_close(*outputs)


def test_layers_inside_an_encoding_are_not_those_of_the_model():
    names = [f"layers.{n}.self_attn.position.layers.{m}.weight" for n in (1, 2) for m in (0, 1)]
    kinds = [_kind(name) for name in names]
    assert kinds[0] == kinds[2] != kinds[1] == kinds[3]


def test_encodings_with_different_options_of_one_name_are_refused(monkeypatch):
    other = type("Other", (ENCODINGS["shaw"],), {"options": {"max_relative_positions": Option(64, "")}})
    monkeypatch.setitem(ENCODINGS, "other", other)
    with pytest.raises(ValueError, match="max_relative_positions"):
        TransformerRopeModel.add_args(ArgumentParser())


def test_the_common_flag_replaces_the_encodings_of_an_architecture(build):
    for side in ("encoder", "decoder"):
        position = getattr(build("transformer_xpos", position_encoding="alibi"), side).layers[0].self_attn.position
        assert type(position) is ENCODINGS["alibi"]


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple", "tupe"])
def test_layers_compute_the_bias_once_in_a_forward_pass(build, task, name, monkeypatch):
    model = build(position_encoding=name, encoder_layers=3, decoder_layers=4).train()
    calls, (owner,) = [], [one for one in ENCODINGS[name].__mro__ if "bias" in vars(one)][:1]
    bias = owner.bias
    monkeypatch.setattr(owner, "bias", lambda *args: calls.append(args) or bias(*args))
    tokens = torch.randint(4, 40, (2, 7))
    model(tokens, torch.tensor([7, 7]), tokens)
    assert len(calls) == 2  # for the encoder and for the decoder


@pytest.mark.parametrize(
    "name, left_pad, causal_layers",
    [
        *[(name, False, 3) for name in ("none", "sinusoidal", "learned", "rope", "xpos")],
        ("rope", True, 0),
        ("shaw", False, 0),
        ("t5", False, 0),
    ],
)
def test_training_needs_no_mask_if_only_later_words_are_hidden(build, name, left_pad, causal_layers, monkeypatch):
    """The reference gives the layers fairseq's mask of later words, which they use as any other mask."""
    model = build(decoder_position_encoding=name, decoder_layers=3, dropout=0.0).double().train()
    source, lengths = batch([9, 4, 6], left_pad=True)
    target, _ = batch([8, 5, 3], left_pad=left_pad, seed=1)
    fused, is_causal, results = nn.functional.scaled_dot_product_attention, [], []

    def recording(*args, **options):
        is_causal.append(options["is_causal"])
        return fused(*args, **options)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", recording)
    for expected in (causal_layers, 0):
        is_causal.clear()
        model.zero_grad()
        features = model.decoder.extract_features(target, model.encoder(source, lengths))[0][target != PAD]
        features.square().sum().backward()
        results.append([features, *(parameter.grad for parameter in model.decoder.layers.parameters())])
        assert sum(is_causal) == expected
        model.decoder._future_mask = torch.full((8, 8), -math.inf).triu(1)
    torch.testing.assert_close(*results, rtol=0, atol=1e-9)


@pytest.mark.parametrize("kv_heads", [1, 2])
def test_a_bias_comes_after_the_rotation_and_gets_keys_of_one_shape_in_all_searches(build, monkeypatch, kv_heads):
    seen = []

    class Seeing(ENCODINGS["none"]):
        def queries_and_keys(self, q, k, offset):
            self.keys = offset + k.size(2)
            return q, k

        def bias(self, q, k, padding):
            seen.append((k.size(1), k.size(2) == self.keys))
            return torch.zeros(1, 1, q.size(2), k.size(2))

    monkeypatch.setitem(ENCODINGS, "seeing", Seeing)
    model = build(position_encoding="seeing", decoder_attention_heads=2, decoder_kv_heads=kv_heads, encoder_layers=0)
    search_both_ways(fast(model), sentences((7, 7)))
    assert set(seen) == {(kv_heads, True)}


def test_layers_on_different_devices_do_not_share_a_bias():
    position = ENCODINGS["alibi"].build("encoder", 8, 2)
    with forward_pass():
        for device in ("cpu", "meta"):
            attention, x = SelfAttention(8, 2, position).to(device), torch.randn(4, 1, 8, device=device)
            assert attention(x, x, x)[0].device.type == device


def test_xpos_refuses_positions_whose_factor_its_type_cannot_hold(build, monkeypatch):
    model = build(decoder_position_encoding="xpos", xpos_scale_base=4.0, max_target_positions=2000)
    source, previous = torch.randint(4, 40, (1, 5)), torch.randint(4, 40, (1, 1000))
    held = previous[:, :250]
    assert model(source, torch.tensor([5]), held)[0].isfinite().all()
    with pytest.raises(ValueError, match="--xpos-scale-base 4: allows 270 positions in torch.float32, and 1000 are"):
        model(source, torch.tensor([5]), previous)
    normalised = build(decoder_position_encoding="xpos", xpos_scale_base=4.0, qk_norm=True)  # in float32
    with torch.autocast("cpu", torch.float16), pytest.raises(ValueError, match="allows 22 positions in torch.float16"):
        normalised(source, torch.tensor([5]), held)
    for is_fast in ("0", "1"):
        monkeypatch.setenv("FAIRSEQ_ROPE_FAST_SEARCH", is_fast)
        with pytest.raises(ValueError, match="^--xpos-scale-base 4: allows 22 positions in torch.float16, and 23 are"):
            search(fast(model.half()), sentences((5,)), beam_size=2, min_len=60, max_len_b=70)
