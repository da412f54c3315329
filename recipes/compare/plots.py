"""The plots of the report: validation losses, and scores by the length of the input."""

import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from recipes.compare.results import Results, buckets, has_documents, per_system, ranked, sets

FEWEST = 20  # sentences that a length bucket needs to appear in the plot
# Distinguishable for colour-blind readers (Okabe and Ito 2008). Each system has the next of each list, so that two
# systems with the same colour have other dashes and markers: the combinations repeat after 140 systems.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
DASHES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")


def plots(results: Results) -> dict[str, Figure]:
    """The plots of the page by their names."""
    all_buckets = buckets(results)
    drawn = [n for n, (_, sentences) in enumerate(all_buckets) if sentences >= FEWEST] or range(len(all_buckets))
    lengths = per_system(results, lambda run: [run["by_length"][n]["score"] for n in drawn])
    of_lengths = lengths, ["{}\n({})".format(*all_buckets[n]) for n in drawn], "words of the source (sentences)"
    return {
        "losses": _figure(results, 2, lambda *axes: _draw_losses(results, *axes)),
        "lengths": _figure(results, 1, lambda axes: _draw_scores(axes, results, *of_lengths)),
        "joined": _figure(results, 1 + has_documents(results), lambda *axes: _draw_joined(results, *axes)),
    }


def _figure(results: Results, count: int, draw: Callable[..., None]) -> Figure:
    """A figure of *count* axes that *draw* fills, with one legend below them."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq makes it log everything
    width = 5 * count + 1
    columns = max(1, int(width / (0.8 + 0.09 * max(map(len, results["systems"])))))  # inches of the longest entry
    height = 3.8 + 0.25 * math.ceil(len(results["systems"]) / columns)
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    axes = [figure.add_subplot(1, count, n + 1) for n in range(count)]
    draw(*axes)
    for each in axes:
        each.grid(alpha=0.3)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns)
    return figure


def style(results: Results, system: str) -> dict[str, Any]:
    """Colour, dashes and marker of *system*. They do not depend on the scores."""
    number = results["systems"].index(system)
    kinds = {"color": COLOURS, "linestyle": DASHES, "marker": MARKERS}
    return {"linewidth": 1.2, "markersize": 5, **{key: of[number % len(of)] for key, of in kinds.items()}}


def _draw_losses(results: Results, by_updates: Axes, by_time: Axes) -> None:
    trainings = {
        system: [run["training"] for run in results["runs"][system]]
        for system in ranked(results)
        if results["runs"][system][0].get("training_of") not in results["systems"]
    }
    for system, of_system in trainings.items():
        for number, training in enumerate(of_system):
            look = {**style(results, system), "label": None if number else system, "alpha": 0.8}
            if any(map(math.isfinite, training["losses"])):  # matplotlib places no markers on a line without a point
                look["markevery"] = 0.2
            by_updates.plot(training["updates"], training["losses"], **look)
            by_time.plot([s / 60 for s in training["seconds"]], training["losses"], **look)
    all_losses = [loss for of_system in trainings.values() for training in of_system for loss in training["losses"]]
    lowest = min(filter(math.isfinite, all_losses), default=0.0)  # a diverged loss is not finite
    for axes, what in ((by_updates, "updates"), (by_time, "minutes")):
        axes.set(xlabel=what, ylabel="validation loss (bits a token)", ylim=(lowest - 0.1, lowest + 2.5))


def _draw_joined(results: Results, of_sentences: Axes, of_documents: Axes | None = None) -> None:
    """Draw the scores of the test set in lines of several lengths."""
    by_length = sets(results)
    xlabel = "subwords a line, at most" if of_documents else "sentences a line"
    for axes, key, ylabel in (
        (of_sentences, "scores", "sacreBLEU"),
        (of_documents, "document_scores", "sacreBLEU of documents"),
    ):
        if axes is not None:
            scores = {
                system: zip(*(one[key][system] for one in by_length.values()), strict=True)
                for system in ranked(results)
            }
            _draw_scores(axes, results, scores, [*by_length], xlabel, ylabel)


def _draw_scores(
    axes: Axes,
    results: Results,
    scores: Mapping[str, Iterable[Sequence[float]]],
    places: Sequence[str],
    xlabel: str,
    ylabel: str = "sacreBLEU",
) -> None:
    """Draw a line for each system through the means over seeds of *scores* (system: seed, place)."""
    step = min(0.06, 0.6 / len(scores))
    for number, (system, seeds) in enumerate(scores.items()):
        values = list(zip(*seeds, strict=True))  # place, seed
        means = [statistics.mean(of_place) for of_place in values]
        # Rounding can put the mean of equal numbers below or above them.
        below = [max(0, mean - min(of_place)) for mean, of_place in zip(means, values, strict=True)]
        above = [max(0, max(of_place) - mean) for mean, of_place in zip(means, values, strict=True)]
        positions = [n + step * (number - (len(scores) - 1) / 2) for n in range(len(places))]
        axes.errorbar(positions, means, yerr=[below, above], capsize=3, label=system, **style(results, system))
    axes.set_xticks(range(len(places)), places)
    axes.set(xlabel=xlabel, ylabel=ylabel)
