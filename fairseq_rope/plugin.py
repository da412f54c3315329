"""Registers the plugin with fairseq: patches, models and architectures, criterion. Import it to register."""

from . import criterion, patches, presets  # noqa: F401  importing them registers the models and the criterion

patches.apply()
