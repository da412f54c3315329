"""NumPy as modules of fairseq see it, with names that newer versions do not have."""

import types
from typing import Any

import numpy as np


class NumpyWithOldNames(types.ModuleType):
    """``numpy`` with ``float``, ``compat.long`` and ``percentile(…, interpolation=…)``."""

    float = float
    compat = types.SimpleNamespace(long=int)

    @staticmethod
    def percentile(*args: Any, interpolation: str = "linear", **kwargs: Any) -> Any:
        """Return ``numpy.percentile``, whose *interpolation* is called *method* since NumPy 1.22."""
        return np.percentile(*args, **{"method": interpolation, **kwargs})

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)
