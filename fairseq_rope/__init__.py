"""Rotary position embedding (RoPE) for fairseq's encoder-decoder transformer.

``--user-dir fairseq_rope`` imports this package. When fairseq is loaded, before or after this package, the plugin
applies its patches of fairseq (``patches``) and registers the model ``transformer_rope`` with its architectures and
the criterion ``fused_label_smoothed_cross_entropy``. The package itself loads neither torch nor fairseq.
"""

import importlib
import sys
from importlib.abc import MetaPathFinder
from typing import Any

__version__ = "0.1.0"


class _Registrar(MetaPathFinder):
    """Imports ``plugin`` as soon as fairseq is loaded and no module of this package is partly loaded.

    ``plugin`` imports the modules of this package, and a partly loaded module lacks some of its names. This finder
    leaves the search to the other finders, and wraps the loaders of fairseq and of these modules.
    """

    def __init__(self) -> None:
        self.loading = 0  # the number of partly loaded modules of this package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        ours = name.startswith(f"{__name__}.")
        if not ours and name != "fairseq":
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others if hasattr(finder, "find_spec"))
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            exec_module = spec.loader.exec_module

            def exec_and_register(module: Any) -> None:
                self.loading += ours
                try:
                    exec_module(module)
                finally:
                    self.loading -= ours
                self.register()

            spec.loader.exec_module = exec_and_register  # type: ignore[method-assign]
        return spec

    def register(self) -> None:
        if self in sys.meta_path and not self.loading and "fairseq.models" in sys.modules:
            sys.meta_path.remove(self)
            importlib.import_module(f"{__name__}.plugin")


if sys.modules.get("fairseq"):
    from . import plugin  # noqa: F401
else:
    sys.meta_path.insert(0, _Registrar())
