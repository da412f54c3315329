"""Self-attention with each position encoding, against the formula of its paper in plain float64 numbers."""

import copy
import math
from functools import partial
from itertools import product

import pytest
import torch
from fairseq.modules.espnet_multihead_attention import RelPositionMultiHeadedAttention
from torch.func import functional_call

from fairseq_rope.modules.attention import SelfAttention
from fairseq_rope.positions import ENCODINGS
from fairseq_rope.positions.alibi import slopes
from fairseq_rope.positions.interface import DistanceBias
from fairseq_rope.positions.kerple import Kerple
from fairseq_rope.positions.sharing import forward_pass
from fairseq_rope.positions.t5 import T5Bias
from fairseq_rope.positions.transformer_xl import sinusoids
from tests.references import CASES, OPTIONS, C, D, H, bucket, by_the_paper, causal_mask, sinusoid

T, B = 9, 3  # words of a sentence, and sentences

PADS = {
    "none": torch.zeros(B, T).bool(),
    "right": torch.tensor([[0] * 9, [0] * 7 + [1] * 2, [0] * 3 + [1] * 6]).bool(),
    "left": torch.tensor([[0] * 9, [1] * 2 + [0] * 7, [1] * 6 + [0] * 3]).bool(),
}


def make(name, side, options, dtype=torch.float32):
    position = ENCODINGS[name].build(side, C, H, **options)
    attention = SelfAttention(C, H, position)
    for bias in (attention.q_proj.bias, attention.k_proj.bias, attention.v_proj.bias):
        torch.nn.init.normal_(bias)
    return attention.to(dtype).eval()


# -- the formulas ------------------------------------------------------------------------------------

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def assert_exact(name, side, options, dtype, padding, *cases):
    """*cases* are the values of need_weights."""
    attention, pad = make(name, side, options, dtype), PADS[padding]
    x = torch.randn(T, B, C).to(dtype)
    mask = causal_mask(T, dtype=dtype) if side == "decoder" else None
    expected, expected_weights = by_the_paper(attention, name, side, options, x, pad)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
    for need_weights in cases:
        out, weights = attention(
            *(x, x, x, pad if pad.any() else None),
            attn_mask=mask,
            need_weights=need_weights,
            need_head_weights=need_weights,
        )
        torch.testing.assert_close(out.double()[~pad.T], expected[~pad.T], **close)
        if need_weights:
            rows = ~pad[None].expand(H, B, T)
            torch.testing.assert_close(weights.double()[rows], expected_weights[rows], **close)


@pytest.mark.parametrize("name, side, options", CASES)
def test_attention_is_that_of_the_paper(name, side, options):
    for padding, need_weights in (("left", True), ("right", False)):
        assert_exact(name, side, options, torch.float32, padding, need_weights)
    assert_exact(name, side, options, torch.bfloat16, "left", False)


@pytest.mark.slow
@pytest.mark.parametrize("padding", list(PADS))
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name, side, options", CASES)
def test_attention_is_that_of_the_paper_in_all_types_with_all_padding(name, side, options, dtype, padding):
    assert_exact(name, side, options, dtype, padding, False, True)


def assert_gradients(name, side, options, need_weights, second):
    """Of the input and of the encoding's parameters, beside finite differences."""
    attention = make(name, side, options, torch.float64)
    own = {key: value.detach() for key, value in attention.named_parameters() if key.startswith("position.")}
    if name == "kerple":  # not near 0.01, where the derivative has a step
        own = {key: value.clamp(min=0.1) for key, value in own.items()}
    x, pad = torch.randn(4, 2, C, dtype=torch.float64), torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    mask = causal_mask(4, dtype=torch.float64) if side == "decoder" else None

    def attend(x, *parameters):
        chosen = dict(zip(own, parameters, strict=True))
        masks = {"key_padding_mask": pad, "attn_mask": mask, "need_weights": need_weights}
        return functional_call(attention, chosen, (x, x, x), masks)[0]

    check = torch.autograd.gradgradcheck if second else torch.autograd.gradcheck
    assert check(attend, tuple(given.requires_grad_() for given in (x, *own.values())), fast_mode=True)


@pytest.mark.parametrize("name, side, options", CASES)
def test_gradients_are_those_of_finite_differences(name, side, options):
    for need_weights in (False, True):
        assert_gradients(name, side, options, need_weights, second=False)


@pytest.mark.parametrize("name", ["t5", "kerple"])
def test_a_layer_without_gradient_leaves_that_of_the_next_layer_alone(name):
    attention, x = make(name, "encoder", OPTIONS[name][0]), torch.randn(T, B, C)
    with forward_pass():
        with torch.no_grad():
            attention(x, x, x, need_weights=False)
        attention(x, x, x, need_weights=False)[0].square().sum().backward()
    assert all(bool(parameter.grad.any()) for parameter in attention.position.parameters())


# fairseq's attention has second derivatives where it computes weights.
@pytest.mark.parametrize("name, side, options", [case for case in CASES if case.id.endswith("0")])
def test_second_derivatives_are_those_of_finite_differences(name, side, options):
    assert_gradients(name, side, options, need_weights=True, second=True)


def test_cases_are_those_of_all_encodings_in_attention():
    assert set(OPTIONS) == {name for name, encoding in ENCODINGS.items() if not encoding.absolute}
    for name in ("sinusoidal", "learned"):
        assert not list(ENCODINGS[name].build("encoder", C, H).parameters())


# -- single formulas ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", sorted(ENCODINGS))
def test_torch_quantises_projections_to_int8(name):
    """Weights of quantised layers are methods. int8 changes outputs by a few hundredths of their size."""
    side = "decoder" if name == "xpos" else "encoder"
    options = {"tupe": {"positions": T}}
    attention, x = make(name, side, options.get(name, {})), torch.randn(T, B, C)
    quantised = torch.ao.quantization.quantize_dynamic(copy.deepcopy(attention), {torch.nn.Linear}, torch.qint8)
    outputs = [module(x, x, x, need_weights=False)[0] for module in (attention, quantised)]
    error = (outputs[1] - outputs[0]).norm() / outputs[0].norm()
    assert 0 < error < 0.05


def test_tupe_counts_words_and_refuses_more_than_it_has_positions_for():
    attention = make("tupe", "encoder", {"positions": T, "tupe_absolute_only": True})
    x = torch.randn(T + 4, 1, C)
    words = torch.tensor([[1] * 4 + [0] * T])
    out, _ = attention(x, x, x, words)
    torch.testing.assert_close(out[4:], attention(x[4:], x[4:], x[4:])[0])
    for padding, length in ((None, T + 4), (torch.tensor([[1] * 3 + [0] * (T + 1)]), T + 1)):
        with pytest.raises(ValueError, match=f"a sentence has {length} tokens, and .* {T} positions"):
            attention(x, x, x, padding)


def test_gradients_of_tupe_in_bf16_are_sums_over_many_padded_sentences():
    q, padding = torch.zeros(2000, H, 5, D), torch.zeros(2000, 5).bool()
    padding[::2, 0] = True
    gradients = []
    for dtype in (torch.bfloat16, torch.float64):
        torch.manual_seed(0)
        position = ENCODINGS["tupe"].build("encoder", C, H, positions=50).to(dtype)
        torch.manual_seed(1)
        q, of_scores = q.to(dtype), torch.rand(2000, H, 5, 5).bfloat16().to(dtype)
        (gradient,) = torch.autograd.grad((position.bias(q, q, padding) * of_scores).sum(), position.position_norm.bias)
        gradients.append(gradient.double())
    torch.testing.assert_close(*gradients, atol=0.1 * float(gradients[1].norm()) / math.sqrt(C), rtol=0.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_gradient_of_t5s_largest_distances_is_their_sum_in_16_bits(dtype):
    """887 of the distances to 1,000 keys are at least 113, where the last bucket begins."""
    decoder = T5Bias(1, C, bidirectional=False).to(dtype)
    decoder.by_distance(-torch.arange(1000)).sum().backward()
    assert decoder.relative_attention_bias.grad[-1].item() == pytest.approx(887, rel=2**-8)


def test_the_gradient_of_a_bias_of_others_is_its_sum_in_16_bits():
    class OneNumber(DistanceBias):
        def __init__(self):
            super().__init__()
            self.number = torch.nn.Parameter(torch.zeros(H, 1, dtype=torch.bfloat16))

        def by_distance(self, distance):
            return self.number.expand(-1, len(distance))

    position, x = OneNumber(), torch.zeros(1, H, 600, D, dtype=torch.bfloat16)
    position.bias(x, x, None).float().sum().backward()
    assert position.number.grad.flatten().tolist() == pytest.approx(H * [360_000], rel=2**-8)


UNIFORM = {
    "shaw": ["relative_position_keys", "relative_position_values"],
    "transformer-xl": ["linear_pos.weight", "pos_bias_u", "pos_bias_v"],
    "tupe": ["position_query_projection", "position_key_projection"],
    "deberta": ["query_projection", "key_projection"],
}


@pytest.mark.parametrize("name", list(UNIFORM))
def test_parameters_of_positions_start_uniform_as_fairseqs_projections(name):
    """Glorot and Bengio 2010, equation 16: in ± sqrt(6 / (rows + columns)), with a deviation of this over sqrt(3)."""
    build = partial(ENCODINGS[name].build, "encoder", 64, 4, **OPTIONS[name][0])
    drawn = [dict(build().named_parameters()) for _ in range(20)]
    for parameter in UNIFORM[name]:
        numbers = torch.stack([parameters[parameter].detach() for parameters in drawn])
        most = math.sqrt(6 / sum(numbers.shape[1:]))
        assert 0.97 * most < float(numbers.abs().max()) <= most
        assert float(numbers.std()) == pytest.approx(most / math.sqrt(3), rel=0.05)
        assert abs(float(numbers.mean())) < 0.05 * most


def test_the_vectors_of_nezha_are_there_if_the_model_was_built_without_memory():
    build = partial(ENCODINGS["nezha"].build, "encoder", C, H)
    with torch.device("meta"):
        empty = build()
    assert empty.to("meta").relative_position_keys.is_meta
    for dtype in (torch.float32, torch.bfloat16):
        filled, expected = copy.deepcopy(empty).to(dtype).to_empty(device="cpu"), build().to(dtype)
        for name in ("relative_position_keys", "relative_position_values"):
            assert torch.equal(getattr(filled, name), getattr(expected, name))


def test_buckets_of_t5_are_those_computed_by_hand():
    # Range k begins at 16 * 8^(k/16) = 16 * 2^(3k/16) in the decoder, at 8 * 16^(k/8) = 8 * 2^(k/2) in the encoder.
    decoder_starts = [*range(16), 16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113]
    encoder_starts = [*range(8), 8, 12, 16, 23, 32, 46, 64, 91]
    distance = torch.arange(301)

    def by_hand(starts):
        return [sum(start <= n for start in starts) - 1 for n in range(301)]

    decoder, encoder = T5Bias(H, C, bidirectional=False), T5Bias(H, C, bidirectional=True)
    assert decoder.buckets(-distance).tolist() == by_hand(decoder_starts)
    assert decoder.buckets(distance).tolist() == 301 * [0]
    assert encoder.buckets(-distance).tolist() == by_hand(encoder_starts)
    assert encoder.buckets(distance).tolist() == [0] + [16 + number for number in by_hand(encoder_starts)[1:]]


def test_many_buckets_of_t5_are_those_of_the_formula():
    decoder = T5Bias(1, C, False, relative_attention_num_buckets=1024, relative_attention_max_distance=4096)
    expected = [bucket(-n, False, 1024, 4096) for n in range(5001)]
    on_an_edge = [512 * 8 ** (k / 512) for k in range(513)]  # where the logarithm is rounded
    inside = [n for n in range(5001) if all(abs(n - edge) > 1e-6 for edge in on_an_edge)]
    found = decoder.buckets(-torch.arange(5001)).tolist()
    assert [found[n] for n in inside] == [expected[n] for n in inside] and len(inside) > 4990


def test_slopes_of_alibi_are_those_of_the_paper():
    assert slopes(8) == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]
    assert slopes(6) == [1 / 4, 1 / 16, 1 / 64, 1 / 256, 1 / 2, 1 / 8]
    half = 2**-0.5
    assert slopes(12) == pytest.approx(slopes(8) + [half, half / 2, half / 4, half / 8], rel=1e-12)
    assert slopes(1) == [1 / 256]


def test_kerple_holds_its_numbers_at_001_and_lets_them_rise_again():
    position = Kerple(2)
    with torch.no_grad():
        position.r1.copy_(torch.tensor([-1.0, 0.5]))
        position.r2.copy_(torch.tensor([2.0, -3.0]))
    bias = position.bias(torch.zeros(1, 2, T, D), torch.zeros(1, 2, T, D), None)
    for (h, r1, r2), i, j in product([(0, 0.01, 2.0), (1, 0.5, 0.01)], range(T), range(T)):
        assert bias[0, h, i, j].item() == pytest.approx(-r1 * math.log(1 + r2 * abs(i - j)), abs=1e-6)
    bias.sum().backward()
    assert bool((position.r1.grad != 0).all() and (position.r2.grad != 0).all())


def test_kerple_in_16_bits_has_the_formula_at_distances_whose_product_with_r2_is_not_finite():
    position = Kerple(2).half()
    with torch.no_grad():
        position.r1.fill_(1.5)
        position.r2.fill_(16.0)
    distance = 8000  # 16 * 8000 is above 65,504
    bias = position.by_distance(torch.tensor([-distance, 0]))
    assert bias[0].tolist() == pytest.approx([-1.5 * math.log(1 + 16 * distance), 0], rel=1e-6)
    bias.sum().backward()
    assert position.r2.grad[0].item() == pytest.approx(-1.5 * distance / (1 + 16 * distance), rel=1e-3)


def test_sinusoids_of_distant_positions_are_exact():
    distances = [-5000, -1, 0, 7, 5000, 100_000]
    expected = torch.tensor([sinusoid(n, 64) for n in distances])
    torch.testing.assert_close(sinusoids(torch.tensor(distances), 64), expected, atol=1e-6, rtol=0)


def test_transformer_xl_is_that_of_fairseqs_speech_encoders():
    ours, theirs = make("transformer-xl", "encoder", {}), RelPositionMultiHeadedAttention(C, H, 0.0).eval()
    own = ours.state_dict()
    names = {f"linear_{part}": f"{part}_proj" for part in ("q", "k", "v", "out")}
    state = {f"{name}.{end}": own[f"{ours_}.{end}"] for name, ours_ in names.items() for end in ("weight", "bias")}
    of_positions = ("linear_pos.weight", "pos_bias_u", "pos_bias_v")
    theirs.load_state_dict({**state, **{name: own[f"position.{name}"] for name in of_positions}})
    x, pad = torch.randn(T, B, C), PADS["right"]
    by_distance = torch.tensor([sinusoid(n, C) for n in range(T - 1, -T, -1)])
    expected, _ = theirs(x, x, x, by_distance.unsqueeze(1), key_padding_mask=pad)
    got, _ = ours(x, x, x, key_padding_mask=pad, need_weights=False)
    torch.testing.assert_close(got[~pad.T], expected[~pad.T], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["shaw", "nezha"])
def test_dropped_weights_add_no_vectors_of_distances(name):
    attention, x = make(name, "encoder", OPTIONS[name][0]).train(), torch.randn(T, B, C)
    attention.dropout_module.p = 1.0
    out, _ = attention(x, x, x, need_weights=False)
    torch.testing.assert_close(out, attention.out_proj.bias.expand_as(out))
