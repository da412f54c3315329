"""What fairseq needs on current Python, torch and NumPy: replacements of its functions, one file per subject.

Importing this package puts the replacements in their places. Each package here that imports fairseq begins with an
import of this one, so that it is never used without them. The package knows nothing of this plugin's models.
"""

import fairseq  # noqa: F401  if another thread is importing it, this waits until it is complete
import torch

if tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 6):
    raise ImportError(f"fairseq-rope needs torch 2.6 or newer, and this is torch {torch.__version__}")

from ..checkpoints import allow_checkpoint_classes  # noqa: E402
from . import (  # noqa: E402
    batches,
    ending,
    flags,
    indexed,
    loading,
    moses,
    numpy_names,
    optimizers,
    options,
    pieces,
    precision,
    resuming,
    saving,
    searching,
    starting,
    unknown_words,
)
from .compiled import provide_missing  # noqa: E402
from .other_tasks import adaptive, ema, fasta, nan, roberta  # noqa: E402
from .registry import Patch, apply, owners, patches_of, replaces  # noqa: E402

__all__ = ["MODULES", "PATCHES", "Patch", "apply", "owners", "patches_of", "replaces"]

# In the order of the page of differences from fairseq
MODULES = (
    *(loading, starting, options, flags, saving, batches, resuming, precision, optimizers, numpy_names),
    *(searching, unknown_words, indexed, moses, pieces, ending),
    *(adaptive, ema, fasta, nan, roberta),
)
PATCHES = patches_of(*MODULES)

provide_missing()
allow_checkpoint_classes()
apply(PATCHES)
