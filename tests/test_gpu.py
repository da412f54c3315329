"""Models, both criteria and both searches on a pretended GPU: devices, waits of the host, and results as on the CPU."""

import contextlib
import functools
import os
import subprocess
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from fairseq_rope.modules.dropout import Dropout
from fairseq_rope.positions import rotary
from tests import every_model
from tests.commands import ENVIRONMENT, LIMIT, ROOT
from tests.every_model import FUSED, LAYERS, MODELS, PLAIN, TASK, TOLERANCE, WORDS, batch, build, gradient, search
from tests.pretended_gpu import Waits, WrongDeviceError, to_gpu

# How often our lines may make the host wait in a search, at its start and in each step: never layer by layer; the fast
# search compares the rows of the source, and reads the new order.
WAITS_IN_SEARCH = {"0": (0, 0), "1": (3, 1)}
DTYPES = {PLAIN: torch.float32, FUSED: torch.float16}
FIRST = ("rope", "t5", "linear, elu1")
NAMES = [name if name in FIRST else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]


def train_on_gpu(options, criterion, dtype, arch="transformer_rope"):
    """Return the gradient of a second training step, when tables are there, and the waits of that step."""
    model, sample = to_gpu(build(options, arch).to(dtype)).train(), to_gpu(batch())
    with Waits() as waits:
        gradient(model, criterion, sample)
        waits.places.clear()
        found = gradient(model, criterion, sample)
    return found, waits


@contextlib.contextmanager
def recorded_attention():
    """Yield a list that gets the arguments of each call of torch's fused attention."""
    fused, calls = torch.nn.functional.scaled_dot_product_attention, []

    def recording(q, k, v, attn_mask=None, **options):
        calls.append((q, k, v, attn_mask, options))
        return fused(q, k, v, attn_mask=attn_mask, **options)

    with mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", recording):
        yield calls


@functools.cache
def trained(name, criterion):
    """The gradient of a second training step on the GPU, its waits, and its calls of attention."""
    with recorded_attention() as calls:
        found, waits = train_on_gpu(MODELS[name], criterion, DTYPES[criterion])
    return found, waits, calls[len(calls) // 2 :]


@functools.cache
def searched(name, fast, on_gpu=True):
    """The hypotheses of a search, when tables are there, its steps, its waits, and its calls of attention."""
    move = to_gpu if on_gpu else lambda each: each
    variables = mock.patch.dict(os.environ, FAIRSEQ_ROPE_FAST_SEARCH=fast)
    with variables, recorded_attention() as calls, Waits() if on_gpu else contextlib.nullcontext() as waits:
        with torch.no_grad():
            model = move(build(MODELS[name]))
            if on_gpu:
                model.eval()(**move(batch())["net_input"])  # makes the tables
                calls.clear()
                waits.places.clear()
            found, steps = search(model, move(batch()))
    return found, steps, waits, calls


@pytest.mark.parametrize("criterion", [PLAIN, FUSED])
@pytest.mark.parametrize("name", NAMES)
def test_training_waits_for_nothing_and_has_the_gradient_of_the_cpu(name, criterion):
    found, waits, _ = trained(name, criterion)
    expected = gradient(build(MODELS[name]).train(), criterion, batch())
    assert float((found - expected).norm() / expected.norm()) < TOLERANCE[DTYPES[criterion]]
    assert waits.of("fairseq_rope") == []


@pytest.mark.parametrize("fast", ["0", "1"])
@pytest.mark.parametrize("name", NAMES)
def test_a_search_waits_rarely_and_finds_the_hypotheses_of_the_cpu(name, fast):
    found, steps, waits, _ = searched(name, fast)
    assert found == searched(name, "0", on_gpu=False)[0]
    at_start, in_a_step = WAITS_IN_SEARCH[fast]
    assert len(waits.of("fairseq_rope")) <= at_start + in_a_step * steps, waits.of("fairseq_rope")


ROTARY = ("rope", "xpos", "layout half", "dynamic scaling", "length scaling", "qk-norm, kv heads", "llama")
WITHOUT = ("shaw", "nezha", "linear, elu1", "linear, favor")
CAUSAL = ("none", "sinusoidal", "shape", "learned", *ROTARY)


def check_strides(calls):
    for *queries_keys_values, mask, _ in calls:
        assert all(x.stride(-1) == 1 and x.storage_offset() % 8 == 0 for x in queries_keys_values)
        assert mask is None or mask.stride(-1) == 1 and all(stride % 8 == 0 for stride in mask.stride()[:-1])


@pytest.mark.parametrize("name", NAMES)
def test_attention_gives_torchs_kernels_tensors_that_they_take_without_a_copy(name):
    *_, calls = trained(name, PLAIN)
    check_strides(calls)
    causal = [mask for *_, mask, options in calls if options["is_causal"]]
    assert causal == [None] * (LAYERS if name in CAUSAL else 0)
    for fast in "01":
        _, steps, _, calls = searched(name, fast)
        check_strides(calls)
        # self-attention and cross-attention of each step, after the encoder's layers
        assert len(calls) == LAYERS * ((0 if name in WITHOUT else 1 + steps) + steps)


@pytest.mark.parametrize("name", ["rope", "alibi", pytest.param("t5, kv heads", marks=pytest.mark.slow)])
def test_the_layers_of_a_fast_search_share_their_masks(name):
    """No layer copies a mask. Sources have 9 tokens, and most steps no multiple of 8 keys."""
    _, steps, _, calls = searched(name, "1")
    of_search = calls[LAYERS:]
    for step in range(steps):
        of_step = [mask for *_, mask, _ in of_search[2 * LAYERS * step :][: 2 * LAYERS]]
        of_self, of_source = of_step[::2], of_step[1::2]
        assert all(mask is of_source[0] for mask in of_source) and of_source[0] is not None
        if name != "rope":  # whose mask is a part of the cache's
            assert all(mask is of_self[0] for mask in of_self)


@pytest.mark.slow
@pytest.mark.parametrize("of_user, expected", [(None, "1"), ("0", "0")])
def test_the_plugin_puts_cudnns_attention_last_unless_the_user_decides(of_user, expected):
    variable = "TORCH_CUDNN_SDPA_DEPRIORITIZED"
    environment = {name: value for name, value in ENVIRONMENT.items() if name != variable}
    environment |= {} if of_user is None else {variable: of_user}
    program = f"import os, fairseq_rope.plugin; print(os.environ['{variable}'])"
    printed = subprocess.check_output(
        [sys.executable, "-c", program], env=environment, cwd=ROOT, timeout=LIMIT, text=True
    )
    assert printed == f"{expected}\n"


@pytest.mark.parametrize("says_right", [True, False])
def test_left_padded_targets_keep_their_mask_on_a_gpu_or_stop_the_training(says_right, monkeypatch):
    monkeypatch.setattr(TASK.cfg, "left_pad_target", not says_right)
    expected, sample = batch(), batch()
    for one in (expected, sample):
        tokens = one["net_input"]["prev_output_tokens"]
        tokens[2], one["target"][2] = tokens[2].roll(3), one["target"][2].roll(3)
    with Waits():
        model = to_gpu(build({})).train()
        if says_right:
            with pytest.raises(RuntimeError, match="--left-pad-target is False, but a target has padding on the left"):
                gradient(model, PLAIN, to_gpu(sample))
            return
        found = gradient(model, PLAIN, to_gpu(sample))
    torch.testing.assert_close(found, gradient(build({}).train(), PLAIN, expected))


MISTAKES = {
    "a table on the host": lambda q: q * torch.ones(q.size(-1)),
    "a result on the host": lambda q: torch.empty(q.shape).copy_(q) + q,
    "another type": lambda q: torch.matmul(q, torch.eye(q.size(-1), dtype=torch.float64, device=q.device)),
    "a number that is read": lambda q: q * (2 - q.new_ones(()).item()),
    "a size that is read": lambda q: q + q.new_zeros(2).nonzero().sum(),
    "a list that is copied": lambda q: q + torch.tensor([0.0], device=q.device),
    "a mask as an index": lambda q: q + q[torch.zeros_like(q, dtype=torch.bool)].sum(),
    "an index on the host": lambda q: q[torch.arange(q.size(0))],
    "a copy to the host": lambda q: q * q.new_ones(()).cpu(),
    "a copy to the host that is not awaited": lambda q: q * q.new_ones(()).to("cpu", non_blocking=True),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_planted_mistakes_are_found(monkeypatch, mistake):
    right = rotary.RotaryEmbedding.queries_and_keys
    wrong = lambda self, q, k, offset: right(self, MISTAKES[mistake](q), k, offset)  # noqa: E731
    monkeypatch.setattr(rotary.RotaryEmbedding, "queries_and_keys", wrong)
    try:
        _, waits = train_on_gpu({}, PLAIN, torch.float32)
    except (WrongDeviceError, RuntimeError) as error:
        assert isinstance(error, WrongDeviceError) or "expected scalar type" in str(error)
    else:
        assert len(waits.places) >= LAYERS


def test_dropout_on_a_gpu_draws_its_numbers_there():
    with Waits() as waits:
        out = Dropout(0.25).train()(to_gpu(torch.ones(500, 40)))
    assert out.is_cuda and not waits.places
    left = out.host[out.host != 0]
    torch.testing.assert_close(left, torch.full_like(left, 1 / 0.75))
    assert 0.7 < len(left) / 20_000 < 0.8


def test_a_gpu_attends_in_16_bits():
    *_, calls = trained("rope", FUSED)
    assert calls and {x.dtype for q, k, v, *_ in calls for x in (q, k, v)} == {torch.float16}


@pytest.mark.parametrize("name", ["rope", "layout half", "xpos", "alibi", "t5", "dynamic scaling"])
def test_a_model_that_has_computed_on_the_cpu_moves_to_a_gpu(name):
    model = build(MODELS[name]).train()
    expected = gradient(model, PLAIN, batch())
    with Waits():
        found = gradient(to_gpu(model), PLAIN, to_gpu(batch()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["cfg", "args"])  # of tasks with a configuration, and of those of fairseq 0.10
def test_masks_of_targets_are_left_out_on_a_gpu_if_the_task_pads_on_the_right(kind, monkeypatch):
    options = SimpleNamespace(left_pad_target=False)
    task = SimpleNamespace(source_dictionary=WORDS, target_dictionary=WORDS, **{kind: options})
    monkeypatch.setattr(every_model, "TASK", task)
    with recorded_attention() as calls:
        train_on_gpu({}, PLAIN, torch.float32)
    assert sum(options["is_causal"] for *_, options in calls) == 2 * LAYERS  # in each layer of two steps
