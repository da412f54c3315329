"""Recipes that run in seconds: a few pairs of the demo's corpus, and a small model."""

import atexit
import contextlib
import functools
import gzip
import io
import shutil
import tempfile
from pathlib import Path

import pytest

from recipes.__main__ import main
from tests.commands import ENVIRONMENT, ROOT

# Models that have hardly trained write to the limit, which takes time. The precision depends on the machine.
SMALL = (
    *("vocab_size=250", "layers=1", "width=32", "ffn_width=32", "heads=2", "max_epochs=1", "average_checkpoints=1"),
    *("max_len_b=10", "generate_flags=--max-len-a=0", "precision=fp32", "gpus=0", "disk_gb=0"),
)


@functools.cache
def small_corpus(train=200, heldout=12):
    """A folder with the first pairs of the demo's corpus: *train* to train, *heldout* each to validate and to test."""
    folder = Path(tempfile.mkdtemp(prefix="small_demo"))
    atexit.register(shutil.rmtree, folder)
    for name, pairs in (("train", train), ("valid", heldout), ("test", heldout)):
        for lang in ("en", "de"):
            file = f"{name}.{lang}.gz"
            whole = gzip.decompress((ROOT / "recipes" / "demo" / "corpus" / file).read_bytes())
            (folder / file).write_bytes(gzip.compress(b"".join(whole.splitlines(keepends=True)[:pairs]), mtime=0))
    return folder


def run(recipe, *words):
    """Run *recipe* with the settings SMALL and *words*. Returns its output."""
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
        main([recipe, *SMALL, *map(str, words)])
    return printed.getvalue()


def one(folder, pattern):
    """The only path in *folder* that *pattern* matches."""
    (path,) = folder.glob(pattern)
    return path
