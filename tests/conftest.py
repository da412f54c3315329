"""A tiny corpus in fairseq's binary form, and a model to put on it."""

import os
import random
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

import fairseq_rope  # noqa: F401  registers the architectures

ROOT = Path(__file__).resolve().parents[1]
PLUGIN = ROOT / "fairseq_rope"
BIN = Path(sys.executable).parent

# One thread: enough for tiny models, and two processes do not fight over the cores.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def run_program(*words, check=True, **kwargs):
    """Run a fairseq program (by name) as a user would; returns the finished process."""
    command = [str(BIN / str(words[0])), *(str(word) for word in words[1:])]
    done = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, **kwargs)
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(command)}\n{done.stdout}\n{done.stderr}")
    return done


def write_pairs(folder, count, seed):
    """A language pair to learn in seconds: the target is the source backwards, in capitals."""
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
def data_bin(tmp_path_factory):
    """A folder made by fairseq-preprocess: 200 pairs, joined dictionary; the text is in text/."""
    folder = tmp_path_factory.mktemp("corpus")
    text = write_pairs(folder / "text", 200, seed=1)
    prefixes = [word for n in ("train", "valid", "test") for word in (f"--{n}pref", text / n)]
    run_program(
        "fairseq-preprocess", "-s", "en", "-t", "de", *prefixes,
        "--joined-dictionary", "--destdir", folder / "bin",
    )  # fmt: skip
    return folder / "bin"


@pytest.fixture
def task():
    """What build_model asks of a task: a dictionary of 40 words for both sides."""
    dictionary = Dictionary()
    for number in range(40):
        dictionary.add_symbol(f"w{number}")
    return SimpleNamespace(source_dictionary=dictionary, target_dictionary=dictionary)


@pytest.fixture
def build(task):
    """build(arch, **options): the model of a named architecture, in eval mode."""

    def build(arch="transformer_rope_tiny", **options):
        args = Namespace(arch=arch, **options)
        ARCH_CONFIG_REGISTRY[arch](args)
        return ARCH_MODEL_REGISTRY[arch].build_model(args, task).eval()

    return build
