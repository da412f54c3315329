"""How long one sentence takes when 1, 4 and 16 clients ask for translations at the same time.

    python -m benchmarks.latency [--size small|base] [--clients 1 4 16] [--sentences 1000] [--rounds N] [--json]

The clients are threads of one process with one Translator of an int8 export. Each asks for the next sentence when it
has the last one. Weights are random: an output ends at 5 subwords more than its source. Sentences have real lengths.
"""

import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.alternating import build_parser, report
from benchmarks.serve import Exported, sentences
from benchmarks.subjects import SIZES, dictionary
from fairseq_rope.serving.translator import Translator


def latencies(translator: Translator, lines: list[str], clients: int) -> tuple[list[float], float]:
    """Return the seconds of each of *lines*, and those of all, with a number of *clients* at the same time."""
    remaining, seconds, lock = list(reversed(lines)), [], threading.Lock()

    def ask() -> None:
        while True:
            with lock:
                if not remaining:
                    return
                line = remaining.pop()
            begun = time.perf_counter()
            translator.translate(line)
            seconds.append(time.perf_counter() - begun)

    with ThreadPoolExecutor(clients) as threads:
        begun = time.perf_counter()
        for client in [threads.submit(ask) for _ in range(clients)]:
            client.result()
    return seconds, time.perf_counter() - begun


def main() -> None:
    parser = build_parser("latency", __doc__, rounds=1)
    parser.add_argument("--size", choices=sorted(SIZES), default="base", help="default: %(default)s")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16], metavar="N", help="default: 1 4 16")
    parser.add_argument("--sentences", type=int, default=1000, metavar="N", help="default: %(default)s")
    args = parser.parse_args()
    for flag, values, least in (("clients", args.clients, 1), ("sentences", [args.sentences], 2)):
        for value in values:
            if value < least:
                parser.error(f"--{flag} {value}: must be {least} or more")
    vocabulary = dictionary(SIZES[args.size]["vocab"])
    _, pairs = sentences(vocabulary)
    count = args.rounds * args.sentences
    lines = [" ".join(vocabulary[n] for n in pairs[number % len(pairs)][0]) for number in range(count)]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Exported(SIZES[args.size], vocabulary, pairs, "int8", Path(folder, "model")).folder
        with Translator(str(path)) as translator:
            translator.translate(lines[0])
            for clients in args.clients:
                seconds, total = latencies(translator, lines, clients)
                cuts = statistics.quantiles(seconds, n=100)
                row = {"clients": clients, "p50, s": cuts[49], "p99, s": cuts[98], "sentences/s": len(lines) / total}
                rows.append(row)
    report(f"latency, {args.size}, int8, beam 4", rows, args.json)


if __name__ == "__main__":
    main()
