"""fairseq_rope/criterion.py, compared with fairseq's own criterion."""

import pytest
import torch
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.criterions.cross_entropy import CrossEntropyCriterion

from fairseq_rope import criterion
from fairseq_rope.criterion import output_weight
from tests.commands import call, training

FUSED, FAIRSEQS = "fused_label_smoothed_cross_entropy", "label_smoothed_cross_entropy"


@pytest.fixture
def sample(task):
    """A batch of three sentences, with targets padded on the right and sources padded on the left."""
    pad, eos = task.target_dictionary.pad(), task.target_dictionary.eos()
    lengths = (9, 4, 7)
    sentences = torch.full((3, 9), pad)
    for row, length in enumerate(lengths):
        sentences[row, :length] = torch.randint(4, 44, (length,))
        sentences[row, length - 1] = eos
    previous = sentences.roll(1, dims=1)
    previous[:, 0] = eos
    return {
        "net_input": {
            "src_tokens": sentences.flip(1),
            "src_lengths": torch.tensor(lengths),
            "prev_output_tokens": previous.masked_fill(sentences.eq(pad), pad),
        },
        "target": sentences,
        "ntokens": sum(lengths),
    }


def run(name, model, sample, task, **options):
    """Loss, sample size, logs and gradients of the criterion *name*."""
    model.zero_grad()
    loss, size, log = build_criterion(name, task, **options)(model, sample)
    (loss * 3).backward()
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), size, {key: float(value) for key, value in log.items()}, grads


def run_both(*args, **options):
    """:func:`run` with fairseq's criterion and with the fused one."""
    return run(FAIRSEQS, *args, **options), run(FUSED, *args, **options)


def build_criterion(name, task, **options):
    return CRITERION_REGISTRY[name](task, **{"label_smoothing": 0.1, "sentence_avg": False, **options})


def assert_equal_runs(actual, expected):
    """Two results of :func:`run` must be equal to the last bit."""
    assert torch.equal(actual[0], expected[0]) and actual[1:3] == expected[1:3]
    assert actual[3].keys() == expected[3].keys()
    assert all(torch.equal(actual[3][name], grad) for name, grad in expected[3].items())


@pytest.mark.parametrize("arch", ["transformer_rope_tiny", "transformer_tiny"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"label_smoothing": 0.0},
        {"label_smoothing": 0.4, "ignore_prefix_size": 2},
        {"ignore_prefix_size": -1},
        {"report_accuracy": True, "sentence_avg": True},
        {"report_accuracy": True, "ignore_prefix_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("shared", [True, False])
def test_value_gradient_and_logs_equal_fairseqs(build, task, sample, arch, options, shared, monkeypatch):
    monkeypatch.setattr(criterion, "CHUNK", 5 * len(task.target_dictionary))  # five tokens at a time
    model = build(arch, share_all_embeddings=shared)
    assert output_weight(model) is model.decoder.output_projection.weight
    assert_close_runs(*run_both(model, sample, task, **options))


def assert_close_runs(expected, actual):
    """Two results of :func:`run` must be equal within the rounding of float32."""
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-6, atol=0)
    assert actual[1] == expected[1]
    assert actual[2] == pytest.approx(expected[2], rel=1e-6)
    assert actual[3].keys() == expected[3].keys()
    largest = max(grad.abs().max().item() for grad in expected[3].values())
    for name, grad in expected[3].items():
        torch.testing.assert_close(actual[3][name], grad, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_likely_targets_is_exact_in_16_bits(dtype):
    """p is between 0.99 and 1, where 16 bits have few numbers. The gradient is p - 1."""
    torch.manual_seed(1)
    weight = torch.nn.functional.normalize(torch.randn(12, 16), dim=1).to(dtype)
    target = torch.randint(1, 12, (40,))
    features = (13 * weight[target].float() + torch.randn(40, 16) / 4).to(dtype)
    exact = [one.double().requires_grad_() for one in (features, weight)]
    scores = exact[0] @ exact[1].t()
    assert scores.softmax(1).gather(1, target.unsqueeze(1)).gt(0.98).float().mean() > 0.8
    torch.nn.functional.cross_entropy(scores, target, reduction="sum").backward()
    narrow = [one.requires_grad_() for one in (features, weight)]
    criterion._FusedLoss.apply(*narrow, target, 0, 0.0, False, True)[0].backward()
    for one, expected in zip(narrow, exact, strict=True):
        assert (one.grad - expected.grad).norm() < 0.02 * expected.grad.norm()


@pytest.mark.parametrize("distance", [10.0, 60.0, 95.0, 3000.0])
def test_the_loss_of_an_improbable_target_does_not_underflow(distance):
    # The scores of two words are so much higher that the target's probability underflows.
    features = torch.tensor([[distance]], requires_grad=True)
    weight = torch.tensor([[1.0], [0.0], [1.0]])
    loss, nll, _ = criterion._FusedLoss.apply(features, weight, torch.tensor([1]), 2, 0.1, False, True)
    lprobs = torch.log_softmax(features.double() @ weight.double().t(), dim=-1)[0]
    assert nll.item() == pytest.approx(-lprobs[1].item(), rel=1e-6)
    each = 0.1 / 2
    assert loss.item() == pytest.approx((-(0.9 - each) * lprobs[1] - each * lprobs.sum()).item(), rel=1e-6)


def test_a_batch_of_only_padding_has_zero_loss_and_gradients(build, task, sample):
    model = build("transformer_rope_tiny")
    sample["target"] = torch.full_like(sample["target"], task.target_dictionary.pad())
    loss, _, _, grads = run(FUSED, model, sample, task)
    assert loss == 0.0 and all(grad.eq(0).all() for grad in grads.values())


def test_the_logits_of_all_tokens_are_never_in_memory_together(build, task, sample, monkeypatch):
    words = len(task.target_dictionary)
    monkeypatch.setattr(criterion, "CHUNK", 4 * words)
    model = build("transformer_rope_tiny")
    largest = 0
    width = model.decoder.embed_dim  # a transposed weight is (width, words)

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for one in out if isinstance(out, (tuple, list)) else [out]:
                if torch.is_tensor(one) and one.shape[-1:] == (words,) and one.shape != (width, words):
                    largest = max(largest, one.numel())
            return out

    with Watch():
        run(FUSED, model, sample, task)
    assert largest == 4 * words
    with Watch():
        run(FAIRSEQS, model, sample, task)
    assert largest == sample["target"].numel() * words


def test_unsupported_models_use_fairseqs_own_loss(build, task, sample):
    assert output_weight(build(adaptive_softmax_cutoff="20")) is None
    model = build()
    model.decoder.output_projection = torch.nn.Sequential(model.decoder.output_projection)
    expected, actual = run_both(model, sample, task)
    assert_equal_runs(actual, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_the_fused_loss_is_within_rounding_of_fairseqs_in_float32(build, task, sample, dtype):
    model = build()
    exact = run(FAIRSEQS, model, sample, task)
    with torch.autocast("cpu", dtype=dtype):
        assert output_weight(model) is not None
        fairseqs, fused = run_both(model, sample, task)
    errors = {
        name: tuple((run[-1][name] - gradient).norm() for run in (fused, fairseqs))
        for name, gradient in exact[-1].items()
    }
    for name, (error, fairseqs_error) in errors.items():
        assert fused[-1][name].dtype == torch.float32
        # The gradient of a bias of keys is 0 but for rounding, which differs between CPUs.
        assert error <= 4 * fairseqs_error + 1e-6 * exact[-1][name].norm(), name
    error, fairseqs_error = (torch.stack(of_run).norm() for of_run in zip(*errors.values(), strict=True))
    assert error <= 1.5 * fairseqs_error
    assert float(fused[0]) == pytest.approx(float(exact[0]), rel=0.01)


CHANGES = {
    "hook": lambda m: m.decoder.register_forward_hook(lambda module, given, out: (2 * out[0], out[1])),
    "hook before": lambda m: m.register_forward_pre_hook(lambda module, given: None),
    "hook of gradients": lambda m: m.decoder.output_projection.register_full_backward_hook(lambda *_: None),
    "projection": lambda m: m.decoder.output_projection.register_forward_hook(lambda module, given, out: 2 * out),
    "targets": lambda m: setattr(m, "get_targets", lambda sample, out: sample["target"].flip(1)),
    "probs": lambda m: setattr(m.decoder, "get_normalized_probs", lambda out, log, sample: out[0]),
    "decoder": lambda m: setattr(m.decoder, "__class__", type("Own", (type(m.decoder),), {"forward": None})),
    "forward": lambda m: setattr(m, "__class__", type("Own", (type(m),), {"forward": None})),
    "probs of a class": lambda m: setattr(m, "__class__", type("Own", (type(m),), {"get_normalized_probs": None})),
    "output layer": lambda m: setattr(m.decoder, "output_layer", lambda features: 2 * features),
}


@pytest.mark.parametrize("change", list(CHANGES.values()), ids=list(CHANGES))
def test_a_customised_model_uses_fairseqs_own_loss(build, change):
    model = build()
    assert output_weight(model) is not None
    change(model)
    assert output_weight(model) is None


def doubled(method):
    """*method*, with its result (or the first of its results) doubled."""

    def call(*args, **kwargs):
        result = method(*args, **kwargs)
        return (2 * result[0], *result[1:]) if isinstance(result, tuple) else 2 * result

    return call


@pytest.mark.parametrize("name", ["compute_loss", "get_lprobs_and_target", "compute_accuracy"])
def test_a_subclass_of_our_criterion_computes_the_same_as_of_fairseqs(build, task, sample, name, monkeypatch):
    model = build()
    for base in (FAIRSEQS, FUSED):
        cls = CRITERION_REGISTRY[base]
        monkeypatch.setitem(CRITERION_REGISTRY, base, type("Own", (cls,), {name: doubled(getattr(cls, name))}))
    expected, actual = run_both(model, sample, task, report_accuracy=True)
    assert_equal_runs(actual, expected)


def test_a_gradient_of_the_gradient_is_refused(build, task, sample):
    """Otherwise it would be wrong: it would treat the gradients of the features as constants."""
    model, fused = build(), build_criterion(FUSED, task)
    weight = model.decoder.layers[0].fc1.weight
    with pytest.raises(RuntimeError, match="differentiated twice"):
        torch.autograd.grad(fused(model, sample)[0], weight, create_graph=True)
    torch.autograd.grad(fused(model, sample)[0], weight)


def test_only_wrapped_models_that_use_every_parameter_are_fused(build):
    def wrapped(name, package="torch.nn.parallel", **attributes):
        attributes = {**attributes, "module": build(), "__module__": package}
        return type(name, (torch.nn.Module,), attributes)()

    assert output_weight(wrapped("DistributedDataParallel", find_unused_parameters=False)) is not None
    assert output_weight(wrapped("DistributedDataParallel", find_unused_parameters=True)) is None
    assert output_weight(wrapped("FullyShardedDataParallel")) is None
    assert output_weight(wrapped("Scaled", package="somebodys")) is None, "an unknown wrapper may compute anything"
    hooked = wrapped("DistributedDataParallel")
    hooked.register_forward_hook(lambda module, given, out: (2 * out[0], out[1]))
    assert output_weight(hooked) is None


def test_accuracy_chooses_the_first_of_equal_scores_as_fairseq_does(build, task, sample):
    model = build()
    with torch.no_grad():
        model.decoder.output_projection.weight.zero_()
    sample["target"][:, 1] = 0  # of equal scores, fairseq chooses the first word
    expected, actual = run_both(model, sample, task, report_accuracy=True)
    assert actual[2]["n_correct"] == expected[2]["n_correct"] == 3


def test_the_unreduced_loss_equals_fairseqs(build, task, sample):
    model = build()
    losses = [build_criterion(name, task)(model, sample, reduce=False)[0] for name in (FAIRSEQS, FUSED)]
    assert losses[0].numel() == sample["target"].numel() and torch.equal(*losses)


class WithAttention(CrossEntropyCriterion):
    """A user's criterion that reads the attention."""

    needs_attention = True
    read = []

    def forward(self, model, sample, reduce=True):
        _, extra = model(**sample["net_input"])
        self.read.append((model.training, extra["attn"][0]))
        return super().forward(model, sample, reduce)


def test_a_criterion_can_say_that_it_needs_attention(data_bin, tmp_path, monkeypatch):
    for needs, is_read in ((True, True), (False, False)):
        monkeypatch.setattr(WithAttention, "needs_attention", needs)
        monkeypatch.setattr(WithAttention, "read", [])
        monkeypatch.setitem(CRITERION_REGISTRY, "cross_entropy", WithAttention)
        more = ("--criterion", "cross_entropy", "--max-update", 2)
        call(*training(data_bin, tmp_path / str(needs), *more, without=("--label-smoothing 0.1",)))
        in_training = [attention for is_training, attention in WithAttention.read if is_training]
        assert in_training and all((attention is not None) is is_read for attention in in_training)


@pytest.mark.slow
def test_a_criterion_of_several_languages_gets_the_attention(data_bin, tmp_path, monkeypatch):
    monkeypatch.setattr(WithAttention, "read", [])
    monkeypatch.setitem(CRITERION_REGISTRY, "cross_entropy", WithAttention)
    languages = ["--task", "multilingual_translation", "--lang-pairs", "en-de,de-en", "--arch"]
    more = [*languages, "multilingual_transformer_rope", "--criterion", "cross_entropy", "--max-update", 1]
    small = [f"--{side}-{option}" for side in ("encoder", "decoder") for option in ("embed-dim=32", "ffn-embed-dim=32")]
    call(*training(data_bin, tmp_path, *more, *small, without=("--label-smoothing 0.1", "--share-all-embeddings")))
    in_training = [attention for is_training, attention in WithAttention.read if is_training]
    assert len(in_training) == 2 and all(attention is not None for attention in in_training)
