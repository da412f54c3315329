"""fairseq_rope/patches/loading.py: what a training reads of a checkpoint besides weights and the optimiser's state."""

import sys
from argparse import Namespace
from types import ModuleType

import numpy as np
import pytest
import torch

from fairseq_rope.checkpoints import CheckpointError, load_checkpoint
from fairseq_rope.patches.loading import refuse_damaged_extra_state
from fairseq_rope.patches.saving import restore_early_stopping
from tests.commands import call, train, training

FORMS = {
    "train_iterator": "the number of an epoch and of its iterations",
    "early_stopping": "a number and a count",
    "early_stopping_metric": "text",
    "best": "a number",
    "previous_training_time": "a number",
    "metrics": "a dictionary",
}
DAMAGED = [
    *(("early_stopping", value) for value in (5, None, "best", [1], {"best": "x"}, {"num_runs": None}, {"other": 1})),
    *(("early_stopping", {"best": 2.0, "num_runs": value}) for value in (-1, 1.5, True, "3")),
    *(("train_iterator", value) for value in (None, 3, {}, {"epoch": "2"}, {"epoch": 1, "iterations_in_epoch": None})),
    ("early_stopping_metric", 3),
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


@pytest.mark.parametrize("module", ["fairseq_cli.train", "__mp_main__"])
@pytest.mark.parametrize(
    "metric, maximize, runs", [("loss", False, 2), ("ppl", False, 0), ("accuracy", True, 0), ("loss", True, 0)]
)
def test_the_counter_of_another_metric_is_not_restored(monkeypatch, start, module, metric, maximize, runs):
    """torch names the main module of a process __mp_main__ if it starts one for each GPU."""
    assert start["extra_state"]["early_stopping_metric"] == "loss"
    function = ModuleType("should_stop_early")  # has attributes, like a function
    function.__module__ = module
    if module not in sys.modules:
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setattr(sys.modules[module], "should_stop_early", function, raising=False)
    saved = {**start["extra_state"], "early_stopping": {"best": 2.5, "num_runs": 2}}
    cfg = Namespace(best_checkpoint_metric=metric, maximize_best_checkpoint_metric=maximize, patience=-1)
    assert restore_early_stopping(saved, cfg) == 0 and not hasattr(function, "best")
    cfg.patience = 3
    assert restore_early_stopping(saved, cfg) == runs
    restored = {name: value for name, value in vars(function).items() if name in ("best", "num_runs")}
    assert restored == ({"best": 2.5, "num_runs": 2} if runs else {})
    del saved["early_stopping_metric"]  # as in checkpoints of earlier commits
    assert restore_early_stopping(saved, cfg) == 2


def test_a_training_that_starts_from_one_that_has_ended_trains(data_bin, start, tmp_path):
    """As in fairseq, which makes an update before it compares with --max-update."""
    state = {**start["extra_state"], "early_stopping": {"best": 0.0, "num_runs": 3}}
    (tmp_path / "old").mkdir()
    old = tmp_path / "old" / "checkpoint_last.pt"
    torch.save({**start, "extra_state": state}, old)
    updates = start["optimizer_history"][-1]["num_updates"]
    for number, flags in enumerate((["--max-update", 1, "--max-epoch", 9], ["--patience", 4, "--max-epoch", 3])):
        folder = tmp_path / f"new{number}"
        output = train(data_bin, folder, "--restore-file", old, *flags)
        made = load_checkpoint(str(folder / "checkpoint_last.pt"))["optimizer_history"][-1]["num_updates"]
        assert made > updates and "has already ended" not in output
    for flag, reason in (("--max-update", f"it has made {updates:,} updates, and --max-update is 1"),
                         ("--patience", "3 validations had no better loss, and --patience is 1")):  # fmt: skip
        before = old.read_bytes()
        output = train(data_bin, old.parent, flag, 1, "--max-epoch", 9)
        named = train(
            data_bin, old.parent, flag, 1, "--max-epoch", 9, "--restore-file", f"{old.parent}/../old/{old.name}"
        )
        assert f"has already ended: {reason}" in named
        assert f"the training in --save-dir {old.parent} has already ended: {reason}" in output
        assert old.read_bytes() == before
