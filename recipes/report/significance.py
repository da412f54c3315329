"""The test of a difference between two systems that were trained several times, from different seeds.

Equal systems differ by chance for two reasons: the seeds of their trainings, and the choice of the test set's lines.
So a difference must be significant in two tests. The test over seeds is Student's paired t-test of the scores. The test
over lines is a paired bootstrap (Koehn 2004). It draws test sets of the same size from the lines, with replacement.
Every seed translates the drawn lines, and the score of a system is the mean of BLEU over its seeds.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from sacrebleu.metrics import BLEU
from scipy.special import stdtr, stdtrit  # Student's t: its distribution function, and the inverse of it

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


def paired_test(baseline: Sequence[np.ndarray], system: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the comparison of two systems, each given as its :func:`scores_of_draws` for each seed, in the same order.

    Returns:
        ``difference``, system - baseline, of the means over seeds; ``p_value``, the probability that two equal systems
        differ as much, the larger one of the two tests; ``low`` and ``high``, the wider 95% interval. It has 0 if and
        only if the p-value is above 0.05. With one seed, all are of the test over lines.
    """
    differences = np.subtract(system, baseline)
    seeds = len(differences)
    difference, *resampled = map(float, differences.mean(axis=0))
    tests = [(math.inf, float(np.std(resampled)))]  # degrees of freedom, and the standard error of the difference
    if seeds > 1:
        tests.append((seeds - 1, float(np.std(differences[:, 0], ddof=1)) / math.sqrt(seeds)))
    # The same translations have no error, and a difference of 0.
    p_value = max(2 * float(stdtr(freedom, -abs(difference) / max(error, 1e-300))) for freedom, error in tests)
    radius = max(float(stdtrit(freedom, 1 - SIGNIFICANT / 2)) * error for freedom, error in tests)
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
