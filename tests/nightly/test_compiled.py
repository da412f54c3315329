"""fairseq's compiled modules and those of ``fairseq_rope.patches.compiled`` give the same on random inputs."""

import ctypes
import importlib.util
import random
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from fairseq.scoring import bleu

from fairseq_rope.patches.compiled import data_utils_fast, libbleu, token_block_utils_fast

pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """A folder with fairseq's compiled modules. This needs a C++ compiler and Python's headers, and takes minutes."""
    folder = tmp_path_factory.mktemp("compiled")
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "--no-cache-dir"]
    subprocess.run([*pip, "--wheel-dir", folder, "fairseq-fixed==0.12.3.1"], check=True, timeout=1800)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.endswith(".so")])
    return folder / "fairseq"


def load(folder, name):
    (path,) = folder.glob(f"data/{name}*.so")
    spec = importlib.util.spec_from_file_location(f"fairseq.data.{name}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_batches(compiled):
    theirs, draw = load(compiled, "data_utils_fast"), np.random.default_rng(0)
    for trial in range(5000):
        size = int(draw.integers(0, 60))
        lengths = draw.integers(trial % 3 > 0, draw.integers(2, 40), size)
        lengths = np.sort(lengths) if trial % 2 else lengths
        indices, longest = draw.permutation(size), int(lengths.max(initial=1))
        max_tokens = int(draw.choice([-1, 0, longest, longest + draw.integers(0, 200)]))
        limits = max_tokens, int(draw.choice([-1, 0, 1, 2, 3, 7, 8, 20])), int(draw.choice([1, 2, 4, 8, 16]))
        both = [module.batch_by_size_vec(indices, lengths, *limits) for module in (theirs, data_utils_fast)]
        assert [batch.tolist() for batch in both[0]] == [batch.tolist() for batch in both[1]], (lengths, limits)
        by_index = dict(zip(indices.tolist(), lengths.tolist())).__getitem__
        both = [module.batch_by_size_fn(indices, by_index, *limits) for module in (theirs, data_utils_fast)]
        assert [batch.tolist() for batch in both[0]] == [batch.tolist() for batch in both[1]], (lengths, limits)
        shapes = draw.integers(1, 40, (int(draw.integers(1, 4)), 2))
        both = [module.batch_fixed_shapes_fast(indices, by_index, shapes) for module in (theirs, data_utils_fast)]
        assert both[0] == both[1], (lengths, shapes)


def test_blocks(compiled):
    theirs, draw = load(compiled, "token_block_utils_fast"), np.random.default_rng(0)
    for trial in range(5000):
        sizes = draw.integers(trial % 3 > 0, draw.integers(2, 40), draw.integers(1, 60))
        block_size, separator = int(draw.integers(1, 50)), int(draw.integers(0, 3))
        for mode in ("none", "complete", "complete_doc", "eos"):
            ours = token_block_utils_fast._get_slice_indices_fast(sizes, mode, block_size, separator)
            if len(ours) == 0:
                continue  # fairseq's ends in an error of NumPy
            expected = theirs._get_slice_indices_fast(sizes, mode, block_size, separator)
            assert ours.tolist() == expected.tolist() and ours.dtype == expected.dtype, (sizes, mode, block_size)
            expected = theirs._get_block_to_dataset_index_fast(sizes, expected)
            places = token_block_utils_fast._get_block_to_dataset_index_fast(sizes, ours)
            assert places.tolist() == expected.tolist() and places.dtype == expected.dtype, (sizes, mode, block_size)


def test_bleu(compiled):
    (path,) = compiled.glob("libbleu*.so")
    library, draw = ctypes.cdll.LoadLibrary(str(path)), random.Random(0)
    scorer, theirs = object.__new__(bleu.Scorer), bleu.BleuStat()
    libbleu.init(scorer, bleu.BleuConfig(pad=1, eos=2, unk=3))
    for trial in range(4000):
        words = [[draw.randint(2 + trial % 2, 8) for _ in range(draw.randint(1, 12))] for _ in range(2)]
        ref, pred = (torch.IntTensor([1] * draw.randint(0, 2) + side + [2, 1][: draw.randint(0, 2)]) for side in words)
        libbleu.add(scorer, ref, pred)
        known = torch.where(ref == 3, -999, ref).int()
        arguments = [(ctypes.c_size_t(len(side)), ctypes.c_void_p(side.data_ptr())) for side in (known, pred)]
        library.bleu_add(ctypes.byref(theirs), *arguments[0], *arguments[1], 1, 2)
        assert bytes(theirs) == bytes(scorer.stat), (ref, pred)
