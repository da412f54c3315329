"""Long inputs beside fairseq's transformer: time and peak memory of the encoder and of a search with beam 4.

    python -m benchmarks.long_inputs [--size small|base] [--lengths N …] [--outputs N …] [--rounds N] [--json]

Each measurement has a process, and the models take turns. Weights are random. The encoder reads one
sentence of each of --lengths. A search writes outputs of each of --outputs for a source of usual length. The peak
is that of the process, with the model and without the imports. A model that needs more memory than the machine has
free, or than --memory, is reported, and the others are measured.
"""

import torch

from benchmarks.alternating import build_parser, report, seconds_of
from benchmarks.generate import ARCHS, Translating
from benchmarks.processes import available_memory, measure
from benchmarks.subjects import DEVICE, SIZES, build, dictionary


@torch.no_grad()
def encoding_seconds(arch: str, size_name: str, tokens: int) -> float:
    """Return the seconds of the encoder for one sentence of *tokens* words."""
    size = SIZES[size_name]
    words = dictionary(size["vocab"])
    model = build(arch, words, size).eval()
    if DEVICE == "cuda":
        model.half()
    model.make_generation_fast_(need_attn=False)

    def encode(length: int) -> None:
        sentence = torch.randint(words.nspecial, len(words), (1, length), device=DEVICE)
        model.encoder(sentence, torch.tensor([length], device=DEVICE))

    encode(16)  # the first call is slower
    return seconds_of(lambda: encode(tokens))


def search_seconds(arch: str, size_name: str, tokens: int) -> float:
    """Return the seconds of a search with beam 4 for an output of *tokens* words."""
    return seconds_of(Translating(arch, size_name, 1, tokens).translate)


def main() -> None:
    parser = build_parser("long_inputs", __doc__, rounds=3)
    numbers = {"type": int, "nargs": "*", "metavar": "N"}
    parser.add_argument("--size", choices=sorted(SIZES), default="base", help="default: %(default)s")
    parser.add_argument("--lengths", **numbers, default=[1000, 4000, 16000], help="of the encoder's inputs")
    parser.add_argument("--outputs", **numbers, default=[1000, 4000], help="lengths of the outputs of the search")
    parser.add_argument("--memory", type=float, metavar="GIB", help="for one model; default: what is free")
    args = parser.parse_args()
    for work, seconds_for, lengths in (
        ("encoder", encoding_seconds, args.lengths),
        ("search, beam 4", search_seconds, args.outputs),
    ):
        for tokens in lengths:
            limit = available_memory() if args.memory is None else int(args.memory * 2**30)
            rows = measure(seconds_for, ARCHS, args.rounds, args.size, tokens, limit=limit)
            report(f"{work}, {tokens} tokens, {args.size}", rows, args.json)


if __name__ == "__main__":
    main()
