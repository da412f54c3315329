"""Registers the plugin with fairseq: patches, models and architectures, criterion. Import it to register."""

from . import criterion, patches  # noqa: F401  importing it registers the criterion
from .transformer import architectures  # noqa: F401  importing it registers the models

patches.apply()
