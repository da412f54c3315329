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
    versions = {name: own[name] for name in own if "version" in name and name not in state_dict}
    _restore(self, {**versions, **state_dict}, build_fp32_params)
