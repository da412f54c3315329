"""The place in an epoch at which a training resumes."""

import logging
import math
from typing import Any

from fairseq.data.iterators import CountingIterator, EpochBatchIterator, GroupedIterator, _chunk_iterator

from .registry import replaces

logger = logging.getLogger(__name__)

SEEN = "batches_seen"  # in train_iterator: the batches that all processes have seen, and those of the epoch

_state_dict = EpochBatchIterator.state_dict
_load_state_dict = EpochBatchIterator.load_state_dict
_init_grouped = GroupedIterator.__init__


@replaces(
    "fairseq.data.iterators.EpochBatchIterator.state_dict",
    prevents="wrong results",
    until="fairseq's checkpoints have this number",
    wraps=_state_dict,
)
def state_dict(self: Any) -> dict[str, Any]:
    """Return the place in the epoch, with the batches that all processes have seen, and those of the epoch.

    A checkpoint in the middle of an epoch says how many batches each process has seen, and not of how many. Resumed
    with another number of GPUs or another --max-tokens, fairseq repeats or skips a part of the epoch, or ends with
    'Cannot resume training due to dataloader mismatch'.
    """
    state: dict[str, Any] = _state_dict(self)
    if type(self) is EpochBatchIterator and state["iterations_in_epoch"]:
        state[SEEN] = [state["iterations_in_epoch"] * self.num_shards, len(self.frozen_batches)]
    return state


@replaces(
    "fairseq.data.iterators.EpochBatchIterator.load_state_dict",
    prevents="wrong results",
    until="fairseq resumes after the same share of the epoch",
    wraps=_load_state_dict,
)
def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
    """Resume after the same share of the epoch.

    fairseq resumes after the same number of batches, also if the epoch has another number of them; see state_dict. The
    log says so if the place is another. It is rounded down, so that batches are repeated and none is skipped.
    """
    if type(self) is EpochBatchIterator and SEEN in state_dict:
        (seen, of), now, before = state_dict[SEEN], len(self.frozen_batches), state_dict["iterations_in_epoch"]
        place = seen * now // (of * self.num_shards)
        if place != before:
            state_dict = {**state_dict, "iterations_in_epoch": place}
            logger.info(
                f"{seen} of {of} batches of the epoch have been seen, and it has {now} now: this process resumes after "
                f"{place} in place of {before}"
            )
    _load_state_dict(self, state_dict)


@replaces(
    "fairseq.data.iterators.GroupedIterator.__init__",
    prevents="wrong results",
    until="fairseq counts the groups of the rest",
    wraps=_init_grouped,
)
def init_grouped(self: Any, iterable: Any, chunk_size: int, skip_remainder_batch: bool = False) -> None:
    """Group the batches of an epoch, and count the groups that are left.

    If a training resumes in an epoch with another --update-freq, the batches before are not a multiple of it. fairseq
    then counts too few groups for the rest: the epoch does not end, and is trained again. Here the groups of the rest
    are counted.
    """
    seen = getattr(iterable, "n", 0)
    left = len(iterable) - seen
    if seen == 0 or seen % chunk_size == 0 and (left >= chunk_size or not skip_remainder_batch):
        _init_grouped(self, iterable, chunk_size, skip_remainder_batch)
        return
    skips = skip_remainder_batch and left >= chunk_size  # an epoch without any update would end the training
    groups = left // chunk_size if skips else math.ceil(left / chunk_size)
    start = math.ceil(seen / chunk_size)
    CountingIterator.__init__(self, _chunk_iterator(iterable, chunk_size, skips), start=start, total=start + groups)
    self.chunk_size = chunk_size
    if skips:
        iterable.take(seen + groups * chunk_size)
