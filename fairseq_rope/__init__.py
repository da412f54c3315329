"""Rotary position embedding (RoPE) for fairseq's encoder-decoder transformer.

What ``--user-dir fairseq_rope`` loads: importing this package makes fairseq's checkpoints loadable
on today's torch (``compat``) and registers the model ``transformer_rope`` with its architectures
(``presets``).
"""

import sys
from importlib.util import find_spec

__version__ = "0.1.0"

# ``python -m fairseq_rope.TOOL`` imports this package while it still looks for the tool (sys.argv[0]
# is then "-m"); a tool imports by itself what it needs, and says in one sentence what is missing.
if sys.argv[:1] != ["-m"] and find_spec("fairseq") is not None:
    from fairseq_rope import compat, presets  # noqa: F401
