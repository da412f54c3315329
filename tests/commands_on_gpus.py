"""Run whole programs on simulated GPUs (tests/simulated_gpu), or with REAL_GPU=1 on those of this machine."""

import json
import os
import re
import subprocess

import pytest
import torch

from tests.commands import BIN, ENVIRONMENT, LIMIT, ROOT, training

SIMULATED = str(ROOT / "tests" / "simulated_gpu")
REAL_GPU = bool(os.environ.get("REAL_GPU"))
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


def environment(gpus):
    """The variables of a process on a machine with *gpus* GPUs."""
    more = {"PYTHONPATH": SIMULATED + os.pathsep + ENVIRONMENT["PYTHONPATH"], "SIMULATED_GPUS": str(gpus)}
    return {**ENVIRONMENT, **more, "PATH": f"{BIN}:{os.environ['PATH']}"}


def run_on_gpus(gpus, *words, **kwargs):
    """Run a program of this environment on *gpus* GPUs. Returns its output and its log."""
    if REAL_GPU and gpus > torch.cuda.device_count():
        pytest.skip(f"needs {gpus} GPUs, and this machine has {torch.cuda.device_count()}")
    command = [f"{BIN}/{words[0]}", *(str(word) for word in words[1:])]
    kwargs = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": LIMIT, **kwargs}
    done = subprocess.run(command, env=environment(gpus), **kwargs)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}"
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
