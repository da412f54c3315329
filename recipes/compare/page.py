"""Rows and plots of the report, and the page and the table rendered from them.

The wording is in the templates beside this file. The numbers come from results.json (stage23_report.py).
"""

import base64
import io
import logging
import math
import shlex
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Results = dict[str, Any]
NOTED = ("commit", "versions", "hardware", "batches")  # facts about every training process
FEWEST = 20  # sentences that a length bucket needs to appear in the plot
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # distinguishable for colour-blind readers

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: name == "report.html.j2",
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)


def per_architecture(results: Results, value: Callable[[dict[str, Any]], Any]) -> list[list[Any]]:
    """*value* of every system, as one list over the seeds for each architecture."""
    return [[value(system) for system in systems] for systems in zip(*results["systems"], strict=True)]


def scores(results: Results, metric: str = "sacreBLEU") -> list[list[float]]:
    """The scores in *metric*, as one list over the seeds for each architecture."""
    return per_architecture(results, lambda system: system["metrics"][metric]["score"])


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation as text, or the values if there is only one or one is not finite."""
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return ", ".join(f"{value:.2f}" for value in values)
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def p_text(results: Results, p_value: float) -> str:
    """*p_value* as text. The smallest value that the resamples can give becomes an upper bound."""
    least = 1 / (results["bootstrap"]["resamples"] + 1)
    return f"≤ {least:.3f}" if p_value <= least * 1.0001 else f"{p_value:.3f}"


def between_seeds(baseline: Sequence[float], system: Sequence[float]) -> str:
    """The number of seeds, the differences *system* - *baseline* for each, and their standard deviation."""
    if len(baseline) == 1:
        return "from one seed: other seeds may differ"
    differences = [b - a for a, b in zip(baseline, system, strict=True)]
    each = ", ".join(f"{difference:+.2f}" for difference in differences)
    return f"the mean over {len(baseline)} seeds ({each}; standard deviation {statistics.stdev(differences):.2f})"


def verdict(results: Results) -> list[str]:
    """A sentence on each architecture but the baseline, and a warning if the trainings are not comparable."""
    baseline, *others = results["architectures"]
    first, *rest = scores(results)
    sentences = [
        f"{arch} differs from {baseline} by {against['difference']:+.2f} sacreBLEU, {between_seeds(first, system)}. "
        f"When the test sentences are resampled, 95% of the differences between these trainings are from "
        f"{against['low']:+.2f} to {against['high']:+.2f} (p {p_text(results, against['p_value'])})."
        for arch, system, against in zip(others, rest, results["joined"][0]["against_baseline"], strict=True)
    ]
    return sentences + training_differences(results)


def processes(results: Results) -> list[dict[str, Any]]:
    """The training processes of all systems."""
    return [one for pair in results["systems"] for system in pair for one in system["training"]["processes"]]


def training_differences(results: Results) -> list[str]:
    """A sentence if code, versions, hardware or batches differ between the trainings."""
    differ = [
        f"{name} ({'; '.join(kinds)})"
        for name in NOTED
        if len(kinds := dict.fromkeys(_plain(one.get(name, "not noted")) for one in processes(results))) > 1
    ]
    return [f"The trainings differ in {', '.join(differ)}."] if differ else []


def _plain(value: Any) -> str:
    """*value*, a fact about a process, as words."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


# -- plots -----------------------------------------------------------------------------------------


def plots(results: Results) -> dict[str, str]:
    """The plots of the page, as PNG in base64."""
    buckets = _by_length(results)
    drawn = [bucket for bucket in buckets if bucket[1] >= FEWEST] or buckets
    joined = results["joined"]
    lengths = [bucket[2] for bucket in drawn], [f"{words}\n({count})" for words, count, _ in drawn]
    times = [one["scores"] for one in joined], [str(one["times"]) for one in joined]
    return {
        "losses": _png(lambda *axes: _draw_losses(results, *axes), count=2),
        "lengths": _png(lambda axes: _draw_scores(axes, results, *lengths, "words of the source (sentences)")),
        "joined": _png(lambda axes: _draw_scores(axes, results, *times, "sentences a line")),
    }


def _png(draw: Callable[..., None], count: int = 1) -> str:
    """The PNG, in base64, that *draw* draws on *count* axes."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq makes it log everything
    figure = Figure(figsize=(5 * count + 1, 3.8), dpi=110, layout="constrained")
    axes = [figure.add_subplot(1, count, n + 1) for n in range(count)]
    draw(*axes)
    for each in axes:
        each.grid(alpha=0.3)
        each.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return base64.b64encode(png.getvalue()).decode()


def _draw_losses(results: Results, by_updates: Axes, by_time: Axes) -> None:
    trainings = per_architecture(results, lambda system: system["training"])
    for arch, color, of_arch in zip(results["architectures"], COLOURS, trainings, strict=False):
        for number, training in enumerate(of_arch):
            style = {"color": color, "label": arch if number == 0 else None, "alpha": 0.8, "linewidth": 1.2}
            by_updates.plot(training["updates"], training["losses"], **style)
            by_time.plot([s / 60 for s in training["seconds"]], training["losses"], **style)
    all_losses = [loss for of_arch in trainings for training in of_arch for loss in training["losses"]]
    lowest = min(filter(math.isfinite, all_losses), default=0.0)  # a diverged loss is not finite
    for axes, what in ((by_updates, "updates"), (by_time, "minutes")):
        axes.set(xlabel=what, ylabel="validation loss (bits a token)", ylim=(lowest - 0.1, lowest + 2.5))


def _draw_scores(
    axes: Axes, results: Results, of_all: Sequence[list[list[float]]], places: list[str], xlabel: str
) -> None:
    """Draw a line for each architecture through the seeds' means of *of_all* (place, architecture, seed)."""
    for number, arch in enumerate(results["architectures"]):
        seeds = [place[number] for place in of_all]
        means = [statistics.mean(values) for values in seeds]
        # Rounding can put the mean of equal numbers below or above them.
        below = [max(0, m - min(v)) for m, v in zip(means, seeds, strict=True)]
        above = [max(0, max(v) - m) for m, v in zip(means, seeds, strict=True)]
        positions = [n + 0.06 * (number - 0.5) for n in range(len(places))]
        style = {"color": COLOURS[number], "label": arch, "capsize": 3, "marker": "o"}
        axes.errorbar(positions, means, yerr=[below, above], **style)
    axes.set_xticks(range(len(places)), places)
    axes.set(xlabel=xlabel, ylabel="sacreBLEU")


# -- rows ------------------------------------------------------------------------------------------


def _score_rows(results: Results) -> list[list[str]]:
    baseline, *others = scores(results)
    joined = results["joined"][0]

    def row(title: str, seeds: slice, bootstraps: Sequence[dict[str, float]]) -> list[str]:
        compared = zip(others, bootstraps, strict=True)
        cells = [cell for values, one in compared for cell in (spread(values[seeds]), *_against(results, one))]
        return [title, spread(baseline[seeds]), *cells]

    rows = [
        row(f"seed {seed}", slice(n, n + 1), [by_seed[n] for by_seed in joined["by_seed"]])
        for n, seed in enumerate(results["seeds"])
    ]
    return rows if len(rows) == 1 else [*rows, row("all seeds", slice(None), joined["against_baseline"])]


def _against(results: Results, against: dict[str, float]) -> list[str]:
    """The two cells of a bootstrap: the difference with its interval, and p."""
    interval = f"{against['difference']:+.2f} ({against['low']:+.2f} to {against['high']:+.2f})"
    return [interval, p_text(results, against["p_value"])]


def _by_length(results: Results) -> list[tuple[str, int, list[list[float]]]]:
    """Word range, number of sentences and scores (architecture, seed) of every length bucket."""
    buckets = enumerate(results["systems"][0][0]["by_length"])
    return [
        (
            bucket["words"],
            bucket["sentences"],
            per_architecture(results, lambda system, n=n: system["by_length"][n]["score"]),
        )
        for n, bucket in buckets
    ]


def _joined_rows(results: Results) -> list[list[str]]:
    rows = []
    for joined in results["joined"]:
        first, *others = [
            f"{spread(values)} ({statistics.mean(lengths):.2f})"
            for values, lengths in zip(joined["scores"], joined["length_ratio"], strict=True)
        ]
        row = [str(joined["times"]), str(joined["lines"]), f"{joined['subwords']:.0f}"]
        row += [str(joined["longer_than_in_training"]), first]
        for cell, against in zip(others, joined["against_baseline"], strict=True):
            row += [cell, *_against(results, against)]
        rows.append(row)
    return rows


def _training_rows(results: Results) -> list[list[str]]:
    rows = []
    for system in (system for pair in results["systems"] for system in pair):
        training = system["training"]
        commits = dict.fromkeys(str(process["commit"]) for process in training["processes"])
        gap = "" if system["curve_is_whole"] else " (the end of the curve is missing)"
        row = [f"{system['architecture']}, seed {system['seed']}", _parameters(system)]
        row += [f"{training['updates'][-1]}{gap}", f"{training['seconds'][-1] / 60:.1f}"]
        row += [f"{training['tokens_per_second']:,.0f}", ", ".join(f"{loss:.3f}" for loss in training["losses"][-5:])]
        rows.append([*row, ", ".join(commits) or "not noted"])
    return rows


def _parameters(system: dict[str, Any]) -> str:
    return f"{system['parameters']:,}" if system["parameters"] else "not in the log"


# -- texts -----------------------------------------------------------------------------------------


def html(results: Results) -> str:
    """The report as one page."""
    last = [system["training"]["processes"][-1:] for system in results["systems"][0]]
    return TEMPLATES.get_template("report.html.j2").render(
        results,
        names=" and ".join(results["architectures"]),
        baseline=results["architectures"][0],
        compared=[cell for arch in results["architectures"][1:] for cell in (arch, "difference", "p")],
        verdict=verdict(results),
        score_rows=_score_rows(results),
        metric_rows=[[f"{name} ({results['signatures'][name]})", *cells] for name, *cells in _metric_rows(results)],
        training_rows=_training_rows(results),
        length_rows=[[words, count, *map(spread, by_arch)] for words, count, by_arch in _by_length(results)],
        joined_rows=_joined_rows(results),
        images=plots(results),
        fewest=FEWEST,
        made=_yaml({"command": results["command"], "settings": results["settings"]}),
        noted=_yaml({key: last[0][0].get(key) for key in NOTED} if last[0] else "not noted"),
        commands="\n\n".join(process["command"] for processes in last for process in processes),
    )


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10**6)


def table(results: Results) -> str:
    """The table for docs/results.md, with the command, versions and hardware."""
    first = next(iter(processes(results)), {})
    return TEMPLATES.get_template("results.md.j2").render(
        results,
        command=_without_places(results["command"]),
        table_rows=_table_rows(results),
        verdict=verdict(results),
        trained_with="; ".join(f"{name}: {_plain(first.get(name, 'not noted'))}" for name in NOTED),
    )


def _metric_rows(results: Results) -> list[list[str]]:
    """A row for every metric but sacreBLEU."""
    names = [name for name in results["systems"][0][0]["metrics"] if name != "sacreBLEU"]
    return [[name, *map(spread, scores(results, name))] for name in names]


def _table_rows(results: Results) -> list[list[str]]:
    baseline, *others = results["architectures"]

    def plain(title: str, first: str, *cells: str) -> list[str]:
        """A row without differences."""
        return [title, first, *(word for cell in cells for word in (cell, "", ""))]

    def of_training(title: str, value: Callable[[dict[str, Any]], float]) -> list[str]:
        return plain(title, *map(spread, per_architecture(results, lambda system: value(system["training"]))))

    head = ["", f"`{baseline}`"] + [word for arch in others for word in (f"`{arch}`", "difference (95%)", "p")]
    joined = [
        [
            f"{times} sentences a line: {lines} of {subwords} subwords, {longer} of them longer than any in "
            f"training, {results['longest_in_training']} (length ratio)",
            *cells,
        ]
        for times, lines, subwords, longer, *cells in _joined_rows(results)[1:]
    ]
    first_seed = results["systems"][0]
    return [
        head,
        ["---"] * len(head),
        *_score_rows(results),
        *(plain(*row) for row in _metric_rows(results)),
        *(plain(f"sources of {words} words ({n})", *map(spread, scores)) for words, n, scores in _by_length(results)),
        *joined,
        plain("updates", *(f"{system['training']['updates'][-1]:,}" for system in first_seed)),  # the same for all
        of_training("validation loss at the end", lambda training: training["losses"][-1]),
        of_training("minutes of training", lambda training: training["seconds"][-1] / 60),
        of_training("tokens a second", lambda training: training["tokens_per_second"]),
        plain("parameters", *map(_parameters, first_seed)),
    ]


def _without_places(command: str) -> str:
    """*command* without the flags that name folders of one machine."""
    words = shlex.split(command)
    places = {"--data-dir", "--work-dir", "--manifest"}
    previous = ["", *words[:-1]]
    return shlex.join(
        w for w, before in zip(words, previous, strict=True) if not {before, w.partition("=")[0]} & places
    )
