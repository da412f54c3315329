"""Paired bootstrap of two systems that were trained several times, from different seeds.

The method is from Koehn 2004, "Statistical significance tests for machine translation evaluation". It draws test sets
of the same size from the test set, with replacement, and scores both systems on each. Here every seed translates the
drawn sentences, and the score of a system is the mean of BLEU over its seeds. The result holds for these seeds only.
The spread between the seeds shows what to expect of others.
"""

from collections.abc import Sequence

import numpy as np
from sacrebleu.metrics import BLEU

RESAMPLES = 1000
SEED = 12345


def statistics(hypotheses: Sequence[str], references: Sequence[str], tokenize: str = "13a") -> np.ndarray:
    """Each sentence's statistics (N, 10): 4 counts of matching n-grams, 4 counts of all n-grams, 2 lengths."""
    # effective_order avoids a warning for each sentence. It changes only sentence scores, which are not used.
    bleu = BLEU(effective_order=True, tokenize=tokenize)
    rows = []
    for hypothesis, reference in zip(hypotheses, references, strict=True):
        sentence = bleu.sentence_score(hypothesis, [reference])
        rows.append([*sentence.counts, *sentence.totals, sentence.sys_len, sentence.ref_len])
    return np.array(rows)


def corpus_bleu(sums: np.ndarray) -> float:
    """The BLEU score of a corpus, from the sum (10) of its sentences' :func:`statistics`."""
    counts, totals = [list(map(int, half)) for half in (sums[:4], sums[4:8])]
    return BLEU.compute_bleu(counts, totals, int(sums[8]), int(sums[9]), smooth_method="exp").score


def paired_bootstrap(
    baseline: Sequence[np.ndarray], system: Sequence[np.ndarray], resamples: int = RESAMPLES
) -> dict[str, float]:
    """Compare two systems, each given as one array of :func:`statistics` for each seed.

    Returns:
        ``difference``, system - baseline, of the means over seeds; ``low`` and ``high``, the 95% interval of the
        resampled differences; ``p_value``, the probability that chance alone gives a difference as large, computed
        as in sacrebleu, except that equal systems have p = 1
    """
    sentences = len(baseline[0])
    draws = np.random.default_rng(SEED).integers(sentences, size=(resamples, sentences))
    counts = np.stack([np.bincount(draw, minlength=sentences) for draw in draws])  # (resamples, N)

    def means(seeds: Sequence[np.ndarray], weights: np.ndarray) -> np.ndarray:
        return np.mean([[corpus_bleu(sums) for sums in weights @ rows] for rows in seeds], axis=0)

    whole = np.ones((1, sentences), dtype=int)
    difference = (means(system, whole) - means(baseline, whole)).item()
    differences = means(system, counts) - means(baseline, counts)
    as_large = np.abs(differences - differences.mean()) >= abs(difference)
    low, high = np.percentile(differences, [2.5, 97.5])
    p_value = float((as_large.sum() + 1) / (resamples + 1))
    return {"difference": difference, "low": float(low), "high": float(high), "p_value": p_value}
