"""fairseq's distributed training in two processes, on CPUs with gloo."""

import multiprocessing
import socket

import pytest

from tests.commands import LIMIT, call, training, valid_losses


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def train_in_two_processes(*command):
    """Run the fairseq-train *command* as ranks 0 and 1. Returns the log of rank 0."""
    several = [
        *("--ddp-backend", "legacy_ddp", "--distributed-backend", "gloo", "--distributed-no-spawn"),
        *("--distributed-init-method", f"tcp://127.0.0.1:{free_port()}", "--distributed-world-size", 2),
    ]
    commands = [[*command, *several, "--distributed-rank", rank] for rank in range(2)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        log, _ = pool.starmap_async(call, commands).get(timeout=LIMIT)
    return log


@pytest.mark.slow
def test_two_processes_train_and_resume_with_the_losses_of_one_with_accumulated_gradients(data_bin, tmp_path):
    same = ["--max-epoch", 2, "--dropout", 0, "--no-epoch-checkpoints", "--save-interval-updates", 1]
    losses = valid_losses(call(*training(data_bin, tmp_path / "one", *same, "--update-freq", 2)))
    assert len(losses) == 2
    assert valid_losses(train_in_two_processes(*training(data_bin, tmp_path / "two", *same))) == losses
    middle_of_epoch = tmp_path / "two" / "checkpoint_1_1.pt"
    resumed = train_in_two_processes(*training(data_bin, tmp_path / "three", *same, "--restore-file", middle_of_epoch))
    assert "Loaded checkpoint" in resumed
    assert valid_losses(resumed) == losses
