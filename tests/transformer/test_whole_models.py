"""Training of whole models: activation checkpointing, after an evaluation, and in 16 bits."""

from functools import partial

import pytest
import torch

from tests.models import BLOCK_OPTIONS, ENCODING_OPTIONS, FAVOR, MODELS, batch, is_of_positions, teacher_forced


def teacher_forcing_of(model, source=(9, 4, 6), target=(5, 5, 5)):
    return teacher_forced(model, *batch(source, left_pad=True), batch(target, left_pad=False, seed=1)[0])


def slow_unless(*fast_ones):
    return [name if name in fast_ones else pytest.param(name, marks=pytest.mark.slow) for name in ENCODING_OPTIONS]


@pytest.mark.parametrize("name", ["all", "all, favor", *slow_unless("t5", "kerple", "rope", "alibi")])
def test_activation_checkpointing_gives_the_same_gradients(build, name):
    models = {**MODELS, "all, favor": {**BLOCK_OPTIONS["all"], **FAVOR}}
    gradients = []
    for flag in (False, True):
        torch.manual_seed(0)
        model = build(checkpoint_activations=flag, **models[name]).train().double()
        assert isinstance(model.decoder.layers[0].forward, partial) == flag
        torch.manual_seed(1)
        scores = teacher_forcing_of(model, target=(5, 4, 2))
        (scores[0].square().sum() + scores[1, :4].square().sum() + scores[2, :2].square().sum()).backward()
        gradients.append({key: value.grad for key, value in model.named_parameters()})
    for key, gradient in gradients[0].items():
        assert bool(gradient.any()) or (name in ENCODING_OPTIONS and not is_of_positions(key)), key
        for other in gradients[1:]:
            torch.testing.assert_close(other[key], gradient, msg=key, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", list(ENCODING_OPTIONS))
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
        ("rope", torch.float16, 0.01),
        ("rope", torch.bfloat16, 0.05),
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
