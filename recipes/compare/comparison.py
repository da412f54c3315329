"""Compare the collected numbers of runs (:mod:`.collect`): scores, bootstraps, and the order of the systems."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fairseq_rope.scorers import Scorer
from recipes.compare import bootstrap
from recipes.compare.results import in_order

# The numbers of the runs of each system, one for each seed.
Numbers = Mapping[str, Sequence[Mapping[str, Any]]]
Draws = Mapping[str, Mapping[int, np.ndarray]]  # system: seed: the score of every draw


def compared_sets(data: Mapping[str, Any], runs: Numbers, baseline: str) -> list[dict[str, Any]]:
    """For each set of *data*: its lengths, the scores of all systems, and the bootstraps of their differences."""
    compared = []
    for number, size in enumerate(data["sets"]):
        sets = {system: {run["seed"]: run["sets"][number] for run in runs[system]} for system in runs}
        statistics = {
            system: {seed: np.asarray(of_run["statistics"]) for seed, of_run in seeds.items()}
            for system, seeds in sets.items()
        }
        drawn = bootstrap.draw(size["lines"], bootstrap.RESAMPLES)
        draws = {
            system: {seed: bootstrap.scores_of_draws(rows, drawn) for seed, rows in seeds.items()}
            for system, seeds in statistics.items()
        }
        ratios = {
            system: [float(rows[:, 8].sum() / rows[:, 9].sum()) for rows in seeds.values()]
            for system, seeds in statistics.items()
        }
        documents = {
            name: {system: [of_run[key] for of_run in seeds.values()] for system, seeds in sets.items()}
            for name, key in (("document_scores", "document_score"), ("other_separators", "other_separators"))
            if "tokens" in size
        }
        compared.append({**size, **documents, "length_ratio": ratios, **compared_draws(baseline, draws)})
    return compared


def compared_by_program(scorer: Scorer, runs: Numbers, baseline: str) -> dict[str, Any]:
    """The scores of the systems by the program *scorer*, over the runs that it has scored, and their bootstraps."""
    draws: dict[str, dict[int, np.ndarray]] = {}
    for system, of_system in runs.items():
        for run in of_system:
            if scorer.name in run["scorers"]:
                rows = np.asarray(run["scorers"][scorer.name])
                sums, sentences = (bootstrap.draw(len(rows), bootstrap.RESAMPLES) @ rows).T
                draws.setdefault(system, {})[run["seed"]] = sums / sentences
    seeds = {system: [*of_system] for system, of_system in draws.items()}
    return {"seeds": seeds, **compared_draws(baseline, draws, scorer.lower_is_better)}


def compared_draws(baseline: str, draws: Draws, lower_is_better: bool = False) -> dict[str, Any]:
    """The scores of the systems, the best one, and the bootstraps against the *baseline* and against the best."""
    scores = {system: [float(of_draws[0]) for of_draws in seeds.values()] for system, seeds in draws.items()}
    against_baseline = _against(baseline, draws)
    best = next(iter(in_order(scores, baseline, against_baseline, lower_is_better)), "")
    return {
        "scores": scores,
        "best": best,
        "against_baseline": against_baseline,
        "against_best": _against(best, draws),
        "by_seed": {
            system: [
                {"seed": seed, **bootstrap.paired_bootstrap([reference[seed]], [of_draws])}
                for seed, of_draws in seeds.items()
            ]
            for system, seeds, reference in _sharing(baseline, draws)
        },
    }


def _sharing(reference: str, draws: Draws) -> list[tuple[str, Mapping[int, np.ndarray], Mapping[int, np.ndarray]]]:
    """The other systems, with their *draws* and those of *reference*, both without the seeds that the other lacks."""
    of_reference = draws.get(reference, {})
    shared = {
        system: {seed: of_draws for seed, of_draws in seeds.items() if seed in of_reference}
        for system, seeds in draws.items()
        if system != reference
    }
    return [(name, seeds, {seed: of_reference[seed] for seed in seeds}) for name, seeds in shared.items() if seeds]


def _against(reference: str, draws: Draws) -> dict[str, dict[str, Any]]:
    """The paired bootstraps of all systems that share a seed with *reference*, with p corrected for their number."""
    compared: dict[str, dict[str, Any]] = {
        system: {"seeds": [*seeds], **bootstrap.paired_bootstrap([*of_reference.values()], [*seeds.values()])}
        for system, seeds, of_reference in _sharing(reference, draws)
    }
    corrected = bootstrap.holm([result["p_value"] for result in compared.values()])
    return {name: {**result, "p_holm": p} for (name, result), p in zip(compared.items(), corrected, strict=True)}
