"""Rotary position embedding (RoPE) for fairseq's encoder-decoder transformer.

``--user-dir fairseq_rope`` imports this package. When fairseq is loaded, that registers the plugin: the model
``transformer_rope`` with its architectures, the criterion ``fused_label_smoothed_cross_entropy``, and what
fairseq needs on current torch (``patches``). The package itself loads neither torch nor fairseq.
"""

import sys

__version__ = "0.1.0"


class _SearchPath(list):  # type: ignore[type-arg]
    """``__path__`` of a package that was imported before fairseq.

    ``fairseq.utils.import_user_module`` does not import a --user-dir again that is already imported. It asks
    whether the folder is in ``__path__``, and that question registers the plugin.
    """

    def __contains__(self, path: object) -> bool:
        if sys.modules.get("fairseq"):
            from . import plugin  # noqa: F401
        return super().__contains__(path)


if sys.modules.get("fairseq"):
    from . import plugin  # noqa: F401
else:
    __path__ = _SearchPath(__path__)
