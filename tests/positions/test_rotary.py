"""fairseq_rope/positions/rotary.py, compared with the equations of arXiv:2104.09864."""

import math
from concurrent.futures import ThreadPoolExecutor

import hypothesis
import pytest
import torch
from hypothesis import strategies

from fairseq_rope.positions.rotary import (
    LAYOUTS,
    RotaryEmbedding,
    frequencies,
    rotary_dim,
    rotary_tables,
    rotate,
    turnings,
)


def rotate_by_the_paper(x, offset, base, layout, dim):
    """Rotate x (T, D) by equation 34, one number at a time, in Python's float64."""
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
def test_rotation_keeps_norms_and_rotations_add_up(layout):
    rotary, x = RotaryEmbedding(32, layout=layout), torch.randn(3, 2, 400, 32)
    torch.testing.assert_close(rotary(x, 7).norm(dim=-1), x.norm(dim=-1))
    assert torch.equal(rotary(x[..., :1, :]), x[..., :1, :])
    x = torch.randn(1, 32, dtype=torch.float64)
    torch.testing.assert_close(rotary(rotary(x, 13), 29), rotary(x, 42), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_the_bound_on_scores_decays_with_distance(head_dim):
    # Section 3.4.3, equation 37: the mean of |S_j| over j bounds the score at relative distance m.
    cos, sin = rotary_tables(512, frequencies(head_dim), torch.device("cpu"))
    partial_sums = torch.complex(cos.double(), sin.double()).cumsum(dim=1)
    bound = partial_sums.abs().mean(dim=1)
    # It ripples as in the paper's figure 2, so compare means over doubling distances.
    rings = [bound[2**n : 2 ** (n + 1)].mean() for n in range(9)]  # 1, 2-3, 4-7, …, 256-511
    assert all(far < near for near, far in zip(rings, rings[1:], strict=False)), rings
    assert rings[-1] < 0.5 * rings[0]


def test_float64_input_is_rotated_in_float64():
    x = torch.randn(4, 8, dtype=torch.float64)
    cos, sin = rotary_tables(4, frequencies(8), torch.device("cpu"))
    out = rotate(x, *turnings(cos, sin, interleaved=False))
    x1, x2 = x[:, :4], x[:, 4:]
    exact = torch.cat([x1 * cos.double() - x2 * sin.double(), x1 * sin.double() + x2 * cos.double()], 1)
    assert out.dtype == torch.float64
    torch.testing.assert_close(out, exact, atol=1e-15, rtol=1e-15)


@pytest.mark.parametrize("cast", ["half", "bfloat16", "double"])
def test_tables_stay_float32_in_any_dtype_of_the_model(cast):
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


def test_reading_tables_while_another_thread_makes_them_gives_the_right_rotation():
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


def test_tables_made_in_inference_mode_can_be_used_in_training():
    rotary, x = RotaryEmbedding(8), torch.randn(3, 8, requires_grad=True)
    with torch.inference_mode():
        rotary(torch.randn(3, 8))
    rotary(x).sum().backward()
    assert x.grad is not None


def test_the_rotating_part_of_a_head_is_exact_in_spite_of_rounding():
    assert rotary_dim(48, 1 / 3) == 16


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
    base=strategies.sampled_from([10000.0, 500.0]),
    layout=strategies.sampled_from(LAYOUTS),
    dtype=strategies.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
    seed=strategies.integers(0, 2**16),
)
def test_every_shape_dtype_and_slice_is_rotated_by_its_positions(
    shape, steps, pairs, rotating, offset, base, layout, dtype, seed
):
    rotating = min(rotating, pairs)
    rotary = RotaryEmbedding(2 * pairs, base, layout, rotating / pairs)
    torch.manual_seed(seed)
    x = torch.randn(*shape, steps, 2 * pairs).to(dtype)
    out = rotary(x, offset)
    assert out.dtype == dtype and out.shape == x.shape
    first = x.reshape(-1, steps, 2 * pairs)[0]
    exact = rotate_by_the_paper(first, offset, base, layout, 2 * rotating)
    assert torch.equal(out[..., 2 * rotating :], x[..., 2 * rotating :]), "the rest of the head passes through"
    error = (out.reshape(-1, steps, 2 * pairs)[0].double() - exact).abs()
    # The bound: one rounding of the result (half a unit in the last place), and float32 tables and products.
    assert bool((error <= torch.finfo(dtype).eps / 2 * exact.abs() + 4e-7 * (1 + first.double().abs().max())).all())
    middle = steps // 2
    of_slice = rotary(x[..., middle:, :], offset + middle)
    close = 2 * torch.finfo(dtype).eps * x.abs().max().item()
    torch.testing.assert_close(of_slice, out[..., middle:, :], rtol=torch.finfo(dtype).eps, atol=close)
