"""The place in an epoch at which a training resumes.

These functions replace fairseq's; the table in ``patches/table.py`` says why.
"""

import functools
import logging
from typing import Any

from fairseq.data.iterators import EpochBatchIterator

logger = logging.getLogger(__name__)

WHOLE = "batches_in_epoch"  # the entry of a checkpoint's train_iterator with the batches of a process in the epoch

_state_dict = EpochBatchIterator.state_dict
_load_state_dict = EpochBatchIterator.load_state_dict


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
