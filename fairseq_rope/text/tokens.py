"""Plain text to tokens and back, as the recipes and fairseq-interactive do it."""

import os
import unicodedata
from collections.abc import Sequence
from typing import Any

from .languages import language
from .subwords import read_bpe, read_sentencepiece, text_of_pieces, without_bpe

Tokens = list[str]
Pair = tuple[Tokens, Tokens]  # a source and its translation

MOST_CHARACTERS = 10_000_000  # subword-nmt keeps the subwords of every word; after so much text, they are dropped


class Tokeniser:
    """Converts plain text to tokens and back, as ``fairseq-interactive`` does with the flags of the recipes.

    It follows moses_tokenizer.py, subword_nmt_bpe.py and sentencepiece_bpe.py in ``fairseq/data/encoders``. *settings*
    has ``moses`` and ``subwords`` of ``fairseq_rope.json``, with the file of the subword model in *folder*.
    """

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        self._tokeniser = self._detokeniser = self._bpe = self._pieces = None
        self._characters = 0  # of the lines since subwords were dropped
        moses, subwords = settings["moses"], settings["subwords"]
        if moses:
            from sacremoses import MosesDetokenizer, MosesTokenizer

            self._tokeniser = MosesTokenizer(language(moses["source"]))
            self._detokeniser = MosesDetokenizer(language(moses["target"]))
            self._dash_splits = moses["dash_splits"]
        if subwords:
            path = os.path.join(folder, subwords["file"])
            if subwords["kind"] == "sentencepiece":
                self._pieces = read_sentencepiece(path)
            else:
                self._bpe = read_bpe(path)

    def tokens(self, line: str) -> list[str]:
        """Return the tokens of a sentence, without the blanks around it; an empty sentence has none."""
        line = line.strip()  # some sentencepiece models make tokens of blanks
        if self._tokeniser is not None:
            line = unicodedata.normalize("NFC", line)  # Moses separates marks from their letters
            line = self._tokeniser.tokenize(line, aggressive_dash_splits=self._dash_splits, return_str=True)
        if self._bpe is not None:
            self._characters += len(line)
            line = self._bpe.process_line(line)
            if self._characters > MOST_CHARACTERS:
                self._bpe.cache = {}  # a new one, because another thread can be reading the old one
                self._characters = 0
        if self._pieces is not None:
            line = " ".join(self._pieces.encode(line, out_type=str))
        return line.split()

    def plain(self, tokens: Sequence[str]) -> str:
        """Return *tokens* as plain text. ``<s>`` and ``</s>`` are removed, as in fairseq."""
        tokens = [token for token in tokens if token not in ("<s>", "</s>")]
        line = " ".join(tokens) if self._pieces is None else text_of_pieces(tokens, self._pieces)
        if self._bpe is not None:
            line = without_bpe(line)
        if self._detokeniser is not None:
            line = self._detokeniser.detokenize(line.split())
        return line
