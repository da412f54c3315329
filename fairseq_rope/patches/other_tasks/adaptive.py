"""The loss of an adaptive softmax."""

from typing import Any

import torch.nn.functional as F
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from torch import Tensor

from ...errors import InputError
from ..registry import replaces

_forward = AdaptiveLoss.forward


@replaces(
    "fairseq.criterions.adaptive_loss.AdaptiveLoss.forward",
    prevents="wrong results",
    until="fairseq ignores the padding in the head alone",
    wraps=_forward,
)
def adaptive_loss(self: Any, model: Any, sample: Any, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
    """Return fairseq's adaptive loss, in which each tail ignores only its own padding.

    The words of each tail of an adaptive softmax are counted from 0, and fairseq's adaptive_loss leaves out the word
    with the number of the padding. So in each tail the second word is not trained, and losses and perplexities are too
    low. With reduce=False it ends in an error. A model without adaptive softmax is refused with a sentence.
    """
    softmax = getattr(getattr(model, "decoder", None), "adaptive_softmax", None)
    if softmax is None:
        raise InputError("--criterion adaptive_loss: the model has no adaptive softmax; give --adaptive-softmax-cutoff")
    features, *_ = output = model(**sample["net_input"])
    words = model.get_targets(sample, output)
    sentences, words = words.size(0), words.view(-1)
    scores, targets = softmax(features, words)
    loss = features.new_zeros(1 if reduce else len(words))
    starts = [0, *softmax.cutoff]  # the number of the first word of the head and of each tail
    for part, (of_part, target) in enumerate(zip(scores, targets)):
        if target is None:
            continue
        # The words of a tail are counted from its first one, and so is the padding.
        padding = self.padding_idx - starts[part]
        losses = F.cross_entropy(of_part, target, ignore_index=padding, reduction="sum" if reduce else "none")
        if reduce or part == 0:
            loss += losses
        else:
            is_own = words.ge(starts[part]) & words.lt(starts[part + 1])
            loss[is_own] += losses
    tokens = int(words.ne(self.padding_idx).sum())
    size = sample["target"].size(0) if self.sentence_avg else tokens
    logging_output = {"loss": loss.data, "ntokens": tokens, "nsentences": sentences, "sample_size": size}
    return loss, size, logging_output
