"""fairseq_rope/patches/optimizers.py: Adam's formula and state, the float32 copies, loss scales."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from fairseq.optim import adam, amp_optimizer, fp16_optimizer
from fairseq.optim.adam import FairseqAdam

from fairseq_rope.patches import optimizers
from fairseq_rope.patches.optimizers import FLOAT32_COPIES

SHAPES = ((7, 5), (3,), (4, 2, 3), ())


def by_the_formula(weights, gradients, lr, betas, eps, weight_decay, amsgrad):
    """Return *weights* after updates with *gradients*, lists with a tensor or None for each weight, in float64.

    Kingma and Ba 2015, arXiv:1412.6980, algorithm 1, as at the end of its section 2: the step is lr times
    sqrt(1 - beta2^t) / (1 - beta1^t), and eps is added to sqrt(v). Weight decay is Loshchilov and Hutter's
    (arXiv:1711.05101), and amsgrad Reddi et al.'s (arXiv:1904.09237), without bias correction of the maximum.
    """
    weights = [weight.double() for weight in weights]
    first, second, highest = ([torch.zeros_like(weight) for weight in weights] for _ in range(3))
    steps = [0] * len(weights)
    for update in gradients:
        for i, gradient in enumerate(update):
            if gradient is None:
                continue
            steps[i] += 1
            gradient = gradient.double()
            first[i] = betas[0] * first[i] + (1 - betas[0]) * gradient
            second[i] = betas[1] * second[i] + (1 - betas[1]) * gradient**2
            highest[i] = torch.maximum(highest[i], second[i])
            size = lr * (1 - betas[1] ** steps[i]) ** 0.5 / (1 - betas[0] ** steps[i])
            weights[i] = weights[i] - lr * weight_decay * weights[i]
            weights[i] = weights[i] - size * first[i] / ((highest[i] if amsgrad else second[i]).sqrt() + eps)
    return weights


def updates(count, scale=1.0):
    """Gradients of *count* updates; every third update has none for the second weight."""
    drawn = [[torch.randn(shape) * scale for shape in SHAPES] for _ in range(count)]
    return [[None if i == 1 and n % 3 == 1 else g for i, g in enumerate(update)] for n, update in enumerate(drawn)]


def run(optimizer, weights, gradients, **step):
    for update in gradients:
        for weight, gradient in zip(weights, update, strict=True):
            weight.grad = None if gradient is None else gradient.to(weight.dtype)
        optimizer.step(**step)


@pytest.mark.parametrize("scale, eps", [(1.0, 1e-8), (1e-6, 1e-5)], ids=["", "eps decides"])
@pytest.mark.parametrize("weight_decay, amsgrad", [(0.0, False), (0.1, False), (0.1, True)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_adam_is_the_formula(dtype, weight_decay, amsgrad, scale, eps):
    start = [torch.randn(shape) for shape in SHAPES]
    gradients = updates(12, scale)
    options = dict(lr=0.01, betas=(0.9, 0.98), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
    weights = [weight.to(dtype, copy=True).requires_grad_() for weight in start]
    run(adam.Adam(weights, **options), weights, gradients)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6}[dtype]
    for weight, expected in zip(weights, by_the_formula(start, gradients, **options), strict=True):
        torch.testing.assert_close(weight.detach().double(), expected, atol=tolerance, rtol=tolerance)
    assert not torch.equal(weights[0].detach(), start[0].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("transposed", [False, True])
def test_adam_has_the_results_and_the_state_of_fairseqs_and_each_continues_the_other(dtype, transposed):
    options = dict(lr=0.01, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.01)
    start, gradients = [torch.randn(shape) for shape in SHAPES], updates(8)
    ends = {}
    for classes in itertools.product((optimizers.Adam, optimizers.FairseqAdam), repeat=2):
        weights = [weight.to(dtype, copy=True) for weight in start]
        if transposed:
            weights[0] = weights[0].t().contiguous().t()
        state = None
        for half, cls in enumerate(classes):
            optimizer = optimizers.Adam(weights, **options)
            if cls is not optimizers.Adam:  # fairseq's code in the same object
                optimizer.step = lambda self=optimizer: optimizers.FairseqAdam.step(self)
            if state is not None:
                optimizer.load_state_dict(state)
            run(optimizer, weights, gradients[4 * half :][:4])
            state = optimizer.state_dict()
        assert all(set(entry) == {"step", "exp_avg", "exp_avg_sq"} for entry in state["state"].values())
        assert [entry["step"] for entry in state["state"].values()] == [8, 5, 8, 8]
        ends[classes] = [*weights, *(entry["exp_avg_sq"] for entry in state["state"].values())]
    theirs = ends[optimizers.FairseqAdam, optimizers.FairseqAdam]
    for end in ends.values():
        for value, expected in zip(end, theirs, strict=True):
            assert value.dtype == expected.dtype
            torch.testing.assert_close(value, expected, atol=1e-6, rtol=1e-5)


def test_adam_continues_the_state_of_apex_which_counts_updates_in_the_group():
    """fairseq trains with apex's FusedAdam on a GPU if apex is installed (fairseq/optim/fused_adam.py, FusedAdamV2)."""
    start = [torch.randn(shape) for shape in SHAPES]
    gradients = [[torch.randn(shape) for shape in SHAPES] for _ in range(6)]
    weights = [weight.clone().requires_grad_() for weight in start]
    ours = adam.Adam(weights, lr=0.01, betas=(0.9, 0.98))
    run(ours, weights, gradients[:3])
    state = ours.state_dict()
    state["param_groups"][0]["step"] = {values.pop("step") for values in state["state"].values()}.pop()
    resumed = [weight.detach().clone().requires_grad_() for weight in weights]
    other = adam.Adam(resumed, lr=0.01, betas=(0.9, 0.98))
    other.load_state_dict(state)
    run(other, resumed, gradients[3:])
    expected = by_the_formula(start, gradients, 0.01, (0.9, 0.98), 1e-8, 0.0, False)
    for weight, reference in zip(resumed, expected, strict=True):
        torch.testing.assert_close(weight.detach().double(), reference, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale, dtype", [(4.0, torch.float32), (torch.tensor([4.0]), torch.bfloat16)])
def test_a_scale_divides_the_gradients(scale, dtype):
    start = [torch.randn(shape) for shape in SHAPES]
    gradients = updates(3)
    multiplied = [[None if gradient is None else 4 * gradient for gradient in update] for update in gradients]
    results = []
    for given, step in ((gradients, {}), (multiplied, {"scale": scale})):
        weights = [weight.to(dtype, copy=True) for weight in start]
        run(adam.Adam(weights, lr=0.01, eps=0.1), weights, given, **step)
        results.append(weights)
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


# -- float32 copies ------------------------------------------------------------------------------------


def config(optimizer="adam", **common):
    options = SimpleNamespace(
        _name=optimizer, lr=[0.01], adam_betas="(0.9, 0.98)", adam_eps=1e-9, weight_decay=0.0, use_old_adam=False,
        fp16_adam_stats=False, tpu=False, momentum=0.0, optimizer=optimizer,
    )  # fmt: skip
    common = {"bf16": True, "fp16_scale_window": 128, "fp16_no_flatten_grads": False, **common}
    common = {"fp16_init_scale": 4, "fp16_scale_tolerance": 0, "threshold_loss_scale": None, **common}
    return SimpleNamespace(
        optimizer=options, common=SimpleNamespace(min_loss_scale=1e-4, **common),
        optimization=SimpleNamespace(update_freq=[1]), distributed_training=SimpleNamespace(distributed_world_size=1),
    )  # fmt: skip


def with_copies(weights, **common):
    return fp16_optimizer.FP16Optimizer.build_optimizer(config(**common), weights)


def train_with_copies(optimizer, weights, gradients):
    for update in gradients:
        optimizer.zero_grad()
        loss = sum((weight * gradient.to(weight.dtype)).sum() for weight, gradient in zip(weights, update, strict=True))
        optimizer.backward(loss)
        optimizer.multiply_grads(0.5)
        optimizer.clip_grad_norm(1.0)
        optimizer.step()


FORMS = {  # options, type of the weights
    "bf16": ({}, torch.bfloat16),
    "fp16": ({"bf16": False}, torch.float16),
    "fp16, not flat": ({"bf16": False, "fp16_no_flatten_grads": True}, torch.float16),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_optimizer_continues_from_the_saved_float32_copies(form, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # the key of the flat copy
    common, dtype = FORMS[form]
    start = [torch.randn(shape) for shape in SHAPES]
    gradients = [[torch.randn(shape) for shape in SHAPES] for _ in range(6)]
    weights = [torch.nn.Parameter(weight.to(dtype)) for weight in start]
    whole = with_copies(weights, **common)
    train_with_copies(whole, weights, gradients)

    half_way = [torch.nn.Parameter(weight.to(dtype)) for weight in start]
    first = with_copies(half_way, **common)
    train_with_copies(first, half_way, gradients[:3])
    state = first.state_dict()
    copies = state[FLOAT32_COPIES]
    assert all(copy.dtype == torch.float32 for copy in copies)
    flat = torch.cat([copy.flatten() for copy in copies])
    assert torch.equal(flat.to(dtype), torch.cat([weight.detach().flatten() for weight in half_way]))
    assert not torch.equal(flat.to(dtype).float(), flat), "nothing is lost by rounding: the test shows nothing"

    resumed = [torch.nn.Parameter(weight.detach().clone()) for weight in half_way]
    second = with_copies(resumed, **common)
    second.load_state_dict(state)
    train_with_copies(second, resumed, gradients[3:])
    assert all(torch.equal(one, other) for one, other in zip(resumed, weights, strict=True))
    ends = [torch.cat([copy.flatten() for copy in each.state_dict()[FLOAT32_COPIES]]) for each in (second, whole)]
    assert torch.equal(*ends)


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_were_changed_after_saving_are_kept(form, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    common, dtype = FORMS[form]
    weights = [torch.nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    first = with_copies(weights, **common)
    train_with_copies(first, weights, [[torch.randn(shape) for shape in SHAPES] for _ in range(3)])
    state = first.state_dict()
    changed = [torch.nn.Parameter(weight.detach().clone()) for weight in weights]
    changed[2].data += 1
    second = with_copies(changed, **common)
    second.load_state_dict(state)
    sizes = [weight.numel() for weight in weights]
    states = [each[FLOAT32_COPIES] for each in (second.state_dict(), state)]
    parts = [torch.cat([copy.flatten() for copy in copies]).split(sizes) for copies in states]
    for number, (part, copy) in enumerate(zip(*parts, strict=True)):
        assert torch.equal(part, changed[2].detach().float().flatten() if number == 2 else copy)


def test_a_state_without_copies_and_one_of_another_model_load_as_in_fairseq():
    weights = [torch.nn.Parameter(torch.randn(shape).bfloat16()) for shape in SHAPES]
    first = with_copies(weights)
    train_with_copies(first, weights, [[torch.randn(shape) for shape in SHAPES]])
    state = first.state_dict()
    for copies in (None, [torch.zeros(2)] * len(SHAPES)):
        second = with_copies(weights)
        second.load_state_dict({**state, FLOAT32_COPIES: copies})
        for copy, weight in zip(second.fp32_params, weights, strict=True):
            assert torch.equal(copy.detach(), weight.detach().float())


def test_each_bfloat16_update_has_its_own_factor():
    """The weights are float32's to the rounding of gradients, with an optimiser that divides gradients itself."""
    start = [torch.randn(shape) for shape in SHAPES]
    gradients = [[torch.randn(shape).bfloat16().float() for shape in SHAPES] for _ in range(5)]
    weights = [torch.nn.Parameter(weight.bfloat16()) for weight in start]
    optimizer = with_copies(weights)
    assert optimizer.supports_step_with_scale
    for update in gradients:
        optimizer.zero_grad()
        optimizer.backward(sum((w * g.bfloat16()).sum() for w, g in zip(weights, update, strict=True)))
        optimizer.multiply_grads(0.25)
        optimizer.step()
    quarter = [[gradient / 4 for gradient in update] for update in gradients]
    options = dict(lr=0.01, betas=(0.9, 0.98), eps=1e-9, weight_decay=0.0, amsgrad=False)
    expected = by_the_formula([weight.bfloat16() for weight in start], quarter, **options)
    for copy, value in zip(optimizer.fp32_params, expected, strict=True):
        torch.testing.assert_close(copy.detach().double(), value, atol=1e-5, rtol=1e-5)


# -- --amp ---------------------------------------------------------------------------------------------


def test_amp_divides_gradients_by_the_loss_scale_once():
    weight = torch.nn.Parameter(torch.ones(3))
    inner = SimpleNamespace(optimizer=torch.optim.SGD([weight], lr=0.5))
    inner.param_groups = inner.optimizer.param_groups
    inner.step = inner.optimizer.step
    inner.clip_grad_norm = lambda *_: torch.nn.utils.clip_grad_norm_([weight], 100.0)
    amp = object.__new__(amp_optimizer.AMPOptimizer)
    amp.fp32_optimizer, amp.min_loss_scale = inner, 1e-4
    amp._grad_scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    amp.backward((weight * torch.tensor([1.0, 2.0, 3.0])).sum())
    amp.clip_grad_norm(0.0)
    amp.step()
    assert weight.tolist() == [0.5, 0.0, -0.5]


def test_fairseqs_adam_is_the_one_of_the_plugin():
    options = config().optimizer
    optimizer = FairseqAdam(options, [torch.nn.Parameter(torch.ones(2))])
    assert type(optimizer.optimizer) is optimizers.Adam and optimizer.supports_flat_params
    assert optimizer.supports_memory_efficient_fp16


def test_all_that_the_kernel_gets_is_on_the_device_of_the_weights(monkeypatch):
    given = []
    monkeypatch.setattr(optimizers, "FUSED_ON", ("meta",))
    monkeypatch.setattr(torch, "_fused_adamw_", lambda *lists, **options: given.append((lists, options)))
    weight = torch.empty(3, device="meta", requires_grad=True)
    weight.grad = torch.empty(3, device="meta")
    adam.Adam([weight], lr=0.1).step(scale=2.0)
    ((lists, options),) = given
    assert {each.device.type for part in lists for each in part} == {options["grad_scale"].device.type} == {"meta"}
