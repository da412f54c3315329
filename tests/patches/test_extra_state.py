"""fairseq_rope/patches/loading.py: what a training reads of a checkpoint besides weights and the optimiser's state."""

import numpy as np
import pytest
import torch

from fairseq_rope.checkpoints import CheckpointError, load_checkpoint
from fairseq_rope.patches.loading import refuse_damaged_extra_state
from tests.commands import call, train, training

FORMS = {
    "train_iterator": "the number of an epoch and of its iterations",
    "early_stopping": "a number and a count",
    "best": "a number",
    "previous_training_time": "a number",
    "metrics": "a dictionary",
}
DAMAGED = [
    *(("early_stopping", value) for value in (5, None, "best", [1], {"best": "x"}, {"num_runs": None}, {"other": 1})),
    *(("early_stopping", {"best": 2.0, "num_runs": value}) for value in (-1, 1.5, True, "3")),
    *(("train_iterator", value) for value in (None, 3, {}, {"epoch": "2"}, {"epoch": 1, "iterations_in_epoch": None})),
    *((name, "x") for name in ("best", "previous_training_time", "metrics")),
    ("metrics", []),
]


@pytest.fixture(scope="module")
def start(data_bin, tmp_path_factory):
    """The state of a training after one epoch, which counts validations for --patience."""
    folder = tmp_path_factory.mktemp("start")
    train(data_bin, folder, "--patience", 3, "--no-epoch-checkpoints")
    return load_checkpoint(str(folder / "checkpoint_last.pt"))


@pytest.mark.parametrize("name, value", DAMAGED)
def test_a_damaged_entry_ends_a_training_in_one_sentence(data_bin, start, tmp_path, name, value):
    assert name in start["extra_state"]
    path = tmp_path / "checkpoint_last.pt"
    torch.save({**start, "extra_state": {**start["extra_state"], name: value}}, path)
    before = path.read_bytes()
    with pytest.raises(CheckpointError) as refused:
        call(*training(data_bin, tmp_path, "--patience", 3, "--max-epoch", 2))
    entry = f'extra_state["{name}"]'
    expected = f"{path} is not a valid checkpoint: its {entry} is damaged, and must be {FORMS[name]}"
    assert str(refused.value) == expected and path.read_bytes() == before


def test_an_extra_state_that_is_no_dictionary_is_damaged():
    with pytest.raises(CheckpointError, match="^x.pt is not a valid checkpoint: its extra_state is damaged"):
        refuse_damaged_extra_state("x.pt", [1])


@pytest.mark.parametrize("best", [None, 3, 2.5, float("inf"), np.float32(2.5), np.float64(2.5), torch.tensor(2.5)])
def test_the_numbers_that_fairseq_writes_are_not_damaged(best):
    """A metric can be a number of Python, NumPy or torch, and old checkpoints lack entries."""
    iterator = {"version": 2, "epoch": 3, "iterations_in_epoch": 0, "shuffle": True}
    for state in ({}, {"train_iterator": {"epoch": 0, "iterations_in_epoch": 0}, "val_loss": None}):
        refuse_damaged_extra_state("x.pt", state)
    counters = {"best": best, "num_runs": 2}
    refuse_damaged_extra_state("x.pt", {"train_iterator": iterator, "early_stopping": counters, "best": best})


def test_a_training_resumes_from_the_undamaged_file(data_bin, start, tmp_path):
    torch.save(start, tmp_path / "checkpoint_last.pt")
    train(data_bin, tmp_path, "--patience", 3, "--max-epoch", 2)
    assert load_checkpoint(str(tmp_path / "checkpoint_last.pt"))["extra_state"]["train_iterator"]["epoch"] == 3
