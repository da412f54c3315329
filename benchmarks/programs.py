"""Whole fairseq-train processes: words a second, beside fairseq's transformer in float32.

    python -m benchmarks.programs [--size small|base] [--rounds N] [--updates N] [--max-tokens N] [--bf16] [--json]

Each measurement is a process of its own, and counts the second half of its updates. The processes take turns.
fairseq's transformer runs without the plugin, with fairseq's Adam and criterion. Sentences have real lengths, and
words by Zipf's law. On a CPU that computes bfloat16 in hardware, and with the flag --bf16, the last row is a training
with --bf16. On a GPU there are also rows with --fp16; fairseq's own --bf16 does not train on a GPU.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.alternating import build_parser, report, turned
from benchmarks.subjects import DEVICE, HAS_FAST_BFLOAT16, SIZES, dataset, dictionary

PLUGIN = Path(__file__).resolve().parents[1] / "fairseq_rope"
OURS = "--arch transformer_rope --criterion fused_label_smoothed_cross_entropy"
THREADS = 2
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": str(THREADS)}
FLAGS = {  # by the names of the rows; the first is the yardstick
    "transformer": "--arch transformer --criterion label_smoothed_cross_entropy",
    "transformer_rope, fused": OURS,
    "transformer_rope, fused, bf16": f"{OURS} --bf16",
}
if DEVICE == "cuda":
    FLAGS["transformer, fp16"] = f"{FLAGS['transformer']} --fp16"
    FLAGS["transformer_rope, fused, fp16"] = f"{OURS} --fp16"
COPIES = 50 if DEVICE == "cuda" else 1  # of the pairs: a new epoch takes a GPU longer than many updates


def program(name: str) -> str:
    """The path of a program of this Python's environment."""
    return str(Path(sys.executable).with_name(name))


def write_data(size: dict[str, int], folder: Path) -> Path:
    """Write the pairs of ``subjects.dataset`` as fairseq's binary data. Returns their folder."""
    words = dictionary(size["vocab"])
    pairs = dataset(words)
    words.save(str(folder / "dict.txt"))
    for side, sentences in (("src", pairs.src), ("tgt", pairs.tgt)):
        text = "\n".join(words.string(sentence) for sentence in sentences)
        (folder / f"train.{side}").write_text(f"{text}\n" * COPIES, encoding="utf-8")
    files = ["--trainpref", str(folder / "train"), "--srcdict", str(folder / "dict.txt")]
    files += ["--joined-dictionary", "--destdir", str(folder / "bin")]
    command = [program("fairseq-preprocess"), "-s", "src", "-t", "tgt", *files]
    subprocess.run(command, check=True, capture_output=True)
    return folder / "bin"


def command(name: str, size: dict[str, int], data: Path, updates: int, tokens: int) -> list[str]:
    """The fairseq-train command of the row *name*."""
    sizes = " ".join(
        f"--{side}-layers {size['layers']} --{side}-embed-dim {size['width']} "
        f"--{side}-ffn-embed-dim {size['ffn_width']} --{side}-attention-heads {size['heads']}"
        for side in ("encoder", "decoder")
    )
    flags = (
        f"{FLAGS[name]} {sizes} --share-all-embeddings --dropout 0.1 --label-smoothing 0.1 --optimizer adam "
        f"--lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000 --max-tokens {tokens} --max-update {updates} "
        "--disable-validation --no-save --log-format json --log-interval 1"
    )
    device = ["--distributed-world-size", "1", *([] if DEVICE == "cuda" else ["--cpu"])]  # by default, all GPUs
    user_dir = PLUGIN if FLAGS[name].startswith(OURS) else Path(__file__).parent / "fairseq_alone"
    return [program("fairseq-train"), str(data), "--user-dir", str(user_dir), *flags.split(), *device]


def words_per_second(words: list[str], updates: int) -> float:
    """Run the fairseq-train command *words*; return the words a second of the second half of its updates."""
    begun, ended, count, lines = 0.0, 0.0, 0.0, []
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors, text=True, env=ENVIRONMENT) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if '"num_updates"' not in line or "| train_inner |" not in line:
                continue
            entry = json.loads(line[line.index("{") :])
            if int(entry["num_updates"]) == updates // 2:
                begun = time.perf_counter()
            elif int(entry["num_updates"]) > updates // 2:
                count, ended = count + float(entry["wpb"]), time.perf_counter()
        if process.wait() or not count:
            errors.seek(0)
            sys.exit(f"{' '.join(words)} ended with status {process.returncode}:\n{''.join(lines)}{errors.read()}")
    return count / (ended - begun)


def main() -> None:
    parser = build_parser("programs", __doc__, rounds=3)
    parser.add_argument("--size", choices=sorted(SIZES), action="append", help="default: all")
    parser.add_argument("--updates", type=int, default=12, help="of each process; default: %(default)s")
    parser.add_argument("--max-tokens", type=int, default=2048, help="of a batch; default: %(default)s")
    parser.add_argument("--bf16", action="store_true", help="also if the CPU emulates bfloat16, which is slow")
    args = parser.parse_args()
    if args.updates < 2:
        parser.error(f"--updates {args.updates}: must be 2 or more, because the second half counts")
    torch.set_num_threads(THREADS)  # the head of the table says it
    names = [name for name in FLAGS if "bf16" not in name or args.bf16 or HAS_FAST_BFLOAT16 or DEVICE == "cuda"]
    for size in args.size or SIZES:
        speeds: dict[str, list[float]] = {name: [] for name in names}
        with tempfile.TemporaryDirectory() as folder:
            data = write_data(SIZES[size], Path(folder))
            for number in range(args.rounds):
                for name in turned(names, number):
                    words = command(name, SIZES[size], data, args.updates, args.max_tokens)
                    speeds[name].append(words_per_second(words, args.updates))
        rows = [
            {
                "model": name,
                "words/s": statistics.median(speeds[name]),
                "times as fast": statistics.median(a / b for a, b in zip(speeds[name], speeds[names[0]], strict=True)),
            }
            for name in names
        ]
        report(f"fairseq-train, {size}", rows, args.json)


if __name__ == "__main__":
    main()
