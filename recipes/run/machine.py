"""Describe the machine for the results: versions, commit and hardware."""

import contextlib
import hashlib
import os
import platform
import re
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

from fairseq_rope.files import checksum
from recipes.run.run import ROOT

PACKAGES = ("torch", "numpy", "fairseq-fixed", "fairseq", "subword-nmt", "sacremoses", "sentencepiece", "sacrebleu")


def describe() -> dict[str, Any]:
    """Versions, commit and hardware, for run.yaml and docs/results.md."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    is_clone = (ROOT / ".git").exists()  # else git would describe a repository around the folder
    commit = is_clone and printed("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12")
    return {"versions": versions, "commit": commit or "unknown", "hardware": _hardware()}


def code_of(folder: Path) -> str:
    """The first 12 digits of the SHA-256 of all Python files in *folder*, with their names."""
    files = sorted(path for path in folder.rglob("*.py") if path.is_file())
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(folder)}\0{checksum(path)}\n".encode())
    return digest.hexdigest()[:12]


def cpu_info() -> str:
    """What Linux says of the CPUs; "" on other systems."""
    path = Path("/proc/cpuinfo")
    return path.read_text() if path.exists() else ""


def cpu_computes_bf16() -> bool:
    """Whether the CPU has instructions for bfloat16 that torch uses in training: AVX512_BF16 or AMX."""
    flags = re.search(r"^flags[ \t]*:(.*)", cpu_info(), re.MULTILINE)
    return bool(flags and {"avx512_bf16", "amx_bf16"} & {*flags[1].split()})


def device_in_words(gpus: int) -> str:
    """The device of a training on *gpus* GPUs; 0: the CPU."""
    return f"{gpus} GPU{'s' * (gpus > 1)}" if gpus else "the CPU"


def _hardware() -> dict[str, Any]:
    model = re.search(r"^model name[ \t]*:[ \t]*(.*\S)", cpu_info(), re.MULTILINE)
    cpu = model[1] if model else platform.processor() or platform.machine()
    gpus = printed("nvidia-smi", "--query-gpu=name", "--format=csv,noheader").splitlines()
    return {"cpu": cpu, "cores": os.cpu_count(), "gpus": gpus}


def printed(*command: str) -> str:
    """The stripped output of *command*; empty if it fails or does not exist."""
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
