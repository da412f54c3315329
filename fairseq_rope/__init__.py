"""Rotary position embedding (RoPE) for fairseq's encoder-decoder transformer.

``--user-dir fairseq_rope`` imports this package. If fairseq is loaded, the package imports ``plugin``, which registers
the models, the criterion and the patches of fairseq. By itself the package loads neither torch nor fairseq. A program
that imports it before fairseq, and then uses fairseq, imports ``fairseq_rope.plugin``. Modules of this package that
import fairseq import the patches.
"""

import sys

if sys.version_info < (3, 10):  # noqa: UP036  old versions of Python must be able to read this file
    raise ImportError("fairseq-rope needs Python 3.10 or newer, and this is Python {}.{}".format(*sys.version_info[:2]))

__version__ = "1.0.0"

if sys.modules.get("fairseq"):
    from . import plugin  # noqa: F401
