"""A corpus through ``fairseq-rope translate --output-dir``: two processes of one thread beside one of two threads.

    python -m benchmarks.corpus [--size small|base] [--lines N] [--shard-lines N] [--rounds N] [--json]

The model has random weights and is exported in int8; an output ends at 5 subwords more than its source. Sentences have
real lengths. The time is that of the whole command: each shard starts a process, which loads the model.
"""

import itertools
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.alternating import build_parser, in_turns, ratio, report
from benchmarks.serve import Exported, sentences
from benchmarks.subjects import SIZES, dictionary

CANDIDATES = {"1 process, 2 threads": (1, 2), "2 processes, 1 thread": (2, 1)}


def translate(model: Path, text: Path, outputs: "itertools.count[int]", lines: int, jobs: int, threads: int) -> None:
    """Translate *text* into a new folder."""
    output = text.with_name(f"output{next(outputs)}")
    words = ["--model", model, "--input", text, "--output-dir", output, "--shard-lines", lines]
    flags = map(str, [*words, "--jobs", jobs, "--threads", threads])
    subprocess.run([sys.executable, "-m", "fairseq_rope", "translate", *flags], check=True)


def main() -> None:
    parser = build_parser("corpus", __doc__, rounds=3)
    parser.add_argument("--size", choices=sorted(SIZES), default="small", help="default: %(default)s")
    for flag, default in (("--lines", 8000), ("--shard-lines", 2000)):
        parser.add_argument(flag, type=int, default=default, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    for flag, value in (("lines", args.lines), ("shard-lines", args.shard_lines)):
        if value < 1:
            parser.error(f"--{flag} {value}: must be 1 or more")
    vocabulary = dictionary(SIZES[args.size]["vocab"])
    _, pairs = sentences(vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text")
        sources = itertools.islice(itertools.cycle(source for source, _ in pairs), args.lines)
        text.write_text("".join(" ".join(vocabulary[n] for n in source) + "\n" for source in sources))
        model = Exported(SIZES[args.size], vocabulary, pairs, "int8", Path(folder, "model")).folder
        run = partial(translate, model, text, itertools.count(), args.shard_lines)
        seconds = in_turns({name: partial(run, *numbers) for name, numbers in CANDIDATES.items()}, args.rounds)
    first = next(iter(CANDIDATES))
    rows = [
        {
            "processes": name,
            "lines/s": args.lines / statistics.median(seconds[name]),
            "times as fast": ratio(seconds, name, first),
        }
        for name in CANDIDATES
    ]
    report(f"corpus, {args.size}, int8, beam 4, shards of {args.shard_lines} lines", rows, args.json)


if __name__ == "__main__":
    main()
