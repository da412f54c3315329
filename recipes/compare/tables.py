"""The tables of the report, as text."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from recipes.compare.bootstrap import SIGNIFICANT
from recipes.compare.results import (
    Results,
    at_end,
    buckets,
    has_documents,
    in_order,
    lowest_loss,
    marked,
    per_system,
    ranked,
    sets_by_length,
    trained_in,
    tuned_value,
)

# Columns of words. They are aligned at the left, like the first column; all others have numbers.
OF_WORDS = ("compared with the best", "architecture", "flags", "trained in", "commit", "files", "contents")
LOWEST = "lowest validation loss"


class Table(NamedTuple):
    """A table of text: its head, and its rows."""

    head: list[str]
    rows: list[list[str]]

    @property
    def aligned(self) -> list[str]:
        """ "left" or "right" for each column."""
        return ["left" if n == 0 or title in OF_WORDS else "right" for n, title in enumerate(self.head)]


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation as text, or the values if there is only one or one is not finite."""
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return ", ".join(f"{value:,.{digits}f}" for value in values)
    return f"{statistics.mean(values):,.{digits}f} ± {statistics.stdev(values):,.{digits}f}"


def p_text(results: Results, against: Mapping[str, Any], key: str = "p_holm") -> str:
    """The p-value *key* of a bootstrap as text. The smallest value that the resamples can give is an upper bound."""
    least = 1 / (results["bootstrap"]["resamples"] + 1)
    return f"{'≤ ' if against['p_value'] <= least * 1.0001 else ''}{against[key]:.3f}"


def p_judged(results: Results, against: Mapping[str, Any], key: str = "p_holm") -> str:
    """:func:`p_text`, and whether the difference is not significant."""
    return p_text(results, against, key) + (" (not significant)" if against[key] > SIGNIFICANT else "")


def interval(against: Mapping[str, Any], digits: int = 2) -> str:
    """The difference of a bootstrap and its interval as text."""
    difference, low, high = (f"{against[key]:+.{digits}f}" for key in ("difference", "low", "high"))
    return f"{difference} ({low} to {high})"


def tables(results: Results) -> dict[str, Table]:
    """The tables of the page by their names. All of them have the best system first."""
    metrics = [name for name in results["signatures"] if name != "sacreBLEU"]
    of_metrics = per_system(results, lambda run: [run["metrics"][name]["score"] for name in metrics])
    of_lengths = per_system(results, lambda run: [bucket["score"] for bucket in run["by_length"]])
    lengths = [f"{words} ({sentences})" for words, sentences in buckets(results)]
    scorers = results.get("scorers", {})

    def by_column(head: list[str], values: Mapping[str, list[list[float]]]) -> Table:
        rows = [[marked(results, name), *map(spread, zip(*seeds, strict=True))] for name, seeds in values.items()]
        return Table(["system", *head], rows)

    return {
        "data": _data_table(results),
        "scores": _score_table(results, results["joined"][0], "sacreBLEU"),
        "costs": _cost_table(results),
        "runs": _run_table(results),
        "trainings": _training_table(results),
        "systems": _definition_table(results),
        "metrics": by_column([f"{name} ({results['signatures'][name]})" for name in metrics], of_metrics),
        "lengths": by_column(lengths, of_lengths),
        **_joined_tables(results),
        **({"tuning": _tuning_table(results)} if results.get("tuning") else {}),
        **{f"scorer-{name}": _score_table(results, compared, name) for name, compared in scorers.items()},
    }


def _data_table(results: Results) -> Table:
    files, unit = results["data"]["files"], "segments" if has_documents(results) else "pairs"
    kinds = {"train": f"{unit} after cleaning", "valid": unit, "test": "sentences"}
    rows = []
    for name, size in results["sizes"].items():
        sources = ", ".join(files[name]) if name in files else "held out from the training set"
        rows.append([name, sources, f"{size:,} {kinds[name]}"])
    return Table(["set", "files", "contents"], rows)


def _score_table(results: Results, compared: Mapping[str, Any], metric: str) -> Table:
    """The scores of the systems by *metric*, and their bootstraps. *compared* has both."""
    baseline, scores, lower_is_better = results["baseline"], compared["scores"], compared.get("lower_is_better", False)
    seeds = compared.get("seeds") or {name: [run["seed"] for run in runs] for name, runs in results["runs"].items()}
    most_seeds = max(map(len, scores.values()), default=0)
    largest = max((abs(score) for over_seeds in scores.values() for score in over_seeds), default=0.0)
    digits = 2 if metric == "sacreBLEU" or largest >= 100 else 4
    rows = []
    for name in in_order(scores, baseline, compared["against_baseline"], lower_is_better):
        against = compared["against_baseline"].get(name)
        difference = ["the baseline" if name == baseline else "no common seed", ""]
        if against is not None:
            difference = [interval(against, digits), p_judged(results, against)]
        title = name if len(scores[name]) == most_seeds else f"{name} †"
        cells = [title, ", ".join(map(str, seeds[name])), spread(scores[name], digits), *difference]
        rows.append([*cells, _beside_best(results, compared, name)])
    return Table(["system", "seeds", metric, f"difference to {baseline} (95%)", "p (Holm)", OF_WORDS[0]], rows)


def _cost_table(results: Results) -> Table:
    head = ["system", "parameters", "updates", "minutes", "tokens/s", "peak memory (MiB)", "validation loss at the end"]
    rows = []
    for name, runs in per_system(results, lambda run: run).items():
        trainings = [run["training"] for run in runs]
        updates = [training["updates"][-1] for training in trainings]
        row = [marked(results, name), _parameters(runs[0]), spread(updates[:1] if len({*updates}) == 1 else updates, 0)]
        row += [spread([training["seconds"][-1] / 60 for training in trainings], 1)]
        row += [spread([training["tokens_per_second"] for training in trainings], 0)]
        row += [_peak(trainings), spread([training["losses"][-1] for training in trainings])]
        rows.append(row)
    return Table(head, rows)


def _tuning_table(results: Results) -> Table:
    tuning = results["tuning"]
    rows = []
    for name in (name for name in ranked(results) if name in tuning["systems"]):
        outcome = tuning["systems"][name]
        cells = [
            "no finished training" if run["update"] is None else _loss_at(run["loss"], run["update"])
            for run in outcome["runs"]
        ]
        end = " (end of the range)" if at_end(outcome) else ""
        rows.append([name, *cells, f"{outcome['chosen']}{end}"])
    return Table(["system", *(f"{tuning['setting']} {value}" for value in tuning["values"]), "chosen"], rows)


def _loss_at(loss: float | None, update: int) -> str:
    finite = loss is not None and math.isfinite(loss)
    return f"{loss:.3f} at update {update:,}" if finite else "not finite"


def as_good(against: Mapping[str, Any], lower_is_better: bool = False) -> bool:
    """Whether a bootstrap *against* the best system does not show the other system to be worse."""
    better = against["difference"] <= 0 if lower_is_better else against["difference"] >= 0  # in the seeds of both
    return against["p_holm"] > SIGNIFICANT or better


def _beside_best(results: Results, compared: Mapping[str, Any], name: str) -> str:
    """How the system *name* compares with the best one, by the bootstraps in *compared*."""
    if name == compared["best"]:
        return "best"
    against = compared["against_best"].get(name)
    if against is None:
        return "no common seed"
    good = as_good(against, compared.get("lower_is_better", False))
    return f"{'indistinguishable' if good else 'worse'} (p {p_text(results, against)})"


def _run_table(results: Results) -> Table:
    head = ["run", "sacreBLEU", f"difference to {results['baseline']} (95%)", "p", LOWEST]
    rows = []
    for name, runs in per_system(results, lambda run: run).items():
        by_seed = results["joined"][0]["by_seed"].get(name, [])
        bootstraps = {bootstrap["seed"]: bootstrap for bootstrap in by_seed}
        for run in runs:
            against = bootstraps.get(run["seed"])
            row = [f"{name}, seed {run['seed']}", f"{run['metrics']['sacreBLEU']['score']:.2f}"]
            row += [interval(against), p_judged(results, against, "p_value")] if against else ["", ""]
            rows.append([*row, _loss_at(*lowest_loss(run["training"]))])
    return Table(head, rows)


def _training_table(results: Results) -> Table:
    head = ["run", "updates", "minutes", "tokens/s", "peak memory (MiB)", "validation loss, the last five", "commit"]
    rows = []
    for name, runs in per_system(results, lambda run: run).items():
        for run in runs:
            training = run["training"]
            commits = dict.fromkeys(str(process["commit"]) for process in training["processes"])
            gap = "" if run["curve_is_whole"] else " (the end of the curve is missing)"
            row = [f"{name}, seed {run['seed']}", f"{training['updates'][-1]:,}{gap}"]
            row += [f"{training['seconds'][-1] / 60:.1f}", f"{training['tokens_per_second']:,.0f}", _peak([training])]
            row += [", ".join(f"{loss:.3f}" for loss in training["losses"][-5:]), ", ".join(commits) or "not noted"]
            rows.append(row)
    return Table(head, rows)


def _definition_table(results: Results) -> Table:
    tuning, rows = results.get("tuning"), []
    for name in ranked(results):
        first = results["runs"][name][0]
        other = [f"training of {first['training_of']}", first["generate"]] if "training_of" in first else []
        kinds = "; ".join(trained_in(results["runs"][name]))
        tuned = [tuned_value(results, name)] if tuning else []
        lowest = spread([lowest_loss(run["training"])[0] for run in results["runs"][name]], 3)
        rows.append([name, *(other or [first["architecture"], first["flags"]]), kinds, *tuned, lowest])
    setting = [tuning["setting"]] if tuning else []
    return Table(["system", "architecture", "flags", "trained in", *setting, LOWEST], rows)


def _joined_tables(results: Results) -> dict[str, Table]:
    by_length = sets_by_length(results)
    all_joined = [*by_length.values()]
    documents = has_documents(results)
    joined_rows = [
        ["lines", *(str(joined["lines"]) for joined in all_joined)],
        ["mean" if documents else "subwords a line", *(f"{joined['subwords']:.0f}" for joined in all_joined)],
        ["lines longer than in training", *(str(joined["longer_than_in_training"]) for joined in all_joined)],
    ]
    differences, document_rows = [], []
    for name in ranked(results):
        title = marked(results, name)
        joined_row, document_row = [title], [title]
        for joined in all_joined:
            joined_row.append(f"{spread(joined['scores'][name])} ({statistics.mean(joined['length_ratio'][name]):.2f})")
            if documents:
                share = statistics.mean(joined["other_separators"][name])
                document_row.append(f"{spread(joined['document_scores'][name])} ({share:.1%})")
        joined_rows.append(joined_row)
        if documents:
            document_rows.append(document_row)
        bootstraps = [joined["against_baseline"].get(name) for joined in all_joined]
        if all(bootstraps):
            cells = (f"{interval(bootstrap)}, p {p_judged(results, bootstrap)}" for bootstrap in bootstraps)
            differences.append([title, *cells])
    head = ["subwords a line, at most" if documents else "sentences a line", *by_length]
    of_documents = {"documents": Table(head, document_rows)} if documents else {}
    return {"joined": Table(head, joined_rows), "differences": Table(head, differences), **of_documents}


def _parameters(run: dict[str, Any]) -> str:
    return f"{run['parameters']:,}" if run["parameters"] else "not in the log"


def _peak(trainings: Iterable[dict[str, Any]]) -> str:
    """The highest peak memory of *trainings*."""
    peaks = [peak for training in trainings if (peak := training["peak_memory_mib"]) is not None]
    return f"{max(peaks):,.0f}" if peaks else "not noted"
