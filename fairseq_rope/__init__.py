"""Rotary position embedding (RoPE) for fairseq's encoder-decoder transformer.

What ``--user-dir fairseq_rope`` loads: importing this package makes fairseq's checkpoints loadable
on today's torch (``compat``) and registers the model ``transformer_rope`` with its architectures
(``presets``) and the criterion ``fused_label_smoothed_cross_entropy`` (``criterion``).
"""

import os
import sys
from importlib.util import find_spec

__version__ = "0.1.0"

# A tool of ours (``python -m fairseq_rope.TOOL``, for which sys.argv[0] is "-m" at this point, or
# ``fairseq-rope-TOOL``) imports by itself what it needs, and says in one sentence what is missing.
_program = os.path.basename(sys.argv[0]) if sys.argv else ""
_words = getattr(sys, "orig_argv", [__name__])  # Python < 3.10 does not say which module it looks for
_is_tool = _program.startswith("fairseq-rope-") or (
    _program == "-m" and any(word.startswith(__name__) for word in _words)
)
# So does a tool of the recipes, and every process that it starts: fairseq is run by its own commands.
_is_recipe = "recipes.pipeline" in sys.modules and "fairseq" not in sys.modules
if not _is_tool and not _is_recipe and find_spec("fairseq") is not None:
    from . import compat, criterion, faults, presets  # noqa: F401
