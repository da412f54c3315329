"""Long inputs beside fairseq's transformer: time and peak memory of the encoder and of a search with beam 4.

    python -m benchmarks.long_inputs [--size small|base] [--lengths N …] [--outputs N …] [--rounds N] [--json]

Each measurement has a process, and the models take turns. Weights are random. The encoder reads one
sentence of each of --lengths. A search writes outputs of each of --outputs for a source of usual length. The peak
is that of the process, with the model and without the imports. A model that needs more memory than the machine has
free, or than --memory, is reported, and the others are measured.
"""

import statistics
from collections.abc import Callable

import torch

from benchmarks.alternating import build_parser, ratio, report, seconds_of, turned
from benchmarks.generate import ARCHS, Translating
from benchmarks.processes import OutOfMemoryError, available_memory, in_a_process
from benchmarks.subjects import DEVICE, SIZES, build, dictionary

YARDSTICK = ARCHS[0]


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


def measure(
    seconds_for: Callable[[str, str, int], float], size: str, tokens: int, rounds: int, limit: int
) -> list[dict[str, object]]:
    """Return a row for each model: medians of its seconds and of its peak memory over the rounds."""
    seconds: dict[str, list[float]] = {arch: [] for arch in ARCHS}
    peaks: dict[str, list[float]] = {arch: [] for arch in ARCHS}
    failures: dict[str, str] = {}
    for number in range(rounds):
        for arch in turned(ARCHS, number):
            if arch not in failures:
                try:
                    second, peak = in_a_process(seconds_for, arch, size, tokens, limit=limit)
                except OutOfMemoryError as error:
                    failures[arch] = str(error)
                    continue
                seconds[arch].append(second)
                peaks[arch].append(peak)
    rows: list[dict[str, object]] = []
    for arch in ARCHS:
        row = {
            "model": arch,
            "seconds": failures.get(arch, ""),
            "times as fast": "",
            "peak MiB": "",
            "of the memory": "",
        }
        if arch not in failures:
            row.update({"seconds": statistics.median(seconds[arch]), "peak MiB": statistics.median(peaks[arch])})
            if YARDSTICK not in failures:
                row["times as fast"] = ratio(seconds, arch, YARDSTICK)
                row["of the memory"] = row["peak MiB"] / statistics.median(peaks[YARDSTICK])
        rows.append(row)
    return rows


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
            rows = measure(seconds_for, args.size, tokens, args.rounds, limit)
            report(f"{work}, {tokens} tokens, {args.size}", rows, args.json)


if __name__ == "__main__":
    main()
