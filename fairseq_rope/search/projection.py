"""The projection onto the vocabulary, with its weight packed for oneDNN."""

from typing import Any

import torch
from torch import Tensor

from ..modules.overrides import is_plain_linear


class PackedProjection:
    """The weight of a projection onto the vocabulary, packed for oneDNN, as torch's compiler packs it.

    With few rows, the projection takes the time to read its weight. The packed weight takes about half of it (37,000
    words, 4 rows). Packing takes the time that five steps save, so later searches use the packed weight again. Copies
    and pickles of the ensemble that holds it do not contain it.
    """

    def __init__(self) -> None:
        # Products that identify the weight, and the packed weight. One tuple, so that threads can share it.
        self._cached: tuple[Tensor, Tensor] | None = None

    def packed_weight(self, module: Any) -> Tensor | None:
        """Return the packed weight of *module*; None if it cannot be packed and *module* must be called.

        Optimisers write to ``.data``, and torch does not count these writes. So each row of the weight is multiplied by
        the same random vector, and the weight is packed again if a product has changed. A change that is too small to
        change the product is within the rounding error of scores.
        """
        if not (
            is_plain_linear(module)
            and module.bias is None
            and module.weight.device.type == "cpu"
            and module.weight.dtype == torch.float32
            and torch.backends.mkldnn.is_available()
        ):
            return None
        weight = module.weight.detach()
        numbers = torch.Generator("cpu").manual_seed(1)
        factors = torch.rand(weight.size(1), generator=numbers, dtype=weight.dtype, device="cpu") + 1.0
        products = torch.mv(weight, factors)
        cached = self._cached
        if cached is None or not torch.equal(cached[0], products):
            try:
                packed = torch.ops.mkldnn._reorder_linear_weight(weight)
            except (AttributeError, RuntimeError, TypeError):  # this build of torch lacks the operation
                return None
            self._cached = cached = (products, packed)
        return cached[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


def project_packed(x: Tensor, packed: Tensor) -> Tensor:
    """Return *x* (…, C) projected by the *packed* weight: (…, V)."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
