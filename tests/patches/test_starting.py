"""fairseq_rope/patches/starting.py, saving.py: a training that has ended, and the counter of --patience."""

import sys
from argparse import Namespace
from types import ModuleType

import pytest
import torch

from fairseq_rope.checkpoints import load_checkpoint
from fairseq_rope.patches.saving import restore_early_stopping
from tests.commands import train


@pytest.fixture(scope="module")
def start(data_bin, tmp_path_factory):
    """The state of a training after one epoch, which counts validations for --patience."""
    folder = tmp_path_factory.mktemp("start")
    train(data_bin, folder, "--patience", 3, "--no-epoch-checkpoints")
    return load_checkpoint(str(folder / "checkpoint_last.pt"))


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
        assert f"the training in --save-dir {old.parent} has already ended: {reason}" in output
        assert old.read_bytes() == before
    named = ["--restore-file", f"{old.parent}/../old/{old.name}"]
    assert f"has already ended: {reason}" in train(data_bin, old.parent, flag, 1, "--max-epoch", 9, *named)
