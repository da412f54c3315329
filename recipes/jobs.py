"""Several runs at a time on this machine. Each is a process of its own, the same as ``--run K`` on a cluster."""

import os
import queue
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from tqdm import tqdm

from recipes import machine
from recipes.plan import Plan
from recipes.report.history import history, logged, progress_of
from recipes.script import ROOT
from recipes.work import StepError


def outcomes(
    plan: Plan, numbers: Sequence[int], command: Sequence[str], jobs: int, gpus: int
) -> Iterator[tuple[int, str]]:
    """Do the runs *numbers*, *jobs* at a time. Yields each with the reason of its failure, or "", when it has ended.

    On CPUs, each has one thread. On GPUs, each has one, which several share if *jobs* is larger than their number.
    """
    devices: queue.SimpleQueue[str] = queue.SimpleQueue()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(machine.gpus_here() if gpus else 0))))
    names = visible.split(",")[: gpus if gpus > 0 else None] if gpus else [""]
    for number in range(jobs):
        devices.put(names[number % len(names)])
    logs = plan.corpus.work.path / ".runs"
    logs.mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []

    def run(number: int) -> str:
        device = devices.get()
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        environment |= {"CUDA_VISIBLE_DEVICES": device} if gpus else {"OMP_NUM_THREADS": "1"}
        log = logs / f"{number}.log"
        words = [sys.executable, "-m", "recipes", *command, f"gpus={int(bool(gpus))}", "--run", str(number)]
        with log.open("wb") as output:
            process = subprocess.Popen(words, env=environment, stdout=output, stderr=output, stdin=subprocess.DEVNULL)
            processes.append(process)
            status = process.wait()
        devices.put(device)
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["no output"]
        return f"{lines[-1].removeprefix('recipes: ')} (see {log})" if status else ""

    with ThreadPoolExecutor(jobs) as pool:
        futures = {pool.submit(run, number): number for number in numbers}
        try:
            yield from _watched(plan, futures)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                process.terminate()
            raise


def _watched(plan: Plan, futures: dict[Future[str], int]) -> Iterator[tuple[int, str]]:
    """Yield the runs as they end, below one line that shows all of them."""
    left = set(futures)
    every = 1.0 if sys.stderr.isatty() else 30.0
    with tqdm(total=len(futures), unit="run", bar_format="  {n}/{total} runs [{elapsed}]{postfix}") as bar:
        while left:
            done, left = wait(left, timeout=every, return_when=FIRST_COMPLETED)
            for future in done:
                bar.update()
                yield futures[future], future.result()
            bar.set_postfix_str("; ".join(_running(plan)))


def _running(plan: Plan) -> Iterator[str]:
    """Yield, for each run that trains, its title, epoch, lowest loss and the time that is left."""
    for run in plan.runs:
        try:
            train = plan.pipeline(run).train
        except StepError:  # its sweep is not finished
            continue
        if plan.corpus.work.is_locked(train.name) and (plan.corpus.work.folder(train) / "log").exists():
            limit = train.limits["max_epochs"], train.limits["max_updates"]
            yield f"{run.title}: {in_words(plan.corpus.work.folder(train), *limit)}"


def in_words(folder: Path, max_epochs: int, max_updates: int) -> str:
    """Return how far the training in *folder* is, as in "epoch 3.2/15, loss 4.31, 12 min left"."""
    log = folder / "log"
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 20000))
        entries = [logged(line) for line in file.read().decode("utf-8", "replace").splitlines()]
    last: dict[str, Any] = next((entry for entry in reversed(entries) if "wall" in entry or "train_wall" in entry), {})
    losses = [float(entry["valid_loss"]) for entry in history(folder) if "valid_loss" in entry]
    epoch = float(last.get("update", 0)) or float(progress_of(folder)[0])
    updates = float(last.get("num_updates", last.get("train_num_updates", 0)))
    shares = [done / most for done, most in ((epoch, max_epochs), (updates, max_updates)) if most]
    words = [f"epoch {epoch:.1f}" + (f"/{max_epochs}" if max_epochs else "")]
    words += [f"loss {min(losses):.2f}"] if losses else []
    if shares and max(shares) > 0 and (wall := float(last.get("wall", last.get("train_wall", 0)))):
        words.append(f"{wall * (1 / max(shares) - 1) / 60:.0f} min left")
    return ", ".join(words)
