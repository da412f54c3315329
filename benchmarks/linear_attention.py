"""Linear attention beside softmax attention: time and peak memory of one layer, forward and backward.

    python -m benchmarks.linear_attention [--lengths N …] [--rounds N] [--json]

The layer is the self-attention of a base model (512 dimensions, 8 heads, RoPE), in training, of the encoder (all
positions) and of the decoder (earlier positions), for one sentence. Each measurement has a process, whose second call
is timed. The peak is that of the process, without the imports.
"""

import math

import torch

from benchmarks.alternating import build_parser, report, seconds_of
from benchmarks.processes import available_memory, measure
from benchmarks.subjects import DEVICE, SIZES
from fairseq_rope.modules.attention import SelfAttention
from fairseq_rope.modules.linear_attention import Elu1, Favor, LinearSelfAttention
from fairseq_rope.positions.rotary import RotaryEmbedding

KINDS = ("softmax", "linear, elu1", "linear, favor")
WIDTH, HEADS = SIZES["base"]["width"], SIZES["base"]["heads"]
FEATURES = 272  # what --feature-map favor has for heads of 64 dimensions


def build(kind: str) -> SelfAttention:
    """Return one layer of *kind*, one of ``KINDS``."""
    if kind == "softmax":
        return SelfAttention(WIDTH, HEADS, RotaryEmbedding(WIDTH // HEADS))
    if kind.endswith("favor"):
        return LinearSelfAttention(WIDTH, HEADS, Favor(WIDTH // HEADS, FEATURES, 0), RotaryEmbedding(FEATURES))
    return LinearSelfAttention(WIDTH, HEADS, Elu1(), RotaryEmbedding(WIDTH // HEADS))


def training_seconds(kind: str, side: str, tokens: int) -> float:
    """Return the seconds of a forward and a backward pass of one layer for *tokens* positions."""
    torch.manual_seed(1)
    layer = build(kind).to(DEVICE)
    x = torch.randn(tokens, 1, WIDTH, device=DEVICE, requires_grad=True)
    mask = None
    if side == "decoder":  # as the decoder gives it
        mask = x.new_full((tokens, tokens), -math.inf).triu_(1) if kind == "softmax" else x.new_empty(0)

    def step() -> None:
        layer(x, x, x, attn_mask=mask, need_weights=False)[0].sum().backward()

    step()
    return seconds_of(step)


def main() -> None:
    parser = build_parser("linear_attention", __doc__, rounds=3)
    numbers = {"type": int, "nargs": "*", "metavar": "N"}
    parser.add_argument("--lengths", **numbers, default=[512, 1024, 2048, 4096, 8192, 16384], help="of the sentence")
    args = parser.parse_args()
    for side in ("encoder", "decoder"):
        for tokens in args.lengths:
            rows = measure(training_seconds, KINDS, args.rounds, side, tokens, limit=available_memory())
            report(f"self-attention of the {side}, {tokens} tokens, forward and backward", rows, args.json)


if __name__ == "__main__":
    main()
