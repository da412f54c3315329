"""The plots of the report: differences of scores, validation losses, and scores by the length of the source."""

import io
import logging
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.report.results import BLEU, Results, marked, ranked

FEWEST = 20  # sentences that a length bucket needs to appear in the plot
# Distinguishable for colour-blind readers (Okabe and Ito 2008). Each system has the next of each list: the combinations
# repeat after 140 systems.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")


def plots(results: Results) -> dict[str, Figure]:
    """Return the plots of the page by their names."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq makes it log everything
    return {
        "score-differences": forest(results),
        "training-curves": _figure(results, 2, lambda *axes: _draw_losses(results, *axes)),
        "scores-by-length": _figure(results, len(results["test_sets"]), lambda *axes: _draw_lengths(results, *axes)),
    }


def as_svg(figure: Figure) -> bytes:
    """Return *figure* as SVG: the same bytes each time."""
    drawn = io.BytesIO()
    with rc_context({"svg.hashsalt": "0"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    return drawn.getvalue()


def style(systems: Sequence[str], system: str) -> dict[str, Any]:
    """Return colour, dashes and marker of *system*, one of *systems*. They do not depend on the scores."""
    number = systems.index(system)
    looks = {"color": COLOURS, "linestyle": DASHES, "marker": MARKERS}
    return {"linewidth": 1.2, "markersize": 5, **{key: values[number % len(values)] for key, values in looks.items()}}


def forest(results: Results) -> Figure:
    """Return each system's difference to the baseline with its interval, a panel for each test set, in one scale."""
    sets, against = results["test_sets"], [one[BLEU]["against_baseline"] for one in results["test_sets"]]
    systems = [name for name in ranked(results) if name in against[0]]
    width = 1.2 + 0.08 * max(map(len, systems), default=0) + 3.6 * len(sets)
    figure = Figure(figsize=(width, 1.1 + 0.34 * max(1, len(systems))), dpi=110, layout="constrained")
    all_axes = figure.subplots(1, len(sets), sharex=True, sharey=True, squeeze=False)[0]
    for axes, one, differences in zip(all_axes, sets, against, strict=True):
        for row, system in enumerate(systems):
            difference, low, high = (differences[system][key] for key in ("difference", "low", "high"))
            errors = [[difference - low], [high - difference]]
            axes.errorbar(difference, row, xerr=errors, fmt="o", capsize=3, color=COLOURS[0])
        axes.axvline(0, linewidth=1, color=axes.xaxis.label.get_color())
        axes.grid(axis="x", alpha=0.3)
        axes.set(xlabel=f"sacreBLEU minus that of {results['baseline']} (95% intervals)", title=one["name"])
    all_axes[0].set_yticks(range(len(systems)), [marked(results, system) for system in systems])
    all_axes[0].set_ylim(max(len(systems), 1) - 0.5, -0.5)  # the first system is at the top
    return figure


def _figure(results: Results, count: int, draw: Callable[..., None]) -> Figure:
    """Return a figure of *count* axes, up to three in a row, that *draw* fills, with one legend of all systems."""
    across, labels = min(count, 3), {system: marked(results, system) for system in results["systems"]}
    width, down = 5 * across + 1, math.ceil(count / across)
    columns = max(1, int(width / (0.8 + 0.09 * max(map(len, labels.values())))))  # inches of the longest entry
    height = 3.8 * down + 0.25 * math.ceil(len(labels) / columns)
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    panels = [figure.add_subplot(down, across, n + 1) for n in range(count)]
    draw(*panels)
    handles: dict[str, Any] = {}
    for axes in panels:
        axes.grid(alpha=0.3)
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(handles.values(), [labels[name] for name in handles], loc="outside lower center", ncols=columns)
    return figure


def _draw_losses(results: Results, by_updates: Axes, by_time: Axes) -> None:
    """Draw the validation losses of all seeds. A training that several systems share is drawn once."""
    drawn, all_losses = set(), [0.0]
    for system in ranked(results):
        look = style(results["systems"], system)
        for number, run in enumerate(run for run in results["runs"][system] if run["folder"] not in drawn):
            label = None if number else system
            losses = [math.nan if loss is None else loss for loss in run["losses"]]
            points = [n for n, loss in enumerate(losses) if math.isfinite(loss)]
            # at most six markers before the last one, which marks the end
            markers = [*points[:-1][:: len(points) // 6 + 1], *points[-1:]]
            for axes, places in ((by_updates, run["validated_at"]), (by_time, [one / 60 for one in run["seconds"]])):
                axes.plot(places, losses, **look, label=label, alpha=0.8, markevery=markers)
            all_losses += [losses[n] for n in points]
        drawn |= {run["folder"] for run in results["runs"][system]}
    lowest = min(all_losses[1:], default=0.0)
    for axes, unit in ((by_updates, "updates"), (by_time, "minutes")):
        axes.set(xlabel=unit, ylabel="label-smoothed validation loss (bits a token)", ylim=(lowest - 0.1, lowest + 2.5))


def _draw_lengths(results: Results, *all_axes: Axes) -> None:
    """Draw, for each test set, the means over seeds of the scores of each length, ± their standard deviation."""
    for axes, one in zip(all_axes, results["test_sets"], strict=True):
        buckets = {f"{words}\n({one['sentences']})": one for words, one in one["by_length"].items()}
        buckets = {title: one for title, one in buckets.items() if one["sentences"] >= FEWEST} or buckets
        systems = ranked(results)
        step = min(0.06, 0.6 / len(systems))
        for number, system in enumerate(systems):
            scores = [[*bucket["scores"][system].values()] for bucket in buckets.values()]
            deviations = [statistics.stdev(seeds) if len(seeds) > 1 else 0 for seeds in scores]
            places = [n + step * (number - (len(systems) - 1) / 2) for n in range(len(buckets))]
            look = {**style(results["systems"], system), "capsize": 3, "label": system}
            axes.errorbar(places, [*map(statistics.mean, scores)], yerr=deviations, **look)
        axes.set_xticks(range(len(buckets)), [*buckets])
        axes.set(xlabel="words of the source (sentences)", ylabel="sacreBLEU (mean ± SD over seeds)", title=one["name"])
