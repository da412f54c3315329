"""Fixtures: a tiny corpus in fairseq's binary form, and models for it; a limit on the time of each test."""

import os
import random
import shutil
import signal
import threading
from argparse import Namespace
from types import SimpleNamespace

import pytest
import sentencepiece as spm

if not os.environ.get("REAL_GPU") and any(map(os.path.exists, ("/proc/driver/nvidia", "/dev/dxg"))):  # Linux, WSL
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the tests are about CPUs and simulated GPUs; read by torch
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

import fairseq_rope  # noqa: F401  registers the architectures
from fairseq_rope.locks import locked
from tests.commands import LIMIT, call, train
from tests.real_slurm import RealSlurm, lacking

# Their assertions print the values that they compare, like those of test modules.
pytest.register_assert_rewrite("tests.models", "tests.searches", "tests.transformer.language_models")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Fail a test that hangs where no function takes a limit, for example while it reads a process's output."""
    limit = (36 if item.get_closest_marker("slow") or item.get_closest_marker("nightly") else 4) * LIMIT

    def fail(*_):
        pytest.fail(f"the test has not ended after {limit} seconds")

    if threading.current_thread() is not threading.main_thread():
        return (yield)
    # fairseq-rope translate and sacrebleu's program set it to end the process, also if a test calls them in this one.
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    before = signal.signal(signal.SIGALRM, fail)
    # Repeated, because the end of a "with" block or a fixture's end can hang, too.
    signal.setitimer(signal.ITIMER_REAL, limit, LIMIT)
    try:
        return (yield)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def write_pairs(folder, count, seed):
    """Write a corpus that a model learns in seconds: the target is the reversed source in capitals."""
    draw = random.Random(seed)
    words = "the a dog cat sees takes red blue big old house book under over".split()
    folder.mkdir(parents=True, exist_ok=True)
    for name, size in (("train", count), ("valid", 20), ("test", 20)):
        with open(folder / f"{name}.en", "w") as source, open(folder / f"{name}.de", "w") as target:
            for _ in range(size):
                sentence = [draw.choice(words) for _ in range(draw.randint(2, 9))]
                print(*sentence, file=source)
                print(*(word.upper() for word in reversed(sentence)), file=target)
    return folder


@pytest.fixture(scope="session")
def made_once(tmp_path_factory):
    """made_once(name, make): a folder that *make* fills in one of the parallel test processes. Tests only read it."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # its parent is a folder of this run
        folder = folder.parent
    (folder / "made_once").mkdir(exist_ok=True)

    def made(name, make):
        path = folder / "made_once" / name
        with locked(path.with_suffix(".lock")):
            if not path.with_suffix(".done").exists():
                shutil.rmtree(path, ignore_errors=True)  # of a process in which *make* has failed
                path.mkdir()
                make(path)
                path.with_suffix(".done").touch()
        return path

    return made


@pytest.fixture(scope="session")
def data_bin(made_once):
    """The output folder of fairseq-preprocess: 200 pairs, joined dictionary. The text is in ../text."""

    def make(folder):
        text = write_pairs(folder / "text", 200, seed=1)
        words = [word for n in ("train", "valid", "test") for word in (f"--{n}pref", text / n)]
        words += ["--joined-dictionary", "--destdir", folder / "bin"]
        call("fairseq-preprocess", "-s", "en", "-t", "de", *words)

    return made_once("corpus", make) / "bin"


@pytest.fixture(scope="session")
def text_bin(data_bin, made_once):
    """The output folder of fairseq-preprocess --only-source for the English text of the corpus."""
    text = data_bin.parent / "text"
    prefixes = [word for name in ("train", "valid", "test") for word in (f"--{name}pref", text / f"{name}.en")]
    return made_once("text", lambda folder: call("fairseq-preprocess", "--only-source", *prefixes, "--destdir", folder))


@pytest.fixture(scope="session")
def byte_pieces(tmp_path_factory):
    """The path of a SentencePiece model with byte_fallback, a symbol of a user (<x>) and a control symbol (<2de>)."""
    path = tmp_path_factory.mktemp("pieces") / "sentencepiece.bpe.model"
    lines = ["the dog sees a big cat in 5 houses"] * 9
    options = {"model_type": "bpe", "vocab_size": 330, "hard_vocab_limit": False, "minloglevel": 2}
    symbols = {"byte_fallback": True, "user_defined_symbols": ["<x>"], "control_symbols": ["<2de>"]}
    with open(path, "wb") as model:
        spm.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=model, **options, **symbols)
    return path


@pytest.fixture(scope="session")
def pairs_bin(data_bin, text_bin, tmp_path_factory):
    """Sentences in input0, input1 and input2 with labels, as sentence_prediction and sentence_ranking read them."""
    folder, text = tmp_path_factory.mktemp("pairs"), data_bin.parent / "text"
    for name in ("train", "valid"):
        labels = [str(len(line.split()) % 2) for line in (text / f"{name}.en").read_text().splitlines()]
        (folder / name).write_text("\n".join(labels) + "\n")
    inputs = {"input0": text / "{}.en", "input1": text / "{}.en", "input2": text / "{}.en", "label": folder / "{}"}
    for part, files in inputs.items():
        prefixes = [word for name in ("train", "valid") for word in (f"--{name}pref", str(files).format(name))]
        known = [] if part == "label" else ["--srcdict", text_bin / "dict.txt"]
        call("fairseq-preprocess", "--only-source", *prefixes, "--destdir", folder / "bin" / part, *known)
    for name in ("train", "valid"):
        (folder / "bin" / "label" / f"{name}.label").write_text((folder / name).read_text())
    return folder / "bin"


@pytest.fixture(scope="session")
def trained(data_bin, made_once):
    """The folder with checkpoint_last.pt of a tiny model after 20 epochs."""
    rarely = ["--save-interval", 20, "--validate-interval", 20, "--no-epoch-checkpoints"]
    return made_once("trained", lambda folder: train(data_bin, folder, "--max-epoch", 20, *rarely))


@pytest.fixture(scope="session")
def sinusoidal(data_bin, made_once):
    """A checkpoint of fairseq's own transformer after one epoch."""
    flags = ["--arch", "transformer_tiny", "--no-epoch-checkpoints"]
    return made_once("sinusoidal", lambda folder: train(data_bin, folder, *flags)) / "checkpoint_last.pt"


@pytest.fixture(scope="session")
def task():
    """A task with what build_model needs: a dictionary of 40 words for both sides."""
    dictionary = Dictionary()
    for number in range(40):
        dictionary.add_symbol(f"w{number}")
    return SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)


@pytest.fixture(scope="session")
def build(task):
    """build(arch, **options): the model of a named architecture, in eval mode."""

    def build(arch="transformer_rope_tiny", **options):
        args = Namespace(arch=arch, **options)
        ARCH_CONFIG_REGISTRY[arch](args)
        return ARCH_MODEL_REGISTRY[arch].build_model(args, task).eval()

    return build


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """SLURM itself, with two nodes on this machine. Without programs or root, tests are skipped, with the reason."""
    reason = lacking()
    if reason:
        pytest.skip(reason)
    with RealSlurm(tmp_path_factory.mktemp("slurm") / "slurm") as started:
        yield started
