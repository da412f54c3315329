"""Moses' rules for a code with a region, or for kor, are those of the language, as in the recipes and tools."""

from typing import Any

from fairseq.data.encoders.moses_tokenizer import MosesTokenizer

from ..text.languages import language
from .registry import replaces

_init = MosesTokenizer.__init__


@replaces(
    "fairseq.data.encoders.moses_tokenizer.MosesTokenizer.__init__",
    prevents="wrong results",
    until="sacremoses reads codes with a region",
    wraps=_init,
)
def init(self: Any, cfg: Any) -> None:
    """Set up Moses' tokeniser with the rules of the language, without the region.

    --tokenizer moses has no rules for codes with a region, such as fr-CA: l'ami becomes l &apos; ami. Here the rules
    are those of fr, as in the recipes and tools. In the same way, those of kor are those of ko.
    """
    _init(self, cfg)
    source, target = (code and language(code) for code in (cfg.source_lang, cfg.target_lang))
    self.tok, self.detok = type(self.tok)(source), type(self.detok)(target)
