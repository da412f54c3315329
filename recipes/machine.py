"""The machine: what it has, what it computes, and whether that is enough for a recipe."""

import contextlib
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from fairseq_rope.errors import InputError
from fairseq_rope.files import checksum
from recipes.script import ROOT

PACKAGES = ("torch", "numpy", "fairseq-fixed", "fairseq", "subword-nmt", "sacremoses", "sentencepiece", "sacrebleu")


@functools.cache
def describe() -> dict[str, Any]:
    """Return versions, commit and hardware, for the history of a training."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    is_clone = (ROOT / ".git").exists()  # else git would describe a repository around the folder
    commit = is_clone and _printed("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    model = re.search(r"^model name[ \t]*:[ \t]*(.*\S)", cpu_info(), re.MULTILINE)
    cpu = model[1] if model else platform.processor() or platform.machine()
    gpus = _printed("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    hardware = {"cpu": cpu, "cores": os.cpu_count(), "gpus": gpus}
    return {"versions": versions, "commit": commit or "unknown", "hardware": hardware}


def code_of(folder: Path) -> str:
    """Return the first 12 digits of the SHA-256 of all Python files in *folder*, with their names."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*.py") if path.is_file()):
        digest.update(f"{path.relative_to(folder)}\0{checksum(path)}\n".encode())
    return digest.hexdigest()[:12]


def cpu_info() -> str:
    """Return what Linux says of the CPUs; "" on other systems."""
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def cpu_computes_bf16() -> bool:
    """Whether the CPU has instructions for bfloat16 that torch uses in training: AVX512_BF16 or AMX."""
    flags = re.search(r"^flags[ \t]*:(.*)", cpu_info(), re.MULTILINE)
    return bool(flags and {"avx512_bf16", "amx_bf16"} & {*flags[1].split()})


def devices(gpus: int, precision: str) -> int:
    """Return how many GPUs train (0: the CPU), if *gpus* are asked for (-1: all). Raises an InputError if they cannot.

    Reads CUDA_VISIBLE_DEVICES by way of torch, which is loaded only if GPUs are asked for.
    """
    available = gpus_here() if gpus else 0
    if gpus > available:
        raise InputError(f"gpus={gpus}: this machine has {available}")
    number = available if gpus < 0 else gpus
    if precision == "fp16" and not number:
        raise InputError("precision=fp16: fairseq trains in fp16 on GPUs only")
    if precision == "bf16" and number and best_precision(number) != "bf16":
        raise InputError("precision=bf16: this GPU does not support it; set precision=fp16")
    return number


def best_precision(gpus: int) -> str:
    """Return the best precision that the device computes in hardware: bf16, fp16 or fp32."""
    if not gpus:
        return "bf16" if cpu_computes_bf16() else "fp32"
    import torch

    generation = torch.cuda.get_device_capability()
    return "bf16" if generation >= (8, 0) else "fp16" if generation >= (7, 0) else "fp32"


@functools.cache
def gpus_here() -> int:
    import torch

    return torch.cuda.device_count()


def check_room(work: Path, disk_gb: float) -> None:
    """Raise an InputError if the disk of the folder *work* has too little room."""
    there = next(folder for folder in (work, *work.absolute().parents) if folder.is_dir())
    used = sum(path.lstat().st_size for path in work.rglob("*") if path.is_file() and not path.is_symlink()) / 1e9
    free = shutil.disk_usage(there).free / 1e9
    if free < disk_gb - used:
        raise InputError(f"disk_gb={disk_gb:g}: {work} has {used:.1f} GB, and {free:.1f} GB are free")


def _printed(*command: str) -> str:
    """Return the stripped output of *command*; "" if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
