"""Read results.json, which stage15_report.py writes, and list its runs and systems in their order."""

import contextlib
import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from fairseq_rope.errors import InputError, ending_in_one_sentence
from recipes.run import precision

Results = dict[str, Any]
KEYS = (
    *("recipe", "baseline", "systems", "runs", "failed", "settings", "signatures", "bootstrap", "joined", "command"),
    *("longest_in_training", "data", "sizes"),
)


@contextlib.contextmanager
def reading(program: str, *paths: Path) -> Iterator[list[Results]]:
    """Yield the results in the files *paths*. *program* ends with one sentence if they are wrong, and at an OSError."""
    with ending_in_one_sentence(program):
        results = [read_results(path) for path in paths]
        try:
            yield results
        except (LookupError, TypeError, ValueError, AttributeError, jinja2.UndefinedError) as error:
            names = " ".join(map(str, paths))
            raise InputError(f"{names}: is not the results.json of a comparison: {error!r}") from None


def read_results(path: Path) -> Results:
    """The results in the file *path*. Raises an InputError if it is not the results.json of a comparison."""
    problem = f"{path}: is not the results.json of a comparison"
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{problem}: it is not JSON") from error
    missing = [key for key in KEYS if not isinstance(results, dict) or key not in results]
    if missing:
        raise InputError(f"{problem}, or of an earlier version: it lacks {', '.join(missing)}")
    try:
        for training in (run["training"] for _, run in all_runs(results)):  # JSON has no numbers that are not finite
            training["losses"] = [math.nan if loss is None else loss for loss in training["losses"]]
            if training["tokens_per_second"] is None:
                training["tokens_per_second"] = math.nan
    except (LookupError, TypeError, AttributeError) as error:
        raise InputError(f"{problem}: its runs cannot be read") from error
    return results


def all_runs(results: Results) -> list[tuple[str, dict[str, Any]]]:
    """Every run with the name of its system."""
    return [(system, run) for system, runs in results["runs"].items() for run in runs]


def per_system(results: Results, value: Callable[[dict[str, Any]], Any]) -> dict[str, list[Any]]:
    """*value* of every run, as one list over the seeds for each system, the best system first."""
    return {system: [value(run) for run in results["runs"][system]] for system in ranked(results)}


def in_order(
    scores: Mapping[str, Sequence[float]],
    baseline: str,
    against: Mapping[str, Mapping[str, Any]],
    lower_is_better: bool = False,
) -> list[str]:
    """The systems of *scores* (over their seeds), the best first. *against* has their bootstraps against the baseline.

    Means over different seeds cannot be compared, because some seeds give higher scores to all systems. So the order is
    that of the differences to the baseline, each over the seeds that both have. For the baseline itself, this is 0.
    Systems that share no seed with the baseline come last, by their means.
    """
    sign = 1 if lower_is_better else -1
    differences = {baseline: 0.0, **{system: bootstrap["difference"] for system, bootstrap in against.items()}}
    shared = [system for system in scores if system in differences]
    others = [system for system in scores if system not in differences]
    shared.sort(key=lambda system: sign * differences[system])
    others.sort(key=lambda system: sign * statistics.mean(scores[system]))
    return shared + others


def ranked(results: Results) -> list[str]:
    """The systems of :func:`in_order`, by their scores on the test set."""
    joined = results["joined"][0]
    scores = {name: joined["scores"][name] for name in results["systems"]}
    return in_order(scores, results["baseline"], joined["against_baseline"])


def of_fewer_seeds(results: Results) -> list[str]:
    """The systems with fewer seeds than another one has. Their means cannot be compared with those of others."""
    counts = {system: len(results["runs"][system]) for system in ranked(results)}
    return [system for system, count in counts.items() if count < max(counts.values())]


def marked(results: Results, system: str) -> str:
    """The name of *system*, with a dagger if its means are over fewer seeds than others have."""
    return f"{system} †" if system in of_fewer_seeds(results) else system


def lowest_loss(training: Mapping[str, Any]) -> tuple[float, int]:
    """The lowest finite validation loss of a *training*, and its update; NaN and the last update if none is finite."""
    validations = zip(training["losses"], training["updates"], strict=True)
    finite = [(loss, update) for loss, update in validations if math.isfinite(loss)]
    return min(finite, default=(math.nan, training["updates"][-1]))


def converged(run: Mapping[str, Any]) -> bool:
    """Whether the training of *run* ended because its validation loss had stopped falling (``--patience``)."""
    _, update_of_lowest = lowest_loss(run["training"])
    validations_after = sum(update > update_of_lowest for update in run["training"]["updates"])
    return bool(run.get("patience")) and validations_after >= run["patience"]


def trained_in(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Precision and device of the trainings of *runs*, as in "bf16 on the CPU", each once."""
    processes = [process for run in runs for process in run["training"]["processes"]]
    return list(dict.fromkeys(precision.described(process) or "not noted" for process in processes)) or ["not noted"]


def by_precision(results: Results) -> dict[str, list[str]]:
    """The systems that are trained in each precision, by its name. Runs that do not note it are left out."""
    systems: dict[str, list[str]] = {}
    for name in ranked(results):
        processes = (process for run in results["runs"][name] for process in run["training"]["processes"])
        for precision_name in dict.fromkeys(filter(None, map(precision.of_process, processes))):
            systems.setdefault(precision_name, []).append(name)
    return systems


def tuned_value(results: Results, system: str) -> str:
    """The value of the tuned setting that *system* has; "" if nothing is tuned or no value is known."""
    outcomes = (results.get("tuning") or {"systems": {}})["systems"]
    trained = results["runs"][system][0].get("training_of") or system
    return outcomes[trained]["chosen"] if trained in outcomes else ""


def at_end(outcome: Mapping[str, Any]) -> bool:
    """Whether the chosen value of a tuning's *outcome* for a system is the lowest or the highest one."""
    return bool(outcome["chosen"]) and outcome["chosen"] in (outcome["runs"][0]["value"], outcome["runs"][-1]["value"])


def without(words: Sequence[str], flags: Mapping[str, int]) -> list[str]:
    """The *words* of a command without *flags*, each with the largest number of its values."""
    remaining: list[str] = []
    dropped = 0  # how many of the next words belong to the flag
    for word in words:
        if word.startswith("-"):
            name, _, value = word.partition("=")
            dropped = 0 if value else flags.get(name, 0)
            if name in flags:
                continue
        elif dropped:
            dropped -= 1
            continue
        remaining.append(word)
    return remaining


def has_documents(results: Results) -> bool:
    """Whether the test set was divided into segments of several lengths; else sentences were joined."""
    return "tokens" in results["joined"][0]


def sets_by_length(results: Results) -> dict[str, dict[str, Any]]:
    """The scores and sizes of the test set in lines of several lengths, by the name of the length.

    If the text has documents, the set in the recipe's segments is left out.
    """
    if has_documents(results):
        sets = results["joined"][1:]
        return {f"{joined['tokens']:,}" if joined["tokens"] > 1 else "single": joined for joined in sets}
    return {str(joined["times"]): joined for joined in results["joined"]}


def buckets(results: Results) -> list[tuple[str, int]]:
    """Word range and number of sentences of every length bucket, which are the same for all runs."""
    return [(bucket["words"], bucket["sentences"]) for bucket in all_runs(results)[0][1]["by_length"]]
