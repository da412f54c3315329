"""The average of the weights over the training (``--store-ema``).

This function replaces fairseq's; the table in ``patches/table.py`` says why.
"""

import functools
from typing import Any

from fairseq.models.ema.ema import EMA

_restore = EMA.restore


@functools.wraps(_restore)
def restore(self: Any, state_dict: Any, build_fp32_params: bool = False) -> None:
    own = self.model.state_dict()
    versions = {name: own[name] for name in own if "version" in name}  # also in place of those that fairseq alone saved
    _restore(self, {**state_dict, **versions}, build_fp32_params)
