"""Registers the plugin with fairseq: patches, models and architectures, criterion. Import it to register.

Each package and module here that imports fairseq begins with an import of this module, so that it is never used without
the patches. ``attention`` and ``dropout`` end with it, because this module imports names from them. If an import of
this module fails, each later one fails too.
"""

import fairseq  # noqa: F401  if another thread is importing it, this waits until it is complete
import torch

if tuple(int(number) for number in torch.__version__.split(".")[:2]) < (2, 6):
    raise ImportError(f"fairseq-rope needs torch 2.6 or newer, and this is torch {torch.__version__}")

from . import criterion  # noqa: E402, F401  importing it registers the criterion
from .patches.table import PATCHES, apply  # noqa: E402
from .search.ensemble import FAST_SEARCH  # noqa: E402
from .transformer import architectures  # noqa: E402, F401  importing it registers the models

REPLACEMENTS = (*PATCHES, FAST_SEARCH)
apply(REPLACEMENTS)
