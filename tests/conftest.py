"""A tiny corpus in fairseq's binary form, and a model to put on it."""

import random
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY

import fairseq_rope  # noqa: F401  registers the architectures
from tests.commands import call, train


def half_on_cpus(what, run):
    """Return the mark of a test that needs *run* on a float16 tensor, which older torch supports on GPUs only."""
    try:
        run(torch.ones(2, 2, dtype=torch.float16))
        lacking = False
    except RuntimeError:
        lacking = True
    return pytest.mark.skipif(lacking, reason=f"torch {torch.__version__} has no float16 {what} on CPUs")


needs_half_layer_norm = half_on_cpus("layer norm", lambda x: torch.nn.functional.layer_norm(x, (2,)))
needs_half_linear = half_on_cpus("linear layer", lambda x: torch.nn.functional.linear(x, x, x[0]))


# The files that take longest begin first, so that no process waits for another at the end.
LONGEST = (
    *("recipes/test_pipeline.py", "test_compatibility.py", "tools/test_translate.py", "tools/test_export.py"),
    *("patches/test_patches.py", "patches/test_faults.py", "recipes/test_wmt14.py", "test_end_to_end.py"),
    *("tools/test_convert_layout.py", "test_distributed.py"),
)


def pytest_collection_modifyitems(items):
    places = {Path(__file__).parent / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(LONGEST)))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


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
    call("fairseq-preprocess", "-s", "en", "-t", "de", *prefixes, "--joined-dictionary", "--destdir", folder / "bin")
    return folder / "bin"


@pytest.fixture(scope="session")
def trained(data_bin, tmp_path_factory):
    """The folder of a tiny model that has learnt for 20 epochs; checkpoint_last.pt is in it."""
    folder = tmp_path_factory.mktemp("trained")
    train(
        data_bin, folder, "--max-epoch", 20, "--save-interval", 20, "--validate-interval", 20, "--no-epoch-checkpoints"
    )
    return folder


@pytest.fixture(scope="session")
def task():
    """What build_model asks of a task: a dictionary of 40 words for both sides."""
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
