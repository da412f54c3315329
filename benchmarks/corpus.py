"""A corpus through ``fairseq-rope translate --output-dir``: two processes of one thread beside one of two threads.

    python -m benchmarks.corpus --model FOLDER --input FILE [--lines N] [--rounds N] [--json]

FOLDER is an exported model, which must be trained: the outputs of random weights do not end. The corpus has N lines,
those of FILE, repeated. The time is that of the whole command: each process loads the model.
"""

import itertools
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from benchmarks.alternating import build_parser, in_turns, ratio, report
from fairseq_rope.lines import read_lines

CANDIDATES = {"1 process, 2 threads": (1, 2), "2 processes, 1 thread": (2, 1)}


def translate(model: Path, text: Path, outputs: "itertools.count[int]", jobs: int, threads: int) -> None:
    """Translate *text* into a new folder."""
    output = text.with_name(f"output{next(outputs)}")
    words = ["--model", model, "--input", text, "--output-dir", output, "--jobs", jobs, "--threads", threads]
    subprocess.run([sys.executable, "-m", "fairseq_rope", "translate", *map(str, words)], check=True)


def main() -> None:
    parser = build_parser("corpus", __doc__, rounds=3)
    parser.add_argument("--model", type=Path, required=True, metavar="FOLDER", help="an exported model")
    parser.add_argument("--input", type=Path, required=True, metavar="FILE", help="text, a sentence a line")
    parser.add_argument("--lines", type=int, default=20_000, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    if args.lines < 1:
        parser.error(f"--lines {args.lines}: must be 1 or more")
    try:
        lines = read_lines(str(args.input))
    except (OSError, ValueError) as error:
        parser.error(f"--input: {error}")
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "text")
        text.write_text(
            "".join(f"{line}\n" for line in itertools.islice(itertools.cycle(lines), args.lines)), encoding="utf-8"
        )
        run = partial(translate, args.model, text, itertools.count())
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
    report(f"corpus of {args.lines} lines", rows, args.json)


if __name__ == "__main__":
    main()
