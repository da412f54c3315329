"""fairseq_rope/patches: fairseq's checkpoints load, and nothing in them runs."""

import argparse
import os
import pickle
import re
import zipfile
from collections import OrderedDict
from importlib import import_module
from pathlib import Path

import fairseq
import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import data_utils

from fairseq_rope.patches import loading
from fairseq_rope.patches import options as read_options
from fairseq_rope.patches.loading import CheckpointError, load_checkpoint
from tests.commands import PLUGIN, call

needs_allow_list = pytest.mark.skipif(
    not loading.CAN_ALLOW_LIST, reason="torch < 2.6 cannot allow-list classes by name"
)


def fairseq_state():
    """What fairseq/trainer.py puts into a checkpoint, classes and all."""
    return {
        "args": None,
        "cfg": {"model": argparse.Namespace(arch="transformer_rope"), "task": {"_name": "translation"}},
        "model": OrderedDict(weight=torch.ones(2)),
        "optimizer_history": [{"num_updates": 1, "lr_scheduler_state": {"best": None}}],
        "extra_state": {
            "val_loss": np.float64(3.5),
            "best": np.float32(3.5),
            "scalars": [np.dtype(code).type(1) for code in "?bBhHiIqQefd"],
            "bleu_counts": np.array([3, 2, 1, 0]),
            "metrics": OrderedDict(train=[(10, "loss", "AverageMeter", {"val": torch.tensor(1.0), "round": 3})]),
            "train_iterator": {"epoch": 2, "iterations_in_epoch": np.int64(0)},
        },
        "last_optimizer_state": {"state": {0: {"step": 1, "exp_avg": torch.zeros(2)}}, "param_groups": []},
    }


def test_a_checkpoint_as_fairseq_writes_it_loads_with_weights_only(tmp_path):
    path = str(tmp_path / "checkpoint.pt")
    torch.save(fairseq_state(), path)
    state = load_checkpoint(path)
    assert state["cfg"]["model"].arch == "transformer_rope"
    assert state["extra_state"]["val_loss"] == 3.5
    assert state["extra_state"]["bleu_counts"].tolist() == [3, 2, 1, 0]
    assert torch.equal(state["model"]["weight"], torch.ones(2))


def test_a_checkpoint_of_numpy_1_loads(tmp_path):
    # NumPy 1 wrote its scalars as numpy.core.multiarray.scalar; the module has moved since.
    path, old = str(tmp_path / "new.pt"), str(tmp_path / "old.pt")
    torch.save(fairseq_state(), path)
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(old, "w") as target:
        for item in source.namelist():
            data = source.read(item)
            if item.endswith("data.pkl"):
                data = data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
                assert b"cnumpy.core.multiarray\nscalar" in data
            target.writestr(item, data)
    assert load_checkpoint(old)["extra_state"]["val_loss"] == 3.5


class RunsCode:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


HOSTILE = {
    "in the model": lambda bomb: {**fairseq_state(), "model": {"weight": bomb}},
    "in cfg": lambda bomb: {**fairseq_state(), "cfg": {"model": bomb}},
    "inside an allowed class": lambda bomb: {**fairseq_state(), "args": argparse.Namespace(x=bomb)},
    "alone": lambda bomb: bomb,
}
LOADERS = {
    "ours": load_checkpoint,
    "fairseq's": checkpoint_utils.load_checkpoint_to_cpu,
    "fairseq's ensembles": lambda path: checkpoint_utils.load_model_ensemble([path]),
}


@needs_allow_list
@pytest.mark.parametrize("where", list(HOSTILE))
@pytest.mark.parametrize("loader", list(LOADERS))
@pytest.mark.parametrize("zipped", [True, False])
def test_a_hostile_checkpoint_is_refused_and_runs_nothing(tmp_path, where, loader, zipped):
    path, trace = str(tmp_path / "hostile.pt"), tmp_path / "was_run"
    torch.save(HOSTILE[where](RunsCode(str(trace))), path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="hostile.pt was not loaded, and nothing in it was run.*mkdir"):
        LOADERS[loader](path)
    assert not trace.exists()
    # The same file, loaded as fairseq's git main does, would have run it.
    torch.load(path, weights_only=False)
    assert trace.exists()


@pytest.mark.parametrize("option", ["adaptive_softmax_cutoff", "encoder_xformers_att_config"])
def test_options_in_a_checkpoint_are_read_and_not_evaluated(build, task, tmp_path, option):
    trace = tmp_path / "was_run"
    hostile = f"__import__('os').mkdir('{trace}') or 10"
    for arch in ("transformer_tiny", "transformer_rope_tiny"):
        with pytest.raises((ValueError, AttributeError)):
            build(arch, **{option: hostile})
    assert not trace.exists()
    eval(hostile)  # what fairseq does
    assert trace.exists()


def test_no_module_of_fairseq_evaluates_what_a_checkpoint_says():
    """Which architecture a checkpoint is of, it says itself; so no architecture may evaluate its options."""
    package = Path(fairseq.__file__).parent
    for path in package.rglob("*.py"):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        evaluates = re.search(r"(?<![\w.])eval\(", path.read_text(encoding="utf-8"))
        if evaluates and not name.startswith(("fairseq.examples.", "fairseq.model_parallel.")):
            assert vars(import_module(name)).get("eval") is read_options.literal, name


def test_a_checkpoint_of_another_architecture_runs_nothing_either(data_bin, trained, tmp_path):
    trace, path = tmp_path / "was_run", tmp_path / "fconv.pt"
    state = load_checkpoint(str(trained / "checkpoint_last.pt"))
    options = state["cfg"]["model"]
    options.arch = options._name = "fconv"
    options.encoder_layers = f"__import__('os').mkdir('{trace}') or [(512, 3)]"
    torch.save(state, path)
    with pytest.raises(ValueError):
        call("fairseq-generate", data_bin, "--user-dir", PLUGIN, "--path", path, "--cpu")
    assert not trace.exists()
    eval(options.encoder_layers)  # what fairseq does
    assert trace.exists()


def test_options_are_read_as_fairseq_reads_them():
    assert utils.eval_str_list("8,16", type=int) == [8, 16]
    assert utils.eval_str_list("[0.5]") == [0.5]
    assert utils.eval_str_list("3", type=int) == [3]
    assert utils.eval_str_list(None) is None
    assert utils.eval_str_dict("{'name': 'x'}") == {"name": "x"}
    for text in ("[(512, 3)] * 20", "[(512, 10, 5)] + [(512, 3, 2)] * 4", "(0.9, 0.98)", "-1", "True"):
        assert read_options.literal(text) == eval(text)
    # A boolean is no text to eval: fairseq takes the default then.
    assert [utils.eval_bool(x) for x in ("True", "0", True, None)] == [True, False, False, False]


@needs_allow_list
def test_a_plain_hostile_pickle_is_refused_and_runs_nothing(tmp_path):
    path, trace = tmp_path / "hostile.pt", tmp_path / "was_run"
    path.write_bytes(pickle.dumps(RunsCode(str(trace))))
    with pytest.raises(CheckpointError, match="hostile.pt was not loaded"):
        load_checkpoint(str(path))
    assert not trace.exists()


@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.99])
def test_a_truncated_checkpoint_is_refused_by_name(tmp_path, keep):
    path = tmp_path / "short.pt"
    torch.save(fairseq_state(), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: keep if isinstance(keep, int) else int(keep * len(whole))])
    with pytest.raises(CheckpointError, match="short.pt") as refused:
        load_checkpoint(str(path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("loader", ["ours", "fairseq's"])
def test_a_checkpoint_cut_at_any_length_is_refused_by_name(tmp_path, zipped, loader):
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    weights = {f"layer{number}": torch.randn(100, 10) for number in range(16)}
    torch.save({**fairseq_state(), "model": weights}, whole, _use_new_zipfile_serialization=zipped)
    content = whole.read_bytes()
    assert 60_000 < len(content) < 80_000
    for number in range(200):
        length = len(content) * number // 200
        cut.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=f"^{cut} is not a whole checkpoint: [^\n]+$"):
            LOADERS[loader](str(cut))


def test_a_foreign_file_is_refused_by_name(tmp_path):
    path = tmp_path / "foreign.pt"
    torch.save({"state_dict": {}}, path)
    with pytest.raises(CheckpointError, match="foreign.pt is not a fairseq checkpoint: .* 'model'"):
        load_checkpoint(str(path))
    for model in ({3: torch.ones(2)}, None, [1]):
        torch.save({"model": model}, path)
        with pytest.raises(CheckpointError, match="foreign.pt is not a fairseq checkpoint"):
            load_checkpoint(str(path))
    path.write_text("no checkpoint at all\n")
    with pytest.raises(CheckpointError, match="foreign.pt"):
        load_checkpoint(str(path))


def test_torch_itself_is_left_as_it_was():
    assert torch.load is not checkpoint_utils.torch.load
    assert checkpoint_utils.torch.save is torch.save


def test_a_copied_checkpoint_appears_whole_or_not_at_all(tmp_path, monkeypatch):
    source, target = tmp_path / "checkpoint1.pt", tmp_path / "checkpoint_last.pt"
    source.write_bytes(b"new" * 1000)
    target.write_bytes(b"old")
    manager = checkpoint_utils.PathManager

    def killed_halfway(src, dst):
        with open(dst, "wb") as file:
            file.write(b"ne")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", killed_halfway)
        with pytest.raises(KeyboardInterrupt):
            manager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == b"old"
    assert manager.copy(str(source), str(target), overwrite=True)
    assert target.read_bytes() == source.read_bytes()


@pytest.mark.parametrize("count", [0, 1, 7, 8, 20, 1014])
@pytest.mark.parametrize("multiple", [1, 8])
def test_no_sentence_is_left_out_of_the_batches(count, multiple):
    order = np.random.RandomState(1).permutation(count)
    sizes = np.arange(count) % 30 + 1
    for limits in ({"max_tokens": 400}, {"max_sentences": 16}):
        batches = data_utils.batch_by_size(order, lambda i: sizes[i], required_batch_size_multiple=multiple, **limits)
        assert [i for batch in batches for i in batch] == order.tolist()
        assert all(len(batch) < multiple or len(batch) % multiple == 0 for batch in batches)
