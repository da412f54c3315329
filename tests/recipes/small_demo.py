"""The demo's recipe on a few pairs of its corpus, with a model that trains in seconds."""

import atexit
import functools
import gzip
import shutil
import tempfile
from pathlib import Path

from recipes.pipeline.__main__ import build_parser
from recipes.pipeline.arguments import describe_experiment, parse
from tests.commands import ROOT

# Everything else is the demo's own.
SMALL = ["vocab_size=250", "width=32", "ffn_width=32", "max_epochs=5"]


@functools.cache
def small_corpus(train=200, heldout=12):
    """A folder with the first pairs of the demo's corpus: so many to train, and to validate and to test."""
    folder = Path(tempfile.mkdtemp(prefix="small_demo"))
    atexit.register(shutil.rmtree, folder)
    for name, count in (("train", train), ("valid", heldout), ("test", heldout)):
        for lang in ("en", "de"):
            file = f"{name}.{lang}.gz"
            whole = gzip.decompress((ROOT / "recipes" / "demo" / "corpus" / file).read_bytes())
            few = b"".join(whole.splitlines(keepends=True)[:count])
            (folder / file).write_bytes(gzip.compress(few, mtime=0))
    return folder


def describe(recipe, *flags):
    """The experiment that these flags of a recipe describe."""
    parser = build_parser()
    args, train_flags = parse(parser, [recipe, *flags])
    return describe_experiment(parser, args, args.arch, args.seed, train_flags)


def label(recipe, settings):
    """What these settings add to the name of a model's folder."""
    return describe(recipe, *(word for setting in settings for word in ("--set", setting))).label
