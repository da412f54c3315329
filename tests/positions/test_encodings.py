"""Self-attention with each position encoding, against the formula of its paper in plain float64 numbers."""

import math
from functools import partial
from itertools import product

import pytest
import torch
from fairseq.modules.espnet_multihead_attention import RelPositionMultiHeadedAttention
from torch.func import functional_call, grad, vmap

from fairseq_rope.modules.attention import SelfAttention
from fairseq_rope.positions import ENCODINGS
from fairseq_rope.positions.alibi import slopes
from fairseq_rope.positions.kerple import Kerple
from fairseq_rope.positions.sharing import forward_pass
from fairseq_rope.positions.t5 import T5Bias
from fairseq_rope.positions.transformer_xl import sinusoids

T, B, H, D = 9, 3, 3, 4
C = H * D

SMALL_T5 = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 6}
ROPE = {"rope_base": 10000.0, "rope_layout": "interleaved", "rope_fraction": 1.0}
HALF = {"rope_base": 500.0, "rope_layout": "half", "rope_fraction": 0.5}
# the options of each encoding that are tested; sentences are longer than its largest distance
OPTIONS = {
    "none": [{}],
    "rope": [ROPE, HALF],
    "alibi": [{"alibi_type": "symmetric"}, {"alibi_type": "asymmetric"}],
    "t5": [SMALL_T5],
    "shaw": [{"max_relative_positions": 2}],
    "transformer-xl": [{}],
    "kerple": [{}],
    "xpos": [{**ROPE, "xpos_scale_base": 512.0}, {**HALF, "xpos_scale_base": 32.0}],
}
CASES = [
    pytest.param(name, side, options, id=f"{name}-{side}-{number}")
    for name, choices in OPTIONS.items()
    for number, options in enumerate(choices)
    for side in (("decoder",) if name == "xpos" else ("encoder", "decoder"))
]
DECODERS = [case for case in CASES if case.values[1] == "decoder"]
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


def future(queries, keys=None, dtype=torch.float32):
    """The causal mask (queries, keys) of the last *queries* of *keys* positions."""
    keys = keys or queries
    return torch.full((queries, keys), -math.inf, dtype=dtype).triu(keys - queries + 1)


# -- the formulas ------------------------------------------------------------------------------------
# Each score is that of one query q at position i and one key k at position j, both lists of D numbers, in head h.
# p has the encoding's parameters as lists, o its options.


def dot(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True))


def plus(a, b):
    return [x + y for x, y in zip(a, b, strict=True)]


def rotated(x, m, o, power=0.0):
    """RoFormer, equation 34; with *power*, pair t is also multiplied by zeta_t^power (xPos, algorithm 1)."""
    d, out = round(o["rope_fraction"] * D), list(x)
    for t in range(d // 2):
        a, b = (2 * t, 2 * t + 1) if o["rope_layout"] == "interleaved" else (t, t + d // 2)
        angle, scale = m * o["rope_base"] ** (-2 * t / d), ((2 * t / d + 0.4) / 1.4) ** power
        out[a] = scale * (x[a] * math.cos(angle) - x[b] * math.sin(angle))
        out[b] = scale * (x[a] * math.sin(angle) + x[b] * math.cos(angle))
    return out


def xpos(q, k, i, j, h, p, o, side):
    scale_base = o["xpos_scale_base"]
    return dot(rotated(q, i, o, i / scale_base), rotated(k, j, o, -j / scale_base)) / math.sqrt(D)


def alibi(q, k, i, j, h, p, o, side):
    slope = [2**-4, 2**-8, 2**-2][h]  # of 2 heads, then the first of 4
    nearer = 0.5 if o["alibi_type"] == "asymmetric" and j > i else 0.0
    return dot(q, k) / math.sqrt(D) - slope * (abs(i - j) - nearer)


def bucket(distance, both_directions, buckets, max_distance):
    """mesh_tensorflow's _relative_position_bucket, of *distance* = j - i."""
    first, n = 0, max(-distance, 0)
    if both_directions:
        buckets //= 2
        first, n = (buckets if distance > 0 else 0), abs(distance)
    exact = buckets // 2
    if n < exact:
        return first + n
    part = math.log(n / exact) / math.log(max_distance / exact)
    return first + min(buckets - 1, exact + math.floor(part * (buckets - exact)))


def t5(q, k, i, j, h, p, o, side):
    bias = p["relative_attention_bias"][bucket(j - i, side == "encoder", *o.values())][h]
    return dot(q, k) / math.sqrt(D) + bias


def clip(distance, o):
    k = o["max_relative_positions"]
    return max(-k, min(k, distance)) + k


def shaw(q, k, i, j, h, p, o, side):
    return dot(q, plus(k, p["relative_position_keys"][clip(j - i, o)])) / math.sqrt(D)


def sinusoid(distance, width):
    return [f(distance / 10000 ** (2 * t / width)) for t in range(width // 2) for f in (math.sin, math.cos)]


def transformer_xl(q, k, i, j, h, p, o, side):
    projected = [dot(p["linear_pos.weight"][h * D + n], sinusoid(i - j, C)) for n in range(D)]
    with_u, with_v = plus(q, p["pos_bias_u"][h]), plus(q, p["pos_bias_v"][h])
    return (dot(with_u, k) + dot(with_v, projected)) / math.sqrt(D)


def kerple(q, k, i, j, h, p, o, side):
    r1, r2 = max(0.01, p["r1"][h]), max(0.01, p["r2"][h])
    return dot(q, k) / math.sqrt(D) - r1 * math.log(1 + r2 * abs(i - j))


SCORES = {
    "none": lambda q, k, i, j, h, p, o, side: dot(q, k) / math.sqrt(D),
    "rope": lambda q, k, i, j, h, p, o, side: dot(rotated(q, i, o), rotated(k, j, o)) / math.sqrt(D),
    "alibi": alibi,
    "t5": t5,
    "shaw": shaw,
    "transformer-xl": transformer_xl,
    "kerple": kerple,
    "xpos": xpos,
}


def by_the_paper(attention, name, side, o, x, pad):
    """Output (T, B, C) and weights (H, B, T, S), sentence by sentence without its padding; 0 where a pad stands."""
    p = {key: value.double().tolist() for key, value in attention.position.named_parameters()}
    out, all_weights = torch.zeros(*x.shape).double(), torch.zeros(H, x.size(1), x.size(0), x.size(0)).double()
    for b in range(x.size(1)):
        words = (~pad[b]).nonzero().squeeze(1)

        def project(projection, words=words, b=b):
            projected = x[words, b].double() @ projection.weight.double().T + projection.bias.double()
            return projected.view(len(words), H, D).tolist()

        q, k, v = map(project, (attention.q_proj, attention.k_proj, attention.v_proj))
        for i, h in product(range(len(words)), range(H)):
            keys = range(i + 1 if side == "decoder" else len(words))
            exps = [math.exp(SCORES[name](q[i][h], k[j][h], i, j, h, p, o, side)) for j in keys]
            for j in keys:
                weight = exps[j] / sum(exps)
                value = v[j][h]
                if name == "shaw":
                    value = plus(value, p["relative_position_values"][clip(j - i, o)])
                all_weights[h, b, words[i], words[j]] = weight
                out[words[i], b, h * D : (h + 1) * D] += weight * torch.tensor(value, dtype=torch.float64)
        projection = attention.out_proj
        out[words, b] = out[words, b] @ projection.weight.double().T + projection.bias.double()
    return out, all_weights


TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def assert_exact(name, side, options, dtype, padding, need_weights):
    attention, pad = make(name, side, options, dtype), PADS[padding]
    x = torch.randn(T, B, C).to(dtype)
    mask = future(T, dtype=dtype) if side == "decoder" else None
    out, weights = attention(
        *(x, x, x, pad if pad.any() else None),
        attn_mask=mask,
        need_weights=need_weights,
        need_head_weights=need_weights,
    )
    expected, expected_weights = by_the_paper(attention, name, side, options, x, pad)
    close = {"atol": TOLERANCE[dtype], "rtol": TOLERANCE[dtype]}
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
    for need_weights in (False, True):
        assert_exact(name, side, options, dtype, padding, need_weights)


def assert_gradients(name, side, options, need_weights, second):
    """Of the input and of the encoding's parameters, beside finite differences."""
    attention = make(name, side, options, torch.float64)
    own = {key: value.detach() for key, value in attention.named_parameters() if key.startswith("position.")}
    if name == "kerple":  # not near 0.01, where the derivative has a step
        own = {key: value.clamp(min=0.1) for key, value in own.items()}
    x, pad = torch.randn(4, 2, C, dtype=torch.float64), torch.tensor([[0, 0, 0, 0], [1, 0, 0, 0]]).bool()
    mask = future(4, dtype=torch.float64) if side == "decoder" else None

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


@pytest.mark.parametrize("name, side, options", CASES)
def test_torch_func_gives_autograds_gradients(name, side, options):
    attention, x = make(name, side, options).requires_grad_(False), torch.randn(2, T, B, C)

    def loss(x, need_weights):
        return attention(x, x, x, PADS["right"], attn_mask=future(T), need_weights=need_weights)[0].square().sum()

    for need_weights in (False, True):
        leaf = x.clone().requires_grad_()
        loss(leaf[0], need_weights).backward()
        torch.testing.assert_close(grad(loss)(x[0], need_weights), leaf.grad[0])
    by_row = torch.stack([grad(loss)(each, True) for each in x])
    torch.testing.assert_close(vmap(grad(partial(loss, need_weights=True)))(x), by_row)


# fairseq's attention has second derivatives where it computes weights.
@pytest.mark.parametrize("name, side, options", [case for case in CASES if case.id.endswith("0")])
def test_second_derivatives_are_those_of_finite_differences(name, side, options):
    assert_gradients(name, side, options, need_weights=True, second=True)


@pytest.mark.parametrize("name, side, options", DECODERS)
def test_step_by_step_with_reordered_beams_equals_all_at_once(name, side, options):
    attention, x = make(name, side, options), torch.randn(40, B, C)
    history, state = x[:0], {}
    begin = 0
    for length in [4] + 36 * [1]:  # a prefix, then step by step
        if begin in (6, 20, 33):
            order = torch.tensor([2, 0, 0])
            attention.reorder_incremental_state(state, order)
            history = history[:, order]
        new = x[begin : begin + length]
        history, begin = torch.cat([history, new]), begin + length
        mask = future(length, begin)
        step, _ = attention(new, None, None, incremental_state=state, attn_mask=mask, need_weights=False)
        all_at_once, _ = attention(history, None, None, attn_mask=future(begin), need_weights=False)
        torch.testing.assert_close(step, all_at_once[-length:], atol=1e-5, rtol=1e-4)
    chunk, _ = attention(x[:5], None, None, incremental_state=state, attn_mask=future(5, 45), need_weights=False)
    all_at_once, _ = attention(torch.cat([history, x[:5]]), None, None, attn_mask=future(45))
    torch.testing.assert_close(chunk, all_at_once[-5:], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name, side, options", CASES)
def test_shifted_positions_and_padding_on_the_left_change_nothing(name, side, options):
    attention, x = make(name, side, options, torch.float64), torch.randn(T, 1, C, dtype=torch.float64)
    position = attention.position
    assert not position.absolute

    def scores(offset):
        q, k = (attention._split_heads(x) for _ in range(2))
        turned_q, turned_k = position.queries_and_keys(q, k, offset)
        return (turned_q @ turned_k.transpose(2, 3)).tril()

    for offset in (1, 90, 700):
        torch.testing.assert_close(scores(offset), scores(0), atol=1e-5, rtol=1e-5)
    mask = (lambda n: future(n, dtype=torch.float64)) if side == "decoder" else lambda n: None
    alone, _ = attention(x, x, x, attn_mask=mask(T))
    padded = torch.cat([torch.randn(30, 1, C, dtype=torch.float64), x])
    pad = (torch.arange(T + 30) < 30).unsqueeze(0)
    shifted, _ = attention(padded, padded, padded, pad, attn_mask=mask(T + 30))
    torch.testing.assert_close(shifted[30:], alone, atol=1e-5, rtol=1e-5)


def test_cases_are_those_of_all_encodings_in_attention():
    assert set(OPTIONS) == {name for name, encoding in ENCODINGS.items() if not encoding.absolute}
    for name in ("sinusoidal", "learned"):
        assert not list(ENCODINGS[name].build("encoder", C, H).parameters())


# -- single formulas ---------------------------------------------------------------------------------


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
    bias = position.bias(torch.zeros(1, 2, T, D), torch.zeros(1, 2, T, D))
    for (h, r1, r2), i, j in product([(0, 0.01, 2.0), (1, 0.5, 0.01)], range(T), range(T)):
        assert bias[0, h, i, j].item() == pytest.approx(-r1 * math.log(1 + r2 * abs(i - j)), abs=1e-6)
    bias.sum().backward()
    assert bool((position.r1.grad != 0).all() and (position.r2.grad != 0).all())


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
