"""The loss of an adaptive softmax.

This function replaces fairseq's; the table in ``patches/table.py`` says why.
"""

import functools
from typing import Any

import torch.nn.functional as F
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from torch import Tensor

from ..errors import InputError

_forward = AdaptiveLoss.forward


@functools.wraps(_forward)
def adaptive_loss(self: Any, model: Any, sample: Any, reduce: bool = True) -> tuple[Tensor, int, dict[str, Any]]:
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
