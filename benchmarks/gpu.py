"""Everything about one GPU, as one page in Markdown: correctness, kernels, training, generation, memory, profile.

    python -m benchmarks.gpu --output gpu.md [--only correct --only kernels …] [--size small|base] [--device cpu]

Takes about 20 minutes on a GPU. The sections are written as they end, so that an interrupted run leaves a page with
those that ended. ``--device cpu --size small --rounds 1`` tries the command on a machine without one.
"""

import argparse
import contextlib
import inspect
import itertools
import os
import statistics
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.alternating import in_turns, machine, ratio, seconds_of
from benchmarks.every_model import FUSED, MODELS, PLAIN, TOLERANCE, batch, build, gradient, search
from benchmarks.generate import SENTENCES, Translating
from benchmarks.subjects import DEVICE, SIZES, on_device
from benchmarks.train import Candidate, Training
from fairseq_rope.files import write_whole
from fairseq_rope.search.ensemble import SWITCH

Row = dict[str, object]
NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
TRAINED = {
    "transformer": Candidate("transformer"),
    "transformer, fused": Candidate("transformer", FUSED),
    "transformer_rope": Candidate("transformer_rope"),
    "transformer_rope, fused": Candidate("transformer_rope", FUSED),
    "transformer_t5, fused": Candidate("transformer_t5", FUSED),
    "transformer_rope_llama, fused": Candidate("transformer_rope_llama", FUSED),
}


def waits_of(run: Callable[[], Any]) -> tuple[Any, Counter[str]]:
    """Return what *run* returns, and the lines of code at which the host waits for the GPU in it, according to torch.

    Without a GPU there are none.
    """
    if DEVICE != "cuda":
        return run(), Counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            result = run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits = [warning for warning in caught if "synchroniz" in str(warning.message)]
    return result, Counter(f"{Path(warning.filename).name}:{warning.lineno}" for warning in waits)


@contextlib.contextmanager
def fast_search(switch: str) -> Iterator[None]:
    """Turn the fast search on ("1") or off ("0")."""
    with mock.patch.dict(os.environ, {SWITCH: switch}):
        yield


def correct(args: argparse.Namespace) -> list[Row]:
    """Gradients of each model beside those of the CPU in float32, where the host waits, and both searches.

    One of the waits is that for the result. The searches, with the fast search off and on, are in the rows of float32,
    and must find the CPU's hypotheses.
    """
    rows: list[Row] = []
    for name, options in {"transformer": {}, **MODELS}.items():
        arch = "transformer" if name == "transformer" else "transformer_rope"
        with fast_search("0"):
            hypotheses, _ = search(build(options, arch), batch())
        expected = gradient(build(options, arch).train(), PLAIN, batch())
        for dtype, criterion in itertools.product(NAMES, (PLAIN, FUSED)):
            model, sample = build(options, arch).to(DEVICE, dtype).train(), on_device(batch())
            gradient(model, criterion, sample)
            found, waits = waits_of(lambda m=model, c=criterion, s=sample: gradient(m, c, s))
            error = float((found - expected).norm() / expected.norm())
            row: Row = {
                "model": name,
                "type": NAMES[dtype],
                "criterion": "fused" if criterion == FUSED else "fairseq's",
            }
            row |= {"gradient's error": f"{error:.1e}"}
            row["waits"] = ", ".join(f"{place} {count} times" for place, count in waits.items())
            row["result"] = "right" if error < 10 * TOLERANCE[dtype] else "WRONG"
            if dtype == torch.float32 and criterion == PLAIN:
                for switch in "01":
                    with fast_search(switch):
                        same = search(build(options, arch).to(DEVICE), on_device(batch()))[0] == hypotheses
                    row["result"] = row["result"] if same else "WRONG hypotheses"
            rows.append(row)
    return rows


def kernels(args: argparse.Namespace) -> list[Row]:
    """The kernel that torch chooses for attention, and the time of the first and of later calls of a shape.

    First as torch chooses with the plugin, then with cuDNN's attention first. cuDNN refuses a learned bias.
    """
    rows = [{"first": "as with the plugin", **row} for row in _kernels_of(args)]
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH], set_priority=True):
        return rows + [{"first": "cuDNN", **row} for row in _kernels_of(args)]


def _kernels_of(args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    pairs, heads, dim = (64, 8, 64) if DEVICE == "cuda" else (2, 2, 16)
    for what in ("no mask", "causal", "padding mask", "causal and padding mask", "learned bias", "step of a search"):
        chosen, firsts, laters = [], [], []
        for length in range(31, 31 + 8 * 5, 5):
            queries = 1 if what == "step of a search" else length
            q, k, v = (
                torch.randn(pairs, heads, n, dim, device=DEVICE, dtype=torch.bfloat16, requires_grad=queries > 1)
                for n in (queries, length, length)
            )
            mask = None if what in ("no mask", "causal") else _mask(what, q, length)
            is_causal = what == "causal"
            if DEVICE == "cuda":
                choice = torch._fused_sdp_choice(q, k, v, mask, is_causal=is_causal)
                chosen.append(torch.nn.attention.SDPBackend(choice).name)

            def run(q: Tensor = q, k: Tensor = k, v: Tensor = v, mask: Any = mask, is_causal: bool = is_causal) -> None:
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal)
                if out.requires_grad:
                    out.sum().backward()

            firsts.append(1000 * seconds_of(run))
            laters.append(1000 * statistics.median(seconds_of(run) for _ in range(args.rounds)))
        names = ", ".join(f"{name} {count} times" for name, count in Counter(chosen).items())
        row: Row = {"attention": what, "kernel": names or "CPU", "first call, ms": statistics.median(firsts[1:])}
        rows.append({**row, "later calls, ms": statistics.median(laters)})
    return rows


def _mask(what: str, q: Tensor, keys: int) -> Tensor:
    mask = q.new_zeros(q.size(0), 1, 1, keys)
    mask[:, :, :, -3:] = -3e4
    if what == "causal and padding mask":
        return mask + q.new_full((keys, keys), float("-inf")).triu(1)
    if what == "learned bias":
        return mask + q.new_zeros(1, q.size(1), keys, keys).requires_grad_()
    return mask


def training(args: argparse.Namespace) -> list[Row]:
    """Steps of training (bfloat16 on a GPU) beside fairseq's transformer, and the peak of memory."""
    rows: list[Row] = []
    trainings = {name: Training(candidate, args.size) for name, candidate in TRAINED.items()}
    news = {}
    for name, one in trainings.items():
        one.step()  # allocates memory and tables
        news[name] = seconds_of(one.step)
    seconds = in_turns({name: one.step for name, one in trainings.items()}, args.rounds)
    for name, one in trainings.items():
        row: Row = {"model": name, "tokens/s": one.tokens / statistics.median(seconds[name])}
        row |= {
            "times as fast": ratio(seconds, name, "transformer"),
            "tokens/s of a new shape": one.tokens / news[name],
        }
        if DEVICE == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            one.step()
            row["MiB for a step"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        rows.append(row)
    return rows


def generation(args: argparse.Namespace) -> list[Row]:
    """Sentences a second with beam 4, with the fast search off and on."""
    rows: list[Row] = []
    systems = {"transformer": ("transformer", "0"), "layer by layer": ("transformer_rope", "0")}
    systems["fast search"] = ("transformer_rope", "1")
    for size in args.batch:
        translating = {name: Translating(arch, args.size, size) for name, (arch, _) in systems.items()}

        def run(name: str, translating: dict[str, Translating] = translating) -> None:
            with fast_search(systems[name][1]):
                translating[name].translate()

        seconds = in_turns({name: lambda name=name: run(name) for name in systems}, args.rounds)
        for name in systems:
            row: Row = {
                "batch": size,
                "search": name,
                "sentences/s": SENTENCES[size] / statistics.median(seconds[name]),
            }
            rows.append({**row, "times as fast": ratio(seconds, name, "transformer")})
    return rows


def profile(args: argparse.Namespace) -> list[Row]:
    """Where the time of a training step goes: kernels, and the share of the time in which the GPU works."""
    rows: list[Row] = []
    for name in ("transformer", "transformer_rope", "transformer_rope, fused"):
        one = Training(TRAINED[name], args.size)
        one.step()
        with torch.profiler.profile() as events:
            wall = seconds_of(one.step)
        device = torch.autograd.DeviceType.CUDA if DEVICE == "cuda" else torch.autograd.DeviceType.CPU
        averages = [event for event in events.key_averages() if event.device_type == device]
        attribute = "self_device_time_total" if DEVICE == "cuda" else "self_cpu_time_total"
        averages.sort(key=lambda event: -getattr(event, attribute))
        busy = sum(getattr(event, attribute) for event in averages) / 1e6
        row: Row = {"model": name, "operations": one.operations()}
        row["ms a step"], row["busy %"] = 1000 * wall, 100 * busy / wall
        rows.append({**row, "longest": "; ".join(event.key[:40] for event in averages[:5])})
    return rows


SECTIONS = {"correct": correct, "kernels": kernels, "training": training, "generation": generation, "profile": profile}


def as_markdown(rows: list[Row]) -> str:
    """Return *rows*, all with the same keys, as a table."""
    lines = [list(rows[0]), ["---"] * len(rows[0])]
    lines += [[f"{x:.4g}" if isinstance(x, float) else str(x) for x in row.values()] for row in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="the page, in Markdown")
    parser.add_argument("--only", choices=SECTIONS, action="append", help="a section; default: all")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="default: %(default)s")
    parser.add_argument("--size", choices=sorted(SIZES), default="base", help="default: %(default)s")
    parser.add_argument("--batch", type=int, choices=sorted(SENTENCES), nargs="+", default=[1, 16, 128])
    parser.add_argument("--rounds", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU; --device cpu tries the command without one")
    if args.device != DEVICE:
        parser.error("--device cpu: torch finds a GPU; hide it with CUDA_VISIBLE_DEVICES= before the command")
    page = f"# Measured on {machine()}\n\ncuDNN {torch.backends.cudnn.version()}, size {args.size}, "
    page += f"TORCH_CUDNN_SDPA_DEPRIORITIZED={os.environ.get('TORCH_CUDNN_SDPA_DEPRIORITIZED', '')!r}\n"
    wrong = 0
    for name, section in SECTIONS.items():
        if args.only and name not in args.only:
            continue
        rows = section(args)
        wrong += sum("WRONG" in str(row.get("result")) for row in rows)
        page += f"\n## {name.capitalize()}\n\n{inspect.getdoc(section)}\n\n{as_markdown(rows)}"
        write_whole(args.output, page)
        print(f"{name}: written to {args.output}", flush=True)
    sys.exit(f"{wrong} results are wrong" if wrong else 0)


if __name__ == "__main__":
    main()
