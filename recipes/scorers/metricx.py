"""Print MetricX-24's error of each translation, from 0, the best, to 25: a program for ``--scorer``.

It runs ``python -m metricx24.predict`` with its own Python interpreter, and needs a clone of
https://github.com/google-research/metricx in PYTHONPATH. It passes unknown flags on.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    """Print the errors. Exits with the status of MetricX if that fails."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for flag in ("--source", "--hypothesis"):
        parser.add_argument(flag, type=Path, required=True, metavar="FILE")
    without = "default: estimate the quality without one"
    parser.add_argument("--reference", type=Path, nargs="+", action="extend", metavar="FILE", help=without)
    args, flags = parser.parse_known_args()
    if len(args.reference or ()) > 1:
        files = " ".join(map(str, args.reference))
        parser.error(f"--reference {files}: MetricX compares with one reference; drop {{reference}} from the command")
    paths = {"source": args.source, "hypothesis": args.hypothesis}
    if args.reference:
        paths["reference"] = args.reference[0]
    texts = {name: path.read_text(encoding="utf-8").splitlines() for name, path in paths.items()}
    texts.setdefault("reference", [""] * len(texts["source"]))
    rows = [dict(zip(texts, row, strict=True)) for row in zip(*texts.values(), strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        input_file, predictions = Path(folder) / "input.jsonl", Path(folder) / "output.jsonl"
        input_file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        flags += ["--input_file", str(input_file), "--output_file", str(predictions)]
        flags += [] if args.reference else ["--qe"]
        status = subprocess.run([sys.executable, "-m", "metricx24.predict", *flags], stdout=sys.stderr).returncode
        if status != 0:
            sys.exit(status)
        for line in predictions.read_text(encoding="utf-8").splitlines():
            print(json.loads(line)["prediction"])


if __name__ == "__main__":
    main()
