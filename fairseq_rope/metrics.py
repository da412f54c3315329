"""Scores of translations, with their signatures: BLEU, chrF, TER and paired bootstraps, by sacrebleu.

For languages without spaces between words, the metrics are sacreBLEU, with a tokeniser for the language, and chrF2.
The others need spaces.
"""

import itertools
import os
import re
import statistics
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from .errors import InputError
from .text.languages import UNSPACED, language
from .text.moses import compound_split, moses_tokeniser

if TYPE_CHECKING:
    from sacrebleu.metrics import BLEU

RESAMPLES = 1000  # in the paired bootstrap; sacrebleu's default
_LIMITS = (0, 11, 21, 31, 41, 61)  # the number of words in the shortest source of each bucket
SOURCE_WORDS = {f"{low}-{after - 1}": range(low, after) for low, after in itertools.pairwise(_LIMITS)}
SOURCE_WORDS[f"{_LIMITS[-1]}+"] = range(_LIMITS[-1], sys.maxsize)


class Metric(NamedTuple):
    """A metric; its input is detokenised text."""

    name: str  # as the report prints it
    what: str  # a short description
    sacrebleu: Any  # its implementation there
    tokens: str | None = None  # the name of its tokens in the report of the references

    def count_tokens(self, line: str) -> int:
        """Return the number of tokens of *line*, as this metric counts them."""
        if self.name == "chrF2":
            return len("".join(line.split()))
        if self.name == "chrF2++":  # sacrebleu has no public name for its words
            return len(self.sacrebleu._remove_punctuation(line))
        return len(self.sacrebleu.tokenizer(line).split())


def metrics_for(target_lang: str, tokenize: str) -> list[Metric]:
    """Return the metrics in the order of the report; *tokenize* is sacreBLEU's tokeniser, one of TOKENIZERS."""
    import sacremoses
    from sacrebleu.metrics import BLEU, CHRF, TER

    lang = language(target_lang)
    sacre_bleu = Metric("sacreBLEU", "detokenised text", BLEU(tokenize=tokenize, force=True), tokenize)
    if lang in UNSPACED:
        return [sacre_bleu, Metric("chrF2", "characters", CHRF())]
    moses, signed = moses_tokeniser(lang), f"moses-{lang}-sacremoses-{sacremoses.__version__}"
    split = multi_bleu(lambda line: compound_split(moses(line)), f"{signed}+compound-split")
    of_tokens = ("tokenised BLEU", "Moses tokens, not comparable with sacreBLEU", multi_bleu(moses, signed), "Moses")
    differs = "the same after the split of Vaswani et al., which usually raises it"
    return [
        sacre_bleu,
        Metric(*of_tokens),
        Metric("tokenised BLEU, compound split", differs, split, "Moses + compound split"),
        Metric("chrF2++", "characters, and words without punctuation", CHRF(word_order=2)),
        Metric("TER", "edits per reference word, case ignored: lower is better", TER()),
    ]


def multi_bleu(tokenise: Callable[[str], str], signature: str) -> "BLEU":
    """Return the scorer of multi-bleu.perl: cased, without smoothing, and so 0 if no 4-gram matches."""
    from sacrebleu.metrics import BLEU

    scorer: Any = BLEU(tokenize="none", smooth_method="none", force=True)
    scorer.tokenizer, scorer.tokenizer_signature = tokenise, signature
    return scorer


def score_systems(
    metric: Metric, systems: Sequence[Sequence[str]], references: Sequence[Sequence[str]]
) -> list[dict[str, Any]]:
    """Return the scores of *systems*, lists of detokenised lines; of several, also a bootstrap against the first.

    Returns:
        for each system ``score`` and ``signature``; for BLEU also ``precisions`` (percentages, of 1-grams to
        4-grams), ``brevity_penalty``, ``system_tokens`` and ``reference_length`` (the length that the brevity
        penalty uses: of several references, the closest for each sentence); with several systems also
        ``mean`` and ``confidence`` (the 95% interval is mean ± confidence), and ``p_value`` (None for the
        first system)
    """
    from sacrebleu.significance import PairedTest

    scorer, results = metric.sacrebleu, list[Any]()
    if len(systems) > 1:
        numbered = [(str(number), lines) for number, lines in enumerate(systems)]
        signatures, columns = PairedTest(numbered, {"": scorer}, references, "bs", n_samples=RESAMPLES)()
        (signature,), (_, results) = signatures.values(), columns.values()
    else:
        results = [scorer.corpus_score(lines, references) for lines in systems]
        signature = scorer.get_signature()
    rows: list[dict[str, Any]] = []
    for result, lines in zip(results, systems):
        row: dict[str, Any] = {"score": float(result.score)}
        if len(systems) > 1:
            p_value = None if result.p_value is None else float(result.p_value)
            if p_value is not None and row["score"] == rows[0]["score"]:  # sacrebleu counts larger differences only
                p_value = 1.0
            row.update(mean=float(result.mean), confidence=float(result.ci), p_value=p_value)
        row["signature"] = str(signature)
        if "BLEU" in metric.name:
            details = scorer.corpus_score(lines, references)
            row.update(precisions=details.precisions, brevity_penalty=details.bp)
            row.update(system_tokens=details.sys_len, reference_length=details.ref_len)
        rows.append(row)
    return rows


def score_sentences(systems: Sequence[Sequence[float]]) -> list[dict[str, Any]]:
    """Return the mean of each of *systems*, scores of sentences; of several, also a bootstrap against the first.

    Returns:
        ``score``, ``mean``, ``confidence`` and ``p_value`` as :func:`score_systems`, by the method of sacrebleu's
        paired bootstrap, but equal systems have the p-value 1; and the ``sentence_scores``
    """
    import numpy as np
    from sacrebleu.significance import estimate_ci

    rows: list[dict[str, Any]] = [{"score": statistics.fmean(scores)} for scores in systems]
    if len(systems) > 1:
        sentences = len(systems[0])
        drawn = np.random.default_rng(bootstrap_seed()).choice(sentences, size=(RESAMPLES, sentences))
        resampled = [np.array(scores)[drawn].mean(axis=1) for scores in systems]
        for row, means in zip(rows, resampled):
            mean, confidence = estimate_ci(means)
            differences = np.abs(means - resampled[0])
            as_large = differences - differences.mean() >= abs(row["score"] - rows[0]["score"])
            p_value = None if row is rows[0] else (int(as_large.sum()) + 1) / (RESAMPLES + 1)
            row.update(mean=float(mean), confidence=float(confidence), p_value=p_value)
    return [{**row, "sentence_scores": list(scores)} for row, scores in zip(rows, systems)]


def by_source_length(
    metric: Metric, system: Sequence[str], references: Sequence[Sequence[str]], source: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the BLEU *metric* of the sentences in each bucket of SOURCE_WORDS that is not empty."""
    buckets: list[dict[str, Any]] = []
    for words, lengths in SOURCE_WORDS.items():
        chosen = [n for n, line in enumerate(source) if len(line.split()) in lengths]
        if chosen:
            lines, *expected = ([text[n] for n in chosen] for text in (system, *references))
            result = metric.sacrebleu.corpus_score(lines, expected)
            values = {"score": result.score, "reference_tokens": result.ref_len}
            buckets.append({"words": words, "sentences": len(chosen), **values})
    return buckets


def load_tokeniser(name: str) -> None:
    """Load sacreBLEU's tokeniser *name*; raise an InputError if its package is missing or it cannot be downloaded."""
    from sacrebleu.metrics import BLEU

    try:
        BLEU(tokenize=name)
    except Exception as error:  # sacrebleu raises many kinds, also assertions
        raise InputError(f"--tokenize {name}: {' '.join(str(error).split())}") from None


def bootstrap_seed() -> int:
    """Return the seed with which sacrebleu resamples; with "none" and 0, which are refused, its results vary."""
    seed = os.environ.get("SACREBLEU_SEED", "12345")
    if not re.fullmatch(r"0*[1-9][0-9]*", seed):
        raise InputError(f"SACREBLEU_SEED={seed}: must be a positive integer, or unset")
    return int(seed)
