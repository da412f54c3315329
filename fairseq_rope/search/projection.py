"""The projection onto the vocabulary, with its weight packed for oneDNN."""

from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ..overrides import is_plain_linear


class PackedProjection:
    """The weight of a projection onto the vocabulary, packed for oneDNN, as torch's compiler packs it.

    The projection reads its weight once for a few rows: packed, at about twice the speed (37,000 words, 4
    rows). Packing takes as long as five steps gain, so the packed weight is kept from one search to the next.
    A copy or pickle of the model leaves it out.
    """

    def __init__(self) -> None:
        self._kept: Optional[Tuple[Tensor, Tensor]] = None  # one tuple, for threads that share a model

    def of(self, module: Any) -> Optional[Tensor]:
        """The packed weight of *module*; None where it cannot be packed, and *module* has to be called.

        Optimizers and others write to ``.data``, and torch does not count that. So each row of the weight is
        multiplied by the same random vector, and a changed product shows that the weight has changed. A
        change of one number that is too small to alter the product is within the rounding error of scores.
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
        factors = torch.rand(weight.size(1), generator=torch.Generator().manual_seed(1)) + 1.0
        products = torch.mv(weight, factors)
        kept = self._kept
        if kept is None or not torch.equal(kept[0], products):
            packed = _packed(weight)
            if packed is None:
                return None
            self._kept = kept = (products, packed)
        return kept[1]

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), ()


def _packed(weight: Tensor) -> Optional[Tensor]:
    try:
        return torch.ops.mkldnn._reorder_linear_weight(weight)
    except (AttributeError, RuntimeError, TypeError):  # not in this build of torch
        return None


def project_packed(x: Tensor, packed: Tensor) -> Tensor:
    """*x* (…, C) by the weight that was *packed*: (…, V)."""
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
