"""fairseq_rope/positions/rotary.py against the equations of arXiv:2104.09864, written out plainly here."""

import math
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import pytest
import torch
from hypothesis import strategies

from fairseq_rope.positions.rotary import LAYOUTS, RotaryEmbedding, rotary_dim, rotary_tables, rotate


def rotate_by_the_paper(x, offset, base, layout, dim):
    """Equation 34, one number at a time, in Python's float64. x: (T, D)."""
    out = x.clone().double()
    for t in range(x.size(0)):
        for i in range(dim // 2):
            a, b = (2 * i, 2 * i + 1) if layout == "interleaved" else (i, i + dim // 2)
            angle = (t + offset) * base ** (-2.0 * i / dim)
            x1, x2 = float(x[t, a]), float(x[t, b])
            out[t, a] = x1 * math.cos(angle) - x2 * math.sin(angle)
            out[t, b] = x1 * math.sin(angle) + x2 * math.cos(angle)
    return out


def test_known_values_of_the_interleaved_layout():
    rotary = RotaryEmbedding(4)
    out = rotary(torch.tensor([[0.0, 1.0, 0.0, 1.0]]), offset=1)
    expected = torch.tensor([[-0.84147, 0.54030, -0.01000, 0.99995]])
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)
    out = rotary(torch.full((1, 4), 0.5), offset=4)
    expected = torch.tensor([[0.0516, -0.7052, 0.4796, 0.5196]])
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("offset", [0, 1, 300])
@pytest.mark.parametrize("head_dim, fraction", [(8, 1.0), (16, 0.5), (64, 0.25)])
@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_rotation_equals_the_papers_equation(layout, offset, head_dim, fraction, base):
    x = torch.randn(5, head_dim)
    out = RotaryEmbedding(head_dim, base, layout, fraction)(x, offset)
    expected = rotate_by_the_paper(x, offset, base, layout, int(head_dim * fraction))
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_norm_is_kept(layout):
    x = torch.randn(3, 2, 400, 32)
    out = RotaryEmbedding(32, layout=layout)(x, offset=7)
    torch.testing.assert_close(out.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_score_depends_on_the_difference_of_positions_only(layout):
    rotary = RotaryEmbedding(16, layout=layout)
    q, k = torch.randn(1, 16, dtype=torch.float64), torch.randn(1, 16, dtype=torch.float64)
    scores = [float(rotary(q, m) @ rotary(k, m + 5).T) for m in (0, 1, 90, 700)]
    assert scores == pytest.approx([scores[0]] * 4, abs=1e-5)
    assert float(rotary(q, 0) @ rotary(k, 6).T) != pytest.approx(scores[0], abs=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_position_zero_is_the_identity(layout):
    x = torch.randn(1, 64)
    assert torch.equal(RotaryEmbedding(64, layout=layout)(x), x)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rotations_add_up(layout):
    rotary = RotaryEmbedding(32, layout=layout)
    x = torch.randn(1, 32, dtype=torch.float64)
    torch.testing.assert_close(rotary(rotary(x, 13), 29), rotary(x, 42), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_step_by_step_equals_all_at_once(layout):
    x = torch.randn(2, 3, 600, 16)  # 600 is beyond the first table
    at_once = RotaryEmbedding(16, layout=layout)(x)
    stepwise = RotaryEmbedding(16, layout=layout)
    steps = [stepwise(x[:, :, t : t + 1], offset=t) for t in range(600)]
    assert torch.equal(torch.cat(steps, dim=2), at_once)


def test_layouts_are_a_permutation_of_one_another():
    x = torch.randn(4, 16)
    order = torch.cat([torch.arange(0, 16, 2), torch.arange(1, 16, 2)])
    interleaved = RotaryEmbedding(16, layout="interleaved")(x, 3)
    half = RotaryEmbedding(16, layout="half")(x[:, order], 3)
    torch.testing.assert_close(interleaved[:, order], half, rtol=0, atol=1e-6)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_the_bound_on_scores_decays_with_distance(head_dim):
    # Section 3.4.3, equation 37: the mean of |S_j| over j bounds the score at relative distance m.
    cos, sin = rotary_tables(512, head_dim, 10000.0, torch.device("cpu"))
    partial_sums = torch.complex(cos.double(), sin.double()).cumsum(dim=1)
    bound = partial_sums.abs().mean(dim=1)
    # It falls with ripples, as in the paper's figure 2: compare means over doubling distances.
    rings = [bound[2**n : 2 ** (n + 1)].mean() for n in range(9)]  # 1, 2-3, 4-7, …, 256-511
    assert all(far < near for near, far in zip(rings, rings[1:], strict=False)), rings
    assert rings[-1] < 0.5 * rings[0]


def test_angles_stay_exact_at_large_positions():
    cos, sin = rotary_tables(100_001, 64, 10000.0, torch.device("cpu"))
    for i in range(32):
        angle = 100_000 * 10000.0 ** (-2.0 * i / 64)
        assert float(cos[-1, i]) == pytest.approx(math.cos(angle), abs=1e-6)
        assert float(sin[-1, i]) == pytest.approx(math.sin(angle), abs=1e-6)


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_16_bit_input_is_rotated_in_float32(dtype, tolerance):
    # One rounding of the result to 16 bits is all that may be lost: half a unit in the last place.
    x = torch.randn(300, 64, dtype=dtype)
    out = RotaryEmbedding(64)(x, offset=700)
    exact = rotate_by_the_paper(x, 700, 10000.0, "interleaved", 64)
    assert out.dtype == dtype
    assert bool(((out.double() - exact).abs() <= tolerance * exact.abs() + 1e-6).all())


def test_float64_input_is_rotated_in_float64():
    x = torch.randn(4, 8, dtype=torch.float64)
    cos, sin = rotary_tables(4, 8, 10000.0, torch.device("cpu"))
    out = rotate(x, cos, sin, interleaved=False)
    x1, x2 = x[:, :4], x[:, 4:]
    exact = torch.cat([x1 * cos.double() - x2 * sin.double(), x1 * sin.double() + x2 * cos.double()], 1)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, exact, atol=1e-15, rtol=1e-15)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_tables_stay_float32_whatever_the_model_is_cast_to(cast):
    rotary = RotaryEmbedding(8)
    rotary(torch.randn(3, 8))
    module = getattr(torch.nn.Sequential(rotary), cast)()
    assert [table.dtype for table in module[0]._tables] == [torch.float32] * 2


def test_tables_are_not_in_the_state_dict_and_grow_in_steps():
    rotary = RotaryEmbedding(8)
    lengths = set()
    for t in range(1000):
        rotary(torch.randn(1, 8), offset=t)
        lengths.add(rotary._tables[0].size(0))
    assert rotary.state_dict() == {}
    assert len(lengths) <= 4


def test_a_thread_that_reads_while_another_makes_tables_gets_cos_and_sin_of_its_positions():
    x = torch.randn(40, 8)
    expected = rotate_by_the_paper(x, 300, 10000.0, "interleaved", 8).float()
    rotated = []

    class Watched(RotaryEmbedding):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if "watched" in vars(self):
                rotated.append(ThreadPoolExecutor(1).submit(self, x, 300).result(timeout=60))

    rotary = Watched(8)
    vars(rotary)["watched"] = True
    rotated.append(rotary(x, 300))
    assert len(rotated) > 1, "the tables grew"
    for one in rotated:
        torch.testing.assert_close(one, expected, atol=1e-5, rtol=1e-5)


def test_tables_made_in_inference_mode_serve_training_later():
    rotary = RotaryEmbedding(8)
    with torch.inference_mode():
        rotary(torch.randn(3, 8))
    x = torch.randn(3, 8, requires_grad=True)
    rotary(x).sum().backward()
    assert x.grad is not None


def test_rest_of_the_head_passes_through():
    x = torch.randn(5, 16)
    out = RotaryEmbedding(16, fraction=0.25)(x, offset=9)
    assert torch.equal(out[:, 4:], x[:, 4:])
    assert not torch.equal(out[:, :4], x[:, :4])


@pytest.mark.parametrize("fraction", [0.0, -0.5, 1.5, float("nan")])
def test_fraction_outside_its_range_is_refused(fraction):
    with pytest.raises(ValueError, match=r"--rope-fraction .* must be in \(0, 1\]"):
        rotary_dim(64, fraction)


@pytest.mark.parametrize("head_dim, fraction, left", [(5, 1.0, "5"), (64, 0.05, "3.2"), (10, 0.5, "5")])
def test_odd_rotating_dimension_is_refused(head_dim, fraction, left):
    with pytest.raises(ValueError, match=f"leaves {left} to rotate; it must be an even integer"):
        rotary_dim(head_dim, fraction)


def test_a_third_of_48_is_16_in_spite_of_rounding():
    assert rotary_dim(48, 1 / 3) == 16


@pytest.mark.parametrize("base", [1.0, 0.0, -3.0, float("inf"), float("nan")])
def test_base_that_gives_no_angles_is_refused(base):
    with pytest.raises(ValueError, match="--rope-base .* must be a finite number above 1"):
        RotaryEmbedding(8, base=base)


def test_unknown_layout_is_refused():
    with pytest.raises(ValueError, match="--rope-layout neox: must be one of interleaved, half"):
        RotaryEmbedding(8, layout="neox")


def test_rotation_scripts():
    scripted = torch.jit.script(RotaryEmbedding(16, fraction=0.5, layout="half"))
    x = torch.randn(2, 300, 16)
    eager = RotaryEmbedding(16, fraction=0.5, layout="half")(x, 40)
    torch.testing.assert_close(scripted(x, 40), eager, rtol=0, atol=1e-6)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_gradient_is_that_of_finite_differences(layout, fraction):
    rotary = RotaryEmbedding(8, layout=layout, fraction=fraction)
    x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: rotary(x, offset=5), (x,))


def test_rotation_at_position_100000_is_exact_to_float32():
    x = torch.randn(1, 64)
    for layout in LAYOUTS:
        out = RotaryEmbedding(64, layout=layout)(x, offset=100_000)
        exact = rotate_by_the_paper(x, 100_000, 10000.0, layout, 64)
        assert float((out.double() - exact).norm() / exact.norm()) < 1e-6


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    shape=strategies.lists(strategies.integers(1, 3), max_size=3),
    steps=strategies.integers(1, 40),
    pairs=strategies.integers(1, 8),
    rotating=strategies.integers(1, 8),
    offset=strategies.integers(0, 2000),
    layout=strategies.sampled_from(LAYOUTS),
    dtype=strategies.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    seed=strategies.integers(0, 2**16),
)
def test_any_slice_of_any_shape_and_type_is_rotated_by_its_position(
    shape, steps, pairs, rotating, offset, layout, dtype, seed
):
    rotating = min(rotating, pairs)
    rotary = RotaryEmbedding(2 * pairs, layout=layout, fraction=rotating / pairs)
    torch.manual_seed(seed)
    x = torch.randn(*shape, steps, 2 * pairs).to(dtype)
    out = rotary(x, offset)
    assert out.dtype == dtype and out.shape == x.shape
    first = x.reshape(-1, steps, 2 * pairs)[0]
    exact = rotate_by_the_paper(first, offset, 10000.0, layout, 2 * rotating)
    error = (out.reshape(-1, steps, 2 * pairs)[0].double() - exact).abs()
    # One rounding of the result, and tables and products in float32.
    assert bool((error <= torch.finfo(dtype).eps * exact.abs() + 4e-7 * (1 + first.double().abs().max())).all())
    middle = steps // 2
    of_slice = rotary(x[..., middle:, :], offset + middle)
    close = 2 * torch.finfo(dtype).eps * x.abs().max().item()
    torch.testing.assert_close(of_slice, out[..., middle:, :], rtol=torch.finfo(dtype).eps, atol=close)
