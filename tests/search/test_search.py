"""The fast search against the model called as fairseq calls it."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.modules import PositionalEmbedding
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from fairseq.search import BeamSearch, DiverseBeamSearch, Sampling
from fairseq.sequence_generator import SequenceGenerator

from fairseq_rope import search as fast_search
from fairseq_rope.attention import CrossAttention, RotaryMultiheadAttention
from fairseq_rope.dropout import Dropout, ResidualInPlace
from fairseq_rope.positions.rotary import RotaryEmbedding
from fairseq_rope.search import STATE, interface
from fairseq_rope.search.cache import FIRST_CAPACITY
from fairseq_rope.search.equal_rows import LARGEST
from fairseq_rope.search.projection import PackedProjection, project_packed
from fairseq_rope.search.step import bind_all

FAIRSEQS_REORDER = TransformerEncoderBase.reorder_encoder_out


def batch(task, lengths=(9, 3, 6, 12, 5)):
    """Sentences of *lengths*, padded on the left, as fairseq's."""
    pad, eos = task.target_dictionary.pad(), task.target_dictionary.eos()
    tokens = torch.full((len(lengths), max(lengths)), pad)
    for row, length in enumerate(lengths):
        tokens[row, -length:-1] = torch.randint(4, 44, (length - 1,))
        tokens[row, -1] = eos
    return {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor(lengths)}}


def search(model, task, sample, plain=False, beam_size=4, strategy=BeamSearch, prefix_tokens=None, **options):
    """The hypotheses that SequenceGenerator finds, and whether its decoder took bound steps.

    With *plain*, the fast search is turned off.
    """
    torch.manual_seed(5)
    dictionary = task.target_dictionary
    generator = SequenceGenerator(
        [model], dictionary, beam_size=beam_size, search_strategy=strategy(dictionary), **options
    )
    begun = []
    real = fast_search.begin

    def begin(decoder, methods, previous, encoder_out, state):
        real(decoder, methods, previous, encoder_out, state)
        begun.append(STATE in state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_search, "begin", begin)
        if plain:
            patch.setenv("FAIRSEQ_ROPE_FAST_SEARCH", "0")
        found = generator.generate([model], sample, prefix_tokens=prefix_tokens)
    return found, all(begun) and bool(begun)


def test_the_switch_turns_the_search_off_and_on(build, task, monkeypatch):
    model, sample = fast(build()), batch(task)
    for choice, is_fast in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv("FAIRSEQ_ROPE_FAST_SEARCH", choice)
        assert search(model, task, sample)[1] is is_fast
    monkeypatch.setenv("FAIRSEQ_ROPE_FAST_SEARCH", "yes")
    with pytest.raises(ValueError, match="FAIRSEQ_ROPE_FAST_SEARCH is 'yes': must be 0"):
        search(model, task, sample)


def test_only_devices_that_were_measured_search_fast_by_default(monkeypatch):
    monkeypatch.delenv("FAIRSEQ_ROPE_FAST_SEARCH", raising=False)
    assert interface.is_on(torch.device("cpu")) and not interface.is_on(torch.device("cuda"))
    monkeypatch.setenv("FAIRSEQ_ROPE_FAST_SEARCH", "1")
    assert interface.is_on(torch.device("cuda"))


def assert_same(found, expected):
    assert len(found) == len(expected)
    for hypotheses, true in zip(found, expected, strict=True):
        assert [h["tokens"].tolist() for h in hypotheses] == [h["tokens"].tolist() for h in true]
        for one, other in zip(hypotheses, true, strict=True):
            scores, expected_scores = one["positional_scores"], other["positional_scores"]
            rounding = 1e-6 * len(scores)  # they are differences of sums
            torch.testing.assert_close(scores, expected_scores, rtol=0, atol=1e-5 + rounding)


def fast(model):
    """*model* as fairseq-generate prepares it."""
    model.make_generation_fast_(beamable_mm_beam_size=4, need_attn=False)
    # An untrained model ends no sentence: give the end a better chance, so that sentences end one by one.
    with torch.no_grad():
        model.decoder.output_projection.weight[2] *= 3.0
    return model


def unwatched(model):
    """*model*, of which nobody wants the weights of attention; unlike a fast one it can go on training."""
    for layer in model.decoder.layers:
        layer.need_attn = False
    return model


MODELS = {
    "as it is": {},
    "half": {"rope_layout": "half"},
    "half, a fraction": {"rope_layout": "half", "rope_fraction": 0.5},
    "a fraction, another base": {"rope_fraction": 0.25, "rope_base": 500.0},
    "pre-norm": {"encoder_normalize_before": True, "decoder_normalize_before": True},
    "normalised embeddings": {"layernorm_embedding": True, "no_scale_embedding": True},
    "gelu": {"activation_fn": "gelu"},
    "other heads": {"decoder_attention_heads": 4, "encoder_attention_heads": 1},
    "another width": {"encoder_embed_dim": 32, "decoder_embed_dim": 64, "decoder_output_dim": 48},
}


@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("beam_size", [1, 4])
def test_bound_steps_find_what_the_layers_find(build, task, name, beam_size):
    model = fast(build(**MODELS[name]))
    sample = batch(task)
    options = {"beam_size": beam_size, "max_len_a": 1, "max_len_b": 20, "len_penalty": 0.6}
    expected, took_them = search(model, task, sample, plain=True, **options)
    assert not took_them
    found, took_them = search(model, task, sample, **options)
    assert took_them
    assert_same(found, expected)
    assert len({len(h[0]["tokens"]) for h in found}) > 1, "sentences end at different times"


@pytest.mark.parametrize(
    "options",
    [
        {"beam_size": 3, "strategy": Sampling},
        {"beam_size": 4, "strategy": lambda words: DiverseBeamSearch(words, 2, 0.5)},
        {"beam_size": 5, "min_len": 7, "max_len_b": 15},
        {"beam_size": 4, "temperature": 1.7, "unk_penalty": 2.0},
    ],
    ids=["sampling", "diverse", "long", "temperature"],
)
def test_other_searches(build, task, options):
    model, sample = fast(build()), batch(task)
    expected, _ = search(model, task, sample, plain=True, **options)
    found, took_them = search(model, task, sample, **options)
    assert took_them
    assert_same(found, expected)


def test_prefixes_of_different_lengths(build, task):
    model, sample = fast(build()), batch(task)
    prefix = torch.tensor([[5, 6, 7], [8, 9, 1], [10, 1, 1], [11, 12, 13], [14, 15, 1]])
    expected, _ = search(model, task, sample, plain=True, prefix_tokens=prefix, max_len_b=20)
    found, took_them = search(model, task, sample, prefix_tokens=prefix, max_len_b=20)
    assert took_them
    assert_same(found, expected)


def test_outputs_longer_than_the_first_capacity(build, task):
    model, sample = build(), batch(task)
    model.make_generation_fast_(need_attn=False)
    options = {"min_len": 3 * FIRST_CAPACITY, "max_len_b": 3 * FIRST_CAPACITY + 5}
    expected, _ = search(model, task, sample, plain=True, **options)
    found, _ = search(model, task, sample, **options)
    assert_same(found, expected)


def test_float64_and_bfloat16(build, task):
    for dtype in (torch.float64, torch.bfloat16):
        model, sample = fast(build()).to(dtype), batch(task)
        expected, _ = search(model, task, sample, plain=True, max_len_b=10)
        found, took_them = search(model, task, sample, max_len_b=10)
        assert took_them
        if dtype == torch.float64:
            assert_same(found, expected)
        else:  # rounded elsewhere, hypotheses of nearly the same score can change places
            for one, other in zip(found, expected, strict=True):
                assert one[0]["score"].item() == pytest.approx(other[0]["score"].item(), rel=0.05)


def test_an_ensemble_with_fairseqs_own_model(build, task):
    models = [fast(build("transformer_rope_tiny")), fast(build("transformer_tiny"))]
    sample, words = batch(task), task.target_dictionary
    found = SequenceGenerator(models, words, beam_size=4).generate(models, sample)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAIRSEQ_ROPE_FAST_SEARCH", "0")
        expected = SequenceGenerator(models, words, beam_size=4).generate(models, sample)
    assert_same(found, expected)


def of_its_own(module, **methods):
    """Make *module* one of a subclass, with *methods*."""
    module.__class__ = type("Own", (type(module),), methods)


def scaled(method):
    """*method*, its result (or the first of its results) scaled."""

    def call(*args, **kwargs):
        result = method(*args, **kwargs)
        return (1.5 * result[0], *result[1:]) if isinstance(result, tuple) else 1.5 * result

    return call


class Doubling(torch.nn.Module):
    """In the place of dropout."""

    p, apply_during_inference = 0.0, False

    def forward(self, x):
        return 2 * x


def overrides():
    """By name: a function that changes what a decoder computes, from the model and a monkeypatch."""
    of_decoder = ("extract_features_scriptable", "extract_features", "forward", "output_layer")
    for name in of_decoder:
        yield (
            f"{name} of a subclass",
            lambda m, _, name=name: of_its_own(m.decoder, **{name: scaled(getattr(type(m.decoder), name))}),
        )
    for path, name in (
        *(("", name) for name in of_decoder),
        ("layers.1", "residual_connection"),
        ("layers.0.self_attn", "forward"),
        ("layers.0.self_attn.rotary", "forward"),
        ("layers.1.encoder_attn", "_attend"),
        ("layers.1.fc2", "forward"),
        ("layers.1.final_layer_norm", "forward"),
        ("layers.0.dropout_module", "forward"),
        ("dropout_module", "forward"),
        ("output_projection", "forward"),
    ):

        def of_instance(m, _, path=path, name=name):
            module = m.decoder.get_submodule(path)
            setattr(module, name, scaled(getattr(module, name)))

        yield f"{path} {name} of the instance", of_instance
    for cls, name in (
        (TransformerDecoderBase, "extract_features_scriptable"),
        (TransformerDecoderBase, "output_layer"),
        (TransformerDecoderLayerBase, "forward"),
        (ResidualInPlace, "residual_connection"),
        (Dropout, "forward"),
        (CrossAttention, "forward"),
        (RotaryMultiheadAttention, "_attend"),
        (RotaryEmbedding, "forward"),
        (torch.nn.LayerNorm, "forward"),
        (torch.nn.Linear, "forward"),
        (torch.nn.Embedding, "forward"),
    ):
        yield (
            f"{cls.__name__}.{name}",
            lambda _, patch, cls=cls, name=name: patch.setattr(cls, name, scaled(getattr(cls, name))),
        )
    for path in ("dropout_module", "embed_tokens", "layer_norm", "output_projection", "layers.0.fc1"):
        yield (
            f"hook of {path}",
            lambda m, _, path=path: m.decoder.get_submodule(path).register_forward_hook(
                lambda module, given, out: 2 * out
            ),
        )
    for path in ("", "layers.0"):
        yield (
            f"dropout replaced {path}",
            lambda m, _, path=path: setattr(m.decoder.get_submodule(path), "dropout_module", Doubling()),
        )
    yield "positions", lambda m, _: setattr(m.decoder, "embed_positions", PositionalEmbedding(1024, 64, 1))


OVERRIDES = dict(overrides())


@pytest.mark.parametrize("name", list(OVERRIDES))
def test_a_search_computes_what_somebody_has_changed_in_the_decoder(build, task, name, monkeypatch):
    model, sample = fast(build(decoder_normalize_before=True)), batch(task)
    before, took_them = search(model, task, sample, max_len_b=10)
    assert took_them
    OVERRIDES[name](model, monkeypatch)
    found, _ = search(model, task, sample, max_len_b=10)
    expected, _ = search(model, task, sample, plain=True, max_len_b=10)
    assert_same(found, expected)
    with pytest.raises(AssertionError):
        assert_same(before, expected)


def test_a_decoder_that_reorders_its_state_in_its_own_way_is_searched_plainly(build, task):
    model, sample, orders = fast(build()), batch(task), []
    expected, _ = search(model, task, sample, plain=True, max_len_b=10)
    of_its_own(model.decoder, reorder_incremental_state=lambda self, state, order: orders.append(order))
    found, took_them = search(model, task, sample, max_len_b=10)
    assert not took_them and orders
    assert_same(found, expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.decoder.layers[1].fc1.register_forward_hook(lambda *_: None),
        lambda m: m.decoder.layers[0].register_forward_pre_hook(lambda *_: None),
        lambda m: setattr(m.decoder.layers[0].dropout_module, "apply_during_inference", True),
        lambda m: setattr(m.decoder.layers[0], "need_attn", True),
        lambda m: m.decoder.layers[1].train(),
        lambda m: setattr(m.decoder.layers[0], "c_attn", torch.nn.Parameter(torch.ones(2))),
        lambda m: setattr(m.decoder.layers[1], "fc2", torch.nn.Sequential(m.decoder.layers[1].fc2)),
        lambda m: setattr(m.decoder.layers[1], "encoder_attn", None),
        lambda m: m.decoder.layers[1].dropout_module.train(),
        lambda m: m.decoder.layers[1].self_attn.register_forward_hook(lambda *_: None),
        lambda m: m.decoder.layers[0].encoder_attn.register_forward_hook(lambda *_: None),
        lambda m: m.decoder.layers[0].dropout_module.register_forward_hook(lambda *_: None),
        lambda m: setattr(m.decoder.layers[0], "onnx_trace", True),
        lambda m: setattr(m.decoder.layers[0], "final_layer_norm", torch.nn.Identity()),
        lambda m: of_its_own(m.decoder.layers[0], residual_connection=lambda self, x, residual: x),
        lambda m: of_its_own(m.decoder.layers[0].self_attn),
        lambda m: of_its_own(m.decoder.layers[0].encoder_attn),
        lambda m: of_its_own(m.decoder.layers[0].self_attn.rotary),
    ],
    ids=[
        *("hook", "hook of a layer", "dropout", "weights", "training", "scaled heads", "wrapped", "no source"),
        *("dropout that trains", "hook of attention", "hook of cross-attention", "hook of dropout", "ONNX"),
        *("no norm", "a residual of its own", "attention of its own", "cross-attention of its own"),
        "a rotation of its own",
    ],
)
def test_a_decoder_with_more_to_it_is_not_bound(build, change):
    model = fast(build())
    assert bind_all(model.decoder.layers) is not None
    change(model)
    assert bind_all(model.decoder.layers) is None


def test_under_autocast_and_in_a_layer_of_somebodys_own_nothing_is_bound(build):
    model = fast(build())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert bind_all(model.decoder.layers) is None
    layer = model.decoder.layers[0]

    class Own(type(layer)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    layer.__class__ = Own
    assert bind_all(model.decoder.layers) is None


def test_hooks_of_all_modules_are_called(build):
    model = fast(build())
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert bind_all(model.decoder.layers) is None
    finally:
        handle.remove()
    assert bind_all(model.decoder.layers) is not None


def test_heads_of_an_odd_dimension_are_searched_plainly(build, task):
    options = {"decoder_embed_dim": 20, "encoder_embed_dim": 20, "rope_fraction": 0.8}
    model, sample = fast(build(decoder_attention_heads=4, encoder_attention_heads=4, **options)), batch(task)
    expected, _ = search(model, task, sample, plain=True, max_len_b=10)
    found, took_them = search(model, task, sample, max_len_b=10)
    assert not took_them
    assert_same(found, expected)


def test_large_beams_share_nothing(build, task):
    model, sample = fast(build()), batch(task)
    for beam, shares in ((LARGEST, True), (LARGEST + 1, False)):
        options = {"beam_size": beam, "max_len_b": 3}
        expected, _ = search(model, task, sample, plain=True, **options)
        with mock.patch.object(interface, "Beams", wraps=interface.Beams) as beams:
            found, _ = search(model, task, sample, **options)
        assert beams.call_args.args[:2] == ((5, beam) if shares else (5 * beam, 1))
        assert_same(found, expected)


def test_a_decoder_that_is_not_bound_finds_the_same_from_shared_sentences(build, task):
    model, sample = fast(build()), batch(task)
    expected, _ = search(model, task, sample, max_len_b=15)
    model.decoder.layers[0].register_forward_hook(lambda *_: None)
    found, took_them = search(model, task, sample, max_len_b=15)
    assert not took_them
    assert_same(found, expected)


def test_weights_of_attention_are_there_until_nobody_wants_them(build, task):
    model, sample = build(), batch(task)
    found, took_them = search(model, task, sample, max_len_b=5)
    assert not took_them and found[0][0]["attention"].shape[0] == 12
    previous = torch.full((5, 1), task.target_dictionary.eos())
    assert model.train()(**sample["net_input"], prev_output_tokens=previous)[1]["attn"] == [None]
    assert model.eval()(**sample["net_input"], prev_output_tokens=previous)[1]["attn"][0] is not None
    asked = model.train()(**sample["net_input"], prev_output_tokens=previous, alignment_layer=0)
    assert asked[1]["attn"][0].shape == (5, 1, 12)
    fast(model.eval())
    assert search(model, task, sample, max_len_b=5)[0][0][0]["attention"].numel() == 0


def test_changed_weights_are_used(build, task):
    model, sample = fast(build()), batch(task)
    search(model, task, sample, max_len_b=10)
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    found, _ = search(model, task, sample, max_len_b=10)
    assert_same(found, search(model, task, sample, plain=True, max_len_b=10)[0])
    model.load_state_dict(build("transformer_rope_tiny").state_dict())
    found, _ = search(model, task, sample, max_len_b=10)
    assert_same(found, search(model, task, sample, plain=True, max_len_b=10)[0])


def test_weights_that_an_optimizer_wrote_past_torchs_count_are_used(build, task):
    """As fairseq's Adam does, in training with --eval-bleu."""
    model, sample = fast(build()), batch(task)
    search(model, task, sample, max_len_b=10)
    for parameter in model.decoder.parameters():
        version = parameter._version
        parameter.data.add_(0.05 * torch.randn_like(parameter))
        assert parameter._version == version
    found, _ = search(model, task, sample, max_len_b=10)
    assert_same(found, search(model, task, sample, plain=True, max_len_b=10)[0])


WRITES = {
    "a row": lambda weight: weight[7].add_(torch.randn_like(weight[7])),
    "a column": lambda weight: weight[:, 5].mul_(-5.0),
    "rows exchanged": lambda weight: weight.copy_(weight[torch.randperm(len(weight))].clone()),
    "columns exchanged": lambda weight: weight.copy_(weight.flip(1)),
    "an element": lambda weight: weight[9, 3].add_(1.0),
    "two elements exchanged": lambda weight: weight[9, 2:4].copy_(weight[9, 2:4].flip(0)),
}


@pytest.mark.parametrize("name", list(WRITES))
@pytest.mark.parametrize("path", ["output_projection", "layers.1.self_attn.q_proj", "layers.0.self_attn.v_proj"])
def test_whatever_was_written_to_a_weight_past_torchs_count_is_used(build, task, path, name):
    model, sample = fast(build()), batch(task)  # whose eval() does nothing any more
    options = {"max_len_b": 10, "beam_size": 8}
    before, took_them = search(model, task, sample, **options)
    assert took_them
    weight = model.decoder.get_submodule(path).weight
    version = weight._version
    WRITES[name](weight.data)
    assert weight._version == version
    found, took_them = search(model, task, sample, **options)
    assert took_them
    expected, _ = search(model, task, sample, plain=True, **options)
    assert_same(found, expected)
    with pytest.raises(AssertionError):
        assert_same(before, expected)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_that_has_searched_can_be_copied_and_pickled(build, task, copied):
    model, sample = unwatched(build()), batch(task)
    search(model, task, sample, plain=True, max_len_b=10)  # tables of angles are made, and may be pickled
    size = len(pickle.dumps(model))
    expected, took_them = search(model, task, sample, max_len_b=10)
    assert took_them
    other = copied(model)
    assert len(pickle.dumps(model)) < size + 1000 and len(pickle.dumps(other)) < size + 1000
    assert_same(search(other, task, sample, max_len_b=10)[0], expected)


def test_dropout_kept_on_the_embeddings_alone_is_applied(build, task):
    model, sample = build(dropout=0.4), batch(task)
    only = ["TransformerDecoder"]  # fairseq-generate --retain-dropout --retain-dropout-modules …
    expected, _ = search(unwatched(model), task, sample, max_len_b=10)
    model.make_generation_fast_(need_attn=False, retain_dropout=True, retain_dropout_modules=only)
    found, took_them = search(model, task, sample, max_len_b=10)
    assert took_them
    with pytest.raises(AssertionError):
        assert_same(found, expected)
    expected, _ = search(model, task, sample, plain=True, max_len_b=10)  # of the same random numbers
    assert_same(found, expected)


def test_inference_mode(build, task):
    with torch.inference_mode():
        model, sample = fast(build()), batch(task)
        found, took_them = search(model, task, sample, max_len_b=10)
    assert took_them
    assert_same(found, search(model, task, sample, plain=True, max_len_b=10)[0])


def test_any_rows_can_go_on_with_one_hypothesis_each(build, task):
    """A search of somebody's own, of which fairseq's encoder output is given row by row."""
    model, words = fast(build()), task.target_dictionary
    encoder_out = model.encoder(**batch(task)["net_input"])
    order = torch.tensor([3, 3, 0, 4])

    def three_steps(state, between):
        tokens = torch.full((5, 1), words.eos())
        model.decoder(tokens, encoder_out=encoder_out, incremental_state=state)
        tokens = torch.cat([tokens, torch.tensor([[7], [8], [9], [10], [11]])], dim=1)
        model.decoder(tokens, encoder_out=encoder_out, incremental_state=state)
        model.decoder.reorder_incremental_state_scripting(state, order)
        tokens = torch.cat([tokens[order], torch.tensor([[12], [13], [14], [15]])], dim=1)
        others = model.encoder.reorder_encoder_out(encoder_out, order)
        return model.decoder(tokens, encoder_out=others, incremental_state=state)[0]

    with torch.no_grad():
        bound: dict = {}
        found = three_steps(bound, order)
        assert STATE in bound
    plain: dict = {}
    expected = three_steps(plain, order)  # with gradients, nothing is bound
    assert STATE not in plain
    torch.testing.assert_close(found, expected.detach(), rtol=0, atol=1e-5)


ORDERS = {
    "other hypotheses": [2, 0, 0, 3, 5, 4, 8, 8, 8],
    "fewer sentences": [7, 6, 6, 2, 0, 1],
    "sentences swapped": [3, 4, 5, 0, 0, 2, 6, 8, 7],
    "fewer hypotheses": [0, 1, 3, 5, 6, 6],
    "one row gone": [0, 1, 2, 3, 4, 5, 6, 7],
    "across sentences": [0, 3, 6, 1, 1, 8, 2, 4, 5],
    "a sentence twice": [0, 1, 2, 2, 1, 0, 6, 7, 8],
}


@pytest.mark.parametrize("by", ["decoder", "modules", "copy"])
@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("name", list(ORDERS))
def test_a_search_of_somebodys_own_may_reorder_rows_as_it_likes(build, task, name, layout, by):
    """The truth is the decoder without an incremental state, on all tokens so far, in fairseq's rows."""
    model = fast(build(rope_layout=layout, rope_fraction=0.5))
    encoder, decoder = model.encoder, model.decoder
    sample, eos = batch(task, lengths=(9, 3, 6)), task.target_dictionary.eos()
    rows = torch.arange(3).repeat_interleave(3)
    with torch.no_grad():
        encoded = encoder(**sample["net_input"])
        of_rows = FAIRSEQS_REORDER(encoder, encoded, rows)
        shared = encoder.reorder_encoder_out(encoded, rows)
        state: dict = {}
        tokens = torch.full((9, 1), eos)
        orders = [[1, 1, 0, 3, 5, 5, 8, 7, 7], ORDERS[name]]
        orders.append(list(range(len(ORDERS[name]))))
        for order in map(torch.tensor, orders):
            decoder(tokens, encoder_out=shared, incremental_state=state)
            assert STATE in state or tokens.size(1) > 2
            if by == "copy":
                before = copy.deepcopy(state)
                decoder(tokens, encoder_out=shared, incremental_state=state)  # goes astray
                state = before
            if by == "modules":
                for module in decoder.modules():
                    if hasattr(module, "reorder_incremental_state"):
                        module.reorder_incremental_state(state, order)
            else:
                decoder.reorder_incremental_state_scripting(state, order)
            shared = encoder.reorder_encoder_out(shared, order)
            of_rows = FAIRSEQS_REORDER(encoder, of_rows, order)
            new = torch.randint(4, 44, (len(order), 1))
            new[0] = task.target_dictionary.pad()
            tokens = torch.cat([tokens[order], new], dim=1)
        found, extra = decoder(tokens, encoder_out=shared, incremental_state=state)
        expected, true_extra = decoder(tokens, encoder_out=of_rows)
    not_pad = slice(1, None)  # what comes of a pad is read by nobody
    torch.testing.assert_close(found[not_pad, 0], expected[not_pad, -1], rtol=0, atol=2e-5)
    for one, other in zip(extra["inner_states"], true_extra["inner_states"], strict=True):
        torch.testing.assert_close(one[0, not_pad], other[-1, not_pad], rtol=0, atol=2e-5)


def assert_same_rows(found, expected):
    """Two outputs of an encoder: each of fairseq's entries has the same rows."""
    for name, tensors in expected.items():
        assert len(found[name]) == len(tensors), name
        assert all(torch.equal(one, other) for one, other in zip(found[name], tensors, strict=True)), name
    assert all(len(found[name]) == 0 for name in found.keys() - expected.keys())


OTHER_ORDERS = {
    "sentences gone": [6, 7, 7, 0, 0, 2],
    "sentences swapped": [3, 4, 5, 0, 1, 2, 6, 7, 8],
    "across sentences": [0, 3, 6, 1, 4, 7, 2, 5, 8],
    "more hypotheses": [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7, 8, 8],
    "fewer hypotheses": [0, 3, 6],
    "none": [],
}


@pytest.mark.parametrize("name", list(OTHER_ORDERS))
def test_every_caller_gets_one_row_for_each_hypothesis(build, task, name):
    model, sample = fast(build()), batch(task, lengths=(9, 3, 6))
    search(model, task, sample, beam_size=3, max_len_b=3)  # fairseq's search has told the model its beam
    rows, order = torch.arange(3).repeat_interleave(3), torch.tensor(OTHER_ORDERS[name]).long()
    with torch.no_grad():
        encoded = model.encoder(**sample["net_input"])
        found = model.encoder.reorder_encoder_out(encoded, rows)
        expected = FAIRSEQS_REORDER(model.encoder, encoded, rows)
        assert found["encoder_out"][0].size(1) == 9
        assert_same_rows(found, expected)
        for new_order in (order, torch.arange(len(order))):
            found = model.encoder.reorder_encoder_out(found, new_order)
            expected = FAIRSEQS_REORDER(model.encoder, expected, new_order)
            assert_same_rows(found, expected)


def test_a_beam_that_goes_on_copies_no_rows(build, task):
    model, rows = fast(build()), torch.arange(5).repeat_interleave(4)
    with torch.no_grad():
        encoded = model.encoder.reorder_encoder_out(model.encoder(**batch(task)["net_input"]), rows)
        reordered = model.encoder.reorder_encoder_out(encoded, torch.tensor([1, 0, 0, 3, *range(4, 20)]))
    assert reordered["encoder_out"][0] is encoded["encoder_out"][0]


CHANGES = {
    "replaced": lambda out, x: out.update(encoder_out=[x * 1.5]),
    "in its list": lambda out, x: out["encoder_out"].__setitem__(0, x * 1.5),
    "in place": lambda out, x: x[:, 1].mul_(1.5),
    "in .data": lambda out, x: x.data[:, 1].mul_(1.5),
    "in .data of the padding": lambda out, x: out["encoder_padding_mask"][0].data[4].fill_(False),
    "padding": lambda out, x: out["encoder_padding_mask"][0][2].fill_(False),
}


@pytest.mark.parametrize("name", list(CHANGES))
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_rows_that_somebody_has_changed_are_what_the_decoder_reads(build, task, name, mode):
    """The truth is the decoder without an incremental state, on rows in fairseq's own dictionary."""
    model, sample = unwatched(build()), batch(task, lengths=(9, 3, 6))
    search(model, task, sample, beam_size=3, max_len_b=3)
    rows, order = torch.arange(3).repeat_interleave(3), torch.tensor([1, 1, 0, 3, 5, 5, 8, 7, 7])
    eos, tokens = task.target_dictionary.eos(), torch.randint(4, 44, (9, 1))
    with mode():
        encoded = model.encoder(**sample["net_input"])
        found = model.encoder.reorder_encoder_out(encoded, rows)
        expected = FAIRSEQS_REORDER(model.encoder, encoded, rows)
        for out in (found, expected):
            CHANGES[name](out, out["encoder_out"][0])
        state: dict = {}
        step = model.decoder(tokens.new_full((9, 1), eos), encoder_out=found, incremental_state=state)[0]
        true = model.decoder(tokens.new_full((9, 1), eos), encoder_out=expected)[0]
        assert STATE in state
        torch.testing.assert_close(step, true, rtol=0, atol=1e-5)
        found = model.encoder.reorder_encoder_out(found, order)
        expected = FAIRSEQS_REORDER(model.encoder, expected, order)
        assert_same_rows(found, expected)
        model.decoder.reorder_incremental_state_scripting(state, order)
        tokens = torch.cat([tokens.new_full((9, 1), eos), tokens], dim=1)
        step = model.decoder(tokens, encoder_out=found, incremental_state=state)[0]
        true = model.decoder(tokens, encoder_out=expected)[0][:, -1:]
        torch.testing.assert_close(step, true, rtol=0, atol=1e-5)


def test_threads_that_share_a_model_find_what_one_finds(build, task):
    model, sample, words = fast(build()), batch(task), task.target_dictionary
    expected, _ = search(copy.deepcopy(model), task, sample, plain=True, max_len_b=20)

    def find(_):
        return SequenceGenerator([model], words, beam_size=4, max_len_b=20).generate([model], sample)

    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(find, range(12)):
            assert_same(found, expected)


def test_generators_of_different_beams_share_a_model(build, task):
    model, sample, words = fast(build()), batch(task), task.target_dictionary
    generators = {beam: SequenceGenerator([model], words, beam_size=beam, max_len_b=10) for beam in (5, 1, 2)}
    for beam, generator in generators.items():
        found = generator.generate([model], sample)
        assert_same(found, search(model, task, sample, plain=True, beam_size=beam, max_len_b=10)[0])


def test_a_search_without_incremental_state(build, task):
    model = fast(build())
    rows = torch.arange(5).repeat_interleave(4)
    tokens = torch.randint(4, 44, (20, 3))
    with torch.no_grad():
        encoder_out = model.encoder(**batch(task)["net_input"])
        found = model.decoder(tokens, encoder_out=model.encoder.reorder_encoder_out(encoder_out, rows))[0]
        of_rows = FAIRSEQS_REORDER(model.encoder, encoder_out, rows)
        expected = model.decoder(tokens, encoder_out=of_rows)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN packs nothing")
@pytest.mark.parametrize("rows", [1, 7])
def test_the_packed_projection_is_the_projection(rows):
    linear = torch.nn.Linear(16, 50, bias=False)
    projection, x = PackedProjection(), torch.randn(rows, 1, 16)
    with torch.no_grad():
        packed = projection.of(linear)
        torch.testing.assert_close(project_packed(x, packed), linear(x), rtol=1e-5, atol=1e-6)
        assert projection.of(linear) is packed, "it is packed once"
        linear.weight.data[3] *= 2.0
        assert projection.of(linear) is not packed
        torch.testing.assert_close(project_packed(x, projection.of(linear)), linear(x), rtol=1e-5, atol=1e-6)
        assert projection.of(torch.nn.Linear(16, 50)) is None
        assert projection.of(linear.double()) is None


def test_cross_attention_is_fairseqs(build, task):
    """Output, gradients and weights, against the class that it stands for."""
    from fairseq.modules import MultiheadAttention

    torch.manual_seed(4)
    theirs = MultiheadAttention(16, 4, kdim=24, vdim=24, encoder_decoder_attention=True)
    ours = CrossAttention(16, 4, kdim=24, vdim=24, encoder_decoder_attention=True)
    ours.load_state_dict(theirs.state_dict())
    query, key = torch.randn(5, 3, 16, requires_grad=True), torch.randn(7, 3, 24, requires_grad=True)
    pads = torch.zeros(3, 7, dtype=torch.bool)
    pads[0, :4] = pads[2, :1] = True
    for mask in (None, pads):
        for weights in (
            {"need_weights": False},
            {"need_weights": True},
            {"need_weights": True, "need_head_weights": True},
        ):
            results = []
            for module in (theirs, ours):
                query.grad = key.grad = None
                out, shown = module(query, key, key, key_padding_mask=mask, static_kv=True, **weights)
                out.square().sum().backward()
                results.append((out.detach(), query.grad, key.grad, shown))
            for expected, found in zip(*results, strict=True):
                assert (expected is None) == (found is None)
                if expected is not None:
                    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
