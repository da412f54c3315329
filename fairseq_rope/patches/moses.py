"""Moses' rules for a language with a region are those of the language, as in the recipes and tools.

This function replaces fairseq's; the table in ``patches/table.py`` says why.
"""

import functools
import re
from typing import Any

from fairseq.data.encoders.moses_tokenizer import MosesTokenizer

from ..text.languages import language

_init = MosesTokenizer.__init__


@functools.wraps(_init)
def init(self: Any, cfg: Any) -> None:
    _init(self, cfg)
    if not any(re.search("[-_]", code or "") for code in (cfg.source_lang, cfg.target_lang)):
        return
    source, target = (code and language(code) for code in (cfg.source_lang, cfg.target_lang))
    self.tok, self.detok = type(self.tok)(source), type(self.detok)(target)
