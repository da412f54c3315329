"""Read results.json, which stage23_report.py writes, and list its runs and systems."""

import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

Results = dict[str, Any]
KEYS = (
    *("recipe", "baseline", "systems", "runs", "failed", "settings", "signatures", "bootstrap", "joined", "command"),
    "longest_in_training",
)


def read_results(path: Path) -> Results:
    """The results in the file *path*. Raises a ValueError if it is not the results.json of a comparison."""
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: is not the results.json of a comparison: it is not JSON") from error
    missing = [key for key in KEYS if not isinstance(results, dict) or key not in results]
    if missing:
        raise ValueError(f"{path}: is not the results.json of a comparison: it lacks {', '.join(missing)}")
    try:
        for training in (run["training"] for _, run in all_runs(results)):  # JSON has no numbers that are not finite
            training["losses"] = [math.nan if loss is None else loss for loss in training["losses"]]
            if training["tokens_per_second"] is None:
                training["tokens_per_second"] = math.nan
    except (LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path}: is not the results.json of a comparison: its runs cannot be read") from error
    return results


def all_runs(results: Results) -> list[tuple[str, dict[str, Any]]]:
    """Every run with the name of its system."""
    return [(system, run) for system, runs in results["runs"].items() for run in runs]


def per_system(results: Results, value: Callable[[dict[str, Any]], Any]) -> dict[str, list[Any]]:
    """*value* of every run, as one list over the seeds for each system, the best system first."""
    return {system: [value(run) for run in results["runs"][system]] for system in ranked(results)}


def ranked(results: Results) -> list[str]:
    """The systems by the mean of their sacreBLEU over all their seeds, the best first."""
    scores = results["joined"][0]["scores"]
    return sorted(results["systems"], key=lambda system: -statistics.mean(scores[system]))


def has_documents(results: Results) -> bool:
    """Whether the test set was divided into segments of several lengths; else sentences were joined."""
    return "tokens" in results["joined"][0]


def sets(results: Results) -> dict[str, dict[str, Any]]:
    """The numbers of the test set in lines of several lengths, by the name of the length.

    If the text has documents, the recipe's own segments are not among them.
    """
    if has_documents(results):
        return {f"{one['tokens']:,}" if one["tokens"] > 1 else "single": one for one in results["joined"][1:]}
    return {str(one["times"]): one for one in results["joined"]}


def buckets(results: Results) -> list[tuple[str, int]]:
    """Word range and number of sentences of every length bucket, which are the same for all runs."""
    return [(bucket["words"], bucket["sentences"]) for bucket in all_runs(results)[0][1]["by_length"]]
