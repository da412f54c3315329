"""What one GPU does, as a page in Markdown: training, generation, and small trainings side by side.

    python -m benchmarks.gpu --output gpu.md [--minutes 12] [--data DATA_BIN] [--only training …] [--size small|base]

The parts share the minutes. Each runs in a process until its time is over, and the page is written with each row.
``--device cpu --size small --minutes 2`` tries the command with tiny batches on a machine without a GPU.
"""

import argparse
import contextlib
import inspect
import json
import multiprocessing
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch.autograd import DeviceType

from benchmarks.alternating import in_turns, machine, ratio, seconds_of
from benchmarks.generate import Translating
from benchmarks.subjects import DEVICE, SIZES, batches, dataset, dictionary
from benchmarks.train import CANDIDATES, Training
from fairseq_rope.files import write_whole
from fairseq_rope.search.ensemble import SWITCH
from recipes.script import PROGRAMS, ROOT, end
from recipes.settings import merged, read_yaml
from recipes.training import Train
from recipes.work import Step

Row = dict[str, object]
Part = Callable[[argparse.Namespace, float], Iterator[Row]]  # called with the time.monotonic() at which it must end
ON_GPU = DEVICE == "cuda"
COMPILED = ", compiled"
OURS = ("transformer_rope", "transformer_rope, fused")
TRAINED = ("transformer", *OURS, *(name + COMPILED for name in OURS))  # compiling takes minutes, so it comes last
SEARCHES = {  # the architecture, and the fast search off (0) or on (1)
    "transformer": ("transformer", "0"),
    "transformer_rope": ("transformer_rope", "1"),
    "transformer_rope, fast search off": ("transformer_rope", "0"),
}
TOKENS = (4096, 8192, 16384, 32768, 65536) if ON_GPU else (256, 512)
SENTENCES = (16, 128, 512) if ON_GPU else (1,)
SIDE_BY_SIDE = 8 if ON_GPU else 2
STEPS, ROUNDS = (4, 3) if ON_GPU else (2, 1)  # so many batches, each timed so many times


def training(args: argparse.Namespace, ends: float) -> Iterator[Row]:
    """Target tokens a second in bfloat16, and the share of a step in which the GPU is busy."""
    words = dictionary(SIZES[args.size]["vocab"])
    data = dataset(words, copies=10)  # enough for STEPS of the largest batches
    of_fairseq: dict[int, float] = {}
    for name in TRAINED:
        one = Training(CANDIDATES[name.removesuffix(COMPILED)], args.size)
        if name.endswith(COMPILED):
            one.model.compiles = True
            one.model.train()
        for tokens in TOKENS:
            one.take(batches(words, tokens, data=data)[:STEPS])
            row: Row = {"model": name, "tokens a batch": tokens}
            try:
                speed, busy = speed_of(one)
            except torch.OutOfMemoryError:
                yield {**row, "tokens/s": "does not fit", "times as fast": "", "GPU busy, %": ""}
                break
            if name == TRAINED[0]:
                of_fairseq[tokens] = speed
            times = speed / of_fairseq[tokens] if tokens in of_fairseq else ""
            yield {**row, "tokens/s": speed, "times as fast": times, "GPU busy, %": busy}


def speed_of(one: Training) -> tuple[float, float]:
    """Return the target tokens a second, and the percentage of a step in which the GPU is busy."""
    for _ in range(STEPS):
        one.step()  # allocates memory, and compiles
    seconds = [seconds_of(one.step) for _ in range(ROUNDS * STEPS)]
    with torch.profiler.profile() as profile:
        seconds_of(one.step)
    of_gpu = (x for x in profile.key_averages() if x.device_type == DeviceType.CUDA and not x.is_user_annotation)
    busy = sum(x.self_device_time_total for x in of_gpu) / 1e6
    return one.tokens * len(seconds) / sum(seconds), 100 * busy / statistics.median(seconds[::STEPS])


def generation(args: argparse.Namespace, ends: float) -> Iterator[Row]:
    """Sentences a second in float16 with beam 4."""

    def translate(one: Translating, switch: str) -> None:
        os.environ[SWITCH] = switch
        one.translate()

    for batch in SENTENCES:
        translating = {name: (Translating(arch, args.size, batch), switch) for name, (arch, switch) in SEARCHES.items()}
        seconds = in_turns({name: partial(translate, *each) for name, each in translating.items()}, ROUNDS)
        for name, (one, _) in translating.items():
            sentences = sum(sample["nsentences"] for sample in one.batches)
            row: Row = {"model": name, "batch": batch, "sentences/s": sentences / statistics.median(seconds[name])}
            yield {**row, "times as fast": ratio(seconds, name, "transformer")}


def side_by_side(args: argparse.Namespace, ends: float) -> Iterator[Row]:
    """Updates a second of trainings of the recipe multi30k_wu2021, all at the same time."""
    settings = merged(
        read_yaml(ROOT / "recipes" / "multi30k_wu2021" / "settings.yaml"),
        {"max_updates": 0, "patience": 0} if ON_GPU else {"tokens_per_update": 256},
    )
    environment = {**os.environ, "FAIRSEQ_ROPE": str(ROOT), "PATH": f"{PROGRAMS}:{os.environ['PATH']}"}
    data, logs = Step("data", ""), []
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as trainings:
        Path(folder, data.name).symlink_to(args.data.resolve())
        for seed in range(SIDE_BY_SIDE):
            train = Train.of("", settings, settings.precision, seed, data)
            command = f"{train.command(int(ON_GPU), settings.tokens_per_update)} --no-save"
            logs.append(Path(folder, str(seed), "log"))
            logs[-1].parent.mkdir()
            with logs[-1].open("wb") as log:
                process = subprocess.Popen(
                    ["bash", "-c", command], cwd=logs[-1].parent, env=environment, stdout=log, start_new_session=True
                )
            trainings.callback(end, process)
        time.sleep(max(0.0, ends - time.monotonic() - 10))  # in the last seconds, they are ended
        speeds = [updates_per_second(log) for log in logs]
    yield {"trainings": SIDE_BY_SIDE, "of each": ", ".join(f"{x:.3g}" for x in speeds), "all together": sum(speeds)}


def updates_per_second(log: Path) -> float:
    """Return the mean of the updates a second in a log of fairseq-train, without those until its first line."""
    lines = [line for line in log.read_text().splitlines() if "| train_inner |" in line][1:]
    speeds = [float(json.loads(line[line.index("{") :])["ups"]) for line in lines]
    return statistics.harmonic_mean(speeds) if speeds else 0.0


PARTS = {"training": (training, 5), "generation": (generation, 3), "side_by_side": (side_by_side, 4)}  # with shares


def rows_of(part: Part, args: argparse.Namespace, ends: float) -> Iterator[Row]:
    """Yield the rows of *part* from a process, which is killed at *ends*."""
    spawn = multiprocessing.get_context("spawn")
    receiving, sending = spawn.Pipe(duplex=False)
    process = spawn.Process(target=send_rows, args=(part, args, ends, sending))
    process.start()
    sending.close()
    with contextlib.suppress(EOFError):  # the process has ended
        while receiving.poll(max(0.0, ends - time.monotonic())):
            yield receiving.recv()
    process.kill()
    process.join()


def send_rows(part: Part, args: argparse.Namespace, ends: float, sending: Connection) -> None:
    for row in part(args, ends):
        sending.send(row)


def as_markdown(rows: list[Row]) -> str:
    """Return *rows*, all with the same keys, as a table."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the page, in Markdown")
    parser.add_argument("--minutes", type=float, default=12, help="of all parts together; default: %(default)s")
    parser.add_argument("--data", type=Path, help="data folder of multi30k_wu2021; without it, no side_by_side")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; default: all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    parser.add_argument("--size", choices=sorted(SIZES), default="base", help="default: %(default)s")
    args = parser.parse_args()
    if args.device == "cuda" and not ON_GPU:
        parser.error("--device cuda: torch finds no GPU; --device cpu tries the command without one")
    if args.device == "cpu" and ON_GPU:
        parser.error("--device cpu: torch finds a GPU; hide it with CUDA_VISIBLE_DEVICES= before the command")
    last = time.monotonic() + 60 * args.minutes
    names = [name for name in args.only or PARTS if args.data or name != "side_by_side"]
    page = f"# Measured on {machine()}\n\nSize {args.size}. Rows that are missing had no time.\n"
    for number, name in enumerate(names):
        part, share = PARTS[name]
        seconds = (last - time.monotonic()) * share / sum(PARTS[each][1] for each in names[number:])
        rows, section = [], ""
        for row in rows_of(part, args, time.monotonic() + seconds):
            rows.append(row)
            section = f"\n## {name.capitalize()}, {seconds:.0f} s\n\n{inspect.getdoc(part)}\n\n{as_markdown(rows)}"
            write_whole(args.output, page + section)
        page += section


if __name__ == "__main__":
    main()
