"""Registers the plugin with fairseq: patches, models and architectures, criterion, fast search. Import it to register.

If an import of this module fails, each later one fails too.
"""

import os

from . import criterion  # noqa: F401  importing it registers the criterion
from .patches import PATCHES, apply, patches_of
from .search import ensemble
from .transformer import architectures  # noqa: F401  importing it registers the models

# On an H100 or H200, torch would try cuDNN's attention first, which plans anew for each shape: about 0.1 s, and batches
# have many shapes (docs/gpus.md). torch reads the variable at its first attention.
os.environ.setdefault("TORCH_CUDNN_SDPA_DEPRIORITIZED", "1")

REPLACEMENTS = (*PATCHES, *patches_of(ensemble))
apply(REPLACEMENTS)
