"""Registers the plugin with fairseq: patches, models and architectures, criterion, fast search. Import it to register.

If an import of this module fails, each later one fails too.
"""

from . import criterion  # noqa: F401  importing it registers the criterion
from .patches import PATCHES, apply
from .search.ensemble import FAST_SEARCH
from .transformer import architectures  # noqa: F401  importing it registers the models

REPLACEMENTS = (*PATCHES, FAST_SEARCH)
apply(REPLACEMENTS)
