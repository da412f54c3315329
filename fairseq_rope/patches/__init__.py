"""What fairseq needs on current Python, torch and NumPy: replacements of its functions, one file per subject.

Importing this package puts the replacements in their places. Each package here that imports fairseq begins with an
import of this one, so that it is never used without them.
"""

import fairseq  # noqa: F401  if another thread is importing it, this waits until it is complete
import torch

if tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 6):
    raise ImportError(f"fairseq-rope needs torch 2.6 or newer, and this is torch {torch.__version__}")

from .compiled import provide_missing  # noqa: E402
from .table import PATCHES, Patch, apply, owners  # noqa: E402

__all__ = ["PATCHES", "Patch", "apply", "owners"]

provide_missing()
apply(PATCHES)
