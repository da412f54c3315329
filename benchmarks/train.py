"""Training steps beside fairseq's transformer: tokens a second and peak memory.

    python -m benchmarks.train [--size small|base] [--rounds N] [--json]

A step is forward, criterion, backward and Adam, as fairseq-train does them, on batches of real lengths. fairseq's
transformer has fairseq's Adam, and the others have that of the plugin. On a CPU that computes bfloat16 in hardware, the
last row is a training with --bf16.
"""

import contextlib
import itertools
import os
import resource
import statistics
from argparse import Namespace
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from fairseq import optim
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.optim import adam

from benchmarks.alternating import build_parser, in_turns, ratio, report
from benchmarks.subjects import DEVICE, HAS_FAST_BFLOAT16, SIZES, batches, build, dictionary
from fairseq_rope.patches import optimizers
from fairseq_rope.patches.linear import replace_linear_layers


class Candidate(NamedTuple):
    """What is trained."""

    arch: str
    criterion: str = "label_smoothed_cross_entropy"
    options: dict[str, Any] = {}
    bf16: bool = False  # as --bf16; on a GPU, all candidates are


# the first is the yardstick
CANDIDATES = {
    "transformer": Candidate("transformer"),
    "transformer_rope": Candidate("transformer_rope"),
    "transformer_rope, fused": Candidate("transformer_rope", "fused_label_smoothed_cross_entropy"),
}
if HAS_FAST_BFLOAT16:
    CANDIDATES["transformer_rope, fused, bf16"] = CANDIDATES["transformer_rope, fused"]._replace(bf16=True)
TOKENS = {"small": 4096, "base": 2048}
STEPS = {"small": 4, "base": 2}


class Training:
    """A model, its criterion and its optimizer, and steps with them."""

    def __init__(self, candidate: Candidate, size_name: str) -> None:
        size = SIZES[size_name]
        words = dictionary(size["vocab"])
        self.model = build(candidate.arch, words, size, **candidate.options).train()
        task = Namespace(target_dictionary=words)
        self.criterion = CRITERION_REGISTRY[candidate.criterion](task, sentence_avg=False, label_smoothing=0.1)
        options = Namespace(
            optimizer="adam",
            lr=[5e-4],
            adam_betas="(0.9, 0.98)",
            adam_eps=1e-9,
            weight_decay=0.0,
            use_old_adam=False,
            fp16_adam_stats=False,
            tpu=False,
        )
        is_bf16 = DEVICE == "cuda" or candidate.bf16
        if is_bf16:
            self.model.bfloat16()
            if DEVICE == "cpu":
                replace_linear_layers(self.model)  # as the trainer does
        weights = list(self.model.parameters())
        fairseqs = mock.patch.object(adam, "Adam", optimizers.FairseqAdam)
        with fairseqs if candidate.arch == "transformer" else contextlib.nullcontext():
            if is_bf16:
                self.optimizer = optim.FP16Optimizer.build_optimizer(with_float32_copies(options), weights)
            else:
                self.optimizer = optim.build_optimizer(options, weights)
        self.take(batches(words, TOKENS[size_name] if DEVICE == "cpu" else 8192)[: STEPS[size_name]])

    def take(self, samples: list[dict[str, Any]]) -> None:
        """Train on *samples* from now on, again and again."""
        self.tokens = statistics.mean(sample["ntokens"] for sample in samples)
        self.samples = itertools.cycle(samples)

    def step(self) -> None:
        """A step with the next batch."""
        self.optimizer.zero_grad()
        loss, count, _ = self.criterion(self.model, next(self.samples))
        self.optimizer.backward(loss)
        self.optimizer.multiply_grads(1.0 / count)
        self.optimizer.step()


def with_float32_copies(optimizer: Namespace) -> SimpleNamespace:
    """The configuration of fairseq's optimizer for --bf16 around *optimizer*."""
    common = SimpleNamespace(bf16=True, fp16_scale_window=1, fp16_no_flatten_grads=False)
    return SimpleNamespace(optimizer=optimizer, common=common)


def _peak() -> float:
    """Return the largest number of MiB that this process has had in memory."""
    status = Path("/proc/self/status")
    if status.exists():
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if "VmHWM" in line) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # macOS; on Linux, it includes the parent's peak


def _peak_of_steps(candidate: Candidate, size: str) -> float:
    torch.set_num_threads(2)
    before = _peak()
    training = Training(candidate, size)
    for _ in range(STEPS[size]):
        training.step()
    return torch.cuda.max_memory_allocated() / 2**20 if DEVICE == "cuda" else _peak() - before


def peak_memory(candidate: Candidate, size: str) -> float:
    """MiB that a few steps take beyond what the imports took, in a process of its own."""
    # glibc gives back at once what is freed, so that no leftovers are counted
    with (
        mock.patch.dict(os.environ, MALLOC_MMAP_THRESHOLD_="65536"),
        ProcessPoolExecutor(1, get_context("spawn")) as process,
    ):
        return process.submit(_peak_of_steps, candidate, size).result()


def main() -> None:
    parser = build_parser("train", __doc__, rounds=7)
    parser.add_argument("--size", choices=sorted(SIZES), action="append", help="default: all")
    parser.add_argument("--no-memory", action="store_true", help="time only")
    args = parser.parse_args()
    names = list(CANDIDATES)
    sizes = args.size or list(SIZES)
    memories = {
        size: {name: 0.0 if args.no_memory else peak_memory(CANDIDATES[name], size) for name in names} for size in sizes
    }
    for size, memory in memories.items():
        trainings = {name: Training(CANDIDATES[name], size) for name in names}
        # In turns batch by batch: a busy neighbour slows all down alike.
        rounds = args.rounds * STEPS[size]
        seconds = in_turns({name: training.step for name, training in trainings.items()}, rounds)
        yardstick = names[0]
        rows = [
            {
                "model": name,
                "tokens/s": trainings[name].tokens / statistics.median(seconds[name]),
                "times as fast": ratio(seconds, name, yardstick),
                "peak MiB": memory[name],
                "of the memory": memory[name] / memory[yardstick] if memory[yardstick] else 0.0,
            }
            for name in names
        ]
        report(f"training steps, {size}", rows, args.json)


if __name__ == "__main__":
    main()
