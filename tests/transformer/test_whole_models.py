"""Whole models with every option: the scores of a search, activation checkpointing, and 16 bits."""

from functools import partial

import pytest
import torch

from fairseq_rope.search.cache import FIRST_CAPACITY
from tests.models import (
    BLOCK_OPTIONS,
    ENCODING_OPTIONS,
    FAVOR,
    LINEAR_ATTENTION_OPTIONS,
    batch,
    is_of_positions,
    teacher_forced,
    with_different_norms,
)
from tests.searches import assert_scores_of_the_full_pass, fast, search_both_ways, sentences

HALF = {"rope_layout": "half", "rope_fraction": 0.5}
SIZES = {
    "the default": {},
    "half": HALF,
    "a fraction, another base": {"rope_fraction": 0.25, "rope_base": 500.0},
    "pre-norm": {"encoder_normalize_before": True, "decoder_normalize_before": True},
    "normalised embeddings": {"layernorm_embedding": True, "no_scale_embedding": True},
    "gelu": {"activation_fn": "gelu"},
    "other heads": {"decoder_attention_heads": 4, "encoder_attention_heads": 1},
    "another width": {"encoder_embed_dim": 32, "decoder_embed_dim": 64, "decoder_output_dim": 48},
}
MODELS = {
    **SIZES,
    **BLOCK_OPTIONS,
    **ENCODING_OPTIONS,
    **{f"linear, {name}": each for name, each in LINEAR_ATTENTION_OPTIONS.items()},
}
OF_LINEAR = [name for name in MODELS if name.startswith("linear, ")]


def of(*names, slow=(*ENCODING_OPTIONS,)):
    """The *names* of MODELS, and those of *slow* as slow tests."""
    return [*names, *(pytest.param(name, marks=pytest.mark.slow) for name in slow if name not in names)]


def is_bound(name):
    """Whether the fast search binds the steps of the model *name*."""
    return name not in ("shaw", "nezha", "deberta") and "linear" not in name


def teacher_forcing_of(model, source=(9, 4, 6), target=(5, 5, 5)):
    return teacher_forced(model, *batch(source, left_pad=True), batch(target, left_pad=False, seed=1)[0])


@pytest.mark.parametrize("name", of(*SIZES, *BLOCK_OPTIONS, "t5", "transformer-xl", "xpos", *OF_LINEAR))
@pytest.mark.parametrize("beam_size", [1, 4])
def test_a_search_has_the_scores_of_the_full_pass(build, name, beam_size):
    model, sample = fast(build(**MODELS[name])), sentences()
    if name not in SIZES:
        with_different_norms(model)
    options = {"bound": is_bound(name), "beam_size": beam_size}
    found = search_both_ways(model, sample, max_len_a=1, max_len_b=5, len_penalty=0.6, **options)
    assert_scores_of_the_full_pass(model, sample, found)
    assert name not in SIZES or len({len(h[0]["tokens"]) for h in found}) > 1, "sentences end at different times"


@pytest.mark.parametrize("name", of("the default", "all", "two heads of keys"))
def test_a_search_of_long_outputs_has_the_scores_of_the_full_pass(build, name):
    model, sample = with_different_norms(build(**MODELS[name])).double(), sentences()
    model.make_generation_fast_(need_attn=False)
    longer = {"min_len": 2 * FIRST_CAPACITY + 1, "max_len_b": 2 * FIRST_CAPACITY + 5}
    assert_scores_of_the_full_pass(model, sample, search_both_ways(model, sample, bound=is_bound(name), **longer))


OTHERS = {"all, favor": {**BLOCK_OPTIONS["all"], **FAVOR}}


@pytest.mark.parametrize("name", of("all", *OTHERS, "t5", "kerple", "rope", "alibi"))
def test_activation_checkpointing_gives_the_same_gradients(build, name):
    gradients = []
    for flag in (False, True):
        torch.manual_seed(0)
        model = build(checkpoint_activations=flag, **{**MODELS, **OTHERS}[name]).train().double()
        assert isinstance(model.decoder.layers[0].forward, partial) == flag
        torch.manual_seed(1)
        scores = teacher_forcing_of(model, target=(5, 4, 2))
        (scores[0].square().sum() + scores[1, :4].square().sum() + scores[2, :2].square().sum()).backward()
        gradients.append({key: value.grad for key, value in model.named_parameters()})
    for key, gradient in gradients[0].items():
        assert bool(gradient.any()) or (name in ENCODING_OPTIONS and not is_of_positions(key)), key
        for other in gradients[1:]:
            torch.testing.assert_close(other[key], gradient, msg=key, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["the default", *ENCODING_OPTIONS])
def test_a_model_can_be_trained_after_an_evaluation_in_inference_mode(build, name):
    model, again = (build(**MODELS[name]).double().eval() for _ in range(2))
    again.load_state_dict(model.state_dict())
    with torch.inference_mode():
        teacher_forcing_of(model)
    gradients = []
    for one in (model, again):
        teacher_forcing_of(one).square().sum().backward()
        gradients.append({key: value.grad for key, value in one.named_parameters()})
    assert any(bool(gradient.any()) for gradient in gradients[0].values())
    for key, gradient in gradients[0].items():
        assert gradient is gradients[1][key] is None or torch.equal(gradient, gradients[1][key]), key


@pytest.mark.parametrize(
    "name, dtype, tolerance",
    [
        ("the default", torch.float16, 0.01),
        ("the default", torch.bfloat16, 0.05),
        ("all", torch.float16, 0.02),
        ("all", torch.bfloat16, 0.1),
    ],
)
def test_16_bit_gradients_are_close_to_float32_gradients(build, name, dtype, tolerance):
    # --fp16 and --bf16 need a GPU, because fairseq's optimisers for them call torch.cuda or XLA.
    tokens = torch.randint(4, 44, (4, 12))

    def gradient(model):
        model.train()(tokens, torch.full((4,), 12), tokens)[0].float().log_softmax(-1)[..., 5].mean().backward()
        return torch.cat([p.grad.float().view(-1) for p in model.parameters()])

    narrow, wide = (build(dropout=0.0, **MODELS[name]).to(one) for one in (dtype, torch.float32))
    wide.load_state_dict(narrow.float().state_dict())
    expected, actual = gradient(wide), gradient(narrow.to(dtype))
    assert bool(actual.isfinite().all())
    assert float((actual - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("offload", [False, True])
def test_layers_are_checkpointed_and_offloaded_on_request(build, offload):
    model = build(checkpoint_activations=True, offload_activations=offload)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        assert layer.forward.args[-1] is offload  # the last argument of fairseq's _checkpointed_forward
