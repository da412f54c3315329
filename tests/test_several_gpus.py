"""fairseq-train in two processes: on two simulated GPUs, with gloo in place of nccl, and on CPUs."""

import re
import shlex
import socket
import subprocess

import pytest

from tests.commands import LIMIT, call, training
from tests.commands_on_gpus import SEVERAL_PROCESSES, environment, logged, run_on_gpus, training_on_gpus

pytestmark = pytest.mark.nightly
STEADY = ("--dropout", 0, "--log-interval", 1, "--update-freq", 2)
SCONTROL = "#!/bin/sh\necho localhost\n"  # of SLURM: the names of the nodes
BY_RANK = (
    "fairseq-train … --cpu --ddp-backend legacy_ddp --distributed-backend gloo --distributed-no-spawn "
    "--distributed-init-method tcp://127.0.0.1:29500 --distributed-world-size n --distributed-rank $SLURM_PROCID"
)


def with_two_processes(command, flags):
    """A *command* of SEVERAL_PROCESSES with two processes on this machine, which train with *flags*."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    replaced = {"--nnodes 2": "--nnodes 1", "--nodes 2": "--nodes 1", "HOST": "localhost", "29500": port}
    for before, after in replaced.items():
        command = command.replace(before, after)
    numbers = r"(--(?:nproc-per-node|ntasks-per-node|gpus-per-node|distributed-world-size)) (8|16|n)\b"
    return re.sub(numbers, r"\1 2", command).replace("…", shlex.join(map(str, flags)))


def run_in_shell(command, folder):
    """Run a shell *command* on two GPUs, or without GPUs if it contains --cpu. Returns its output.

    srun is replaced with two processes that have SLURM's variables.
    """
    variables, ranks = environment(0 if "--cpu" in command else 2), ({},)
    (folder / "scontrol").write_text(SCONTROL)
    (folder / "scontrol").chmod(0o755)
    job = {"SLURM_STEP_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2"}
    variables["PATH"] = f"{folder}:{variables['PATH']}"
    if command.startswith("env"):  # in an allocation
        variables |= {**job, "SLURM_JOB_ID": "abc"}
    if command.startswith("srun") or "$SLURM_PROCID" in command:
        ranks = [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
        command = command[command.index("fairseq-train") :]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    shells = [subprocess.Popen(["bash", "-c", command], env={**variables, **rank}, **output) for rank in ranks]
    printed = [shell.communicate(timeout=LIMIT)[0] for shell in shells]
    assert all(shell.returncode == 0 for shell in shells), f"{command}\n{''.join(printed)}"
    return "".join(printed)


def test_each_way_to_start_two_processes_continues_the_training_of_the_one_before(data_bin, tmp_path):
    commands = (*SEVERAL_PROCESSES, BY_RANK)
    alone = call(*training(data_bin, tmp_path / "alone", *STEADY, "--max-epoch", len(commands)))
    for epoch, command in enumerate(commands):
        flags = training_on_gpus(data_bin, tmp_path / "two", "--max-epoch", epoch + 1)[1:]
        log = run_in_shell(with_two_processes(command, flags), tmp_path)
        assert "training on 2 devices (GPUs/TPUs)" in log
        assert ("Loaded checkpoint" in log) == (epoch > 0)
        assert log.count("gloo in place of nccl") == (0 if "--cpu" in command else 2)
        updates = slice(2 * epoch, 2 * epoch + 2)
        assert logged(log, "loss") == pytest.approx(logged(alone, "loss")[updates], abs=0.0015), command
        assert logged(log, "valid_loss") == pytest.approx(logged(alone, "valid_loss")[epoch : epoch + 1], abs=0.0015)


@pytest.mark.parametrize("flags", ["--bf16", "--fp16 --ddp-backend legacy_ddp"])
def test_two_gpus_in_16_bits_have_the_losses_of_one_cpu(data_bin, tmp_path, flags):
    alone = call(*training(data_bin, tmp_path / "alone", *STEADY, "--max-epoch", 2))
    log = run_on_gpus(2, *training_on_gpus(data_bin, tmp_path / "two", *flags.split()))
    assert "training on 2 devices (GPUs/TPUs)" in log and log.count("gloo in place of nccl") == 2
    assert logged(log, "loss") == pytest.approx(logged(alone, "loss"), abs=0.05)
    assert logged(log, "valid_loss") == pytest.approx(logged(alone, "valid_loss"), abs=0.05)
