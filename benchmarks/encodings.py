"""Every position encoding beside fairseq's transformer: training, generation and peak memory, in one table.

    python -m benchmarks.encodings [--size small|base] [--batch 16] [--rounds N] [--no-memory] [--json]

Training steps use fairseq's criterion for all. Generation is beam search with beam 4, as in benchmarks.generate.
"""

import argparse
import statistics

from benchmarks.alternating import build_parser, in_turns, ratio, report
from benchmarks.generate import SENTENCES, Translating
from benchmarks.subjects import SIZES
from benchmarks.train import STEPS, Candidate, Training, peak_memory
from fairseq_rope.positions import ENCODINGS


def systems() -> dict[str, Candidate]:
    """Return what is compared: fairseq's transformer, and transformer_rope with each encoding."""
    candidates = {"transformer": Candidate("transformer")}
    for name, encoding in ENCODINGS.items():
        sides = [""] if len(encoding.sides) == 2 else [f"{side}_" for side in encoding.sides]
        options = {f"{side}position_encoding": name for side in sides}
        candidates[name] = Candidate("transformer_rope", options=options)
    return candidates


def table(candidates: dict[str, Candidate], args: argparse.Namespace) -> list[dict[str, object]]:
    """Return a row for each of *candidates*; the first one is what the others are compared with."""
    yardstick = next(iter(candidates))
    memory = {name: 0.0 if args.no_memory else peak_memory(each, args.size) for name, each in candidates.items()}
    trainings = {name: Training(each, args.size) for name, each in candidates.items()}
    steps = {name: training.step for name, training in trainings.items()}
    training_seconds = in_turns(steps, args.rounds * STEPS[args.size])
    parameters = {name: sum(p.numel() for p in training.model.parameters()) for name, training in trainings.items()}
    del trainings, steps
    searches = {
        name: Translating(each.arch, args.size, args.batch, **each.options).translate
        for name, each in candidates.items()
    }
    search_seconds = in_turns(searches, args.rounds)
    return [
        {
            "model": name,
            "parameters": parameters[name],
            "training, times as fast": ratio(training_seconds, name, yardstick),
            "of the memory": memory[name] / memory[yardstick] if memory[yardstick] else 0.0,
            "sentences/s": SENTENCES[args.batch] / statistics.median(search_seconds[name]),
            "generation, times as fast": ratio(search_seconds, name, yardstick),
        }
        for name in candidates
    ]


def main() -> None:
    parser = build_parser("encodings", __doc__)
    parser.add_argument("--size", choices=sorted(SIZES), default="small", help="default: %(default)s")
    parser.add_argument("--batch", type=int, choices=sorted(SENTENCES), default=16, help="default: %(default)s")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    args = parser.parse_args()
    title = f"position encodings, {args.size}, generation in batches of {args.batch}"
    report(title, table(systems(), args), args.json)


if __name__ == "__main__":
    main()
