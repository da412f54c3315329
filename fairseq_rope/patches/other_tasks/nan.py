"""The search for the module in which NaN begins, when a training ends because of NaN."""

from typing import Any

from fairseq.models import BaseFairseqModel, FairseqEncoder
from fairseq.nan_detector import NanDetector

from ..registry import replaces

_add_hooks = NanDetector.add_hooks


@replaces(
    "fairseq.nan_detector.NanDetector.add_hooks",
    prevents="an unreadable error",
    until="torch's hooks accept such outputs",
    wraps=_add_hooks,
)
def add_hooks(self: Any, module: Any) -> None:
    """Add hooks, but no backward hook to an encoder or a whole model.

    If a loss or gradients are NaN, fairseq repeats the update with a hook on each module, to name the one in which NaN
    begins. torch's hooks cannot read the output of an encoder, a dictionary of lists, and the training ends with an
    empty StopIteration. Here encoders and whole models have no such hook, and their parts do.
    """
    backward = self.backward
    self.backward = backward and not isinstance(module, (FairseqEncoder, BaseFairseqModel))
    try:
        _add_hooks(self, module)
    finally:
        self.backward = backward
