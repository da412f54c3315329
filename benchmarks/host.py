"""The host's time: milliseconds for an update and for a step of the search, of base depth with tiny tensors.

    python -m benchmarks.host [--rounds N] [--updates N] [--json]

A GPU waits for the host when its tensors are small. Here they are so small (6 + 6 layers of width 16, two short
sentences, one thread) that the host's time is all that remains, also on a CPU. Each measurement is a whole process of
fairseq-train or fairseq-generate, and the processes take turns. In the tables, the plugin computes as on a GPU; what
only CPUs run (dropout, and linear layers in 16 bits) has a column of its own.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.alternating import build_parser, report, turned
from recipes.script import PROGRAMS, ROOT

SIZES = (
    "--encoder-embed-dim 16 --decoder-embed-dim 16 --encoder-ffn-embed-dim 32 --decoder-ffn-embed-dim 32 "
    "--encoder-attention-heads 4 --decoder-attention-heads 4 --share-all-embeddings --dropout 0.1 --cpu "
    "--optimizer adam --lr 5e-4 --lr-scheduler inverse_sqrt --warmup-updates 4000 --clip-norm 1.0 --batch-size 2 "
    "--num-workers 0 --disable-validation"
)
PLAIN, FUSED = "--criterion label_smoothed_cross_entropy", "--criterion fused_label_smoothed_cross_entropy"
PLUGIN, FAIRSEQ = ROOT / "fairseq_rope", ROOT / "benchmarks" / "fairseq_alone"
ROWS = {  # by name: --user-dir, flags, and the row with which it is compared
    "fairseq alone": (FAIRSEQ, f"--arch transformer {PLAIN}", "fairseq alone"),
    "transformer_rope": (PLUGIN, f"--arch transformer_rope {PLAIN}", "fairseq alone"),
    "transformer_rope, fused": (PLUGIN, f"--arch transformer_rope {FUSED}", "fairseq alone"),
    "transformer, bf16": (PLUGIN, f"--arch transformer {PLAIN} --bf16", "transformer, bf16"),
    "transformer_rope, bf16": (PLUGIN, f"--arch transformer_rope {PLAIN} --bf16", "transformer, bf16"),
    "transformer_rope, fused, bf16": (PLUGIN, f"--arch transformer_rope {FUSED} --bf16", "transformer, bf16"),
}
SEARCHED = ("fairseq alone", "transformer_rope")
LENGTH = 40  # tokens of each output, with its end
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
ENVIRONMENT["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"  # without it, fairseq alone loads no checkpoint


def write_data(folder: Path) -> Path:
    """Write pairs of short sentences of 40 words as fairseq's binary data. Returns their folder."""
    for side in ("src", "tgt"):
        lines = (" ".join(f"w{(number + word) % 40}" for word in range(5 + number % 4)) for number in range(2000))
        (folder / f"train.{side}").write_text("".join(f"{line}\n" for line in lines))
        (folder / f"test.{side}").write_text("w1 w2 w3 w4 w5 w6\n" * 16)
    files = ["--trainpref", folder / "train", "--testpref", folder / "test", "--joined-dictionary"]
    words = [f"{PROGRAMS}/fairseq-preprocess", "-s", "src", "-t", "tgt", *files, "--destdir", folder / "bin"]
    subprocess.run([str(word) for word in words], check=True, capture_output=True)
    return folder / "bin"


def timed(*words: object) -> dict[str, float]:
    """Return the milliseconds of each part of a program, which ``timed.py`` runs."""
    command = [sys.executable, str(Path(__file__).with_name("timed.py")), *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
    if done.returncode:
        sys.exit(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    times: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return times


def update(name: str, data: Path, updates: int) -> dict[str, float]:
    """Return the milliseconds of an update and of its parts, in a training of *updates* updates."""
    user_dir, flags, _ = ROWS[name]
    train = ["fairseq-train", data, "--user-dir", user_dir, *flags.split(), *SIZES.split()]
    train += ["--max-update", updates, "--no-save"]
    times = timed(*([] if user_dir == FAIRSEQ else ["--as-on-gpu"]), *train)
    parts = {"forward": times["forward and backward"] - times["backward"]}
    parts |= {part: times[part] for part in ("backward", "gradient norm", "optimiser", "logging")}
    parts |= {"trainer": times["update"] - sum(parts.values()), "data": times["all"] - times["update"]}
    on_cpu = times if user_dir == FAIRSEQ else timed(*train)
    return {"all": times["all"], **parts, "only on CPUs": on_cpu["all"] - times["all"]}


def step(name: str, data: Path, folder: Path) -> dict[str, float]:
    """Return the milliseconds of a step of the search for a sentence with beam 4."""
    user_dir, flags, _ = ROWS[name]
    common = [data, "--user-dir", user_dir, "--cpu"]
    if not folder.exists():
        words = ["fairseq-train", *common, *flags.split(), *SIZES.split(), "--max-update", 8]
        timed(*words, "--no-epoch-checkpoints", "--save-dir", folder)
    lengths = ["--max-len-a", 0, "--max-len-b", LENGTH - 1, "--min-len", LENGTH - 1]
    words = ["fairseq-generate", *common, "--path", folder / "checkpoint_last.pt", "--beam", 4, "--batch-size", 1]
    return {"all": timed(*words, *lengths)["search"] / LENGTH}


def table(unit: str, times: dict[str, list[dict[str, float]]]) -> list[dict[str, object]]:
    """Return a row for each name in *times*: medians over the rounds."""
    rows = []
    for name, rounds in times.items():
        pairs = zip(rounds, times[ROWS[name][2]], strict=True)
        row: dict[str, object] = {
            unit: name,
            "of its yardstick": statistics.median(a["all"] / b["all"] for a, b in pairs),
        }
        rows.append(row | {part: statistics.median(each[part] for each in rounds) for part in rounds[0]})
    return rows


def main() -> None:
    parser = build_parser("host", __doc__, rounds=3)
    parser.add_argument("--updates", type=int, default=200, help="of each process; default: %(default)s")
    args = parser.parse_args()
    updates: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    steps: dict[str, list[dict[str, float]]] = {name: [] for name in SEARCHED}
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(folder))
        for number in range(args.rounds):
            for name in turned(list(ROWS), number):
                updates[name].append(update(name, data, args.updates))
            for name in turned(SEARCHED, number):
                steps[name].append(step(name, data, Path(folder, name)))
    report("the host's time, training", table("ms an update", updates), args.json)
    report("the host's time, search", table("ms a step", steps), args.json)


if __name__ == "__main__":
    main()
