"""Lines a second of each text stage of the recipes.

    python -m benchmarks.preprocess [--source FILE --target FILE] [--workers N …] [--json]

Without files, on the demo's training set. Each stage is the tool that the recipes run, its start included.
"""

import argparse
import gzip
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.alternating import report

ROOT = Path(__file__).resolve().parents[1]
CORPUS = ROOT / "recipes" / "demo" / "corpus"


def stages(folder: Path, source: Path, target: Path, workers: int) -> dict[str, list[object]]:
    """The words of the tools, in the order in which each makes the next one's input."""
    module = [sys.executable, "-m"]
    out = {name: folder / f"{name}.{workers}" for name in ("tok", "tok2", "codes", "bpe")}
    codes, size = out["codes"], ["--vocab-size", 1000]
    tokenise = [*module, "recipes.text.tokenise", "--workers", workers]
    bpe = [*module, "recipes.text.bpe"]
    return {
        "tokenise, source": [*tokenise, "--lang", "en", "--input", source, "--output", out["tok"]],
        "tokenise, target": [*tokenise, "--lang", "de", "--input", target, "--output", out["tok2"]],
        "learn BPE, both sides": [*bpe, "learn", *size, "--output", codes, out["tok"], out["tok2"]],
        "apply BPE, source": [
            *[*bpe, "apply", "--codes", codes, "--workers", workers],
            *["--input", out["tok"], "--output", out["bpe"]],
        ],
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.preprocess", description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path)
    parser.add_argument("--target", type=Path)
    parser.add_argument("--workers", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--rounds", type=int, default=5, help="the median counts; default: %(default)s")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if (args.source is None) != (args.target is None):
        parser.error("--source and --target: give both or neither")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source, target = args.source, args.target
        if source is None:
            source, target = folder / "train.en", folder / "train.de"
            for text in (source, target):
                text.write_bytes(gzip.decompress((CORPUS / f"{text.name}.gz").read_bytes()))
        lines = source.read_bytes().count(b"\n")
        seconds: dict[tuple[str, int], list[float]] = {}
        for _ in range(args.rounds):
            for workers in args.workers:
                for stage, words in stages(folder, source, target, workers).items():
                    begun = time.perf_counter()
                    tool = [str(word) for word in words]
                    subprocess.run(tool, cwd=ROOT, env=environment, check=True, capture_output=True)
                    seconds.setdefault((stage, workers), []).append(time.perf_counter() - begun)
    rows = []
    for (stage, workers), times in seconds.items():
        count = 2 * lines if "both" in stage else lines
        speed = count / statistics.median(times)
        rows.append({"stage": stage, "workers": workers, "lines": count, "lines/s": speed})
    report("text stages", rows, args.json)


if __name__ == "__main__":
    main()
