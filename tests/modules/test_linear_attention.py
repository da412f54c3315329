"""Linear attention: beside RoFormer's equation 19 written with loops, in searches, and in whole models."""

import math
from argparse import Namespace
from itertools import product

import pytest
import torch
from fairseq.models import ARCH_CONFIG_REGISTRY

from fairseq_rope.checkpoints import load_checkpoint
from fairseq_rope.errors import InputError
from fairseq_rope.modules.linear_attention import Elu1, Favor, LinearSelfAttention, causal_products
from fairseq_rope.modules.norms import RMSNorm
from fairseq_rope.positions.rotary import RotaryEmbedding
from fairseq_rope.tools.average import average_checkpoints
from fairseq_rope.tools.convert_layout import convert_layout
from tests.commands import train
from tests.models import (
    FAVOR,
    FOUR_HEADS,
    LINEAR,
    LINEAR_ATTENTION_OPTIONS,
    batch,
    teacher_forced,
    with_different_norms,
)
from tests.references import rotated

# -- equation 19 -------------------------------------------------------------------------------------


def elu1_by_formula(x, is_key):
    return [value + 1 if value > 0 else math.exp(value) for value in x]


def favor_by_formula(omega):
    def features(x, is_key):
        x = [value * len(x) ** -0.25 for value in x]
        exponents = [sum(w * v - v * v / 2 for w, v in zip(row, x, strict=True)) for row in omega.tolist()]
        largest = 0.0 if is_key else max(exponents)
        return [(math.exp(exponent - largest) + 1e-4) / math.sqrt(len(exponents)) for exponent in exponents]

    return features


def equation_19(module, x, phi, is_allowed):
    """The attention of *x* (T, B, C) to itself, one number at a time."""
    length, batch_size, heads, dim = x.size(0), x.size(1), module.num_heads, module.head_dim
    groups = module.k_proj.out_features // dim
    out = torch.zeros(length, batch_size, heads * dim, dtype=torch.float64)

    def head(projection, t, b, number, norm=None):
        vector = projection(x[t, b])[number * dim : (number + 1) * dim]
        return (vector if norm is None else norm(vector)).tolist()

    for b, h, m in product(range(batch_size), range(heads), range(length)):
        group, top, bottom = h // (heads // groups), [0.0] * dim, 0.0
        of_query = phi(head(module.q_proj, m, b, h, module.q_norm), False)
        for n in range(length):
            if is_allowed(b, m, n):
                of_key = phi(head(module.k_proj, n, b, group, module.k_norm), True)
                turned = zip(rotated(of_query, m), rotated(of_key, n), strict=True)
                product_of_turned = sum(q * k for q, k in turned)
                value = head(module.v_proj, n, b, group)
                top = [total + product_of_turned * v for total, v in zip(top, value, strict=True)]
                bottom += sum(q * k for q, k in zip(of_query, of_key, strict=True))
        if bottom:
            out[m, b, h * dim : (h + 1) * dim] = torch.tensor([value / bottom for value in top])
    return module.out_proj(out)


def build_attention(name, groups=4, normalises=False):
    feature_map = Elu1() if name == "elu1" else Favor(4, 6, seed=1)
    module = LinearSelfAttention(16, 4, feature_map, RotaryEmbedding(4 if name == "elu1" else 6)).double().eval()
    module.keep_key_value_heads(groups)
    if normalises:
        module.q_norm, module.k_norm = RMSNorm(4).double(), RMSNorm(4).double()
    phi = elu1_by_formula if name == "elu1" else favor_by_formula(feature_map.omega.double())
    return with_different_norms(module), phi


TABLES = {"rtol": 0, "atol": 1e-6}  # cos and sin are float32


@pytest.mark.parametrize("groups, normalises", [(4, False), (2, True), (1, False)])
@pytest.mark.parametrize("name", ["elu1", "favor"])
def test_it_is_equation_19_in_both_directions_with_padding_on_both_sides(name, groups, normalises):
    module, phi = build_attention(name, groups, normalises)
    x = torch.randn(6, 2, 16, dtype=torch.float64)
    is_pad = torch.tensor([[1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]])
    future = torch.full((6, 6), -math.inf, dtype=torch.float64).triu(1)
    with torch.no_grad():
        both_ways = module(x, None, None, key_padding_mask=is_pad)
        causal = module(x, None, None, key_padding_mask=is_pad.bool(), attn_mask=future)
        expected = equation_19(module, x, phi, lambda b, m, n: not is_pad[b, n])
        expected_causal = equation_19(module, x, phi, lambda b, m, n: n <= m and not is_pad[b, n])
        state, steps = {}, []
        for t in range(6):
            pad = is_pad[:, t : t + 1]
            steps.append(module(x[t : t + 1], None, None, key_padding_mask=pad, incremental_state=state)[0])
    assert both_ways[1] is causal[1] is None
    torch.testing.assert_close(both_ways[0], expected, **TABLES)
    torch.testing.assert_close(causal[0], expected_causal, **TABLES)
    torch.testing.assert_close(torch.cat(steps), expected_causal, **TABLES)

    def loss(inputs, mask):
        return module(inputs, None, None, key_padding_mask=is_pad, attn_mask=mask)[0][1:]

    for mask in (None, future):
        assert torch.autograd.gradcheck(loss, (x.requires_grad_(), mask), fast_mode=True)
        (gradient,) = torch.autograd.grad(module(x, None, None, is_pad, attn_mask=mask)[0].sum(), x)
        assert bool(gradient.isfinite().all()), "a row with only padding"


@pytest.mark.parametrize("name", ["elu1", "favor"])
def test_small_features_and_long_keys_keep_their_shares(name):
    """Features of 1e-9, whose products a bound of the denominator could hide, and exponents of favor beyond float32."""
    module, phi = build_attention(name)
    with torch.no_grad():
        for projection in (module.q_proj, module.k_proj):
            projection.bias.sub_(20.0 if name == "elu1" else 3.0)
    x = torch.randn(4, 1, 16, dtype=torch.float64)
    future = torch.full((4, 4), -math.inf, dtype=torch.float64).triu(1)
    with torch.no_grad():
        expected = [equation_19(module, x, phi, rule) for rule in (lambda b, m, n: True, lambda b, m, n: n <= m)]
        for mask, exact in zip((None, future), expected, strict=True):
            torch.testing.assert_close(module(x, None, None, attn_mask=mask)[0], exact, **TABLES)
        for projection in (module.q_proj, module.k_proj):  # products of about e^-140 are exact in float64
            projection.bias.sub_(50.0 if name == "elu1" else 0.0)
        exact = equation_19(module, x, phi, lambda b, m, n: n <= m)
        torch.testing.assert_close(module(x, None, None, attn_mask=future)[0], exact, **TABLES)
    narrow = Elu1()(torch.tensor([-20.0, -80.0]), True)
    torch.testing.assert_close(narrow.double(), torch.tensor([-20.0, -80.0]).double().exp(), rtol=1e-5, atol=0)
    favor = Favor(256, 256, seed=0)
    as_long_as_omega = favor.omega * 256**0.25  # exponents of |ω|² / 2, about 128
    assert bool(favor(as_long_as_omega, True).sum(0).square().isfinite().all())


@pytest.mark.parametrize("bias", [0.0, -43.0, -100.0])
@pytest.mark.parametrize("mask", [None, torch.zeros(5, 5)])
def test_rows_of_padding_and_features_that_underflow_leave_large_gradients_finite(bias, mask):
    """1e10 is a loss that a scale for 16 bits multiplies. A row with only padding divides by the smallest number."""
    module = LinearSelfAttention(64, 2, Elu1(), RotaryEmbedding(32))
    x, is_pad = torch.randn(70, 4, 64, requires_grad=True), torch.zeros(4, 70)
    is_pad[0, :50] = 1
    with torch.no_grad():
        for projection in (module.q_proj, module.k_proj):
            projection.bias.fill_(bias)
    out = module(x, None, None, key_padding_mask=is_pad, attn_mask=mask)[0]
    for gradient in torch.autograd.grad(1e10 * out.sum(), [x, *module.parameters()]):
        assert bool(gradient.isfinite().all())


@pytest.mark.parametrize("length", [1, 3, 4, 5, 11])
def test_sums_over_chunks_are_sums_over_positions(length):
    q, k = (torch.randn(2, 3, length, 5, dtype=torch.float64) for _ in range(2))
    v = torch.randn(2, 3, length, 2, dtype=torch.float64)
    expected = torch.zeros(2, 3, length, 2, dtype=torch.float64)
    for m, n in product(range(length), range(length)):
        if n <= m:
            expected[:, :, m] += (q[:, :, m] * k[:, :, n]).sum(-1, keepdim=True) * v[:, :, n]
    for chunk in (1, 4, 64):
        torch.testing.assert_close(causal_products(q, k, v, chunk), expected)


def test_favor_estimates_softmax_with_orthogonal_vectors():
    q, k = (torch.randn(20, 8, dtype=torch.float64) * 0.5 for _ in range(2))
    expected = torch.softmax(q @ k.t() / math.sqrt(8), dim=1)
    errors = []
    for features in (64, 4096):
        products = Favor(8, features, seed=3).double()(q, False) @ Favor(8, features, seed=3).double()(k, True).t()
        assert bool((products > 0).all())
        errors.append(float((products / products.sum(1, keepdim=True) - expected).abs().max()))
    assert errors[1] < 0.02 < errors[0] < 0.2
    omega = Favor(8, 4096, seed=3).omega.double()
    for block in omega[:80].split(8):
        products = block @ block.t()
        assert bool((products - products.diag().diag()).abs().max() < 1e-4)
    # |ω|² of normal vectors has mean D and variance 2 D; four standard errors
    squares = omega.square().sum(1)
    assert float(squares.mean()) == pytest.approx(8, abs=4 * math.sqrt(16 / 4096))
    assert float(squares.var()) == pytest.approx(16, rel=0.25)
    assert torch.equal(Favor(8, 24, 5).omega, Favor(8, 24, 5).omega)
    assert not torch.equal(Favor(8, 24, 5).omega, Favor(8, 24, 6).omega)


@pytest.mark.parametrize("name", ["elu1", "favor"])
def test_sums_of_long_16_bit_inputs_stay_finite_and_close(name):
    module, _ = build_attention(name)
    module.half()
    x = torch.randn(70000, 1, 16).half() + 1
    with torch.no_grad():
        actual = module(x, None, None)[0].double()
        expected = module.double()(x.double(), None, None)[0]
        if name == "elu1":
            assert float(module.feature_map(x[:, 0, :4].double(), True).sum(0).max()) > torch.finfo(torch.float16).max
    assert bool(actual.isfinite().all())
    assert float((actual - expected).norm() / expected.norm()) < 0.02
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        mixed = module.float()(x[:100].float(), None, None)[0].double()
        sums = {}
        module(x[:100].float(), None, None, incremental_state=sums)
    assert all(value.dtype in (torch.float32, torch.int64) for value in next(iter(sums.values())).values())
    with torch.no_grad():
        exact = module.double()(x[:100].double(), None, None)[0]
    assert float((mixed - exact).norm() / exact.norm()) < 0.02


# -- searches ----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_state_of_a_search_has_the_same_size_at_step_100_and_5000(build):
    """Memory of a search is what the incremental state holds, beside the tokens."""
    options = {"decoder_layers": 1, "encoder_layers": 1, **FOUR_HEADS}

    def sizes(**more):
        model, state, measured = build(**options, **more), {}, {}
        model.make_generation_fast_(need_attn=False)
        tokens = torch.full((2, 1), 5)
        with torch.no_grad():
            encoder_out = model.encoder(torch.tensor([[4, 5, 2], [6, 7, 2]]), torch.tensor([3, 3]))
            for step in range(1, 5001):
                model.decoder(tokens, encoder_out=encoder_out, incremental_state=state)
                if step in (100, 5000):
                    tensors = [x for entry in state.values() for x in entry.values() if x is not None]
                    measured[step] = sum(x.untyped_storage().nbytes() for x in tensors)
        return measured

    measured = sizes(**LINEAR)
    of_sums = 4 * (4 * 16 * 16 + 4 * 16)  # bytes: 4 heads of 16 x 16 products and of 16 features
    of_cross_attention = 4 * 2 * 3 * 64 + 3  # keys and values of 3 positions, and their mask
    assert measured[100] == measured[5000] == 2 * (of_sums + of_cross_attention)


# -- whole models ------------------------------------------------------------------------------------


def test_it_is_where_the_flags_put_it_and_all_parameters_start_as_without_it(build):
    def built(**options):
        torch.manual_seed(7)
        return build(**{**options, **FOUR_HEADS})

    plain = built().state_dict()
    for name, options in LINEAR_ATTENTION_OPTIONS.items():
        model = built(**{**options, **FOUR_HEADS, "encoder_kv_heads": 0, "decoder_kv_heads": 0})
        kinds = {side: type(getattr(model, side).layers[1].self_attn) for side in ("encoder", "decoder")}
        assert (kinds["encoder"] is LinearSelfAttention) is (name != "the decoder only")
        assert kinds["decoder"] is LinearSelfAttention
        for key, value in model.state_dict().items():
            if key in plain:
                assert torch.equal(value, plain[key]), (name, key)
            else:
                assert key.endswith((".omega", ".q_norm.weight", ".k_norm.weight", "._float_tensor")), key
    favor = built(**{**FAVOR, "favor_features": 0, "rope_fraction": 0.5})
    attention = favor.encoder.layers[0].self_attn
    assert attention.feature_map.omega.shape == (48, 16)  # 16 ln 16 = 44.4
    assert (attention.position.head_dim, attention.position.dim) == (48, 24)
    assert torch.equal(attention.feature_map.omega, favor.decoder.layers[1].self_attn.feature_map.omega)
    first, second = (built(**FAVOR, favor_seed=seed).encoder.layers[0].self_attn.feature_map.omega for seed in (0, 1))
    assert not torch.equal(first, second)


def test_a_model_trains_resumes_and_averages(data_bin, trained, tmp_path):
    flags = "--attention-type linear --feature-map favor --decoder-attention-type linear --decoder-kv-heads 1".split()
    train(data_bin, tmp_path, *flags, "--max-epoch", 2)
    paths = [str(tmp_path / f"checkpoint{epoch}.pt") for epoch in (1, 2)]
    resume = ("--restore-file", paths[0], "--save-dir", tmp_path / "resumed", "--max-epoch", 2)
    train(data_bin, tmp_path / "resumed", *flags, *resume)
    uninterrupted, resumed = (load_checkpoint(str(tmp_path / path / "checkpoint2.pt")) for path in (".", "resumed"))
    for key, value in uninterrupted["model"].items():
        assert torch.equal(resumed["model"][key], value), key
    with pytest.raises(InputError, match="was trained with --decoder-attention-type linear, not softmax"):
        train(data_bin, tmp_path / "resumed", *flags, *resume, "--decoder-attention-type", "softmax")
    with pytest.raises(InputError, match="was trained with --favor-seed 0, not 1; use the same value$"):
        train(data_bin, tmp_path / "resumed", *flags, *resume, "--favor-seed", 1)
    start = ("--finetune-from-model", paths[0], "--max-epoch", 1)
    with pytest.raises(InputError, match="was trained with --favor-seed 0, not 1"):  # its vectors are of seed 0
        train(data_bin, tmp_path / "finetuned", *flags, *start, "--favor-seed", 1)
    log = train(  # the weights of softmax attention
        data_bin,
        *(tmp_path / "elu1", "--attention-type", "linear", "--max-update", 1),
        *("--finetune-from-model", trained / "checkpoint_last.pt"),
    )
    assert "Loaded checkpoint" in log
    mean, omega = average_checkpoints(paths)["model"], "encoder.layers.0.self_attn.feature_map.omega"
    assert torch.equal(mean[omega], uninterrupted["model"][omega])


@pytest.mark.parametrize("name", ["elu1", "favor"])
def test_the_other_layout_gives_the_same_output(build, name):
    options = {**LINEAR_ATTENTION_OPTIONS[name], "rope_fraction": 0.5}
    args = Namespace(arch="transformer_rope_tiny", **options)
    ARCH_CONFIG_REGISTRY[args.arch](args)
    model, half = build(**options), build(**options, rope_layout="half")
    state = convert_layout({"args": args, "cfg": None, "model": model.state_dict()}, "half")
    half.load_state_dict(state["model"])
    source, lengths = batch([9, 4, 6], left_pad=True)
    target, _ = batch([5, 5, 5], left_pad=False, seed=1)
    expected = teacher_forced(model, source, lengths, target)
    torch.testing.assert_close(teacher_forced(half, source, lengths, target), expected, rtol=1e-4, atol=1e-5)
    half.load_state_dict(model.state_dict())  # the option alone gives another model
    assert not torch.allclose(teacher_forced(half, source, lengths, target), expected, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_random_vectors_are_not_rounded_in_a_model_of_16_bits(build, dtype):
    model = build(attention_type="linear", feature_map="favor")
    vectors = {name: value for name, value in model.state_dict().items() if name.endswith("omega")}
    narrow = model.to(dtype).state_dict()
    assert vectors and all(torch.equal(narrow[name], value) for name, value in vectors.items())
    assert {value.dtype for name, value in narrow.items() if value.is_floating_point()} >= {dtype}
    assert {model.double().state_dict()[name].dtype for name in vectors} == {torch.float64}
    assert {model.to("meta").state_dict()[name].device.type for name in vectors} == {"meta"}
