"""The place in an epoch at which a training resumes.

These functions replace fairseq's; the table in ``patches/table.py`` says why.
"""

import functools
import logging
import math
from typing import Any

from fairseq.data.iterators import CountingIterator, EpochBatchIterator, GroupedIterator, _chunk_iterator

logger = logging.getLogger(__name__)

WHOLE = "batches_in_epoch"  # the entry of a checkpoint's train_iterator with the batches of a process in the epoch

_state_dict = EpochBatchIterator.state_dict
_load_state_dict = EpochBatchIterator.load_state_dict
_init_grouped = GroupedIterator.__init__


@functools.wraps(_state_dict)
def state_dict(self: Any) -> dict[str, Any]:
    state: dict[str, Any] = _state_dict(self)
    if type(self) is EpochBatchIterator and state["iterations_in_epoch"]:
        state[WHOLE] = len(self)
    return state


@functools.wraps(_load_state_dict)
def load_state_dict(self: Any, state_dict: dict[str, Any]) -> None:
    before = state_dict.get(WHOLE)
    if type(self) is EpochBatchIterator and before:
        now, place = len(self), state_dict["iterations_in_epoch"]
        if now != before:
            state_dict = {**state_dict, "iterations_in_epoch": place * now // before}
            logger.info(
                f"the epoch has {now} batches for this process, and had {before}: resuming after "
                f"{state_dict['iterations_in_epoch']} in place of {place}"
            )
    _load_state_dict(self, state_dict)


@functools.wraps(_init_grouped)
def init_grouped(self: Any, iterable: Any, chunk_size: int, skip_remainder_batch: bool = False) -> None:
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
