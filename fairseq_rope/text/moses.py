"""Moses' tokens (sacremoses), as papers count them for tokenised BLEU."""

import re
from collections.abc import Callable
from functools import lru_cache


def moses_tokeniser(lang: str) -> Callable[[str], str]:
    """Return Moses' tokeniser as in the recipes: without splitting hyphens, with escapes."""
    from sacremoses import MosesTokenizer

    moses = MosesTokenizer(lang)
    return lru_cache(maxsize=None)(lambda line: moses.tokenize(line, return_str=True))


def moses_round_trip(lang: str, tokenise: Callable[[str], str]) -> Callable[[str], str]:
    """Return a function that tokenises a line with *tokenise*, and detokenises it with Moses' detokeniser.

    The result often differs from the line: tokens do not say whether there was a blank at ``/`` or ``…``. A system that
    is trained on Moses' tokens cannot write such a line.
    """
    from sacremoses import MosesDetokenizer

    moses = MosesDetokenizer(lang)
    return lambda line: str(moses.detokenize(tokenise(line).split()))


def compound_split(line: str) -> str:
    """Return tokenised text after the split of Vaswani et al.: ``Ab-Cd`` becomes ``Ab ##AT##-##AT## Cd``.

    One pass from left to right consumes each hyphen with its two neighbours, as in the Perl script of the
    published results: ``A-B-C`` is split once, ``Ab-Cd-Ef`` twice.
    """
    return re.sub(r"(\S)-(\S)", r"\1 ##AT##-##AT## \2", line)
