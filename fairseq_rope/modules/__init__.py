"""The parts of the layers: attention, linear attention, masks, norms, feed-forward layers, dropout."""

from .. import patches  # noqa: F401  isort: skip  the modules here are never used without them
