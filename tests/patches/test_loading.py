"""fairseq_rope/patches: fairseq's checkpoints load, and code in them does not run."""

import builtins
import contextlib
import io
import itertools
import multiprocessing
import os
import pickle
import re
import threading
import zipfile
from argparse import Namespace
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path

import fairseq
import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, utils
from fairseq.data import Dictionary, FastaDataset

from fairseq_rope.checkpoints import CheckpointError, load_checkpoint, safe_load
from fairseq_rope.patches import options
from tests.commands import LIMIT
from tests.patches.contents import RunsCode, same_contents
from tests.patches.fairseq_alone import fasta_dataset_alone, translation_task

# -- contents of checkpoints ---------------------------------------------------------------------------


def fairseq_state():
    """The entries and classes that fairseq/trainer.py and audio tasks put into a checkpoint."""
    dictionary = Dictionary()
    dictionary.add_symbol("word", n=7)
    return {
        "args": None,
        "cfg": {"model": Namespace(arch="transformer_rope"), "task": {"_name": "translation"}},
        "model": OrderedDict(weight=torch.ones(2), _extra_state={"calibrated": True, "scale": 0.5}, _ema={}),
        "optimizer_history": [{"num_updates": 1, "lr_scheduler_state": {"best": None}}],
        "extra_state": {
            "val_loss": np.float64(3.5),
            "best": np.float32(3.5),
            "scalars": [np.dtype(code).type(1) for code in "?bBhHiIqQefd"],
            "bleu_counts": np.array([3]),
            "metrics": OrderedDict(train=[(10, "loss", "AverageMeter", {"val": torch.tensor(1.0), "round": 3})]),
            "train_iterator": {"epoch": 2, "iterations_in_epoch": np.int64(0)},
        },
        "last_optimizer_state": {"state": {0: {"step": 1, "exp_avg": torch.zeros(2)}}, "param_groups": []},
        "task_state": {"target_dictionary": dictionary, "dictionaries": [dictionary], "labels": {"a": "1"}},
    }


def test_fairseqs_checkpoints_load_with_weights_only(tmp_path):
    path, old = tmp_path / "checkpoint.pt", tmp_path / "old.pt"
    torch.save(fairseq_state(), path)
    # NumPy 1 wrote its scalars as numpy.core.multiarray.scalar; NumPy 2 has renamed the module.
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(old, "w") as target:
        for item in source.namelist():
            data = source.read(item)
            if item.endswith("data.pkl"):
                data = data.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
                assert b"cnumpy.core.multiarray\nscalar" in data
            target.writestr(item, data)
    for file in (path, old):
        state = checkpoint_utils.torch.load(str(file))
        dictionary = state["task_state"]["target_dictionary"]
        assert (dictionary.indices["word"], dictionary.count[-1]) == (4, 7)
        assert same_contents(state, {**fairseq_state(), "task_state": state["task_state"]})
    assert torch.load is not checkpoint_utils.torch.load and torch.save is checkpoint_utils.torch.save


class Built:
    """An object that *function* returns for *arguments* when it is unpickled, and that then gets *state*."""

    def __init__(self, function, arguments=(), state=None):
        self.reduced = function, arguments, state

    def __reduce__(self):
        return self.reduced


SCALAR, ARRAY = (one.__reduce__()[0] for one in (np.float64(0), np.zeros(1)))
FLOAT, NUMBERS = np.dtype("f8"), b"\1" * 64
PLAIN = (3, "<", None, None, None, -1, -1, 0)  # the state of np.dtype("f8")
OBJECT = Built(np.dtype, ("O8",))  # NumPy needs no state for it
FIELDS = Built(np.dtype, ("f8", False, True), (3, "<", None, ("a",), {"a": (OBJECT, 0)}, 8, 8, 0))
FLAGS = Built(np.dtype, ("f8", False, True), (*PLAIN[:-1], 1))


def array_of(dtype, shape=(8,), data=NUMBERS):
    return Built(ARRAY, (np.ndarray, (0,), b"b"), (1, shape, dtype, False, data))


NOT_PLAIN = {
    "an array of objects": array_of(OBJECT),
    "an array of fields": array_of(FIELDS),
    "an array with flags": array_of(FLAGS),
    "a number with fields": Built(SCALAR, (FIELDS, NUMBERS[:8])),
    "a number with flags": Built(SCALAR, (FLAGS, NUMBERS[:8])),
    "a type that is none": Built(SCALAR, (Namespace(dtype="O"), NUMBERS[:8])),
    "a negative shape": array_of(FLOAT, (-2, -4)),
    "too little data": array_of(FLOAT, (9,)),
    "data that are no bytes": array_of(FLOAT, (8,), [1.0] * 8),
    "an array without a state": Built(np.ndarray, ((4,), "O")),
    "two numbers as one": Built(SCALAR, (Built(np.dtype, ("f8",), (3, "2", *PLAIN[2:])), NUMBERS)),
    "a type alone": Built(np.dtype, ("f8", False, True), FIELDS.reduced[2]),
}


@pytest.mark.parametrize("content", list(NOT_PLAIN))
def test_numpy_builds_only_plain_numbers(tmp_path, content):
    path = str(tmp_path / "checkpoint.pt")
    torch.save({"model": {}, "extra_state": NOT_PLAIN[content]}, path)
    ended = run_forked(lambda: pytest.raises(CheckpointError, load_checkpoint, path).match("checkpoint.pt"))
    assert ended == 0


def test_no_allowed_class_ends_the_process_with_arguments_and_states_of_the_file():
    arguments = [(), ([1],), ((4,), "O"), (np.ndarray, (0,), b"b"), (FLAGS, NUMBERS[:8]), ("O8",), ("f8", False, True)]
    states = [None, {}, ({}, {"dtype": "O", "shape": (9,)}), {"_content": FLAGS, "_metadata": 1}]
    states += [built.reduced[2] for built in (OBJECT, FIELDS, FLAGS, *NOT_PLAIN.values()) if built.reduced[2]]

    def try_all():
        allowed = [each[0] if isinstance(each, tuple) else each for each in torch.serialization.get_safe_globals()]
        for function in (SCALAR, ARRAY, np.dtype, np.ndarray, *allowed):
            for given, state in itertools.product(arguments, states):
                built, file = Built(function, given, state), io.BytesIO()
                with contextlib.suppress(Exception):
                    of_type = [Built(SCALAR, (built, NUMBERS[:8])), array_of(built)]
                    torch.save({"model": {}, "built": [built, *of_type]}, file)
                    repr(safe_load(file))

    assert run_forked(try_all) == 0


def run_forked(function):
    """The exit code of a process that calls *function*; it is negative after a signal."""
    process = multiprocessing.get_context("fork").Process(target=function)
    process.start()
    process.join()
    return process.exitcode


LOADERS = {
    "ours": load_checkpoint,
    "fairseq's": checkpoint_utils.load_checkpoint_to_cpu,
    "fairseq's ensembles": lambda path: checkpoint_utils.load_model_ensemble([path]),
}


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("loader", ["ours", "fairseq's"])
def test_a_checkpoint_cut_at_any_length_is_refused_by_name(tmp_path, zipped, loader):
    whole, cut = tmp_path / "whole.pt", tmp_path / "cut.pt"
    weights = {f"layer{number}": torch.randn(100, 10) for number in range(16)}
    torch.save({**fairseq_state(), "model": weights}, whole, _use_new_zipfile_serialization=zipped)
    content = whole.read_bytes()
    assert 60_000 < len(content) < 80_000
    for number in range(20):
        cut.write_bytes(content[: len(content) * number // 20])
        with pytest.raises(CheckpointError, match=f"^{cut} is not a valid checkpoint: [^\n]+$"):
            LOADERS[loader](str(cut))


def test_models_loaded_in_parallel_threads_keep_their_languages(trained, data_bin):
    """One thread loads for en-de, which fits. The other loads for de-en, which is refused."""
    path, outcomes = str(trained / "checkpoint_last.pt"), {"en": [], "de": []}
    start = threading.Barrier(2)

    def load(source, target):
        task = translation_task(data_bin, source, target)
        for _ in range(5):
            start.wait(LIMIT)
            try:
                checkpoint_utils.load_model_ensemble([path], task=task)
                outcomes[source].append("loaded")
            except CheckpointError as error:
                outcomes[source].append(str(error).split(":")[0])

    with ThreadPoolExecutor(2) as pool:
        for loading in [pool.submit(load, *pair) for pair in (("en", "de"), ("de", "en"))]:
            loading.result(LIMIT)
    refused = f"{path} was trained from en to de, and the data are from de to en"
    assert outcomes == {"en": ["loaded"] * 5, "de": [refused] * 5}


# -- code in a checkpoint ------------------------------------------------------------------------------


HOSTILE = {
    "in the model": lambda bomb: {**fairseq_state(), "model": {"weight": bomb}},
    "in cfg": lambda bomb: {**fairseq_state(), "cfg": {"model": bomb}},
    "inside an allowed class": lambda bomb: {**fairseq_state(), "args": Namespace(x=bomb)},
    "alone": lambda bomb: bomb,
}


@pytest.mark.parametrize("where", list(HOSTILE))
@pytest.mark.parametrize("zipped", [True, False])
def test_code_in_a_checkpoint_is_refused_and_not_run(tmp_path, where, zipped):
    path, trace = str(tmp_path / "hostile.pt"), tmp_path / "was_run"
    state = HOSTILE[where](RunsCode(trace))
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    (tmp_path / "plain.pt").write_bytes(pickle.dumps(state))
    for load in LOADERS.values():
        with pytest.raises(CheckpointError, match="hostile.pt was not loaded, and no code in it was run.*mkdir"):
            load(path)
        with pytest.raises(CheckpointError, match="plain.pt was not loaded"):
            load(str(tmp_path / "plain.pt"))
    assert not trace.exists()
    # Loading the same file as fairseq's git main does runs the code.
    torch.load(path, weights_only=False)
    assert trace.exists()


def test_no_module_of_fairseq_evaluates_options_of_a_checkpoint():
    """A checkpoint names its own architecture, so no architecture may evaluate its options."""
    package = Path(fairseq.__file__).parent
    for path in package.rglob("*.py"):
        name = ".".join(path.relative_to(package.parent).with_suffix("").parts)
        evaluates = re.search(r"(?<![\w.])eval\(", path.read_text(encoding="utf-8"))
        if evaluates and not name.startswith(("fairseq.examples.", "fairseq.model_parallel.")):
            assert vars(import_module(name)).get("eval") is options.literal, name


@pytest.mark.parametrize(
    "arch, option, value",
    [
        ("fconv", "encoder_layers", "__import__('os').mkdir('was_run') or [(512, 3)]"),
        ("transformer_tiny", "adaptive_softmax_cutoff", "__import__('os').mkdir('was_run') or 10"),
        ("transformer_tiny", "encoder_xformers_att_config", "__import__('os').mkdir('was_run') or {}"),
    ],
)
def test_options_in_a_checkpoint_are_parsed_and_not_evaluated(trained, tmp_path, monkeypatch, arch, option, value):
    monkeypatch.chdir(tmp_path)
    state = load_checkpoint(str(trained / "checkpoint_last.pt"))
    vars(state["cfg"]["model"]).update({"arch": arch, "_name": arch, option: value})
    torch.save(state, "model.pt")
    with pytest.raises((ValueError, AttributeError)):
        checkpoint_utils.load_model_ensemble_and_task(["model.pt"])
    assert not os.path.exists("was_run")
    eval(value)  # as fairseq does
    assert os.path.exists("was_run")


SHELL = "$(touch was_run)"


def plainly(state, hostile):
    state["cfg"]["task"] = hostile


def by_interpolation(state, hostile):
    state["cfg"].update(task="${other}", other=hostile)


def in_old_args(state, hostile):
    state["args"] = Namespace(**{**vars(state["cfg"]["model"]), **hostile})


@pytest.mark.parametrize("edit", [plainly, by_interpolation, in_old_args])
def test_a_command_in_a_checkpoint_runs_only_without_the_patch(trained, data_bin, tmp_path, monkeypatch, edit):
    """The options name a language that contains a command. FASTA files have it in their names."""
    data, source = tmp_path / "data", f"en{SHELL}"
    data.mkdir()
    for language in (source, "de"):
        (data / f"dict.{language}.txt").write_bytes((data_bin / "dict.en.txt").read_bytes())
    for suffix in ("fasta", "idx", "bin"):  # fairseq looks for the last two, and reads the first
        (data / f"valid.{source}-de.{source}.{suffix}").write_text(">1\nA\n")
    state = load_checkpoint(str(trained / "checkpoint_last.pt"))
    of_task = state["cfg"]["task"]
    of_task = dict(of_task if isinstance(of_task, dict) else vars(of_task))
    edit(state, {**of_task, "dataset_impl": "fasta", "source_lang": source})
    monkeypatch.chdir(tmp_path)
    torch.save(state, "model.pt")

    def read_sample_sentences():
        _, _, task = checkpoint_utils.load_model_ensemble_and_task(["model.pt"], {"data": str(data)})
        with contextlib.suppress(Exception):
            task.load_dataset("valid")
        return os.path.exists("was_run")

    assert not read_sample_sentences()
    for index in data.glob("*.npy"):  # the index would be read instead of the files
        index.unlink()
    monkeypatch.setattr(FastaDataset, "_build_index", fasta_dataset_alone().FastaDataset._build_index)
    assert read_sample_sentences()


# -- options that fairseq evaluates --------------------------------------------------------------------


def test_options_are_parsed_as_in_fairseq():
    assert utils.eval_str_list("8,16", type=int) == [8, 16]
    assert utils.eval_str_list("[0.5]") == [0.5] and utils.eval_str_list("1/32") == [1 / 32]
    assert utils.eval_str_list("3", type=int) == [3]
    assert utils.eval_str_list(None) is None
    assert utils.eval_str_dict("{'name': 'x'}") == {"name": "x"}
    # fairseq returns the default for a boolean, which is not text.
    assert [utils.eval_bool(x) for x in ("True", "0", True, None)] == [True, False, False, False]
    for text in (
        "1/32", "5e-4/2", "3 - 1", "-(2 + 3)", "(0.9, 1 - 0.02)", "-1", "1e-8", "None",
        "'a' * 3", "[(512, 3)] * 20", "[(512, 10, 5)] + [(512, 3, 2)] * 4", "{'name': [1/2]}", "{1/32, 2}", "True",
    ):  # fmt: skip
        assert options.literal(text) == builtins.eval(text), text


@pytest.mark.parametrize(
    "text, reason",
    [
        ("__import__('os').getcwd()", "it has a Call"),
        ("9**9**9", "it has a BinOp"),
        ("1/0", "division by zero"),
        ("[1] + 'a'", "can only concatenate"),
        ("args.x", "it has a Attribute"),
        ("1 +", "invalid syntax"),
        ("'a' % 3", "it has a BinOp"),
    ],
)
def test_a_refused_expression_is_shown_with_the_reason(text, reason):
    with pytest.raises(ValueError) as refused:
        options.literal(text)
    message = str(refused.value)
    assert message.startswith(f"{text!r}: must be a literal, or + - * / on literals (")
    assert reason in message
