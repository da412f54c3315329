"""Draw how the bound on a score decays with distance (arXiv:2104.09864, section 3.4.3, figure 2).

    python docs/decay.py [--base 10000] [--output docs/decay.png]

The score of a query and a key at relative distance m is Re sum_i h_i e^(i m theta_i), over the d/2 pairs of a
head, h_i being the product of the i-th pairs. Summed by parts, with h_(d/2) = 0, it is at most

    max_i |h_(i+1) - h_i| * sum_j |S_j|,    S_j = sum_(i < j) e^(i m theta_i)

(equations 36 and 37). Drawn is the mean of |S_j|, for the head sizes of the named architectures.
"""

import argparse
import logging
import math
import os
from pathlib import Path

import torch
from matplotlib.figure import Figure

from fairseq_rope.positions.rotary import rotary_tables

HEAD_SIZES = (32, 64, 128)  # transformer_rope_tiny; base and big; iwslt_de_en
FARTHEST = 512


def bound(head_dim: int, base: float, farthest: int = FARTHEST) -> torch.Tensor:
    """The mean over j of |S_j| at distances 0 … *farthest*: (farthest + 1), float64."""
    cos, sin = rotary_tables(farthest + 1, head_dim, base, torch.device("cpu"))
    partial_sums = torch.complex(cos.double(), sin.double()).cumsum(dim=1)  # (T, d / 2), S_1 … S_(d/2)
    return partial_sums.abs().mean(dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="decay.py", description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=float, default=10000.0, help="--rope-base; default: %(default)g")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".png"), metavar="FILE")
    args = parser.parse_args()
    if not (math.isfinite(args.base) and args.base > 1):
        parser.error(f"--base {args.base}: must be a number above 1")
    if args.output.suffix not in (".png", ".svg", ".pdf") or not args.output.parent.is_dir():
        parser.error(f"--output {args.output}: must be a .png, .svg or .pdf file in a folder that is there")
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq, once imported, lets all be said
    figure = Figure(figsize=(7, 3.8), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    for head_dim in HEAD_SIZES:
        of_distance = bound(head_dim, args.base)
        axes.plot(of_distance / of_distance[0], label=f"head of {head_dim}", linewidth=1.2)
    axes.set(xlabel="distance in tokens", ylabel="bound, relative to distance 0", ylim=(0, 1), xlim=(0, FARTHEST))
    axes.grid(alpha=0.3)
    axes.legend()
    part = args.output.with_suffix(f".tmp{args.output.suffix}")
    figure.savefig(part)
    os.replace(part, args.output)


if __name__ == "__main__":
    main()
