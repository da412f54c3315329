"""Moses' rules for a code with a region, or for kor, are those of the language, as in the recipes and tools.

This function replaces fairseq's; the table in ``patches/table.py`` says why.
"""

import functools
from typing import Any

from fairseq.data.encoders.moses_tokenizer import MosesTokenizer

from ..text.languages import language

_init = MosesTokenizer.__init__


@functools.wraps(_init)
def init(self: Any, cfg: Any) -> None:
    _init(self, cfg)
    codes = (cfg.source_lang, cfg.target_lang)
    source, target = (code and language(code) for code in codes)
    if (source, target) == codes:
        return
    self.tok, self.detok = type(self.tok)(source), type(self.detok)(target)
