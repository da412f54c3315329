"""Comparisons of systems by their scores on resampled test sets, and the order of the systems."""

import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from recipes.report import bootstrap

Draws = Mapping[str, Mapping[int, np.ndarray]]  # by system and seed: the score on each resampled test set


def compared(baseline: str, draws: Draws, lower_is_better: bool = False) -> dict[str, Any]:
    """Return the scores of the systems, the best one, and the bootstraps against the *baseline* and against the best.

    Returns:
        ``scores`` by system and seed; ``best``; ``against_baseline`` and ``against_best``, the bootstraps of the other
        systems over the seeds that both have; ``by_seed``, those against the baseline for each seed
    """
    scores = {system: {seed: float(one[0]) for seed, one in by_seed.items()} for system, by_seed in draws.items()}
    against_baseline = _against(baseline, draws)
    best = in_order(scores, baseline, against_baseline, lower_is_better)[0]
    by_seed = {
        system: {seed: bootstrap.paired_bootstrap([of_baseline[seed]], [one]) for seed, one in of_system.items()}
        for system, of_system, of_baseline in _with_common_seeds(baseline, draws)
    }
    against = {"against_baseline": against_baseline, "against_best": _against(best, draws), "by_seed": by_seed}
    return {"scores": scores, "best": best, **against}


def _with_common_seeds(reference: str, draws: Draws) -> list[tuple[str, dict[int, np.ndarray], dict[int, np.ndarray]]]:
    """Return each other system with its *draws* and those of *reference*, of the seeds that both have."""
    of_reference = draws.get(reference, {})
    pairs = []
    for system, by_seed in draws.items():
        common = [seed for seed in by_seed if seed in of_reference]
        if system != reference and common:
            pairs.append((system, {n: by_seed[n] for n in common}, {n: of_reference[n] for n in common}))
    return pairs


def _against(reference: str, draws: Draws) -> dict[str, dict[str, Any]]:
    """Return the bootstraps of all systems that share a seed with *reference*, with p corrected for their number."""
    results: dict[str, dict[str, Any]] = {
        system: {"seeds": [*by_seed], **bootstrap.paired_bootstrap([*of_reference.values()], [*by_seed.values()])}
        for system, by_seed, of_reference in _with_common_seeds(reference, draws)
    }
    corrected = bootstrap.holm([result["p_value"] for result in results.values()])
    return {name: {**result, "p_holm": p} for (name, result), p in zip(results.items(), corrected, strict=True)}


def in_order(
    scores: Mapping[str, Mapping[int, float]],
    baseline: str,
    against: Mapping[str, Mapping[str, Any]],
    lower_is_better: bool = False,
) -> list[str]:
    """Return the systems of *scores*, the best first. *against* has their bootstraps against the baseline.

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
    """Return whether a bootstrap *against* the best system does not show the other system to be worse."""
    better = against["difference"] <= 0 if lower_is_better else against["difference"] >= 0  # over the common seeds
    return against["p_holm"] > bootstrap.SIGNIFICANT or better
