"""Comparisons of systems by their scores on resampled test sets, and the order of the systems."""

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from recipes.report import significance

Draws = Mapping[str, Mapping[int, np.ndarray]]  # by system and seed: the score on each resampled test set


def compared(baseline: str, draws: Draws, lower_is_better: bool = False) -> dict[str, Any]:
    """Return the scores of the systems, the best one, and the tests against the *baseline* and against the best.

    Returns:
        ``scores`` by system and seed; ``best``; ``against_baseline`` and ``against_best``, the tests of the other
        systems over the seeds that both have
    """
    scores = {system: {seed: float(one[0]) for seed, one in by_seed.items()} for system, by_seed in draws.items()}
    against_baseline = _against(baseline, draws)
    best = in_order(scores, baseline, against_baseline, lower_is_better)[0]
    against_best = _against(best, draws)
    return {"scores": scores, "best": best, "against_baseline": against_baseline, "against_best": against_best}


def _against(reference: str, draws: Draws) -> dict[str, dict[str, Any]]:
    """Return the tests of all systems that share a seed with *reference*, with p corrected for their number."""
    of_reference, results = draws.get(reference, {}), dict[str, dict[str, Any]]()
    for system, by_seed in draws.items():
        common = [seed for seed in by_seed if seed in of_reference]
        if system != reference and common:
            pairs = ([each[seed] for seed in common] for each in (of_reference, by_seed))
            results[system] = {"seeds": common, **significance.paired_test(*pairs)}
    corrected = significance.holm([result["p_value"] for result in results.values()])
    return {name: {**result, "p_holm": p} for (name, result), p in zip(results.items(), corrected, strict=True)}


def in_order(
    scores: Mapping[str, Mapping[int, float]],
    baseline: str,
    against: Mapping[str, Mapping[str, Any]],
    lower_is_better: bool = False,
) -> list[str]:
    """Return the systems of *scores*, the best first. *against* has their tests against the baseline.

    Means over different seeds cannot be compared, because some seeds give higher scores to all systems. So the order is
    that of the differences to the baseline, each over the seeds that both have. For the baseline itself, this is 0.
    Systems that share no seed with the baseline come last, by their means.
    """
    sign = 1 if lower_is_better else -1
    differences = {baseline: 0.0, **{system: one["difference"] for system, one in against.items()}}
    shared = [system for system in scores if system in differences]
    others = [system for system in scores if system not in differences]
    shared.sort(key=lambda system: sign * differences[system])
    others.sort(key=lambda system: sign * statistics.mean(scores[system].values()))
    return shared + others


def as_good(against: Mapping[str, Any], lower_is_better: bool = False) -> bool:
    """Return whether a test *against* the best system does not show the other system to be worse."""
    better = against["difference"] <= 0 if lower_is_better else against["difference"] >= 0  # over the common seeds
    return against["p_holm"] > significance.SIGNIFICANT or better
