"""Batches: no sentence is dropped, and resumed training has the batches of uninterrupted training."""

import inspect
from typing import Any

import numpy as np
from fairseq.data import data_utils
from fairseq.data.fairseq_dataset import EpochListening
from fairseq.tasks import FairseqTask

from .registry import replaces

_batch_by_size = data_utils.batch_by_size
_get_batch_iterator = FairseqTask.get_batch_iterator
_iterator_arguments = inspect.signature(_get_batch_iterator)


@replaces(
    "fairseq.data.data_utils.batch_by_size",
    prevents="wrong results",
    until="fairseq keeps the last batch",
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
    batches = list(_batch_by_size(indices, *args, **kwargs))
    dropped = indices[sum(len(batch) for batch in batches) :]
    return [*batches, np.asarray(dropped, dtype=np.int64)] if len(dropped) else batches


@replaces(
    "fairseq.tasks.FairseqTask.get_batch_iterator",
    prevents="wrong results",
    until="fairseq composes batches from the seed alone",
    wraps=_get_batch_iterator,
)
def get_batch_iterator(*args: Any, **kwargs: Any) -> Any:
    """Return an iterator over the batches of a start in epoch 1.

    fairseq composes the batches once per process, from the seed and the epoch in which the process starts. So training
    that resumes in the middle of an epoch skips some sentences and repeats others. Here the batches are always those of
    a start in epoch 1. The processes that load data (--num-workers) keep the epoch in which they start, so that a
    masked language model sees the same masks in each epoch; here they start again for each epoch if the data can depend
    on it.
    """
    arguments = _iterator_arguments.bind(*args, **kwargs)
    arguments.apply_defaults()
    task, dataset, epoch = (arguments.arguments[name] for name in ("self", "dataset", "epoch"))
    composed_now = task.can_reuse_epoch_itr(dataset) and dataset not in task.dataset_to_epoch_iter
    every_epoch = arguments.arguments.get("disable_iterator_cache") or arguments.arguments.get("update_epoch_batch_itr")
    if every_epoch or not composed_now:  # composed for each epoch by its number, or already composed
        iterator = _get_batch_iterator(*args, **kwargs)
    else:
        arguments.arguments["epoch"] = 1
        iterator = _get_batch_iterator(*arguments.args, **arguments.kwargs)
        dataset.set_epoch(epoch)
        iterator.epoch = max(epoch, 1)
    if type(dataset).set_epoch is not EpochListening.set_epoch:
        # Processes that load data would not hear of a new epoch, so there are new ones for each epoch.
        iterator.reuse_dataloader = iterator.persistent_workers = False
    return iterator
