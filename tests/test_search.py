"""Searches: fairseq_rope/beams.py and decoding.py against the model called as fairseq calls it."""

import copy
import pickle
from unittest import mock

import pytest
import torch
from fairseq.search import BeamSearch, DiverseBeamSearch, Sampling
from fairseq.sequence_generator import SequenceGenerator

from fairseq_rope import transformer
from fairseq_rope.attention import CrossAttention
from fairseq_rope.beams import FIRST_CAPACITY, LARGEST, STATE
from fairseq_rope.decoding import PackedLinear, bind_all


def batch(task, lengths=(9, 3, 6, 12, 5)):
    """Sentences of *lengths*, padded on the left, as fairseq's."""
    pad, eos = task.target_dictionary.pad(), task.target_dictionary.eos()
    tokens = torch.full((len(lengths), max(lengths)), pad)
    for row, length in enumerate(lengths):
        tokens[row, -length:-1] = torch.randint(4, 44, (length - 1,))
        tokens[row, -1] = eos
    return {"net_input": {"src_tokens": tokens, "src_lengths": torch.tensor(lengths)}}


def search(model, task, sample, plain=False, beam_size=4, strategy=BeamSearch, prefix_tokens=None, **options):
    """The hypotheses that SequenceGenerator finds; *plain*: with no step bound and no sentence shared."""
    torch.manual_seed(5)
    dictionary = task.target_dictionary
    generator = SequenceGenerator(
        [model], dictionary, beam_size=beam_size, search_strategy=strategy(dictionary), **options
    )
    begun = []
    real = transformer.RotaryDecoder._begin_search

    def begin(self, previous, encoder_out, state):
        if not plain:
            real(self, previous, encoder_out, state)
        begun.append(STATE in state)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transformer.RotaryDecoder, "_begin_search", begin)
        if plain:
            patch.setattr(model.encoder, "beam_size", 1)
        found = generator.generate([model], sample, prefix_tokens=prefix_tokens)
    return found, all(begun) and bool(begun)


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
        patch.setattr(transformer.RotaryDecoder, "_begin_search", lambda *_: None)
        patch.setattr(transformer.TransformerRopeModel, "set_beam_size", lambda *_: None)
        models[0].encoder.beam_size = 1
        expected = SequenceGenerator(models, words, beam_size=4).generate(models, sample)
    assert_same(found, expected)


def of_its_own(module, **methods):
    """Make *module* one of a subclass, with *methods*."""
    module.__class__ = type("Own", (type(module),), methods)


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
        *(
            "hook",
            "hook of a layer",
            "dropout",
            "weights",
            "training",
            "scaled heads",
            "wrapped",
            "no source",
        ),
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
        with mock.patch.object(transformer, "Beams", wraps=transformer.Beams) as beams:
            found, _ = search(model, task, sample, **options)
        assert beams.call_args.args[:2] == ((5, beam) if shares else (5 * beam, 1))
        assert_same(found, expected)


def test_a_decoder_that_is_not_bound_finds_the_same_from_shared_sentences(build, task):
    model, sample = fast(build()), batch(task)
    expected, _ = search(model, task, sample, max_len_b=15)
    model.decoder.layers[0].register_forward_hook(lambda *_: None)
    found, took_them = search(model, task, sample, max_len_b=15)
    assert not took_them and model.encoder.beam_size == 4
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


def test_what_was_made_of_weights_is_forgotten_before_they_are_trained(build, task):
    model, sample = unwatched(build()), batch(task)
    assert search(model, task, sample, max_len_b=10)[1]
    model.train()
    row = model.decoder.output_projection.weight.data[7]  # so few that a sample of them can miss it
    row.add_(torch.randn_like(row))
    model.decoder.layers[0].self_attn.k_proj.weight.data[5].mul_(3.0)
    model.eval()
    found, _ = search(model, task, sample, max_len_b=10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PackedLinear, "__call__", lambda *_: None)
        assert_same(found, search(model, task, sample, plain=True, max_len_b=10)[0])


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
    model.make_generation_fast_(need_attn=False, retain_dropout=True, retain_dropout_modules=only)
    assert bind_all(model.decoder.layers) is not None
    assert not search(model, task, sample, max_len_b=3)[1]


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
    """After fairseq's search has told the model a beam, which this one happens to share.

    The truth is the decoder without an incremental state, on all tokens so far.
    """
    model = fast(build(rope_layout=layout, rope_fraction=0.5))
    encoder, decoder = model.encoder, model.decoder
    sample, eos = batch(task, lengths=(9, 3, 6)), task.target_dictionary.eos()
    rows = torch.arange(3).repeat_interleave(3)
    with torch.no_grad():
        encoded = encoder(**sample["net_input"])
        of_rows = encoder.reorder_encoder_out(encoded, rows)
        model.set_beam_size(3)
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
            model.set_beam_size(1)
            of_rows = encoder.reorder_encoder_out(of_rows, order)
            model.set_beam_size(3)
            new = torch.randint(4, 44, (len(order), 1))
            new[0] = task.target_dictionary.pad()
            tokens = torch.cat([tokens[order], new], dim=1)
        found, extra = decoder(tokens, encoder_out=shared, incremental_state=state)
        expected, true_extra = decoder(tokens, encoder_out=of_rows)
    not_pad = slice(1, None)  # what comes of a pad is read by nobody
    torch.testing.assert_close(found[not_pad, 0], expected[not_pad, -1], rtol=0, atol=2e-5)
    for one, other in zip(extra["inner_states"], true_extra["inner_states"], strict=True):
        torch.testing.assert_close(one[0, not_pad], other[-1, not_pad], rtol=0, atol=2e-5)


def test_a_search_without_incremental_state(build, task):
    model, sample = fast(build()), batch(task)
    model.set_beam_size(4)
    rows = torch.arange(5).repeat_interleave(4)
    tokens = torch.randint(4, 44, (20, 3))
    with torch.no_grad():
        encoder_out = model.encoder(**sample["net_input"])
        shared = model.encoder.reorder_encoder_out(encoder_out, rows)
        assert shared["encoder_out"][0].size(1) == 5
        found = model.decoder(tokens, encoder_out=shared)[0]
        model.set_beam_size(1)
        of_rows = model.encoder.reorder_encoder_out(encoder_out, rows)
        expected = model.decoder(tokens, encoder_out=of_rows)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_rows_that_are_not_hypotheses_of_their_neighbour_are_reordered_one_by_one(build, task):
    model = fast(build())
    model.set_beam_size(2)
    with torch.no_grad():
        encoder_out = model.encoder(**batch(task)["net_input"])
        tiled = torch.arange(5).repeat(2)  # not 0 0 1 1 2 2 …
        states = model.encoder.reorder_encoder_out(encoder_out, tiled)["encoder_out"][0]
    assert torch.equal(states, encoder_out["encoder_out"][0][:, tiled])


@pytest.mark.parametrize("rows", [1, 7])
def test_the_packed_projection_is_the_projection(rows):
    linear = torch.nn.Linear(16, 50, bias=False)
    packed, x = PackedLinear(), torch.randn(rows, 1, 16)
    assert packed(linear, x) is None, "with gradients, the module is called"
    with torch.no_grad():
        found = packed(linear, x)
        if not torch.backends.mkldnn.is_available():
            assert found is None
            return
        torch.testing.assert_close(found, linear(x), rtol=1e-5, atol=1e-6)
        linear.weight.mul_(2.0)
        torch.testing.assert_close(packed(linear, x), linear(x), rtol=1e-5, atol=1e-6)
        assert packed(torch.nn.Linear(16, 50), x) is None
        assert packed(linear.double(), x.double()) is None


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
