"""xPos: rotary position embedding whose queries grow and keys shrink with their positions.

Sun et al. 2022, "A Length-Extrapolatable Transformer", arXiv:2212.10554, equation 17 and Algorithm 1;
``torchscale/component/xpos_relative_position.py``. Pair i is rotated as in RoPE. At position n it is also multiplied,
in a query by zeta_i^(n / scale_base), in a key by zeta_i^(-n / scale_base), with zeta_i = (2i / d_r + 0.4) / 1.4.
Scores then shrink with the distance i - j of keys in the past. For keys after the query they would grow, so xPos is for
decoders.

A scaled rotation is a rotation whose cos and sin are scaled, so :class:`~fairseq_rope.positions.rotary.RotaryEmbedding`
does the rest. The factor of a key grows with its position, so each type has a largest position: with the default base
about 34,000 in float32, and 2,800 in float16. Longer input is refused.
"""

import math

import torch
from torch import Tensor

from .interface import Option
from .rope_options import BASE, FRACTION, LAYOUTS
from .rotary import RotaryEmbedding, rotate, turnings
from .sharing import current_pass

SCALE_BASE = 512.0
HEADROOM = 2.0**6  # so that keys, which are multiplied by the factor, fit too


class XPos(RotaryEmbedding):
    """Rotates queries and keys as RoPE does, and scales them by position.

    Args:
        head_dim, base, layout, fraction: those of RotaryEmbedding
        scale_base: positions over which a pair is scaled by zeta_i, above 0 (otherwise a ValueError is raised)
    """

    options = {
        **{name: RotaryEmbedding.options[name] for name in ("rope_base", "rope_layout", "rope_fraction")},
        "xpos_scale_base": Option(SCALE_BASE, "number of positions over which xPos scales a pair of dimensions once"),
    }
    sides = ("decoder",)

    def __init__(
        self,
        head_dim: int,
        base: float = BASE,
        layout: str = LAYOUTS[0],
        fraction: float = FRACTION,
        scale_base: float = SCALE_BASE,
    ) -> None:
        super().__init__(head_dim, base, layout, fraction)
        if not (math.isfinite(scale_base) and scale_base > 0):
            raise ValueError(f"--xpos-scale-base {scale_base}: must be a finite number above 0")
        self.scale_base = float(scale_base)

    def scaled_tables(self, offset: int, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return cos and sin for queries, and cos and sin for keys: each float32 (*length*, d_r / 2)."""
        cos, sin = self.tables(offset, length, device)
        pair = torch.arange(self.dim // 2, dtype=torch.float64, device=device)
        zeta = (2.0 * pair / self.dim + 0.4) / 1.4
        position = torch.arange(offset, offset + length, dtype=torch.float64, device=device)
        scale = torch.pow(zeta, position.unsqueeze(1) / self.scale_base).float()
        return cos * scale, sin * scale, cos / scale, sin / scale

    def queries_and_keys(self, q: Tensor, k: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        length = q.size(2)
        dtype, device = q.dtype, q.device.type
        # Normalised queries are in float32, and products are not.
        if dtype == torch.float32 and device != "meta" and torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
        self.refuse_too_far(offset + length, dtype)

        def compute() -> tuple[tuple[Tensor, Tensor], ...]:
            q_cos, q_sin, k_cos, k_sin = self.scaled_tables(offset, length, q.device)
            return turnings(q_cos, q_sin, self.interleaved), turnings(k_cos, k_sin, self.interleaved)

        of_queries, of_keys = current_pass().shared(("scaled turnings", self, offset, length, q.device), compute)
        return rotate(q, *of_queries), rotate(k, *of_keys)

    def refuse_too_far(self, positions: int, dtype: torch.dtype) -> None:
        """Raise a ValueError if the factor of keys at *positions* is too large for *dtype*."""
        largest = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max) / HEADROOM
        limit = int(self.scale_base * math.log(largest) / math.log(1.4 / 0.4))
        if positions > limit:
            raise ValueError(
                f"--xpos-scale-base {self.scale_base:g}: allows {limit} positions in {dtype}, and {positions} are "
                "needed; use a larger base, or shorter sentences"
            )
