"""NumPy as modules of fairseq see it, with names that newer versions do not have."""

import types
from typing import Any

import numpy as np

from .registry import replaces


class NumpyWithOldNames(types.ModuleType):
    """``numpy`` with ``compat.long`` and ``percentile(…, interpolation=…)``.

    Newer versions of NumPy have no np.compat.long, and call interpolation method. So --sample-break-mode eos,
    generation with a language model and --num-batch-buckets end with an AttributeError or a TypeError.
    """

    compat = types.SimpleNamespace(long=int)

    @staticmethod
    def percentile(*args: Any, interpolation: str = "linear", **kwargs: Any) -> Any:
        """Return ``numpy.percentile``, whose *interpolation* is called *method* since NumPy 1.22."""
        return np.percentile(*args, **{"method": interpolation, **kwargs})

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


NUMPY = replaces(
    "fairseq.data.token_block_dataset.np",
    "fairseq.data.language_pair_dataset.np",
    "fairseq.data.data_utils.np",
    prevents="an unreadable error",
    until="fairseq uses the names of NumPy 2",
)(NumpyWithOldNames("numpy"))
