"""Paired bootstrap of two systems that were trained several times, from different seeds.

Koehn 2004, "Statistical significance tests for machine translation evaluation": test sets of the same size are drawn
from the test set, with replacement, and both systems are scored on each. Here a drawn sentence brings its translations
by all seeds, and the score of a system is the mean of BLEU over its seeds. The result holds for these seeds: the spread
between seeds says how others would do.
"""

from collections.abc import Sequence

import numpy as np
from sacrebleu.metrics import BLEU

RESAMPLES = 1000
SEED = 12345


def statistics(hypotheses: Sequence[str], references: Sequence[str], tokenize: str = "13a") -> np.ndarray:
    """What BLEU adds up over sentences (N, 10): 4 counts of n-grams that match, 4 of all, 2 lengths."""
    # effective_order changes the sentences' scores only, which are not used, and avoids a warning for each.
    bleu = BLEU(effective_order=True, tokenize=tokenize)
    rows = []
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        sentence = bleu.sentence_score(hypothesis, [reference])
        rows.append([*sentence.counts, *sentence.totals, sentence.sys_len, sentence.ref_len])
    return np.array(rows)


def corpus_bleu(sums: np.ndarray) -> float:
    """sacreBLEU of a corpus from the sum (10) of its sentences' statistics."""
    counts, totals = [list(map(int, half)) for half in (sums[:4], sums[4:8])]
    return BLEU.compute_bleu(counts, totals, int(sums[8]), int(sums[9]), smooth_method="exp").score


def paired_bootstrap(
    baseline: Sequence[np.ndarray], system: Sequence[np.ndarray], resamples: int = RESAMPLES
) -> dict[str, float]:
    """Compare two systems, each a list of one :func:`statistics` a seed.

    Returns:
        ``difference`` of the means over seeds, system - baseline; ``low`` and ``high``, the 95% interval of the
        resampled differences; ``p_value``, the probability that chance alone gives so large a difference, computed
        as in sacrebleu, except that equal systems have p = 1
    """
    sentences = len(baseline[0])
    drawn = np.random.default_rng(SEED).integers(sentences, size=(resamples, sentences))
    times = np.stack([np.bincount(row, minlength=sentences) for row in drawn])  # (resamples, N)

    def means(seeds: Sequence[np.ndarray], weights: np.ndarray) -> np.ndarray:
        return np.mean([[corpus_bleu(sums) for sums in weights @ rows] for rows in seeds], axis=0)

    whole = np.ones((1, sentences), dtype=int)
    difference = (means(system, whole) - means(baseline, whole)).item()
    differences = means(system, times) - means(baseline, times)
    as_large = np.abs(differences - differences.mean()) >= abs(difference)
    low, high = np.percentile(differences, [2.5, 97.5])
    p_value = float((as_large.sum() + 1) / (resamples + 1))
    return {"difference": difference, "low": float(low), "high": float(high), "p_value": p_value}
