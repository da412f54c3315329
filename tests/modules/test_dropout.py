"""fairseq_rope/modules/dropout.py: the same distribution as torch's dropout, and fairseq's behaviour."""

import math

import pytest
import torch
from fairseq.modules import FairseqDropout

from fairseq_rope.modules.dropout import Dropout, keep_mask
from fairseq_rope.transformer.layers import EncoderLayer


@pytest.mark.parametrize("p", [0.001, 0.1, 0.3, 0.5, 0.99])
def test_elements_are_dropped_independently_with_the_given_probability(p):
    count = 1_000_003  # not a multiple of four
    dropped = (keep_mask(torch.Size([count]), p) == 0).double()
    sigma = math.sqrt(p * (1 - p) / count)
    assert abs(dropped.mean().item() - p) < 5 * sigma
    for lag in (1, 2, 3, 4, 5, 8, 1024):  # four elements share one random number
        both = (dropped[lag:] * dropped[:-lag]).mean().item()
        assert abs(both - p * p) < 5 * math.sqrt(p * p * (1 - p * p) / count)
    for place in range(4):
        assert abs(dropped[place::4].mean().item() - p) < 10 * sigma


def test_a_probability_between_two_16_bit_steps_is_right_on_average():
    p = 2.5 / 65536
    shape = torch.Size([1 << 18])
    counts = [(keep_mask(shape, p) == 0).sum().item() for _ in range(200)]
    expected = p * (1 << 18) * 200
    assert abs(sum(counts) - expected) < 5 * math.sqrt(expected * 1.5)


def test_kept_elements_and_their_gradients_are_scaled():
    x = torch.randn(50, 40, requires_grad=True)
    out = Dropout(0.3).train()(x)
    mask = out != 0
    assert 0.6 < mask.double().mean() < 0.8
    torch.testing.assert_close(out[mask], x[mask] / 0.7)
    out.sum().backward()
    torch.testing.assert_close(x.grad, mask / 0.7)


def test_random_numbers_come_from_torchs_generator():
    x, drop = torch.ones(1000), Dropout(0.5).train()
    torch.manual_seed(1)
    first, second = drop(x), drop(x)
    torch.manual_seed(1)
    assert torch.equal(drop(x), first) and torch.equal(drop(x), second)
    assert not torch.equal(first, second)


def test_dropout_otherwise_behaves_as_fairseqs():
    x = torch.randn(30, 4)
    assert Dropout(0.5).eval()(x) is x and Dropout(0.0).train()(x) is x
    assert Dropout(1.0).train()(x).eq(0).all()
    retained = Dropout(0.5, module_name="TransformerEncoder").eval()
    retained.make_generation_fast_("", retain_dropout=True, retain_dropout_modules=["TransformerEncoder"])
    assert retained(x).eq(0).any()
    assert Dropout(0.25).train()(x.t()).shape == (4, 30), "of a tensor that is not contiguous"
    assert isinstance(retained, FairseqDropout)


def test_a_probability_too_close_to_one_for_16_bits_uses_torchs_dropout():
    x = torch.ones(2000)
    for _ in range(20):  # one element in a million is kept
        assert Dropout(1 - 1e-6).train()(x).ne(0).sum() <= 1


def test_the_residual_is_added_in_place_only_to_a_tensor_that_dropout_made(build):
    for layer in (build(dropout=0.2).encoder.layers[0], build(dropout=0.2).decoder.layers[0]):
        layer.train()
        x, residual = torch.randn(3, 2, 64), torch.randn(3, 2, 64)
        expected = x + residual
        dropped = layer.dropout_module(x)
        expected_dropped = dropped + residual
        assert layer.residual_connection(dropped, residual) is dropped
        assert torch.equal(dropped, expected_dropped)
        for change in (
            lambda m: m.dropout_module.eval(),
            lambda m: setattr(m.dropout_module.train(), "p", 0.0),
            lambda m: (setattr(m.dropout_module, "p", 0.2), m.dropout_module.register_forward_hook(print)),
        ):
            change(layer)
            before = x.clone()
            assert torch.equal(layer.residual_connection(x, residual), expected)
            assert torch.equal(x, before)


def test_a_layer_of_others_can_read_the_output_of_dropout_after_the_residual_was_added(build):
    class Own(EncoderLayer):
        def forward(self, x, encoder_padding_mask, attn_mask=None):
            h = self.dropout_module(x)
            return h, self.residual_connection(h, x)

    layer = build(dropout=0.2).encoder.layers[0].train()
    layer.__class__ = Own
    x = torch.randn(3, 2, 64)
    dropped, summed = layer(x, None)
    kept = dropped != 0
    torch.testing.assert_close(dropped, torch.where(kept, x / 0.8, torch.zeros_like(x)))
    assert 0.6 < kept.double().mean() < 0.95 and torch.equal(summed, dropped + x)


def test_a_residual_of_more_bits_is_not_added_in_16_bits(build):
    """As with --amp, whose layers give float16."""
    layer = build(dropout=0.2).encoder.layers[0].train()
    dropped, residual = layer.dropout_module(torch.randn(3, 2, 64).half()), torch.randn(3, 2, 64)
    expected = dropped.float() + residual
    actual = layer.residual_connection(dropped, residual)
    assert actual.dtype == torch.float32 and torch.equal(actual, expected)


def test_a_hook_keeps_the_output_of_the_projection_when_dropout_is_off(build):
    layer = build(dropout=0.2).encoder.layers[0].train()
    layer.dropout_module.eval()
    seen = []
    layer.fc2.register_forward_hook(lambda module, given, out: seen.append((out, out.clone())))
    layer(torch.randn(3, 2, 64), None).sum().backward()
    assert torch.equal(*seen[0])


def test_the_model_uses_our_dropout(build):
    model = build(dropout=0.2, activation_dropout=0.1, attention_dropout=0.1)
    for module in (model.encoder, model.decoder, *model.encoder.layers, *model.decoder.layers):
        assert type(module.dropout_module) is Dropout and module.dropout_module.p == 0.2
    for layer in (*model.encoder.layers, *model.decoder.layers):
        assert type(layer.activation_dropout_module) is Dropout and layer.activation_dropout_module.p == 0.1
