"""Training spread over two processes, by fairseq's own means, on CPUs over gloo."""

import socket
import subprocess

from .commands import BIN, ENVIRONMENT, run_program, training, valid_losses


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def test_two_processes_train_to_the_losses_of_one_with_accumulated_gradients(data_bin, tmp_path):
    same = ["--max-epoch", 2, "--dropout", 0, "--no-epoch-checkpoints"]
    one = run_program(*training(data_bin, tmp_path / "one", *same, "--update-freq", 2))
    several = [
        "--ddp-backend", "legacy_ddp", "--distributed-backend", "gloo", "--distributed-no-spawn",
        "--distributed-init-method", f"tcp://127.0.0.1:{free_port()}", "--distributed-world-size", 2,
    ]  # fmt: skip
    ranks = []
    for rank in range(2):
        command = [*training(data_bin, tmp_path / "two", *same), *several, "--distributed-rank", rank]
        words = [str(BIN / command[0]), *(str(word) for word in command[1:])]
        ranks.append(
            subprocess.Popen(
                words, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
            )
        )
    logs = [process.communicate(timeout=240)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], logs
    losses = valid_losses(one.stdout + one.stderr)
    assert len(losses) == 2
    assert valid_losses(logs[0]) == losses
