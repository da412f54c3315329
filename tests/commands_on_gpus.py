"""Run whole programs on simulated GPUs, and the tables of what the tests run there.

With the environment variable REAL_GPU=1, the programs run on the GPUs of this machine (make test-gpu). The tests run
each row of the tables.
"""

import json
import os
import re
import subprocess
from typing import NamedTuple

import pytest
import torch

from tests import forked_programs
from tests.commands import BIN, ENVIRONMENT, LIMIT, ROOT, training

SIMULATED = str(ROOT / "tests" / "simulated_gpu")
REAL_GPU = bool(os.environ.get("REAL_GPU"))
GIGABYTES_FREE = 79  # of a simulated GPU, in fairseq's log


class Precision(NamedTuple):
    """Flags of fairseq-train, and what they mean."""

    flags: str
    computes: torch.dtype  # type of numbers of the linear layers
    weights: torch.dtype  # type of the model's weights
    optimizer: str  # fairseq's class
    has_copies: bool = False  # whether the checkpoint has float32 copies of the weights


# fairseq-train on one GPU
TRAININGS = {
    "float32": Precision("", torch.float32, torch.float32, "FairseqAdam"),
    "fp16": Precision("--fp16", torch.float16, torch.float16, "FP16Optimizer", has_copies=True),
    "bf16": Precision("--bf16", torch.bfloat16, torch.bfloat16, "FP16Optimizer", has_copies=True),
    "memory-efficient fp16": Precision(
        "--memory-efficient-fp16", torch.float16, torch.float16, "MemoryEfficientFP16Optimizer"
    ),
    "memory-efficient bf16": Precision(
        "--memory-efficient-bf16", torch.bfloat16, torch.bfloat16, "MemoryEfficientFP16Optimizer"
    ),
    "fp16, not flat": Precision(
        "--fp16 --fp16-no-flatten-grads", torch.float16, torch.float16, "FP16Optimizer", has_copies=True
    ),
    "amp": Precision("--amp --amp-init-scale 16 --amp-scale-window 3", torch.float16, torch.float32, "AMPOptimizer"),
}
# the precisions whose training is resumed, to the last digit
RESUMED = ("float32", "fp16", "bf16")
# other programs on one GPU, with each of these flags
PROGRAMS = {
    "fairseq-generate": ("", "--fp16", "--bf16"),
    "fairseq-interactive": ("", "--fp16", "--bf16"),
    "fairseq-validate": ("--bf16",),
    "fairseq-eval-lm": ("--bf16",),
}
# Commands of docs/training.md for several processes. The tests replace the numbers of processes with 2, … with the
# flags of a training, and HOST and the port with those of this machine. A command with --cpu runs without GPUs.
SEVERAL_PROCESSES = (
    "fairseq-train …",
    "env -u SLURM_JOB_NODELIST -u SLURM_STEP_NODELIST -u SLURM_JOB_ID fairseq-train …",
    "torchrun --nproc-per-node 8 $(which fairseq-train) … --distributed-world-size 8",
    "torchrun --nnodes 2 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 "
    "$(which fairseq-train) … --distributed-world-size 16",
    "srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 "
    "fairseq-train … --distributed-world-size 16 --distributed-port 29500",
    "torchrun --no-python --nproc-per-node n bash -c 'fairseq-train … --cpu --ddp-backend legacy_ddp "
    "--distributed-backend gloo --distributed-no-spawn --distributed-init-method env:// "
    "--distributed-world-size $WORLD_SIZE --distributed-rank $RANK'",
)
# more flags of fairseq-train on two GPUs
ON_TWO_GPUS = ("--bf16", "--fp16 --ddp-backend legacy_ddp")
# flags of recipes/paper/fine_tuning.sh on two GPUs
FINE_TUNING_ON_TWO_GPUS = "--bf16 --distributed-world-size 2 --find-unused-parameters"
# recipes/demo: number of GPUs and precision
RECIPES = ((1, "fp16"), (2, "auto"))
if REAL_GPU and torch.cuda.device_count() == 1:
    RECIPES = ((1, "fp16"), (1, "auto"))


def environment(gpus, out_of_memory=""):
    """The variables of a process on a machine with *gpus* GPUs. *out_of_memory* is that of tests/simulated_gpu."""
    more = {"PYTHONPATH": SIMULATED + os.pathsep + ENVIRONMENT["PYTHONPATH"], "SIMULATED_GPUS": str(gpus)}
    return {**ENVIRONMENT, **more, "SIMULATED_OUT_OF_MEMORY": out_of_memory, "PATH": f"{BIN}:{os.environ['PATH']}"}


def run_on_gpus(gpus, *words, out_of_memory="", check=True, timeout=LIMIT, is_forked=False, **kwargs):
    """Run a program of this environment on *gpus* GPUs. Returns its output and its log; *check* that it succeeds.

    If *is_forked*, the program is one of tests/forked_programs.py; if it is python, the commands of the recipe are.
    """
    if REAL_GPU and gpus > torch.cuda.device_count():
        pytest.skip(f"needs {gpus} GPUs, and this machine has {torch.cuda.device_count()}")
    programs, variables = BIN, environment(gpus, out_of_memory)
    if is_forked and not REAL_GPU:  # CUDA does not survive a fork
        variables["FORKED_PROGRAMS"] = forked_programs.folder(gpus)
        programs = BIN if words[0] == "python" else variables["FORKED_PROGRAMS"]
    command = [f"{programs}/{words[0]}", *(str(word) for word in words[1:])]
    kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, **kwargs}
    done = subprocess.run(command, env=variables, timeout=timeout, **kwargs)
    assert not check or done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
    return done.stdout


def training_on_gpus(data, save_dir, *more):
    """The words of a fairseq-train command for GPUs: two epochs of the tiny model without dropout."""
    steady = ["--dropout", 0, "--max-epoch", 2, "--log-interval", 1]
    return training(data, save_dir, *steady, *more, without=("--cpu ",))


def types_of_numbers(log):
    """The types of numbers in which the linear layers of a program on one GPU computed."""
    return set(re.search(r"^(?:simulated )?GPU: used, linear layers in (.*)$", log, re.M)[1].split(", "))


def logged(log, key):
    """The values of *key* in fairseq's JSON log, as numbers."""
    entries = [json.loads(line) for line in re.findall(r"\{\"(?:epoch|test_loss)\".*\}", log)]
    return [float(entry[key]) for entry in entries if key in entry]


def are_free(gigabytes):
    """Whether fairseq's log has the free memory of the GPU: that of the simulated one, or any of a real one."""
    free = {float(each) for each in gigabytes}
    return min(free) > 0 if REAL_GPU else free == {GIGABYTES_FREE}
