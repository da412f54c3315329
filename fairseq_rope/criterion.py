"""``fused_label_smoothed_cross_entropy``: the label-smoothed loss in less memory.

fairseq's ``label_smoothed_cross_entropy`` stores, for every token, the scores of all words in the vocabulary,
their log-probabilities, and the gradients of both. Here one function computes the projection onto the
vocabulary, the loss and the gradients, for a few hundred tokens at a time.

For the scores x of one token, with target t, V words, e = label smoothing and e' = e / (V - 1), the loss is

    (1 - e - e') * (lse - x_t) + e' * (V * lse - sum_j x_j),    lse = log sum_j exp x_j

as in ``fairseq/criterions/label_smoothed_cross_entropy.py``. Since (1 - e - e') + e' * V = 1, its gradient is

    d/dx_j = exp(x_j - lse) - e' - (1 - e - e') * [j = t]

Shapes: N tokens, C the decoder's width, V words.
"""

from typing import Any

from . import patches  # noqa: F401  isort: skip
import torch
import torch.nn.functional as F
from fairseq.criterions import label_smoothed_cross_entropy as fairseq_criterion
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.models.transformer import (
    TransformerDecoder,
    TransformerDecoderBase,
    TransformerModel,
    TransformerModelBase,
)
from torch import Tensor, nn

from .modules.overrides import hooked, is_exactly, is_plain_linear
from .patches.linear import with_few_sizes
from .transformer import Decoder, TransformerRopeModel

CHUNK = 32 * 2**20  # scores that are in memory at a time: 128 MiB
CHUNK_ON_GPU = 256 * 2**20  # 1 GiB, because each chunk starts some thirty kernels
UNDERFLOW = 1e-20  # a smaller probability may be 0 or inexact in float32, so its logarithm is computed from scores


def _nll(scores: Tensor, features: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return -log p of each target and its score, each (N), and p of all words (N, V), which overwrites *scores*.

    Args:
        scores: float32 (N, V), the product of *features* (N, C) and *weight* (V, C)
        target: (N)
    """
    target_scores = scores.gather(1, target.unsqueeze(1)).squeeze(1)
    probs = torch.softmax(scores, dim=1, out=scores)
    target_probs = probs.gather(1, target.unsqueeze(1)).squeeze(1)
    nll = -target_probs.log()
    is_rare = target_probs < UNDERFLOW
    if scores.device.type != "cpu" or bool(is_rare.any()):  # on a GPU, asking would be a device synchronisation
        highest, word = probs.max(dim=1)
        score = (features.float() * weight.index_select(0, word).float()).sum(1)
        nll = torch.where(is_rare, score - highest.log() - target_scores, nll)
    return nll, target_scores, probs


def _loss_and_gradients(
    features: Tensor, weight: Tensor, target: Tensor, pad: int, epsilon: float, count_correct: bool, needs_grad: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the results of :class:`_FusedLoss`, and the gradients of *features* and *weight* in float32."""
    words = weight.size(0)
    smoothing = epsilon / (words - 1)  # e'
    on_target = 1.0 - epsilon - smoothing

    # Padding has neither loss nor gradient. To leave it out, the number of remaining tokens must be known, which is a
    # device synchronisation on a GPU. There, padding is computed like other tokens, with features of zero. So is some
    # of it in 16 bits on a CPU, so that products have few different sizes.
    on_host = target.device.type == "cpu"
    is_token = target.ne(pad)
    if on_host:
        tokens = is_token.nonzero().squeeze(1)
        is_narrow = features.dtype in (torch.bfloat16, torch.float16)
        if is_narrow:  # see patches/linear.py
            others = is_token.logical_not().nonzero().squeeze(1)
            tokens = torch.cat((tokens, others[: with_few_sizes(tokens.numel()) - tokens.numel()]))
        inputs, target = features.index_select(0, tokens), target.index_select(0, tokens)
        is_token = is_token.index_select(0, tokens)
        if is_narrow:
            inputs.masked_fill_(~is_token.unsqueeze(1), 0)
    else:
        inputs = features.masked_fill(~is_token.unsqueeze(1), 0)
    weight_sum = weight.sum(0, dtype=torch.float32)  # sum_j x_j is its product with a token's features
    loss = torch.zeros((), dtype=torch.float64, device=inputs.device)
    nll_loss, correct = torch.zeros_like(loss), torch.zeros_like(loss, dtype=torch.int64)
    if needs_grad:
        inputs_grad = torch.empty_like(inputs, dtype=torch.float32)
        weight_grad = torch.zeros_like(weight, dtype=torch.float32)
    rows = max(1, (CHUNK if on_host else CHUNK_ON_GPU) // words)
    for begin in range(0, inputs.size(0), rows):
        chunk, chunk_target = inputs[begin : begin + rows], target[begin : begin + rows]
        scores = F.linear(chunk, weight).float()  # (rows, V)
        if count_correct:
            correct += (scores.argmax(dim=1).eq(chunk_target) & is_token[begin : begin + rows]).sum()
        nll, target_scores, probs = _nll(scores, chunk, weight, chunk_target)
        smooth = words * (nll + target_scores) - chunk.float() @ weight_sum
        nll, smooth = (x.double() * is_token[begin : begin + rows] for x in (nll, smooth))
        loss += (on_target * nll + smoothing * smooth).sum()
        nll_loss += nll.sum()
        if needs_grad:
            # Before the rounding to 16 bits, because that of a likely target is the small difference of numbers near 1.
            probs.scatter_add_(1, chunk_target.unsqueeze(1), probs.new_full((len(chunk), 1), -on_target))
            probs = probs.to(weight.dtype)
            grad = (probs @ weight).float().sub_(weight_sum, alpha=smoothing)
            inputs_grad[begin : begin + rows] = grad
            if weight.dtype == torch.float32:
                weight_grad.addmm_(probs.t(), chunk)
            else:
                weight_grad += (probs.t() @ chunk).float()
    if not needs_grad:
        return loss, nll_loss, correct, None, None
    weight_grad.sub_(inputs.sum(0, dtype=torch.float32), alpha=smoothing)
    features_grad = inputs_grad.masked_fill_(~is_token.unsqueeze(1), 0)
    if on_host:
        features_grad = torch.zeros_like(features, dtype=torch.float32).index_copy_(0, tokens, inputs_grad)
    return loss, nll_loss, correct, features_grad, weight_grad


class _FusedLoss(torch.autograd.Function):
    """Computes the summed loss of *features* (N, C), projected by *weight* (V, C), and its gradients.

    ``forward`` computes the gradients from the same scores as the loss, in float32, and ``backward`` scales them. Under
    autocast (``--amp``), matrix products are in its type, and the gradient of a float32 *weight* is float32. Gradients
    cannot be differentiated again: ``create_graph=True`` raises a RuntimeError. The results are the loss, the loss
    without label smoothing and, with *count_correct*, how often the target has the highest score.
    """

    @staticmethod
    def forward(ctx: Any, features: Tensor, weight: Tensor, target: Tensor, *options: Any) -> tuple[Tensor, ...]:
        ctx.types = (features.dtype, weight.dtype)
        device = features.device.type
        if torch.is_autocast_enabled(device):
            narrow = torch.get_autocast_dtype(device)
            features, weight = features.to(narrow), weight.to(narrow)
        with torch.autocast(device, enabled=False):
            loss, nll_loss, correct, *grads = _loss_and_gradients(features, weight, target, *options)
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(nll_loss, correct)
        return loss.float(), nll_loss.float(), correct

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        # torch's once_differentiable does not refuse this: it only checks whether *grad* requires a gradient.
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fused_label_smoothed_cross_entropy cannot be differentiated twice (create_graph=True); "
                "use --criterion label_smoothed_cross_entropy"
            )
        saved_grads = ctx.saved_tensors
        if grad.device.type != "cpu" or grad.item() != 1.0:
            saved_grads = tuple(saved * grad for saved in saved_grads)
        features_grad, weight_grad = (saved.to(dtype) for saved, dtype in zip(saved_grads, ctx.types))
        return features_grad, weight_grad, None, None, None, None, None


@register_criterion(
    "fused_label_smoothed_cross_entropy", dataclass=fairseq_criterion.LabelSmoothedCrossEntropyCriterionConfig
)
class FusedLabelSmoothedCrossEntropyCriterion(LabelSmoothedCrossEntropyCriterion):
    """Computes the loss, gradients and logs of fairseq's ``label_smoothed_cross_entropy``, with the same flags.

    The fused loss is for fairseq's transformer and ``transformer_rope`` if their output is a plain projection. The code
    of fairseq computes the loss of other models and of subclasses, the loss under FSDP, and the loss of each token
    (``reduce=False``).
    """

    def forward(
        self, model: nn.Module, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, int, dict[str, Any]]:
        """Return the summed loss, the sample size that divides its gradient, and the values to log."""
        can_fuse = reduce and is_exactly(self, FusedLabelSmoothedCrossEntropyCriterion)
        weight = output_weight(model) if can_fuse else None
        if weight is None:
            return super().forward(model, sample, reduce=reduce)
        features = model(**sample["net_input"], features_only=True)[0]  # (B, T, C)
        ignored = max(0, self.ignore_prefix_size)  # fairseq ignores nothing for negative sizes
        target, features = sample["target"][:, ignored:], features[:, ignored:]
        loss, nll_loss, correct = _FusedLoss.apply(
            features.reshape(-1, features.size(-1)),
            weight,
            target.reshape(-1),
            self.padding_idx,
            self.eps,
            self.report_accuracy,
            torch.is_grad_enabled() and (features.requires_grad or weight.requires_grad),
        )
        sample_size = sample["target"].size(0) if self.sentence_avg else sample["ntokens"]
        logging_output = {"loss": loss.data, "nll_loss": nll_loss.data, "ntokens": sample["ntokens"]}
        logging_output.update(nsentences=sample["target"].size(0), sample_size=sample_size)
        if self.report_accuracy:
            logging_output["n_correct"] = correct.item()
            logging_output["total"] = target.ne(self.padding_idx).sum().item()
        return loss, sample_size, logging_output


def output_weight(model: nn.Module) -> Tensor | None:
    """Return the matrix (V, C) that projects *model*'s features to scores; None if it does more than that.

    It is None for subclasses of fairseq's transformer and of ``transformer_rope``, because their output can be another.
    """
    inner: Any = model
    while hasattr(inner, "module"):  # DistributedDataParallel and fairseq's wrappers
        known = type(inner).__module__.split(".")[0] in ("torch", "fairseq", "fairscale")
        is_refused = not known or "FullySharded" in type(inner).__name__ or hooked(inner)
        if is_refused or getattr(inner, "find_unused_parameters", False):
            return None
        inner = inner.module
    if not is_exactly(inner, TransformerModelBase, TransformerModel, TransformerRopeModel):
        return None
    decoder = inner.decoder
    is_plain_output = (
        is_exactly(decoder, TransformerDecoderBase, TransformerDecoder, Decoder)
        and decoder.adaptive_softmax is None
        and is_plain_linear(decoder.output_projection)
        and decoder.output_projection.bias is None
    )
    return decoder.output_projection.weight if is_plain_output else None
