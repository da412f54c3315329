"""fairseq-train on two simulated GPUs (tests/simulated_gpu): two processes, with gloo in place of nccl."""

import re
import shlex
import socket
import subprocess

import pytest

from tests.commands import LIMIT, call, training
from tests.commands_on_gpus import ON_TWO_GPUS, SEVERAL_PROCESSES, environment, logged, run_on_gpus, training_on_gpus

STEADY = ("--dropout", 0, "--log-interval", 1, "--update-freq", 2)
SCONTROL = "#!/bin/sh\necho localhost\n"  # of SLURM: the names of the nodes


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def with_two_processes(command, flags):
    """A *command* of SEVERAL_PROCESSES with two processes on this machine, which train with *flags*."""
    port = free_port()
    replaced = {"--nnodes 2": "--nnodes 1", "--nodes 2": "--nodes 1", "HOST:29500": f"localhost:{port}", "29500": port}
    for before, after in replaced.items():
        command = command.replace(before, after)
    command = re.sub(
        r"(--(?:nproc-per-node|ntasks-per-node|gpus-per-node|distributed-world-size)) (8|16|n)\b", r"\1 2", command
    )
    return command.replace("…", shlex.join(map(str, flags)))


def run_in_shell(command, folder):
    """Run a shell *command* on two GPUs, or without GPUs if it contains --cpu. Returns its output.

    srun is replaced with two processes that have SLURM's variables.
    """
    variables, ranks = environment(0 if "--cpu" in command else 2), ({},)
    (folder / "scontrol").write_text(SCONTROL)
    (folder / "scontrol").chmod(0o755)
    job = {"SLURM_STEP_NODELIST": "localhost", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2"}
    if command.startswith("env"):  # in an allocation
        variables |= {**job, "SLURM_JOB_ID": "abc", "PATH": f"{folder}:{variables['PATH']}"}
    if command.startswith("srun"):
        ranks = [{**job, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
        variables["PATH"] = f"{folder}:{variables['PATH']}"
        command = command[command.index("fairseq-train") :]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    shells = [subprocess.Popen(["bash", "-c", command], env={**variables, **rank}, **output) for rank in ranks]
    printed = [shell.communicate(timeout=LIMIT)[0] for shell in shells]
    assert all(shell.returncode == 0 for shell in shells), f"{command}\n{''.join(printed)}"
    return "".join(printed)


@pytest.mark.slow
def test_each_way_to_start_two_processes_continues_the_training_of_the_one_before(data_bin, tmp_path):
    epochs = len(SEVERAL_PROCESSES)
    alone = call(*training(data_bin, tmp_path / "alone", *STEADY, "--max-epoch", epochs))
    for epoch, command in enumerate(SEVERAL_PROCESSES):
        flags = training_on_gpus(data_bin, tmp_path / "two", "--max-epoch", epoch + 1)[1:]
        log = run_in_shell(with_two_processes(command, flags), tmp_path)
        assert "training on 2 devices (GPUs/TPUs)" in log
        assert ("Loaded checkpoint" in log) == (epoch > 0)
        assert log.count("gloo in place of nccl") == (0 if "--cpu" in command else 2)
        updates = slice(2 * epoch, 2 * epoch + 2)
        assert logged(log, "loss") == pytest.approx(logged(alone, "loss")[updates], abs=0.0015), command
        assert logged(log, "valid_loss") == pytest.approx(logged(alone, "valid_loss")[epoch : epoch + 1], abs=0.0015)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ON_TWO_GPUS)
def test_two_gpus_in_16_bits_have_the_losses_of_one_cpu(data_bin, tmp_path, flags):
    alone = call(*training(data_bin, tmp_path / "alone", *STEADY, "--max-epoch", 2))
    log = run_on_gpus(2, *training_on_gpus(data_bin, tmp_path / "two", *flags.split()))
    assert "training on 2 devices (GPUs/TPUs)" in log and log.count("gloo in place of nccl") == 2
    assert logged(log, "loss") == pytest.approx(logged(alone, "loss"), abs=0.05)
    assert logged(log, "valid_loss") == pytest.approx(logged(alone, "valid_loss"), abs=0.05)
