"""Batches: no sentence is dropped, one that is longer than a batch is named or skipped, and resumed training has the
batches of uninterrupted training.
"""

import inspect
import logging
import traceback
from typing import Any

import numpy as np
from fairseq.data import data_utils
from fairseq.data.fairseq_dataset import EpochListening
from fairseq.tasks import FairseqTask

from ..checkpoints import option_value
from ..errors import InputError
from .registry import replaces
from .saving import InPlaceOf

logger = logging.getLogger(__name__)

_batch_by_size = data_utils.batch_by_size
_get_batch_iterator = FairseqTask.get_batch_iterator
OF_EVAL_LM = "eval_lm_dataloader"  # the method of a task that makes the batches of fairseq-eval-lm
# makes the batches of translation_multi_simple_epoch, which skips no sentence longer than a batch
OF_SAMPLING = "construct_batch_sampler"
_batch_arguments = inspect.signature(_batch_by_size)
_iterator_arguments = inspect.signature(_get_batch_iterator)


@replaces(
    "fairseq.data.data_utils.batch_by_size",
    prevents="wrong results",
    until="fairseq keeps the last batch, and names the sentence",
    wraps=_batch_by_size,
)
def batch_by_size(indices: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Return fairseq's batches and, as the last one, the sentences that it drops.

    fairseq drops the last batch if its size is not a multiple of --required-batch-size-multiple (8 by default), so up
    to 7 sentences of a test set are not translated (fairseq #5036, #5094, #5351). It ends with an AssertionError if a
    sentence has more tokens than --max-tokens. Here the error is one sentence with the flag, the number of the sentence
    and its length.
    """
    if not isinstance(indices, np.ndarray):  # fairseq accepts any iterable
        indices = np.fromiter(indices, dtype=np.int64, count=-1)
    if len(indices) == 0:
        return []
    try:
        batches = list(_batch_by_size(indices, *args, **kwargs))
    except AssertionError:
        _name_the_longest(**_batch_arguments.bind(indices, *args, **kwargs).arguments)
        raise
    dropped = indices[sum(len(batch) for batch in batches) :]
    return [*batches, np.asarray(dropped, dtype=np.int64)] if len(dropped) else batches


def _name_the_longest(indices: Any, num_tokens_fn: Any, max_tokens: Any = None, **_: Any) -> None:
    """Raise an InputError that names the longest sentence if it has more than *max_tokens* tokens."""
    length, number = max((num_tokens_fn(index), index) for index in indices)
    if max_tokens and length > max_tokens:
        validates = _is_called_by("get_valid_iterator")  # of fairseq's Trainer
        flag = "--max-tokens-valid" if validates else "--max-tokens"
        skip = ", or skip such sentences with --skip-invalid-size-inputs-valid-test"
        raise InputError(
            f"sentence {number} has {length} tokens, more than {flag} {max_tokens}: give {length} or more"
            f"{'' if _is_called_by(OF_EVAL_LM, OF_SAMPLING) else skip}"
        )


def _is_called_by(*functions: str) -> bool:
    """Return whether a function of one of these names is running."""
    return any(frame.f_code.co_name in functions for frame, _ in traceback.walk_stack(None))


class _SkippingLongerThanABatch(InPlaceOf):
    """A task that skips sentences with more than *max_tokens* tokens, as fairseq skips those beyond the positions."""

    def __init__(self, task: Any, max_tokens: int) -> None:
        super().__init__(task)
        self._max_tokens = max_tokens

    def filter_indices_by_size(self, indices: Any, dataset: Any, *args: Any) -> Any:
        indices = np.asarray(self._replaced.filter_indices_by_size(indices, dataset, *args), dtype=np.int64)
        try:
            lengths = dataset.num_tokens_vec(indices)
        except NotImplementedError:
            lengths = np.array([dataset.num_tokens(index) for index in indices])
        skipped = indices[lengths > self._max_tokens]
        if len(skipped):
            flag = "--max-tokens-valid" if _is_called_by("get_valid_iterator") else "--max-tokens"
            numbers = f"{len(skipped):,} of {len(indices):,} sentences have more than {flag} {self._max_tokens}"
            logger.warning(f"{numbers} tokens and are skipped: {', '.join(map(str, skipped[:10]))}")
        return indices[lengths <= self._max_tokens]


@replaces(
    "fairseq.tasks.FairseqTask.get_batch_iterator",
    prevents="wrong results",
    until="fairseq composes batches from the seed alone, and skips such sentences",
    wraps=_get_batch_iterator,
)
def get_batch_iterator(*args: Any, **kwargs: Any) -> Any:
    """Return an iterator over the batches of a start in epoch 1, which skips what fairseq's program skips.

    fairseq composes the batches once per process, from the seed and the epoch in which the process starts. So training
    that resumes in the middle of an epoch skips some sentences and repeats others. Here the batches are always those of
    a start in epoch 1. The processes that load data (--num-workers) keep the epoch in which they start, so that a
    masked language model sees the same masks in each epoch; here they start again for each epoch if the data can depend
    on it. --skip-invalid-size-inputs-valid-test also skips sentences with more tokens than --max-tokens; fairseq ends
    with an AssertionError. fairseq-eval-lm skips blocks of text with more tokens than the model has positions, and
    prints the perplexity of the rest, or 1.00 if there is no rest; here a warning names the flag, and without a rest it
    is an error.
    """
    bound = _iterator_arguments.bind(*args, **kwargs)
    bound.apply_defaults()
    if not _is_called_by(OF_EVAL_LM):
        return _iterator_of(bound, skips=bound.arguments["ignore_invalid_inputs"])
    iterator = _iterator_of(bound, skips=False)
    task, samples = bound.arguments["self"], len(bound.arguments["dataset"])
    skipped = samples - sum(map(len, iterator.frozen_batches))
    # fairseq skips samples that are too long. If these are blocks of text, or all samples, that is a mistake.
    are_blocks = option_value(getattr(task, "args", None), "sample_break_mode") in (None, "none")
    positions = bound.arguments["max_positions"]
    too_long = f"{skipped:,} of {samples:,} samples have more tokens than the model has positions, {positions}"
    instead = (
        f"give --tokens-per-sample {positions} or less, or --model-overrides \"{{'max_target_positions': N}}\" if "
    )
    instead += "the positions are not learned"
    if skipped and skipped == samples:
        raise InputError(f"{too_long}: {instead}")
    if skipped and are_blocks:
        logger.warning(f"{too_long}, and the perplexity is that of the others: {instead}")
    return iterator


def _iterator_of(bound: inspect.BoundArguments, skips: bool) -> Any:
    """Return the batches. *skips* is whether sentences of more than ``--max-tokens`` are skipped."""
    iterator = _composed(bound, skips)
    if type(bound.arguments["dataset"]).set_epoch is not EpochListening.set_epoch:
        # Processes that load data would not hear of a new epoch, so there are new ones for each epoch.
        iterator.reuse_dataloader = iterator.persistent_workers = False
    return iterator


def _composed(bound: inspect.BoundArguments, skips: bool) -> Any:
    task, dataset, epoch = (bound.arguments[name] for name in ("self", "dataset", "epoch"))
    if skips and (bound.arguments["max_tokens"] or 0) > 0:
        bound.arguments["self"] = _SkippingLongerThanABatch(task, bound.arguments["max_tokens"])
    composed_now = task.can_reuse_epoch_itr(dataset) and dataset not in task.dataset_to_epoch_iter
    every_epoch = bound.arguments.get("disable_iterator_cache") or bound.arguments.get("update_epoch_batch_itr")
    if every_epoch or not composed_now:  # composed for each epoch by its number, or already composed
        return _get_batch_iterator(*bound.args, **bound.kwargs)
    bound.arguments["epoch"] = 1
    iterator = _get_batch_iterator(*bound.args, **bound.kwargs)
    dataset.set_epoch(epoch)
    iterator.epoch = max(epoch, 1)
    return iterator
