"""The tables of the report, as text, and the numbers as CSV."""

import csv
import io
import statistics
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

from recipes.report.comparison import as_good, in_order
from recipes.report.results import BLEU, Results, all_runs, at_end, marked, of_fewer_seeds, ranked
from recipes.report.significance import SIGNIFICANT


class Table(NamedTuple):
    """A table of text."""

    title: str
    head: list[str]
    rows: list[list[str]]


def number(value: float | None, digits: int = 0) -> str:
    """Return *value* as text; a dash if it is missing or was not finite."""
    return "–" if value is None else f"{value:,.{digits}f}"


def spread(values: Collection[float | None], digits: int = 2) -> str:
    """Return mean and standard deviation as text, or the values if there is only one or one is not finite."""
    cells, numbers = [*values], [value for value in values if value is not None]
    if len(cells) == 1 or len(numbers) < len(cells):
        return ", ".join(number(value, digits) for value in cells)
    return f"{statistics.mean(numbers):,.{digits}f} ± {statistics.stdev(numbers):,.{digits}f}"


def p_text(against: Mapping[str, Any]) -> str:
    """Return the corrected p-value of a test as text."""
    p = f"{against['p_holm']:.3f}" if against["p_holm"] > 0.001 else "≤ 0.001"
    return f"{p}; one seed: sentences only" if len(against["seeds"]) == 1 else p


def p_judged(against: Mapping[str, Any]) -> str:
    """Return :func:`p_text`, and whether the difference is not significant."""
    return p_text(against) + (" (not significant)" if against["p_holm"] > SIGNIFICANT else "")


def interval(against: Mapping[str, Any], digits: int = 2) -> str:
    """Return the difference of a test and its interval as text."""
    difference, low, high = (f"{against[key]:+.{digits}f}" for key in ("difference", "low", "high"))
    return f"{difference} ({low} to {high})"


def score_tables(results: Results) -> dict[str, Table]:
    """Return the tables of scores by their names. All tables have the best system first."""
    named = {"test-sets": _test_set_table(results)}
    for n, one in enumerate(results["test_sets"], 1):
        name = one["name"]
        named[f"scores-{n}"] = _score_table(f"{name}: sacreBLEU ({one['signature']})", results, one[BLEU], BLEU)
        for program, scores in one["scorers"].items():
            better = "lower" if scores["lower_is_better"] else "higher"
            title = f"{name}: mean of {scores['command']}; {better} is better"
            named[f"{program}-{n}"] = _score_table(title, results, scores, program)
        metrics = {f"{title} ({metric['signature']})": metric["scores"] for title, metric in one["metrics"].items()}
        lengths = {f"{words} ({bucket['sentences']})": bucket["scores"] for words, bucket in one["by_length"].items()}
        named[f"metrics-{n}"] = _means(f"{name}: other metrics", results, metrics)
        named[f"lengths-{n}"] = _means(f"{name}: sacreBLEU by the words of the source (sentences)", results, lengths)
    return named


def _means(title: str, results: Results, scores: Mapping[str, Mapping[str, Mapping[int, float]]]) -> Table:
    """Return a table of the means over seeds of *scores*, by column, system and seed."""
    rows = [
        [marked(results, name), *(spread(one[name].values()) for one in scores.values())] for name in ranked(results)
    ]
    return Table(title, ["system", *scores], rows)


def training_tables(results: Results) -> dict[str, Table]:
    """Return the other tables by their names."""
    tables = {"costs": _cost_table(results), "runs": _run_table(results), "systems": _system_table(results)}
    return {"sweeps": _sweep_table(results), **tables} if results["sweeps"] else tables


def _test_set_table(results: Results) -> Table:
    sets, rows = results["test_sets"], []
    for key in ("lines", "subwords a line", "lines longer than in training"):
        rows.append([key, *(cell for one in sets for cell in (f"{one[key]:,.0f}", ""))])
    for name in ranked(results):
        rows.append([marked(results, name)])
        for one in sets:
            ratio = statistics.mean(one["length_ratios"][name].values())
            rows[-1].append(f"{spread(one[BLEU]['scores'][name].values())} ({ratio:.2f})")
            against = one[BLEU]["against_baseline"].get(name)
            rows[-1].append(f"{interval(against)}, p {p_judged(against)}" if against else "")
    head = [cell for one in sets for cell in (one["name"], f"{one['name']}: difference to {results['baseline']} (95%)")]
    return Table("sacreBLEU and length ratio on each test set", ["system", *head], rows)


def _score_table(title: str, results: Results, compared: Mapping[str, Any], metric: str) -> Table:
    """Return the scores of the systems by *metric*, and their tests. *compared* has both."""
    baseline, scores, lower_is_better = results["baseline"], compared["scores"], compared.get("lower_is_better", False)
    largest = max(abs(score) for by_seed in scores.values() for score in by_seed.values())
    digits = 2 if metric == BLEU or largest >= 100 else 4
    rows = []
    for name in in_order(scores, baseline, compared["against_baseline"], lower_is_better):
        row = [f"{name} †" if name in of_fewer_seeds(scores) else name, ", ".join(map(str, scores[name]))]
        row.append(spread(scores[name].values(), digits))
        if against := compared["against_baseline"].get(name):
            row += [interval(against, digits), p_judged(against)]
        else:
            row += ["the baseline" if name == baseline else "no common seed", ""]
        rows.append([*row, _beside_best(compared, name)])
    head = ["system", "seeds", metric, f"difference to {baseline} (95%)", "p (Holm)", "compared with the best"]
    return Table(title, head, rows)


def _beside_best(compared: Mapping[str, Any], name: str) -> str:
    """Return how the system *name* compares with the best one, by the tests in *compared*."""
    against = compared["against_best"].get(name)
    if name == compared["best"] or against is None:
        return "best" if name == compared["best"] else "no common seed"
    equal = as_good(against, compared.get("lower_is_better", False))
    return f"{'indistinguishable' if equal else 'worse'} (p {p_text(against)})"


def _sweep_table(results: Results) -> Table:
    rows = []
    for name in ranked(results):
        if sweep := results["sweeps"].get(name):
            losses = ", ".join(f"{value}: {number(loss, 3)}" for value, loss in sweep["losses"].items())
            end = " (end of the range)" if at_end(sweep) else ""
            rows.append([name, sweep["setting"], losses, f"{sweep['chosen']}{end}"])
    return Table("Sweeps", ["system", "setting", "lowest validation loss of seed 1 by value", "chosen"], rows)


def _cost_table(results: Results) -> Table:
    head = ["system", "parameters", "updates", "minutes", "tokens/s", "validation loss at the end", "peak memory (MiB)"]
    keys = {"updates": 0, "minutes": 1, "tokens_per_second": 0, "last_loss": 2}
    rows = []
    for name in ranked(results):
        runs = results["runs"][name]
        spreads = [spread([run[key] for run in runs], digits) for key, digits in keys.items()]
        peak = max((run["peak_memory_mib"] for run in runs if run["peak_memory_mib"]), default=None)
        rows.append([marked(results, name), number(runs[0]["parameters"]), *spreads, number(peak)])
    return Table("Costs", head, rows)


def _run_table(results: Results) -> Table:
    rows, baseline = [], results["baseline"]
    for name in ranked(results):
        for run in results["runs"][name]:
            row = [run["title"]]
            for scores in (one[BLEU]["scores"] for one in results["test_sets"]):
                score = scores[name][run["seed"]]
                beside = name != baseline and run["seed"] in scores[baseline]
                row.append(f"{score:.2f}" + (f" ({score - scores[baseline][run['seed']]:+.2f})" if beside else ""))
            rows.append([*row, f"{number(run['lowest_loss'], 3)} at update {run['update_of_lowest_loss']:,}"])
    sets = [one["name"] for one in results["test_sets"]]
    title = f"sacreBLEU of each run (difference to {baseline} from the same seed)"
    return Table(title, ["run", *sets, "lowest validation loss"], rows)


def _each_once(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(filter(None, texts))) or "–"


def _system_table(results: Results) -> Table:
    rows = []
    for name in ranked(results):
        own, runs = results["definitions"][name], results["runs"][name]
        batches = [process.get("batches", {}) for run in runs for process in run["processes"]]
        kinds = _each_once(" on ".join(filter(None, map(one.get, ("precision", "device")))) for one in batches)
        rows.append([name, *map(str, own.values()), kinds, spread([run["lowest_loss"] for run in runs], 3)])
    settings = results["definitions"][results["baseline"]]
    return Table("Systems", ["system", *settings, "trained in", "lowest validation loss"], rows)


def as_csv(results: Results) -> str:
    """Return the unrounded numbers of *results* as CSV, a line for each run and test set."""
    rows: list[dict[str, Any]] = []
    for system, run in all_runs(results):
        for one in results["test_sets"]:
            seed, metrics = run["seed"], {BLEU: one[BLEU], **one["metrics"], **one["scorers"]}
            row = {"system": system, "seed": seed, "test_set": one["name"]}
            row |= {name: metric["scores"].get(system, {}).get(seed, "") for name, metric in metrics.items()}
            row |= {"length_ratio": one["length_ratios"][system][seed], **results["definitions"][system]}
            row |= {key: value for key, value in run.items() if isinstance(value, (int, float))}
            lengths = one["by_length"].items()
            rows.append(row | {f"{BLEU}, {words} words": bucket["scores"][system][seed] for words, bucket in lengths})
    text = io.StringIO()
    writer = csv.DictWriter(text, dict.fromkeys(key for row in rows for key in row), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
