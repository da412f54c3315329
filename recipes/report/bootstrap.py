"""Paired bootstraps of systems that were trained several times, from different seeds.

The method is from Koehn 2004, "Statistical significance tests for machine translation evaluation". It draws test sets
of the same size from the lines of the test set, with replacement, and scores both systems on each. Here every seed
translates the drawn lines, and the score of a system is the mean of BLEU over its seeds. Other seeds can differ.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU

RESAMPLES = 1000
SEED = 12345
SIGNIFICANT = 0.05  # a difference counts if its corrected p is at most this


def statistics(hypotheses: Sequence[str], *references: Sequence[str], tokenize: str = "13a") -> np.ndarray:
    """Return each line's statistics (N, 10): 4 counts of matching n-grams, 4 counts of all n-grams, 2 lengths."""
    # effective_order avoids a warning for each sentence. It changes only sentence scores, which are not used.
    bleu = BLEU(effective_order=True, tokenize=tokenize)
    rows = []
    for hypothesis, *expected in zip(hypotheses, *references, strict=True):
        sentence = bleu.sentence_score(hypothesis, expected)
        rows.append([*sentence.counts, *sentence.totals, sentence.sys_len, sentence.ref_len])
    return np.array(rows)


def corpus_bleu(sums: np.ndarray) -> float:
    """Return the BLEU score of a corpus, from the sum (10) of its lines' :func:`statistics`."""
    counts, totals = [list(map(int, half)) for half in (sums[:4], sums[4:8])]
    return BLEU.compute_bleu(counts, totals, int(sums[8]), int(sums[9]), smooth_method="exp").score


def draw(lines: int, resamples: int) -> np.ndarray:
    """Return how often each line is drawn (1 + resamples, lines). The first row draws every line once."""
    draws = np.random.default_rng(SEED).integers(lines, size=(resamples, lines))
    return np.stack([np.ones(lines, dtype=int), *(np.bincount(drawn, minlength=lines) for drawn in draws)])


def scores_of_draws(rows: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Return the BLEU scores of one run on all test sets of :func:`draw`, from the run's :func:`statistics`."""
    return np.array([corpus_bleu(sums) for sums in drawn @ rows])


def paired_bootstrap(baseline: Sequence[np.ndarray], system: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the comparison of two systems, each given as its :func:`scores_of_draws` for each seed.

    Returns:
        ``difference``, system - baseline, of the means over seeds; ``p_value``, the probability that chance alone gives
        a difference as large: (k + 1) / (n + 1), if k of n resampled differences are as far from their mean as
        ``difference`` is from 0; ``low`` and ``high``, the 95% interval: the true differences that this test does not
        reject. It has 0 if and only if the p-value is above 0.05.
    """
    difference, *resampled = map(float, np.mean(system, axis=0) - np.mean(baseline, axis=0))
    distances = np.sort(np.abs(np.array(resampled) - np.mean(resampled)))[::-1]
    p_value = float(((distances >= abs(difference)).sum() + 1) / (len(distances) + 1))
    # A difference has a p-value of at most 0.05 if fewer than this number of distances are as large.
    fewer_than = math.floor(SIGNIFICANT * (len(distances) + 1))
    radius = float(distances[fewer_than - 1]) if fewer_than else math.inf
    return {"difference": difference, "low": difference - radius, "high": difference + radius, "p_value": p_value}


def holm(p_values: Sequence[float]) -> list[float]:
    """Return *p_values* of several tests, corrected for their number as in Holm 1979, in the same order.

    The smallest of m values is multiplied by m, the next one by m - 1, and so on. No value becomes smaller than the
    one before it, or greater than 1. Among tests with a corrected p of at most 0.05, the probability of one or more
    false differences is at most 0.05.
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for rank, n in enumerate(sorted(range(len(p_values)), key=lambda n: p_values[n])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[n]))
        corrected[n] = largest
    return corrected
