"""The search for the module in which NaN begins, when a training ends because of NaN.

This function replaces fairseq's; the table in ``patches/table.py`` says why.
"""

import functools
from typing import Any

from fairseq.models import BaseFairseqModel, FairseqEncoder
from fairseq.nan_detector import NanDetector

_add_hooks = NanDetector.add_hooks


@functools.wraps(_add_hooks)
def add_hooks(self: Any, module: Any) -> None:
    backward = self.backward
    self.backward = backward and not isinstance(module, (FairseqEncoder, BaseFairseqModel))
    try:
        _add_hooks(self, module)
    finally:
        self.backward = backward
