"""RoPE for longer inputs: frequencies beside their formulas and Hugging Face's functions, and models with them."""

import json
import math
from itertools import product

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_rope.errors import InputError
from fairseq_rope.positions.rotary import RotaryEmbedding, frequencies
from fairseq_rope.positions.scaling import KEYS, RopeScaling
from fairseq_rope.positions.sharing import forward_pass
from tests.commands import train
from tests.searches import sentences

L = "original_max_position_embeddings"


def scaling(rope_type, **keys):
    return {"rope_type": rope_type, **keys}


def rising(dim, first, last):
    return [first + (last - first) * i / (dim // 2) for i in range(dim // 2)]


# -- frequencies ---------------------------------------------------------------------------------------

# Formulas of the papers, one number at a time: (pair i, dim, base, length, keys) -> frequency.


def larger_base(i, dim, base, times):
    return (base * times ** (dim / (dim - 2))) ** (-2 * i / dim)


def yarn(i, dim, base, length, s):
    """Equations 17 to 23 of arXiv:2309.00071, with rounded limits as in the paper's code."""

    def dimension(rotations):
        return dim * math.log(s[L] / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(s.get("beta_fast", 32)), dimension(s.get("beta_slow", 1))
    if s.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    gamma = 1 - min(max((i - low) / ((high - low) or 0.001), 0), 1)
    theta = base ** (-2 * i / dim)
    return (1 - gamma) * theta / s["factor"] + gamma * theta


def llama3(i, dim, base, length, s):
    theta = base ** (-2 * i / dim)
    wavelength = 2 * math.pi / theta
    if wavelength < s[L] / s["high_freq_factor"]:
        return theta
    if wavelength > s[L] / s["low_freq_factor"]:
        return theta / s["factor"]
    smooth = (s[L] / wavelength - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
    return (1 - smooth) * theta / s["factor"] + smooth * theta


def dynamic(i, dim, base, length, s):
    longest = max(length, s[L])
    return larger_base(i, dim, base, s["factor"] * longest / s[L] - (s["factor"] - 1))


def longrope(i, dim, base, length, s):
    return base ** (-2 * i / dim) / s["long_factor" if length > s[L] else "short_factor"][i]


def proportional(i, dim, base, length, s):
    rotates = i < int(s["partial_rotary_factor"] * dim // 2)
    return base ** (-2 * i / dim) / s.get("factor", 1) if rotates else 0.0


FORMULAS = {
    "default": lambda i, dim, base, length, s: base ** (-2 * i / dim),
    "linear": lambda i, dim, base, length, s: base ** (-2 * i / dim) / s["factor"],
    "ntk": lambda i, dim, base, length, s: larger_base(i, dim, base, s["factor"]),
    "dynamic": dynamic,
    "yarn": yarn,
    "llama3": llama3,
    "longrope": longrope,
    "proportional": proportional,
}
assert set(FORMULAS) == set(KEYS)
LLAMA3 = {L: 8192, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def cases(dim):
    factors = {"short_factor": rising(dim, 1, 2), "long_factor": rising(dim, 1, 9), L: 128, "factor": 4.0}
    return [
        scaling("default"),
        scaling("linear", factor=4.0),
        scaling("ntk", factor=4.0),
        scaling("dynamic", factor=2.0, **{L: 128}),
        scaling("yarn", factor=8.0, **{L: 2048}),
        scaling("yarn", factor=4.0, beta_fast=4, beta_slow=0.5, **{L: 64}),
        scaling("yarn", factor=4.0, truncate=False, mscale=1.0, mscale_all_dim=0.8, **{L: 512}),
        scaling("yarn", factor=4.0, attention_factor=1.1, **{L: 512}),
        scaling("llama3", **LLAMA3),
        scaling("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=8.0, **{L: 128}),
        scaling("longrope", **factors),
        scaling("longrope", attention_factor=1.2, **factors),
        scaling("proportional", partial_rotary_factor=0.25),
        scaling("proportional", partial_rotary_factor=0.5, factor=2.0),
    ]


def test_yarn_interpolates_all_pairs_if_all_rotate_less_often_than_beta_slow():
    """Equation 18 of arXiv:2309.00071 for r below alpha; there, the limits of the paper's code are negative."""
    case = scaling("yarn", factor=4.0, beta_fast=32, beta_slow=16, **{L: 64})
    theta = frequencies(64, 10000.0)
    assert 64 * theta.max() / (2 * math.pi) < 16
    torch.testing.assert_close(RopeScaling(case).frequencies(theta, 10000.0, 64), theta / 4, rtol=1e-12, atol=0)


def test_yarn_changes_no_pair_if_all_rotate_more_often_than_beta_fast():
    case = scaling("yarn", factor=4.0, beta_fast=1, beta_slow=0.5, **{L: 4000})
    theta = frequencies(8, 10.0)
    assert 4000 * theta.min() / (2 * math.pi) > 1
    torch.testing.assert_close(RopeScaling(case).frequencies(theta, 10.0, 4000), theta, rtol=1e-12, atol=0)


SIZES = [(16, 10000.0), (32, 10000.0), (64, 10000.0), (64, 500000.0), (128, 1000.0)]
LENGTHS = (20, 128, 500)


@pytest.mark.parametrize("dim, base", SIZES)
def test_frequencies_are_those_of_the_formula(dim, base):
    for case, length in product(cases(dim), LENGTHS):
        actual = RopeScaling(case).frequencies(frequencies(dim, base), base, length)
        expected = [FORMULAS[case["rope_type"]](i, dim, base, length, case) for i in range(dim // 2)]
        torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


# What ROPE_INIT_FUNCTIONS of Hugging Face's transformers 5.23.0 returns for d = 8, base 10000 and 300 tokens: the
# frequencies and the attention factor.
HUGGING_FACES = [
    (scaling("linear", factor=4.0), [0.25, 0.025, 0.0025, 0.00025], 1.0),
    (scaling("dynamic", factor=2.0, **{L: 128}), [1.0, 0.06472757, 0.004189659, 0.0002711864], 1.0),
    (scaling("yarn", factor=4.0, beta_fast=4, beta_slow=0.5, **{L: 64}), [1.0, 0.0625, 0.0025, 0.00025], 1.1386294),
    (scaling("llama3", **{**LLAMA3, L: 64}), [1.0, 0.01304226, 0.00125, 0.000125], 1.0),
    (
        scaling("longrope", short_factor=[1, 1.25, 1.5, 1.75], long_factor=[1, 2, 3, 4], factor=4.0, **{L: 128}),
        [1.0, 0.05, 0.003333333, 0.00025],
        1.1338934,
    ),
    (scaling("proportional", partial_rotary_factor=0.5, factor=2.0), [0.5, 0.05, 0.0, 0.0], 1.0),
]


@pytest.mark.parametrize("case, expected, factor", HUGGING_FACES, ids=lambda case: str(case)[:30])
def test_frequencies_and_attention_factors_are_those_that_hugging_faces_functions_returned(case, expected, factor):
    ours = RopeScaling(case)
    actual = ours.frequencies(frequencies(8, 10000.0), 10000.0, 300)
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-12)
    assert ours.attention_factor() == pytest.approx(factor)


@pytest.mark.parametrize(
    "case, factor",
    [
        (scaling("linear", factor=4), 1.0),
        (scaling("yarn", factor=4, **{L: 128}), 0.1 * math.log(4) + 1),
        (scaling("yarn", factor=1, **{L: 128}), 1.0),
        (scaling("yarn", factor=4, attention_factor=1.5, **{L: 128}), 1.5),
        (
            scaling("yarn", factor=40, mscale=1, mscale_all_dim=0.7, **{L: 128}),
            (0.1 * math.log(40) + 1) / (0.07 * math.log(40) + 1),
        ),
        (
            scaling("longrope", short_factor=[1] * 8, long_factor=[2] * 8, factor=4, **{L: 128}),
            math.sqrt(1 + math.log(4) / math.log(128)),
        ),
    ],
)
@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rotated_vectors_are_longer_by_the_attention_factor(case, factor, layout):
    rotary, x = RotaryEmbedding(16, layout=layout, scaling=case), torch.randn(2, 50, 16)
    torch.testing.assert_close(rotary(x).norm(dim=-1), x.norm(dim=-1) * factor)
    rotary = RotaryEmbedding(32, layout=layout, fraction=0.5, scaling=case)
    x = torch.randn(2, 50, 32)
    assert torch.equal(rotary(x)[..., 16:], x[..., 16:]), "what does not rotate is not scaled either"


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("case", cases(16), ids=lambda case: case["rope_type"])
def test_the_rotation_and_its_gradient_have_these_frequencies(case, layout):
    rotary = RotaryEmbedding(16, layout=layout, scaling=case)
    x = torch.randn(12, 16, dtype=torch.float64, requires_grad=True)
    with forward_pass(300):
        out = rotary(x, offset=5)
    expected = torch.zeros(12, 16, dtype=torch.float64)
    for t in range(12):
        for i in range(8):
            a, b = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + 8)
            angle = (t + 5) * FORMULAS[case["rope_type"]](i, 16, 10000.0, 300, case)
            factor = rotary.attention_factor
            expected[t, a] = factor * (x[t, a] * math.cos(angle) - x[t, b] * math.sin(angle)).item()
            expected[t, b] = factor * (x[t, a] * math.sin(angle) + x[t, b] * math.cos(angle)).item()
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=1e-6)
    grad = torch.randn_like(out)
    (actual,) = torch.autograd.grad(out, x, grad)
    # The map is linear: the gradient is that of the inner product with the output.
    torch.testing.assert_close((actual * x).sum(), (grad * out).sum())


@pytest.mark.parametrize("length, is_long", [(None, False), (100, False), (129, True)])
def test_the_length_of_the_source_chooses_the_frequencies(length, is_long):
    case = scaling("longrope", short_factor=[1] * 8, long_factor=[4] * 8, **{L: 128})
    rotary, x = RotaryEmbedding(16, scaling=case), torch.randn(3, 16)
    by_four = RotaryEmbedding(16, scaling=scaling("linear", factor=4))
    with forward_pass(length):
        assert torch.equal(rotary(x, 7), (by_four if is_long else RotaryEmbedding(16))(x, 7))


@pytest.mark.parametrize(
    "given, message",
    [
        *((given, "JSON object") for given in ("{", "[1]", "4", 4, "{}", {"type": "linear"}, '{"rope_type": "su"}')),
        *((scaling("linear", factor=value), "factor is ") for value in (10**400, {2}, 0.5, "4", math.inf, True)),
        (scaling("linear"), "linear needs the key factor"),
        (scaling("linear", factor=2, rope_theta=3), "linear has no key rope_theta"),
        (scaling("default", factor=2), "default has no key factor"),
        (scaling("yarn", factor=2, **{L: 1.5}), f"{L} is 1.5"),
        (scaling("yarn", factor=2, truncate=1, **{L: 64}), "truncate is 1"),
        (scaling("yarn", factor=2, beta_slow=32, **{L: 64}), "beta_slow is 32"),
        (scaling("yarn", factor=2, attention_factor=0, **{L: 64}), "attention_factor is 0"),
        (scaling("llama3", **{**LLAMA3, "low_freq_factor": 4}), "low_freq_factor is 4"),
        (scaling("longrope", short_factor=[], long_factor=[0], **{L: 64}), r"long_factor is \[0\]"),
        (scaling("longrope", short_factor=1, long_factor=[2], **{L: 64}), "short_factor is 1"),
        (scaling("proportional", partial_rotary_factor=1.5), "partial_rotary_factor is 1.5"),
    ],
)
def test_a_wrong_scaling_is_refused_in_one_sentence(given, message):
    with pytest.raises(ValueError, match=f"^--rope-scaling .*{message}") as error:
        RopeScaling(given)
    assert "\n" not in str(error.value)


# -- models --------------------------------------------------------------------------------------------


def test_each_side_can_have_its_own_scaling(build):
    both = json.dumps(scaling("linear", factor=2))
    model = build(rope_scaling=both, decoder_rope_scaling=scaling("ntk", factor=3))
    types = [side.layers[0].self_attn.position.scaling.rope_type for side in (model.encoder, model.decoder)]
    assert types == ["linear", "ntk"]
    equal = [
        scaling("yarn", factor=4, **{L: 64}),
        scaling("yarn", truncate=True, factor=4.0, beta_fast=32.0, **{L: 64}),
        json.dumps(scaling("yarn", factor=4.0, attention_factor=None, **{L: 64}), indent=1),
    ]
    assert len({build(rope_scaling=one).cfg.rope_scaling for one in equal}) == 1, "resuming compares them"
    assert model.cfg.decoder_rope_scaling == '{"factor": 3, "rope_type": "ntk"}', "in one form, to be compared"
    assert model.encoder.layers[0].self_attn.position.theta[1] == frequencies(32)[1] / 2


@pytest.mark.parametrize(
    "options", [{"rope_scaling": scaling("yarn", factor=2, **{L: 64})}, {"position_encoding": "shape"}]
)
def test_a_model_that_is_built_without_memory_is_like_any_other(build, options):
    with torch.device("meta"):
        model = build(**options)
    filled, other = model.to_empty(device="cpu").eval(), build(**options)
    filled.load_state_dict(other.state_dict())
    net_input = sentences()["net_input"]
    outputs = [each(**net_input, prev_output_tokens=net_input["src_tokens"])[0] for each in (filled, other)]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


def test_dynamic_has_no_effect_up_to_the_training_length(build):
    plain, source = build(), sentences()
    longest = source["net_input"]["src_tokens"].size(1)
    for length, is_same in ((longest, True), (longest - 1, False)):
        model = build(rope_scaling=scaling("dynamic", factor=4, **{L: length}))
        model.load_state_dict(plain.state_dict())
        with torch.no_grad():
            one, other = (m(**source["net_input"], prev_output_tokens=torch.full((5, 3), 7))[0] for m in (plain, model))
        assert torch.allclose(one, other, atol=1e-6) is is_same


def test_tracing_refuses_frequencies_that_depend_on_the_length():
    rotary = RotaryEmbedding(16, scaling=scaling("dynamic", factor=2, **{L: 64}))
    with pytest.raises(RuntimeError, match="^--rope-scaling: torch.jit.trace does not support dynamic and longrope$"):
        torch.jit.trace(rotary, torch.randn(3, 16))


def test_activation_checkpointing_with_a_scaling_by_length_is_refused(build):
    options = {"rope_scaling": scaling("dynamic", factor=2, **{L: 4})}
    tokens, lengths = torch.randint(4, 40, (2, 7)), torch.tensor([7, 7])
    model = build(**options, checkpoint_activations=True)
    with pytest.raises(ValueError, match="^--rope-scaling "):
        model.train()(tokens, lengths, tokens[:, :5])[0].sum().backward()
    with torch.autograd.graph.save_on_cpu():  # computes no layer again
        build(**options)(tokens, lengths, tokens[:, :5])[0].sum().backward()


# -- a trained model -----------------------------------------------------------------------------------


def test_a_trained_model_takes_another_scaling_without_training_but_not_when_it_resumes(data_bin, trained, tmp_path):
    path = str(trained / "checkpoint_last.pt")
    linear = scaling("linear", factor=2)
    for given in (linear, json.dumps(linear)):
        overrides = {"data": str(data_bin), "rope_scaling": given}
        (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path], overrides)
        assert model.decoder.layers[0].self_attn.position.scaling.rope_type == "linear"
    (plain,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path], {"data": str(data_bin)})
    assert plain.decoder.layers[0].self_attn.position.scaling is None
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), model.parameters(), strict=True))
    resume = ("--restore-file", path, "--max-epoch", 21)
    with pytest.raises(InputError, match=r"was trained without --rope-scaling, not with --rope-scaling .*linear"):
        train(data_bin, tmp_path, *resume, "--rope-scaling", json.dumps(linear))
    with pytest.raises(InputError, match=r"was trained with --attention-length-scaling 0.0, not 9.0"):
        train(data_bin, tmp_path, *resume, "--attention-length-scaling", 9)


def test_overrides_reach_a_checkpoint_of_hydra_that_lacks_the_option(data_bin, trained, tmp_path):
    """fairseq-hydra-train writes a mapping, and fairseq overrides only the options that are in it."""
    state = torch.load(trained / "checkpoint_last.pt", weights_only=False)
    options = {name: value for name, value in vars(state["cfg"]["model"]).items() if "scaling" not in name}
    state["cfg"]["model"] = {**options, "_name": options["arch"]}
    path = str(tmp_path / "older.pt")
    torch.save(state, path)
    overrides = {"rope_scaling": scaling("linear", factor=2), "attention_length_scaling": 9.0, "data": str(data_bin)}
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([path], overrides)
    attention = model.encoder.layers[0].self_attn
    assert (attention.position.scaling.rope_type, attention.average_length) == ("linear", 9.0)


def test_one_longrope_object_changes_its_factors_with_the_length():
    ours = RopeScaling(scaling("longrope", short_factor=[1] * 4, long_factor=[4] * 4, **{L: 128}))
    theta = frequencies(8, 10000.0)
    for length, factor in ((100, 1), (300, 4), (128, 1)):
        assert torch.equal(ours.frequencies(theta, 10000.0, length), theta / factor)
