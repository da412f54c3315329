"""All numbers of a report, as results.json has them."""

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sized
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_rope.errors import InputError
from fairseq_rope.lines import lines_of, read_lines
from fairseq_rope.text.generated import read_generated
from recipes.report import significance
from recipes.report.comparison import compared, in_order
from recipes.report.contents import Contents, FinishedRun, TestSet
from recipes.report.history import last_fall, read_history

Results = dict[str, Any]
BLEU = "sacreBLEU"  # the metric of the tests
LENGTHS = "sacreBLEU_by_source_length"  # of score.json


def results_of(contents: Contents) -> Results:
    """Return all numbers of the report."""
    longest = max(len(line.split()) for line in lines_of(str(contents.train_sources)))
    return {
        **{"recipe": contents.recipe, "command": contents.command, "settings": dict(contents.settings)},
        **{"systems": [*contents.runs], "baseline": next(iter(contents.runs))},
        "definitions": _definitions(contents),
        "runs": {system: [_of_run(run) for run in runs] for system, runs in contents.runs.items()},
        "longest_in_training": longest,
        "bootstrap": {"resamples": significance.RESAMPLES, "seed": significance.SEED},
        "test_sets": [_of_test_set(contents, test_set, longest) for test_set in contents.test_sets],
        "sweeps": {system: asdict(sweep) for system, sweep in contents.sweeps.items()},
        "missing": dict(contents.missing),
    }  # fmt: skip


def _definitions(contents: Contents) -> dict[str, dict[str, Any]]:
    """Return, for each system, the values of all settings that at least one system defines."""
    names = dict.fromkeys(name for own in contents.definitions.values() for name in own)
    resolved = {
        system: {**contents.settings, **contents.definitions.get(system, {}), **runs[0].settings}
        for system, runs in contents.runs.items()
    }
    return {system: {name: settings.get(name, "") for name in names} for system, settings in resolved.items()}


def _of_run(run: FinishedRun) -> dict[str, Any]:
    """Return the numbers of one training."""
    training = read_history(run.training, run.updates)
    validations = [*zip(training["losses"], training["validated_at"], strict=True)]
    lowest, update = min((one for one in validations if one[0] is not None), default=(None, validations[-1][1]))
    patience = int(run.settings.get("patience") or 0)
    validations_after = sum(updates > update for _, updates in validations)
    return {
        **{"title": f"{run.system}, seed {run.seed}", "seed": run.seed, "settings": dict(run.settings)},
        **{"folder": run.training.name, "updates": run.updates, "epochs": run.epochs},
        "parameters": _parameters(run.training),
        **{"minutes": training["seconds"][-1] / 60, "last_loss": training["losses"][-1]},
        **{"lowest_loss": lowest, "update_of_lowest_loss": update, "last_fall": last_fall(training)},
        **{"patience": patience, "converged": bool(patience) and validations_after >= patience},
        **training,
    }


def _parameters(training: Path) -> int | None:
    """Return the number of parameters that the log in the folder *training* has; None if it has none."""
    text = (training / "log").read_text(encoding="utf-8", errors="replace")
    numbers = re.findall(r"num\. shared model params: ([\d,]+)", text)
    return int(numbers[-1].replace(",", "")) if numbers else None


def _of_test_set(contents: Contents, test_set: TestSet, longest: int) -> dict[str, Any]:
    """Return the scores of all runs on *test_set*, their comparisons, and the lengths of the source lines."""
    name, baseline = test_set.name, next(iter(contents.runs))
    runs = {system: {run.seed: run for run in of_system} for system, of_system in contents.runs.items()}
    rows = _of_each(runs, lambda run: _statistics(run, test_set, contents.tokenize))
    reports = _of_each(runs, lambda run: json.loads(run.scores[name].read_text(encoding="utf-8"))["systems"][0])
    report = next(iter(reports[baseline].values()))
    generated = str(contents.runs[baseline][0].generated[name])
    counts = [len(source.split()) for source in read_generated(lines_of(generated), generated).sources.values()]
    drawn = significance.draw(len(next(iter(rows[baseline].values()))), significance.RESAMPLES)
    return {
        **{"name": name, "lines": drawn.shape[1], "signature": report["metrics"][0]["signature"]},
        "subwords a line": statistics.mean(counts),
        "lines longer than in training": sum(count > longest for count in counts),
        BLEU: compared(baseline, _of_each(rows, lambda one: significance.scores_of_draws(one, drawn))),
        "length_ratios": _of_each(rows, lambda one: float(one[:, 8].sum() / one[:, 9].sum())),
        "scorers": _scorers(reports, baseline, drawn),
        "metrics": {
            metric["name"]: {"signature": metric["signature"], "scores": _scores(reports, "metrics", n)}
            for n, metric in enumerate(report["metrics"])
            if n and "sentence_scores" not in metric
        },
        "by_length": {
            one["words"]: {"sentences": one["sentences"], "scores": _scores(reports, LENGTHS, n)}
            for n, one in enumerate(report[LENGTHS])
        },
    }


Reports = Mapping[str, Mapping[int, Mapping[str, Any]]]  # by system and seed: the entry of a system in a score.json


def _scores(reports: Reports, key: str, n: int) -> dict[str, dict[int, float]]:
    """Return the score in the n-th entry of the list *key* of each of *reports*."""
    return _of_each(reports, lambda report: report[key][n]["score"])


def _of_each(runs: Mapping[str, Mapping[int, Any]], value: Callable[[Any], Any]) -> dict[str, dict[int, Any]]:
    """Return the *value* of each of *runs*, by system and seed."""
    return {system: {seed: value(run) for seed, run in by_seed.items()} for system, by_seed in runs.items()}


def _statistics(run: FinishedRun, test_set: TestSet, tokenize: str) -> np.ndarray:
    """Return the :func:`.significance.statistics` of the translations of *test_set* by *run*."""
    path = run.hypotheses[test_set.name]
    hypotheses = read_lines(str(path), may_be_blank=True)
    references = {reference: [*lines_of(str(reference))] for reference in test_set.references}
    for reference, expected in references.items():
        if len(expected) != len(hypotheses):
            raise InputError(f"{path} has {len(hypotheses)} lines, and {reference} has {len(expected)}")
    return significance.statistics(hypotheses, *references.values(), tokenize=tokenize)


def _scorers(reports: Reports, baseline: str, drawn: np.ndarray) -> dict[str, Any]:
    """Return the comparison by each program that scores sentences, over the runs that it has scored."""
    draws: dict[str, dict[str, dict[int, np.ndarray]]] = {}
    about: dict[str, dict[str, Any]] = {}
    for system, by_seed in reports.items():
        for seed, report in by_seed.items():
            for metric in (metric for metric in report["metrics"] if "sentence_scores" in metric):
                means = drawn @ np.array(metric["sentence_scores"]) / drawn.shape[1]
                draws.setdefault(metric["name"], {}).setdefault(system, {})[seed] = means
                lower_is_better = metric["what"].endswith("lower is better")
                about[metric["name"]] = {"command": metric["signature"], "lower_is_better": lower_is_better}
    return {name: {**about[name], **compared(baseline, draws[name], about[name]["lower_is_better"])} for name in about}


def ranked(results: Results) -> list[str]:
    """Return the systems, the best on the first test set first."""
    first = results["test_sets"][0][BLEU]
    return in_order(first["scores"], results["baseline"], first["against_baseline"])


def all_runs(results: Results) -> list[tuple[str, dict[str, Any]]]:
    """Return every run with the name of its system."""
    return [(system, run) for system, runs in results["runs"].items() for run in runs]


def of_fewer_seeds(scores: Mapping[str, Sized]) -> list[str]:
    """Return the systems with fewer *scores* than others, whose means cannot be compared with theirs."""
    most = max(map(len, scores.values()), default=0)
    return [system for system in scores if len(scores[system]) < most]


def marked(results: Results, system: str) -> str:
    """Return the name of *system*, with a dagger if its means are over fewer seeds than others have."""
    return f"{system} †" if system in of_fewer_seeds(results["runs"]) else system


def at_end(sweep: Mapping[str, Any]) -> bool:
    """Return whether the chosen value of a *sweep* is the lowest or the highest number."""
    try:
        values, chosen = sorted(map(float, sweep["losses"])), float(sweep["chosen"])
    except ValueError:
        return False
    return len(values) > 1 and chosen in (values[0], values[-1])
