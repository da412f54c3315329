"""fairseq's compiled modules in Python, for a fairseq that was installed without a compiler.

``provide_missing`` puts these modules where fairseq looks for its own, if those are missing. Each function here has the
name, the arguments and the results of fairseq's.
"""

import importlib
import importlib.util
import sys

from . import data_utils_fast, libbleu, token_block_utils_fast


def provide_missing() -> None:
    """Give fairseq those of the modules here that its installation lacks. Compiled ones stay."""
    for module in (data_utils_fast, token_block_utils_fast):
        name = module.__name__.rpartition(".")[2]
        full_name = f"fairseq.data.{name}"
        if full_name not in sys.modules and importlib.util.find_spec(full_name) is None:
            sys.modules[full_name] = module
            setattr(importlib.import_module("fairseq.data"), name, module)
    if importlib.util.find_spec("fairseq.libbleu") is None:
        libbleu.provide()
