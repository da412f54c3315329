"""For ``--user-dir``: fairseq alone, with its compiled modules in Python where they are missing, and without patches.

The modules are loaded by their paths, because importing ``fairseq_rope.patches`` would apply the patches.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

COMPILED = Path(__file__).resolve().parents[2] / "fairseq_rope" / "patches" / "compiled"


def _load(name: str, full_name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(full_name, COMPILED / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


for name in ("data_utils_fast", "token_block_utils_fast"):
    if importlib.util.find_spec(f"fairseq.data.{name}") is None:
        sys.modules[f"fairseq.data.{name}"] = _load(name, f"fairseq.data.{name}")
if importlib.util.find_spec("fairseq.libbleu") is None:
    _load("libbleu", "fairseq_alone_libbleu").provide()
