"""The fast search, compared with the plain search, in which fairseq calls the model."""

import copy
import pickle
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.models.lstm import LSTMModel
from fairseq.models.transformer import TransformerEncoderBase
from fairseq.modules import PositionalEmbedding
from fairseq.search import DiverseBeamSearch, Sampling
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator

from fairseq_rope.search import decoding, ensemble
from fairseq_rope.search.cache import Beams
from fairseq_rope.search.ensemble import LARGEST, FastEnsemble
from fairseq_rope.search.projection import PackedProjection, project_packed
from fairseq_rope.search.step import bind_all
from tests.commands import train
from tests.models import EOS, PAD
from tests.searches import assert_same, assert_scores_of_the_full_pass, fast, search, search_both_ways, sentences


def without_attention_weights(model):
    """*model* without attention weights in its output. Unlike a fast model, it can still train."""
    for layer in model.decoder.layers:
        layer.need_attn = False
    return model


@pytest.fixture
def model(build):
    return fast(build())


@pytest.fixture
def sample():
    return sentences()


def test_the_switch_turns_the_search_off_and_on(model, sample, monkeypatch):
    for choice, is_fast in (("0", False), ("1", True), ("", True)):
        monkeypatch.setenv("FAIRSEQ_ROPE_FAST_SEARCH", choice)
        assert search(model, sample)[1] is is_fast
    monkeypatch.setenv("FAIRSEQ_ROPE_FAST_SEARCH", "yes")
    with pytest.raises(ValueError, match="FAIRSEQ_ROPE_FAST_SEARCH is 'yes': must be 0"):
        search(model, sample)
    monkeypatch.setenv("FAIRSEQ_ROPE_FAST_SEARCH", "1")
    assert ensemble.is_on(torch.device("mps"))
    monkeypatch.delenv("FAIRSEQ_ROPE_FAST_SEARCH")  # by default, on for devices on which it is faster
    assert [device for device in ("cpu", "cuda", "mps") if ensemble.is_on(torch.device(device))] == ["cpu", "cuda"]


@pytest.mark.parametrize(
    "options",
    [
        {"beam_size": 3, "strategy": Sampling, "max_len_b": 40},
        {"beam_size": 4, "strategy": lambda words: DiverseBeamSearch(words, 2, 0.5), "max_len_b": 40},
        {"beam_size": 5, "min_len": 7, "max_len_b": 15},
        {"beam_size": 4, "temperature": 1.7, "unk_penalty": 2.0, "max_len_b": 40},
        # prefixes of different lengths
        {"prefix_tokens": torch.tensor([[5, 6, 7], [8, 9, 1], [10, 1, 1], [11, 12, 13], [14, 15, 1]]), "max_len_b": 20},
    ],
    ids=["sampling", "diverse", "long", "temperature", "prefixes"],
)
def test_other_search_strategies_find_the_same(model, sample, options):
    search_both_ways(model, sample, **options)


def test_float64_bfloat16_and_inference_mode_find_the_same(build, sample):
    search_both_ways(fast(build()).to(torch.float64), sample)
    with torch.inference_mode():
        search_both_ways(fast(build()), sample)
    # Different rounding can exchange hypotheses of nearly the same score.
    model = fast(build()).to(torch.bfloat16)
    (expected, _), (actual, took_steps) = search(model, sample, plain=True), search(model, sample)
    assert took_steps
    for one, other in zip(actual, expected, strict=True):
        assert one[0]["score"].item() == pytest.approx(other[0]["score"].item(), rel=0.05)


@pytest.mark.parametrize("options", [{}, {"position_encoding": "t5"}])
def test_a_hypothesis_that_overflows_ends_alone(build, sample, options):
    """As in fairseq's search, which drops a hypothesis whose scores are not numbers, and goes on with the others."""
    model = fast(build(**options))
    found, _ = search(model, sample, max_len_b=20)
    words = [word for hypotheses in found for word in hypotheses[-1]["tokens"].tolist() if word != EOS]
    with torch.no_grad():
        model.decoder.embed_tokens.weight[max(words, key=words.count)] = float("inf")
    others = search_both_ways(model, sample, max_len_b=20)
    assert [[h["tokens"].tolist() for h in hypotheses] for hypotheses in others] != [
        [h["tokens"].tolist() for h in hypotheses] for hypotheses in found
    ]
    assert all(hypotheses and hypotheses[0]["positional_scores"].isfinite().all() for hypotheses in others)


def test_a_hypothesis_whose_value_alone_overflows_in_16_bits_ends_too(build, sample):
    """The word that the search likes best has a finite embedding, and a value of more than 65504."""
    model = fast(build()).to(torch.float16)
    found, _ = search(model, sample, max_len_b=20)
    words = [word for hypotheses in found for word in hypotheses[0]["tokens"].tolist() if word != EOS]
    likely, layer = max(words, key=words.count), model.decoder.layers[0].self_attn
    x = model.decoder.embed_scale * model.decoder.embed_tokens.weight[likely]
    with torch.no_grad():
        layer.v_proj.weight[3] = x.sign() * (8e4 / x.float().abs().sum())
        layer.out_proj.weight[:, 3] = 0.0  # values of other words do not matter
    for plain in (True, False):
        others, took_steps = search(model, sample, plain=plain, max_len_b=20)
        assert took_steps is not plain and len(others) == len(found)
        assert all(hypotheses and likely not in hypotheses[0]["tokens"].tolist() for hypotheses in others)


@pytest.mark.parametrize("temperature", [1.0, 1.7])
def test_an_ensemble_with_fairseqs_own_model_finds_the_same(build, task, monkeypatch, temperature):
    models = [fast(build("transformer_rope_tiny")), fast(build("transformer_tiny"))]
    options = {"beam_size": 4, "max_len_b": 20, "temperature": temperature}
    generator, sample = SequenceGenerator(models, task.target_dictionary, **options), sentences()
    made, make = [], Beams.__init__
    monkeypatch.setattr(Beams, "__init__", lambda *args, **kwargs: made.append(args) or make(*args, **kwargs))
    actual = generator.generate(models, sample)
    assert made, "the first model has the fast search"
    monkeypatch.setenv("FAIRSEQ_ROPE_FAST_SEARCH", "0")
    assert_same(actual, generator.generate(models, sample))


def make_subclass(module, **methods):
    """Change the class of *module* to a new subclass with *methods*."""
    module.__class__ = type("Own", (type(module),), methods)


def scaled(method):
    """*method*, with its result (or the first of its results) scaled."""

    def call(*args, **kwargs):
        result = method(*args, **kwargs)
        return (1.5 * result[0], *result[1:]) if isinstance(result, tuple) else 1.5 * result

    return call


class Doubling(torch.nn.Module):
    """A replacement for dropout that doubles its input."""

    p, apply_during_inference = 0.0, False

    def forward(self, x):
        return 2 * x


OF_DECODER = ("extract_features_scriptable", "extract_features", "forward", "output_layer")
OF_INSTANCES = [
    *(("", name) for name in OF_DECODER),
    *(("layers.1", "residual_connection"), ("layers.1.encoder_attn", "_attend")),
    *((path, "forward") for path in ("layers.0.self_attn", "layers.0.self_attn.position", "layers.1.fc2")),
    *((path, "forward") for path in ("layers.1.final_layer_norm", "layers.0.dropout_module")),
    *((path, "forward") for path in ("dropout_module", "output_projection")),
]
HOOKED = ("dropout_module", "embed_tokens", "layer_norm", "output_projection", "layers.0.fc1")


def replace(owner, name, patch):
    patch.setattr(owner, name, scaled(getattr(owner, name)))


# Functions of a decoder and a monkeypatch. Each changes what the decoder computes.
OVERRIDES = {
    **{
        f"{name} of a subclass": lambda d, _, name=name: make_subclass(d, **{name: scaled(getattr(type(d), name))})
        for name in OF_DECODER
    },
    **{
        f"{path} {name} of the instance": lambda d, patch, path=path, name=name: replace(
            d.get_submodule(path), name, patch
        )
        for path, name in OF_INSTANCES
    },
    **{
        f"hook of {path}": lambda d, _, path=path: d.get_submodule(path).register_forward_hook(lambda *x: 2 * x[-1])
        for path in HOOKED
    },
    "dropout replaced": lambda d, _: setattr(d, "dropout_module", Doubling()),
    "dropout of a layer replaced": lambda d, _: setattr(d.layers[0], "dropout_module", Doubling()),
    "positions": lambda d, _: setattr(d, "embed_positions", PositionalEmbedding(1024, 64, 1)),
}


@pytest.fixture(scope="module")
def before_overrides(build):
    """The hypotheses of the model of the next test, before it is changed."""
    torch.manual_seed(0)
    actual, took_steps = search(fast(build(decoder_normalize_before=True)), sentences())
    assert took_steps
    return actual


@pytest.mark.parametrize("name", list(OVERRIDES))
def test_overridden_parts_of_the_decoder_are_used(build, before_overrides, name, monkeypatch):
    torch.manual_seed(0)
    model, sample = fast(build(decoder_normalize_before=True)), sentences()
    OVERRIDES[name](model.decoder, monkeypatch)
    (expected, _), (actual, _) = search(model, sample, plain=True), search(model, sample)
    assert_same(actual, expected)
    with pytest.raises(AssertionError):
        assert_same(before_overrides, expected)


def test_a_decoder_with_its_own_reordering_uses_the_plain_search(model, sample):
    orders = []
    expected, _ = search(model, sample, plain=True)
    make_subclass(model.decoder, reorder_incremental_state=lambda self, state, order: orders.append(order))
    actual, took_steps = search(model, sample)
    assert not took_steps and orders
    assert_same(actual, expected)


UNBINDABLE = {
    "hook": lambda one, two: two.fc1.register_forward_hook(lambda *_: None),
    "hook of a layer": lambda one, two: one.register_forward_pre_hook(lambda *_: None),
    "hook of attention": lambda one, two: two.self_attn.register_forward_hook(lambda *_: None),
    "hook of cross-attention": lambda one, two: one.encoder_attn.register_forward_hook(lambda *_: None),
    "hook of dropout": lambda one, two: one.dropout_module.register_forward_hook(lambda *_: None),
    "dropout": lambda one, two: setattr(one.dropout_module, "apply_during_inference", True),
    "dropout that trains": lambda one, two: two.dropout_module.train(),
    "weights": lambda one, two: setattr(one, "need_attn", True),
    "training": lambda one, two: two.train(),
    "scaled heads": lambda one, two: setattr(one, "c_attn", torch.nn.Parameter(torch.ones(2))),
    "wrapped": lambda one, two: setattr(two, "fc2", torch.nn.Sequential(two.fc2)),
    "no source": lambda one, two: setattr(two, "encoder_attn", None),
    "ONNX": lambda one, two: setattr(one, "onnx_trace", True),
    "no norm": lambda one, two: setattr(one, "final_layer_norm", torch.nn.Identity()),
    "a residual of its own": lambda one, two: make_subclass(one, residual_connection=lambda self, x, residual: x),
    "a layer of its own": lambda one, two: make_subclass(one, forward=lambda self, *args: args[0]),
    "attention of its own": lambda one, two: make_subclass(one.self_attn),
    "cross-attention of its own": lambda one, two: make_subclass(one.encoder_attn),
    "a rotation of its own": lambda one, two: make_subclass(one.self_attn.position),
}


@pytest.mark.parametrize("change", list(UNBINDABLE.values()), ids=list(UNBINDABLE))
def test_a_customised_decoder_is_not_bound(model, change):
    assert bind_all(model.decoder.layers) is not None
    change(*model.decoder.layers)
    assert bind_all(model.decoder.layers) is None


def test_the_search_has_the_scales_of_normformer(build, sample):
    """No flag of translation models sets them, but a configuration can."""
    model = fast(build(scale_attn=True, scale_fc=True, scale_resids=True))
    names = {"attn_ln", "ffn_layernorm", "w_resid"}
    with torch.no_grad():
        for path, parameter in model.decoder.named_parameters():
            if names & set(path.split(".")):
                parameter.add_(torch.randn_like(parameter))
    assert names == {part for path, _ in model.decoder.named_parameters() for part in path.split(".")} & names
    assert_scores_of_the_full_pass(model, sample, search_both_ways(model, sample, bound=False))


def test_decoders_are_not_bound_under_autocast_or_global_hooks(model):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert bind_all(model.decoder.layers) is None
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert bind_all(model.decoder.layers) is None
    finally:
        handle.remove()
    assert bind_all(model.decoder.layers) is not None


def test_unbound_decoders_find_the_same(build, model, sample):
    odd = {"decoder_embed_dim": 20, "encoder_embed_dim": 20, "rope_fraction": 0.8}  # heads of 5 dimensions
    odd = fast(build(decoder_attention_heads=4, encoder_attention_heads=4, **odd))
    search_both_ways(odd, sample, bound=False)
    expected = search_both_ways(model, sample)
    model.decoder.layers[0].register_forward_hook(lambda *_: None)
    assert_same(search_both_ways(model, sample, bound=False), expected)


def test_large_beams_use_the_plain_search(model, sample):
    for beam, is_fast in ((LARGEST, True), (LARGEST + 1, False)):
        search_both_ways(model, sample, bound=is_fast, beam_size=beam, max_len_b=3)


def test_attention_weights_are_returned_until_they_are_turned_off(build, sample):
    model, inputs = build(), {**sample["net_input"], "prev_output_tokens": torch.full((5, 1), EOS)}
    actual, took_steps = search(model, sample, max_len_b=5)
    assert not took_steps and actual[0][0]["attention"].shape[0] == 12
    assert model.train()(**inputs)[1]["attn"] == [None]
    assert model.eval()(**inputs)[1]["attn"][0] is not None
    assert model.train()(**inputs, alignment_layer=0)[1]["attn"][0].shape == (5, 1, 12)
    fast(model.eval())
    assert search(model, sample, max_len_b=5)[0][0][0]["attention"].numel() == 0


def test_changed_weights_are_used(build, model, sample):
    search(model, sample)
    with torch.no_grad():
        for parameter in model.decoder.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    search_both_ways(model, sample)
    model.load_state_dict(build("transformer_rope_tiny").state_dict())
    search_both_ways(model, sample)


WRITES = {
    "a row": lambda weight: weight[7].add_(torch.randn_like(weight[7])),
    "a column": lambda weight: weight[:, 5].mul_(-5.0),
    "rows exchanged": lambda weight: weight.copy_(weight[torch.randperm(len(weight))].clone()),
    "columns exchanged": lambda weight: weight.copy_(weight.flip(1)),
    "an element": lambda weight: weight[9, 3].add_(1.0),
    "two elements exchanged": lambda weight: weight[9, 2:4].copy_(weight[9, 2:4].flip(0)),
    "all": lambda weight: weight.add_(0.05 * torch.randn_like(weight)),
}


@pytest.mark.parametrize("path", ["output_projection", "layers.1.self_attn.q_proj", "layers.0.self_attn.v_proj"])
def test_weights_that_were_written_through_data_are_used(model, sample, path):
    """torch does not count writes to .data, for example those of fairseq's Adam in training with --eval-bleu."""
    options = {"beam_size": 8, "max_len_b": 4}
    before, took_steps = search(model, sample, **options)
    assert took_steps
    weight = model.decoder.get_submodule(path).weight
    original, version = weight.data.clone(), weight._version
    for write in WRITES.values():
        write(weight.data)
        assert weight._version == version
        actual = search_both_ways(model, sample, **options)
        with pytest.raises(AssertionError):
            assert_same(before, actual)
        weight.data.copy_(original)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_model_that_has_searched_can_be_copied_and_pickled(build, sample, copied):
    model = without_attention_weights(build())
    search(model, sample, plain=True)  # makes tables of angles, which may be pickled
    size = len(pickle.dumps(model))
    expected, took_steps = search(model, sample)
    assert took_steps
    other = copied(model)
    assert max(len(pickle.dumps(each)) for each in (model, other)) < 1.01 * size
    assert_same(search(other, sample)[0], expected)


def test_dropout_retained_only_on_embeddings_is_applied(build, sample):
    model = build(dropout=0.4)
    without, _ = search(without_attention_weights(model), sample)
    only = ["TransformerDecoder"]  # fairseq-generate --retain-dropout --retain-dropout-modules …
    model.make_generation_fast_(need_attn=False, retain_dropout=True, retain_dropout_modules=only)
    actual = search_both_ways(model, sample)  # both searches draw the same random numbers
    with pytest.raises(AssertionError):
        assert_same(actual, without)


ORDERS = {
    "other hypotheses": [2, 0, 0, 3, 5, 4, 8, 8, 8],
    "fewer sentences": [7, 6, 6, 2, 0, 1],
    "sentences swapped": [3, 4, 5, 0, 0, 2, 6, 8, 7],
}
REFUSED = {
    "fewer hypotheses": [0, 1, 3, 5, 6, 6],
    "one row gone": [0, 1, 2, 3, 4, 5, 6, 7],
    "across sentences": [0, 3, 6, 1, 1, 8, 2, 4, 5],
    "a sentence twice": [0, 1, 2, 2, 1, 0, 6, 7, 8],
}
ENCODINGS = {
    "rope": {},
    "half": {"rope_layout": "half", "rope_fraction": 0.5},
    "t5": {"position_encoding": "t5"},
    "transformer-xl": {"position_encoding": "transformer-xl"},
    "xpos": {"rope_fraction": 0.5, "decoder_position_encoding": "xpos", "xpos_scale_base": 4.0},
}


def begun(model, beam=3):
    """The ensemble of *model*, and its search for three sentences after their rows were repeated."""
    fast_ensemble = FastEnsemble([model])
    encoded = fast_ensemble.forward_encoder(sentences((9, 3, 6))["net_input"])
    outs = fast_ensemble.reorder_encoder_out(encoded, torch.arange(3).repeat_interleave(beam))
    assert isinstance(outs[0], Beams)
    return fast_ensemble, outs


@pytest.mark.parametrize("options", list(ENCODINGS.values()), ids=list(ENCODINGS))
@pytest.mark.parametrize("name", list(ORDERS))
@torch.no_grad()
def test_rows_may_be_reordered_within_sentences(build, name, options):
    """The reference is the decoder without an incremental state, on all tokens so far, in fairseq's rows."""
    model = fast(build(**options))
    torch.manual_seed(3)
    fast_ensemble, outs = begun(model)
    torch.manual_seed(3)
    plain = EnsembleModel([model])
    rows = plain.reorder_encoder_out(
        plain.forward_encoder(sentences((9, 3, 6))["net_input"]), torch.arange(3).repeat_interleave(3)
    )
    tokens = torch.full((9, 1), EOS)
    orders = [[1, 1, 0, 3, 5, 5, 8, 7, 7], ORDERS[name], list(range(len(ORDERS[name])))]
    for order in map(lambda each: torch.tensor(each, dtype=torch.int64), orders):
        fast_ensemble.forward_decoder(tokens, outs, [{}])
        fast_ensemble.reorder_incremental_state([{}], order)
        outs = fast_ensemble.reorder_encoder_out(outs, order)
        rows = plain.reorder_encoder_out(rows, order)
        new = torch.randint(4, 44, (len(order), 1))
        new[:1] = PAD
        tokens = torch.cat([tokens[order], new], dim=1)
    actual, _ = fast_ensemble.forward_decoder(tokens, outs, [{}])
    expected = model.get_normalized_probs(model.decoder(tokens, encoder_out=rows[0]), log_probs=True)[:, -1]
    torch.testing.assert_close(actual[1:], expected[1:], rtol=0, atol=2e-5)  # nothing reads the one at padding


@pytest.mark.parametrize("name", list(REFUSED))
@torch.no_grad()
def test_a_search_across_sentences_is_refused(model, name):
    fast_ensemble, outs = begun(model)
    fast_ensemble.forward_decoder(torch.full((9, 1), EOS), outs, [{}])
    with pytest.raises(ValueError, match="of another sentence.*FAIRSEQ_ROPE_FAST_SEARCH to 0"):
        fast_ensemble.reorder_encoder_out(outs, torch.tensor(REFUSED[name]))


@pytest.mark.parametrize("name, kept", [("transformer-xl", 0), ("rope", 1)])
@torch.no_grad()
def test_a_mask_for_groups_of_heads_is_kept_only_if_all_layers_have_it(build, name, kept):
    model = fast(build(decoder_position_encoding=name, decoder_kv_heads=1))
    fast_ensemble, outs = begun(model)
    fast_ensemble.forward_decoder(torch.full((9, 1), EOS), outs, [{}])
    assert len([key for key in outs[0]._of_step if isinstance(key, tuple)]) == kept


class OwnSearch(SequenceGenerator):
    """A user's generator, whose search may read the output of the encoder."""

    def _generate(self, sample, *args, **kwargs):
        assert isinstance(self.model.forward_encoder(sample["net_input"])[0], dict)
        return super()._generate(sample, *args, **kwargs)


class OwnGenerate(SequenceGenerator):
    """A user's generator that reads the output of the encoder before fairseq's search."""

    def generate(self, models, sample, **kwargs):
        assert self.model.forward_encoder(sample["net_input"])[0]["encoder_out"][0].dim() == 3
        return super().generate(models, sample, **kwargs)


class OwnEnsemble(EnsembleModel):
    pass


@pytest.mark.parametrize("dims", [{"decoder_input_dim": 48}, {"decoder_output_dim": 48}])
def test_embeddings_of_another_width_are_projected(build, sample, dims):
    model = fast(build(**dims, share_decoder_input_output_embed=False))
    search_both_ways(model, sample)


def test_a_search_with_gradients_calls_the_layers(model, sample, monkeypatch):
    """A bound step has no gradient for the weights."""
    generator = SequenceGenerator([model], model.decoder.dictionary, beam_size=2, max_len_b=6)
    begun = []
    monkeypatch.setattr(ensemble, "begin", lambda *args: begun.append(decoding.begin(*args)) or begun[-1])
    with torch.enable_grad():
        (best, *_), *_ = generator._generate(sample)
    assert begun and set(begun) == {None} and best["positional_scores"].requires_grad


class Wrapper(torch.nn.Module):
    """Passes attributes on to a model, as torch.compile's OptimizedModule and fairseq's ModuleProxyWrapper do."""

    def __init__(self, model):
        super().__init__()
        self.wrapped = model

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("wrapped"), name)


@pytest.mark.parametrize("wrap", [Wrapper, pytest.param(torch.compile, marks=pytest.mark.slow)])
def test_a_wrapped_model_is_searched_like_the_model(model, sample, wrap):
    expected, _ = search(model, sample)
    assert_same(search_both_ways(wrap(model), sample), expected)


def test_an_encoder_with_its_own_reordering_uses_the_plain_search(model, sample):
    def of_zeros(self, encoder_out, new_order):
        reordered = TransformerEncoderBase.reorder_encoder_out(self, encoder_out, new_order)
        return {**reordered, "encoder_out": [torch.zeros_like(reordered["encoder_out"][0])]}

    before, _ = search(model, sample)
    make_subclass(model.encoder, reorder_encoder_out=of_zeros)
    actual = search_both_ways(model, sample, bound=False)
    with pytest.raises(AssertionError):
        assert_same(before, actual)


def test_a_model_with_probabilities_of_its_own_gets_all_that_fairseq_gives(model, sample):
    """As in nearest-neighbour translation, which reads the states of the decoder."""

    def of_states(self, net_output, log_probs, sample=None):
        logits = net_output[0] + net_output[1]["inner_states"][-1].transpose(0, 1)[..., :1]
        return torch.log_softmax(logits * 0.5, dim=-1)

    make_subclass(model, get_normalized_probs=of_states)
    search_both_ways(model, sample, bound=False)


def test_the_search_does_not_depend_on_torchs_default_type(model, sample):
    expected, _ = search(model, sample)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert_same(search(model, sample)[0], expected)
    finally:
        torch.set_default_dtype(before)


def test_an_ensemble_with_another_kind_of_model_finds_the_same(build, task, monkeypatch):
    sizes = {f"{side}_{name}": 16 for side in ("encoder", "decoder") for name in ("embed_dim", "hidden_size")}
    lstm = Namespace(**sizes, decoder_out_embed_dim=16, criterion="cross_entropy")
    ARCH_CONFIG_REGISTRY["lstm"](lstm)
    models = [fast(build("transformer_rope_tiny")), LSTMModel.build_model(lstm, task).eval()]
    sample = sentences((9, 7, 5))  # by length, which fairseq's LSTM needs
    generator = SequenceGenerator(models, task.target_dictionary, beam_size=4, max_len_b=9)
    assert type(generator.model) is FastEnsemble
    actual = generator.generate(models, sample)
    monkeypatch.setenv("FAIRSEQ_ROPE_FAST_SEARCH", "0")
    expected = generator.generate(models, sample)
    assert_same(actual, expected)
    for one, other in zip(sum(actual, []), sum(expected, []), strict=True):
        assert other["attention"].any()
        torch.testing.assert_close(one["attention"], other["attention"], rtol=0, atol=1e-5)


def test_only_fairseqs_search_of_our_models_gets_the_fast_ensemble(build):
    model, stock = fast(build()), fast(build("transformer_tiny"))
    words = model.decoder.dictionary
    assert type(SequenceGenerator([model], words).model) is FastEnsemble
    assert type(SequenceGenerator(EnsembleModel([stock, model]), words).model) is FastEnsemble
    assert type(SequenceGenerator([stock], words).model) is EnsembleModel
    assert type(SequenceGenerator(OwnEnsemble([model]), words).model) is OwnEnsemble
    generator = OwnSearch([model], words, beam_size=4, max_len_b=6)
    assert type(generator.model) is EnsembleModel
    sample = sentences()
    generator.generate([model], sample)
    actual = OwnGenerate([model], words, beam_size=4, max_len_b=6).generate([model], sample)
    assert_same(actual, search(model, sample, plain=True)[0])


def test_threads_that_share_a_model_find_the_same(model, sample):
    expected, _ = search(copy.deepcopy(model), sample, plain=True)

    def find(_):
        words = model.decoder.dictionary
        return SequenceGenerator([model], words, beam_size=4, max_len_b=6).generate([model], sample)

    with ThreadPoolExecutor(4) as threads:
        for actual in threads.map(find, range(12)):
            assert_same(actual, expected)


def test_generators_of_different_beams_share_a_model(model, sample):
    for beam in (5, 1, 2):
        search_both_ways(model, sample, beam_size=beam)


@pytest.mark.parametrize("beam_in_attention", [1, 3, 4])
def test_fairseqs_beam_of_cross_attention_changes_nothing(build, sample, beam_in_attention):
    """fairseq's transformer, with the same beam as the search, is the reference."""
    stock, model = fast(build("transformer_tiny")), fast(build(position_encoding="sinusoidal"))
    model.load_state_dict(stock.state_dict())
    stock.decoder.set_beam_size(4)
    model.decoder.set_beam_size(beam_in_attention)
    expected, _ = search(stock, sample)
    assert_same(search_both_ways(model, sample), expected)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN packs nothing")
@pytest.mark.parametrize("rows", [1, 7])
def test_the_packed_projection_equals_the_projection(rows):
    linear = torch.nn.Linear(16, 50, bias=False)
    projection, x = PackedProjection(), torch.randn(rows, 1, 16)
    with torch.no_grad():
        packed = projection.packed_weight(linear)
        torch.testing.assert_close(project_packed(x, packed), linear(x), rtol=1e-5, atol=1e-6)
        assert projection.packed_weight(linear) is packed, "it is packed once"
        linear.weight.data[3] *= 2.0
        assert projection.packed_weight(linear) is not packed
        torch.testing.assert_close(project_packed(x, projection.packed_weight(linear)), linear(x), rtol=1e-5, atol=1e-6)
        assert projection.packed_weight(torch.nn.Linear(16, 50)) is None
        assert projection.packed_weight(linear.double()) is None


def test_a_model_with_checkpointed_activations_is_searched_fast_without_them(data_bin, tmp_path):
    """fairseq wraps its layers in generation, too."""
    train(data_bin, tmp_path, "--checkpoint-activations", "--max-update", 1)
    taken = []
    for overrides in ({}, {"checkpoint_activations": False}):
        path = str(tmp_path / "checkpoint_last.pt")
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path], overrides)
        source = torch.tensor([[*range(5, 12), EOS]])
        sample = {"net_input": {"src_tokens": source, "src_lengths": torch.tensor([8])}}
        model.make_generation_fast_(beamable_mm_beam_size=4, need_attn=False)
        model.eval()
        taken.append(search(model, sample)[1])
    assert taken == [False, True]
