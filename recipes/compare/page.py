"""Sentences and tables of the report, and the page and the Markdown rendered from them and the plots.

    python -m recipes.compare.page results.json [--output DIR]

draws both again without training. The wording is in the templates beside this file. The numbers come from results.json
(stage23_report.py).
"""

import argparse
import base64
import io
import math
import shlex
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml
from matplotlib.figure import Figure

from fairseq_rope.files import write_whole
from recipes.compare.plots import FEWEST, plots
from recipes.compare.results import Results, all_runs, buckets, has_documents, per_system, ranked, read_results, sets

Table = tuple[list[str], list[list[str]]]  # the head and the rows
NOTED = ("commit", "versions", "hardware", "batches")  # facts about every training process
SIGNIFICANT = 0.05  # a difference counts if its corrected p is at most this

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: name == "report.html.j2",
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)


def spread(values: Sequence[float], digits: int = 2) -> str:
    """Mean and standard deviation as text, or the values if there is only one or one is not finite."""
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return ", ".join(f"{value:,.{digits}f}" for value in values)
    return f"{statistics.mean(values):,.{digits}f} ± {statistics.stdev(values):,.{digits}f}"


def p_text(results: Results, against: Mapping[str, Any], key: str = "p_holm") -> str:
    """The p-value *key* of a bootstrap as text. The smallest value that the resamples can give is an upper bound."""
    least = 1 / (results["bootstrap"]["resamples"] + 1)
    return f"{'≤ ' if against['p_value'] <= least * 1.0001 else ''}{against[key]:.3f}"


def interval(against: Mapping[str, Any]) -> str:
    """The difference of a bootstrap and its interval as text."""
    return f"{against['difference']:+.2f} ({against['low']:+.2f} to {against['high']:+.2f})"


def listed(words: Sequence[str]) -> str:
    """*words* as in "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


# -- sentences -------------------------------------------------------------------------------------


def verdict(results: Results) -> list[str]:
    """Sentences on the systems, on missing runs, and on trainings that are not comparable."""
    compared = results["joined"][0]["against_baseline"]
    sentences = _of_two(results, *compared) if len(compared) == 1 == len(results["systems"]) - 1 else _of_many(results)
    missing = [f"{run} is missing: {' '.join(reason.split())}" for run, reason in results["failed"].items()]
    return sentences + missing + training_differences(results)


def _of_two(results: Results, system: str) -> list[str]:
    joined, baseline = results["joined"][0], results["baseline"]
    against = joined["against_baseline"][system]
    differences = [one["difference"] for one in joined["by_seed"][system]]
    seeds = "from one seed: other seeds may differ"
    if len(differences) > 1:
        each = ", ".join(f"{difference:+.2f}" for difference in differences)
        deviation = statistics.stdev(differences)
        seeds = f"the mean over {len(differences)} seeds ({each}; standard deviation {deviation:.2f})"
    return [
        f"{system} differs from {baseline} by {against['difference']:+.2f} sacreBLEU, {seeds}. "
        f"When the test sentences are resampled, 95% of the differences between these trainings are from "
        f"{against['low']:+.2f} to {against['high']:+.2f} (p {p_text(results, against)})."
    ]


def _of_many(results: Results) -> list[str]:
    joined, baseline, systems = results["joined"][0], results["baseline"], ranked(results)
    best, compared = joined["best"], joined["against_baseline"]
    sentences = [f"{best} has the highest sacreBLEU, {spread(joined['scores'][best])}."]
    if joined["against_best"]:
        equal = [name for name in systems if name in joined["against_best"] and _as_good(joined["against_best"][name])]
        sentences.append(
            f"The test does not show that {listed(equal)} {'is' if len(equal) == 1 else 'are'} worse."
            if equal
            else "The test shows that every other system is worse."
        )
    kinds: dict[str, list[str]] = {"better than": [], "worse than": [], "indistinguishable from": []}
    for name in systems:
        if name in compared:
            difference, significant = compared[name]["difference"], compared[name]["p_holm"] <= SIGNIFICANT
            kind = ("better than" if difference > 0 else "worse than") if significant else "indistinguishable from"
            kinds[kind].append(f"{name} ({difference:+.2f})")
    sentences += [
        f"{listed(names)} {'is' if len(names) == 1 else 'are'} {kind} the baseline {baseline}."
        for kind, names in kinds.items()
        if names
    ]
    apart = [name for name in systems if name not in (*compared, baseline)]
    if baseline not in systems:
        sentences.append(f"The baseline {baseline} has no finished run. The report has no differences to it.")
    elif apart:
        sentences.append(f"{listed(apart)} {'has' if len(apart) == 1 else 'have'} no seed in common with the baseline.")
    single = [name for name in systems if len(joined["scores"][name]) == 1]
    if single:
        which = "Every system" if len(single) == len(systems) else listed(single)
        has = "has" if len(single) in (1, len(systems)) else "have"
        sentences.append(f"{which} {has} one seed: other seeds may differ.")
    return sentences


def _as_good(against: Mapping[str, Any]) -> bool:
    """Whether a comparison with the best system does not show the other one to be worse."""
    return against["p_holm"] > SIGNIFICANT or against["difference"] >= 0  # > 0: better in the seeds that both have


def training_differences(results: Results) -> list[str]:
    """A sentence if code, versions, hardware or batches differ between the trainings."""
    differ = [
        f"{name} ({'; '.join(kinds)})"
        for name in NOTED
        if len(kinds := dict.fromkeys(_plain(one.get(name, "not noted")) for one in _processes(results))) > 1
    ]
    return [f"The trainings differ in {', '.join(differ)}."] if differ else []


def _processes(results: Results) -> list[dict[str, Any]]:
    """The training processes of all runs."""
    return [process for _, run in all_runs(results) for process in run["training"]["processes"]]


def _plain(value: Any) -> str:
    """*value*, a fact about a process, as words."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


# -- tables ----------------------------------------------------------------------------------------


def tables(results: Results) -> dict[str, Table]:
    """The tables of the page by their names. All of them have the best system first."""
    metrics = [name for name in results["signatures"] if name != "sacreBLEU"]
    of_metrics = per_system(results, lambda run: [run["metrics"][name]["score"] for name in metrics])
    of_lengths = per_system(results, lambda run: [bucket["score"] for bucket in run["by_length"]])
    lengths = [f"{words} ({sentences})" for words, sentences in buckets(results)]

    def by_column(head: list[str], values: Mapping[str, list[list[float]]]) -> Table:
        rows = [[name, *map(spread, zip(*seeds, strict=True))] for name, seeds in values.items()]
        return ["system", *head], rows

    return {
        "scores": _score_table(results),
        "runs": _run_table(results),
        "systems": _definition_table(results),
        "metrics": by_column([f"{name} ({results['signatures'][name]})" for name in metrics], of_metrics),
        "lengths": by_column(lengths, of_lengths),
        **_joined_tables(results),
    }


def _score_table(results: Results) -> Table:
    joined, baseline = results["joined"][0], results["baseline"]
    head = [
        "system",
        "seeds",
        "sacreBLEU",
        f"difference to {baseline} (95%)",
        "p",
        "p (Holm)",
        "compared with the best",
    ]
    head += ["parameters", "updates", "minutes", "tokens/s", "peak memory (MiB)", "validation loss at the end"]
    rows = []
    for name in ranked(results):
        runs = results["runs"][name]
        against = joined["against_baseline"].get(name)
        compared = ["the baseline" if name == baseline else "no common seed", "", ""]
        if against is not None:
            compared = [interval(against), p_text(results, against, "p_value"), p_text(results, against)]
        row = [name, ", ".join(str(run["seed"]) for run in runs), spread(joined["scores"][name])]
        row += [*compared, _beside_best(results, name), _parameters(runs[0])]
        trainings = [run["training"] for run in runs]
        row += [f"{trainings[0]['updates'][-1]:,}"]  # the same for all
        row += [spread([training["seconds"][-1] / 60 for training in trainings], 1)]
        row += [spread([training["tokens_per_second"] for training in trainings], 0)]
        row += [_peak(trainings), spread([training["losses"][-1] for training in trainings])]
        rows.append(row)
    return head, rows


def _beside_best(results: Results, name: str) -> str:
    joined = results["joined"][0]
    if name == joined["best"]:
        return "best"
    against = joined["against_best"].get(name)
    if against is None:
        return "no common seed"
    return f"{'indistinguishable' if _as_good(against) else 'worse'} (p {p_text(results, against)})"


def _run_table(results: Results) -> Table:
    head = ["run", "sacreBLEU", f"difference to {results['baseline']} (95%)", "p", "updates", "minutes", "tokens/s"]
    head += ["peak memory (MiB)", "validation loss, the last five", "commit"]
    rows = []
    for name, runs in per_system(results, lambda run: run).items():
        bootstraps = {one["seed"]: one for one in results["joined"][0]["by_seed"].get(name, [])}
        for run in runs:
            training, against = run["training"], bootstraps.get(run["seed"])
            commits = dict.fromkeys(str(process["commit"]) for process in training["processes"])
            gap = "" if run["curve_is_whole"] else " (the end of the curve is missing)"
            row = [f"{name}, seed {run['seed']}", f"{run['metrics']['sacreBLEU']['score']:.2f}"]
            row += [interval(against), p_text(results, against, "p_value")] if against else ["", ""]
            row += [f"{training['updates'][-1]:,}{gap}", f"{training['seconds'][-1] / 60:.1f}"]
            row += [f"{training['tokens_per_second']:,.0f}", _peak([training])]
            row += [", ".join(f"{loss:.3f}" for loss in training["losses"][-5:]), ", ".join(commits) or "not noted"]
            rows.append(row)
    return head, rows


def _definition_table(results: Results) -> Table:
    rows = [
        [name, f"training of {first['training_of']}", first["generate"]]
        if "training_of" in first
        else [name, first["architecture"], first["flags"]]
        for name in ranked(results)
        for first in results["runs"][name][:1]
    ]
    return ["system", "architecture", "flags"], rows


def _joined_tables(results: Results) -> dict[str, Table]:
    by_length = sets(results)
    all_joined = [*by_length.values()]
    documents = has_documents(results)
    joined_rows = [
        ["lines", *(str(one["lines"]) for one in all_joined)],
        ["mean" if documents else "subwords a line", *(f"{one['subwords']:.0f}" for one in all_joined)],
        ["lines longer than in training", *(str(one["longer_than_in_training"]) for one in all_joined)],
    ]
    differences, document_rows = [], []
    for name in ranked(results):
        cells = [
            f"{spread(one['scores'][name])} ({statistics.mean(one['length_ratio'][name]):.2f})" for one in all_joined
        ]
        joined_rows.append([name, *cells])
        if documents:
            shares = (statistics.mean(one["other_separators"][name]) for one in all_joined)
            scores = (spread(one["document_scores"][name]) for one in all_joined)
            document_rows.append(
                [name, *(f"{score} ({share:.1%})" for score, share in zip(scores, shares, strict=True))]
            )
        against = [one["against_baseline"].get(name) for one in all_joined]
        if all(against):
            differences.append([name, *(f"{interval(one)}, p {p_text(results, one)}" for one in against)])
    head = ["subwords a line, at most" if documents else "sentences a line", *by_length]
    of_documents = {"documents": (head, document_rows)} if documents else {}
    return {"joined": (head, joined_rows), "differences": (head, differences), **of_documents}


def _parameters(run: dict[str, Any]) -> str:
    return f"{run['parameters']:,}" if run["parameters"] else "not in the log"


def _peak(trainings: Iterable[dict[str, Any]]) -> str:
    """The highest peak memory of *trainings*."""
    peaks = [peak for training in trainings if (peak := training["peak_memory_mib"]) is not None]
    return f"{max(peaks):,.0f}" if peaks else "not noted"


# -- texts -----------------------------------------------------------------------------------------


def texts(results: Results) -> dict[str, str]:
    """The page and the Markdown, by their file names."""
    systems, process_lists = results["systems"], [runs[0]["training"]["processes"] for runs in results["runs"].values()]
    first = next(iter(_processes(results)), {})
    last = [processes[-1] for processes in process_lists if processes]
    shared = {**results, "tables": tables(results), "verdict": verdict(results), "significant": SIGNIFICANT}
    shared["documents"] = has_documents(results)
    page = TEMPLATES.get_template("report.html.j2").render(
        shared,
        names=listed(systems) if len(systems) < 4 else f"{len(systems)} systems",
        images={name: _png(figure) for name, figure in plots(results).items()},
        fewest=FEWEST,
        made=_yaml({"command": results["command"], "settings": results["settings"]}),
        noted=_yaml({key: last[0].get(key) for key in NOTED} if last else "not noted"),
        commands="\n\n".join(dict.fromkeys(process["command"] for process in last)),
    )
    markdown = TEMPLATES.get_template("results.md.j2").render(
        shared,
        commands=[_without_places(line) for line in results["command"].splitlines()],
        trained_with="; ".join(f"{name}: {_plain(first.get(name, 'not noted'))}" for name in NOTED),
    )
    return {"report.html": page, "results.md": markdown}


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10**6)


def _without_places(command: str) -> str:
    """A *command* without the flags that name folders of one machine."""
    words = shlex.split(command)
    places = {"--data-dir", "--work-dir", "--manifest"}
    previous = ["", *words[:-1]]
    return shlex.join(
        w for w, before in zip(words, previous, strict=True) if not {before, w.partition("=")[0]} & places
    )


def _png(figure: Figure) -> str:
    """*figure* as PNG in base64."""
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return base64.b64encode(png.getvalue()).decode()


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the report again. Exits with status 1 and one sentence if the file has no results or cannot be drawn."""
    parser = argparse.ArgumentParser(prog="recipes.compare.page", description="Draw a report again, without training.")
    parser.add_argument("results", type=Path, help="the results.json of a comparison")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: the folder of results.json")
    args = parser.parse_args(argv)
    try:
        results = read_results(args.results)
    except ValueError as error:
        sys.exit(f"recipes.compare.page: {error}")
    try:
        for name, text in texts(results).items():
            write_whole((args.output or args.results.parent) / name, text)
    except OSError as error:
        sys.exit(f"recipes.compare.page: {error.filename}: {error.strerror}")
    except (LookupError, TypeError, ValueError, AttributeError, jinja2.UndefinedError) as error:
        sys.exit(f"recipes.compare.page: {args.results}: is not the results.json of a comparison: {error!r}")


if __name__ == "__main__":
    main()
