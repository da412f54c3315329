"""The flags of RoPE: their defaults, their help, and the values that are allowed."""

import math

from .interface import Option
from .scaling import read_scaling

# The defaults are the paper's.
BASE = 10000.0
LAYOUTS = ("interleaved", "half")  # the first is the default
FRACTION = 1.0

OPTIONS: dict[str, Option] = {
    "rope_base": Option(BASE, "base of the rotation's angles, theta_i = base^(-2i/d)"),
    "rope_layout": Option(
        LAYOUTS[0],
        "which dimensions of a head rotate together: interleaved = (2i, 2i+1), as the RoFormer paper; half = "
        "(i, i + d/2), as GPT-NeoX and LLaMA",
        LAYOUTS,
    ),
    "rope_fraction": Option(FRACTION, "fraction of each head's dimensions that rotates, in (0, 1]"),
    "rope_scaling": Option(
        "",
        "other frequencies for longer inputs, in JSON with the keys of Hugging Face's rope_scaling, for example "
        '{"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 128}',
        read=read_scaling,
    ),
}


def rotary_dim(head_dim: int, fraction: float = FRACTION) -> int:
    """Return the number of leading dimensions of a head that rotate, d_r = fraction * head_dim.

    Raises a ValueError if *fraction* is outside (0, 1], or d_r is not an even integer of at least 2.
    """
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"--rope-fraction {fraction}: the fraction of the head that rotates must be in (0, 1]")
    exact = fraction * head_dim
    dim = round(exact)
    if dim < 2 or dim % 2 != 0 or not math.isclose(exact, dim, rel_tol=1e-6):
        raise ValueError(
            f"--rope-fraction {fraction} of a head of {head_dim} dimensions leaves {exact:g} to rotate; "
            "it must be an even integer, since dimensions rotate in pairs"
        )
    return dim
