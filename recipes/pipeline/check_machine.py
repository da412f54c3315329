"""Check that the machine is large enough for a recipe."""

import os
import shutil
import sys
from pathlib import Path

from recipes.pipeline.experiment import Experiment
from recipes.run.run import StageError

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
    if not Path(beside, "python").exists():  # which the commands of the stages call
        raise StageError(f"{beside} has no program python: use a virtual environment (docs/install.md)")
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
