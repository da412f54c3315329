"""The number format of a training: what the hardware computes, and what a training has."""

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recipes.run import machine
from recipes.run.history import logged

# The flags of fairseq-train that choose another format than fp32. They exclude each other.
FLAGS = {
    **{"--fp16": "fp16", "--memory-efficient-fp16": "fp16"},
    **{"--bf16": "bf16", "--memory-efficient-bf16": "bf16"},
    "--amp": "amp",
}
# Measured with torch 2.13 and one thread on an AMD EPYC of the Zen 3 generation, in CPU time: the demo with batches of
# 1,024 tokens, transformer-base with 256. With 2 threads, products of 2048 x 512 x 2048 take 330 times as long.
EMULATED = (
    "this CPU has no instructions for bf16 (AVX512_BF16 or AMX), so that bf16 is emulated: on one core of an AMD EPYC "
    "with AVX2, the demo trained about 10 times slower than in fp32, and transformer-base about 30 times"
)


def flag_in(words: str) -> str:
    """The flag that chooses the precision in *words*, quoted for a shell; "" if none does."""
    return next((word for word in shlex.split(words) if word in FLAGS), "")


def of_process(process: Mapping[str, Any]) -> str:
    """The precision of a training *process*, as its history has it; "" if it is not known.

    The command decides, because older notes lack the flags that the user gave. The oldest ones have no command: then,
    all trainings on CPUs were in fp32.
    """
    command = process.get("command", "")
    on_cpu = process.get("hardware", {}).get("gpus") == []
    noted = process.get("batches", {}).get("precision", "fp32" if command or on_cpu else "")
    return FLAGS.get(flag_in(command), noted)


def described(process: Mapping[str, Any]) -> str:
    """Precision and device of a training *process*, as in "bf16 on the CPU"; "" if they are not noted."""
    command, precision = process.get("command", ""), of_process(process)
    of_command = re.search(r" --cpu(?= )| --distributed-world-size (\d+)", f"{command} ")
    device = machine.device_in_words(int(of_command[1] or 0)) if of_command else ""
    device = process.get("batches", {}).get("device", device)
    return f"{precision} on {device}" if precision and device else precision


def last_process(history: Path) -> dict[str, Any]:
    """The last process in the file *history* that has trained an epoch, or the last one of all; {} without any.

    A process that fairseq refuses to resume trains no epoch.
    """
    trained: dict[str, Any] = {}
    last: dict[str, Any] = {}
    lines = history.read_text(encoding="utf-8").splitlines() if history.exists() else []
    for entry in map(logged, lines):
        last = entry.get("process", last)
        if "valid_loss" in entry or "train_loss" in entry:
            trained = last
    return trained or last


def on_cpu() -> str:
    """The best precision of the CPU: bf16 if it has instructions for it, else fp32."""
    return "bf16" if machine.cpu_computes_bf16() else "fp32"
