"""Runs a fairseq program and prints the processor time of its parts, as one line of JSON at the end.

    python benchmarks/timed.py [--as-on-gpu] fairseq-train|fairseq-generate …

With --as-on-gpu, the plugin computes as it does on a GPU, without what only CPUs run. The first half of the updates, or
of the steps of a search, is not counted. Times are those of the process, and the first decile, so that other programs
on the machine change them little. The module imports nothing of the plugin, which --user-dir loads.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from statistics import quantiles
from typing import Any

# A part's name, and the method whose time it is. A part contains those after it that it calls.
PARTS = {
    "fairseq-train": {
        "update": ("fairseq.trainer", "Trainer", "train_step"),
        "forward and backward": ("fairseq.tasks", "FairseqTask", "train_step"),
        "backward": ("fairseq.optim", "FairseqOptimizer", "backward"),
        "gradient norm": ("fairseq.trainer", "Trainer", "clip_grad_norm"),
        "optimiser": ("fairseq.tasks", "FairseqTask", "optimizer_step"),
        "logging": ("fairseq.trainer", "Trainer", "_reduce_and_log_stats"),
    },
    "fairseq-generate": {"search": ("fairseq.sequence_generator", "SequenceGenerator", "generate")},
}


def timed(function: Callable[..., Any], times: list[tuple[float, float]]) -> Callable[..., Any]:
    """Return *function*, which adds to *times* when each call begins and ends."""

    def call(*args: Any, **kwargs: Any) -> Any:
        begun = time.process_time()
        try:
            return function(*args, **kwargs)
        finally:
            times.append((begun, time.process_time()))

    return call


def compute_as_on_gpu() -> None:
    """Turn off what the plugin computes in another way on CPUs: dropout and linear layers in 16 bits."""
    dropout, attention, precision = (
        import_module(f"fairseq_rope.{name}") for name in ("modules.dropout", "modules.attention", "patches.precision")
    )
    dropout.Dropout.forward = dropout.FairseqDropout.forward
    attention.is_faster_in_float32 = lambda q, keys: False
    precision.replace_linear_layers = lambda model: None


def main() -> None:
    if sys.argv[1] == "--as-on-gpu":
        del sys.argv[1]
        import_module("fairseq_rope.plugin")
        compute_as_on_gpu()
    program = sys.argv[1]
    times: dict[str, list[tuple[float, float]]] = {}
    for part, (module, cls, method) in PARTS[program].items():
        owners = [getattr(import_module(module), cls)]
        if part == "backward":
            owners.append(import_module("fairseq.optim.fp16_optimizer")._FP16OptimizerMixin)
        for owner in owners:
            setattr(owner, method, timed(getattr(owner, method), times.setdefault(part, [])))
    sys.argv = sys.argv[1:]
    import_module("fairseq_cli." + program.removeprefix("fairseq-")).cli_main()
    report = {}
    for part, calls in times.items():
        counted = calls[len(calls) // 2 :]
        report[part] = 1000 * quantiles([end - begin for begin, end in counted], n=10)[0]
    first = next(iter(times.values()))
    begins = [begin for begin, _ in first[len(first) // 2 :]]
    report["all"] = 1000 * quantiles([after - before for before, after in zip(begins, begins[1:])], n=10)[0]
    print(json.dumps(report))


if __name__ == "__main__":
    main()
