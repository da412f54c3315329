"""Check that the machine is large enough for a recipe, and describe it for the results."""

import contextlib
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from recipes.pipeline.experiment import ROOT, Experiment, StageError

PACKAGES = ("torch", "numpy", "fairseq-fixed", "fairseq", "subword-nmt", "sacremoses", "sentencepiece", "sacrebleu")
PROGRAMS = ("fairseq-preprocess", "fairseq-train", "fairseq-generate")


def check_machine(experiment: Experiment) -> None:
    """Raise a StageError unless the machine has enough disk, enough memory and every program.

    The settings ``disk_gb`` and ``memory_gb`` are the needs of the whole recipe. Files that are already in its work
    folder count as free disk, except the folders of other models.
    """
    work, beside = experiment.work, str(Path(sys.executable).parent)
    programs = [*PROGRAMS, "subword-nmt"] if experiment.bpe == "subword-nmt" else PROGRAMS
    for program in (*programs, "head", "paste", "tee"):
        if shutil.which(program, path=f"{beside}:{os.environ.get('PATH', '')}") is None:
            how = "docs/install.md says how to install it"
            raise StageError(f"{program} is neither in {beside} nor on the PATH; {how}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    needed = experiment.settings.memory_gb
    if memory < needed:
        anyway = f"to try anyway, run with --set memory_gb={int(memory)}"
        raise StageError(f"this machine has {memory:.1f} GB of memory, and {needed:g} are needed; {anyway}")
    folder = next(path for path in (work, *work.parents) if path.exists())
    used = [path for path in work.glob("*") if ".seed" not in path.name or path == experiment.model]
    used_bytes = sum(_size(file) for path in used for file in (path, *path.rglob("*")))
    free, needed = shutil.disk_usage(folder).free / 1e9, experiment.settings.disk_gb
    if free + used_bytes / 1e9 < needed:
        lack = f"{free:.1f} GB are free on the disk of {folder}, and {needed - used_bytes / 1e9:.1f} are needed"
        raise StageError(f"{lack}; choose another --work-dir, or try anyway with --set disk_gb={int(free)}")


def _size(path: Path) -> int:
    """The size of a file in bytes; 0 if *path* is no file, or if another run has just renamed it."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def describe() -> dict[str, Any]:
    """Versions, commit and hardware, for run.yaml and docs/results.md."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    commit = printed("git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12") or "unknown"
    return {"versions": versions, "commit": commit, "hardware": _hardware()}


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
