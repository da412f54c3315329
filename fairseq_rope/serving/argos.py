"""Translate as Argos Translate and LibreTranslate do with a package.

These programs have their own tokeniser and fixed search values. :class:`Package` repeats both, to compare a package
with the model that it contains. It follows ``translate.py`` and ``tokenizer.py`` of argos-translate-lt 1.12.1, and does
not import them: they need another version of sacremoses.
"""

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from ..text.subwords import read_bpe, read_sentencepiece
from .translator import available_cores

METADATA, MODEL, BPE_CODES, SENTENCEPIECE = "metadata.json", "model", "bpe.model", "sentencepiece.model"
# The search. Nothing else is set, so that CTranslate2 reads 1024 tokens of a sentence and writes at most 256.
BEAM, LENGTH_PENALTY = 4, 0.2
BATCH_TOKENS = 32  # the default of ARGOS_BATCH_SIZE


class Package:
    """An unpacked package.

    Args:
        folder: contains metadata.json, model/, and bpe.model or sentencepiece.model
    """

    def __init__(self, folder: str) -> None:
        import ctranslate2

        self._pieces: Any = None
        with open(os.path.join(folder, METADATA), encoding="utf-8") as file:
            metadata = json.load(file)
        if os.path.exists(os.path.join(folder, SENTENCEPIECE)):
            self._pieces = read_sentencepiece(os.path.join(folder, SENTENCEPIECE))
        else:
            from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer

            self._normaliser = MosesPunctNormalizer(metadata["from_code"])
            self._tokeniser = MosesTokenizer(metadata["from_code"])
            self._detokeniser = MosesDetokenizer(metadata["to_code"])
            self._bpe = read_bpe(os.path.join(folder, BPE_CODES))
        # Paragraphs are translated at the same time, each by one core, as with requests at the same time.
        threads = {"inter_threads": available_cores(), "intra_threads": 1}
        self._model = ctranslate2.Translator(os.path.join(folder, MODEL), **threads)

    def tokens(self, sentence: str) -> list[str]:
        """Return the tokens of a sentence."""
        if self._pieces is not None:
            return list(self._pieces.encode(sentence, out_type=str))
        line = " ".join(self._tokeniser.tokenize(self._normaliser.normalize(sentence)))
        return list(self._bpe.segment_tokens(line.strip("\r\n ").split(" ")))

    def plain(self, tokens: Sequence[str]) -> str:
        """Return *tokens* as plain text."""
        if self._pieces is not None:
            line = self._pieces.decode_pieces(list(tokens)).replace("\u2581", " ").replace("_", " ")
        else:
            line = self._detokeniser.detokenize(" ".join(tokens).replace("@@ ", "").split(" "))
        return line.removeprefix(" ")

    def search(self, paragraphs: Iterable[Sequence[str]]) -> list[list[str]]:
        """Return the tokens of the translation of each paragraph, which consists of sentences in plain text."""
        searches = [
            self._model.translate_batch(
                [self.tokens(sentence) for sentence in sentences],
                replace_unknowns=True,
                max_batch_size=BATCH_TOKENS,
                batch_type="tokens",
                beam_size=BEAM,
                length_penalty=LENGTH_PENALTY,
                asynchronous=True,
            )
            for sentences in paragraphs
        ]
        return [[token for search in sentences for token in search.result().hypotheses[0]] for sentences in searches]
