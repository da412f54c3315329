"""The plots of the report: scores, validation losses, and scores by the length of the input.

    python -m recipes.compare.plots 'TITLE=results.json' 'TITLE=results.json' … --output FILE

draws the scores of several comparisons by the length of the input, side by side. FILE ends with .svg, .png or .pdf.
"""

import io
import logging
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fairseq_rope.files import written_whole
from recipes.compare.forest import Difference, forest
from recipes.compare.results import Results, buckets, has_documents, marked, per_system, ranked, reading, sets_by_length
from recipes.run.command_line import RunParser

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
    systems = results["systems"]
    labels = {system: marked(results, system) for system in systems}
    panels = 1 + has_documents(results)
    against = results["joined"][0]["against_baseline"]
    compared = [
        Difference(labels[name], *(against[name][key] for key in ("difference", "low", "high")))
        for name in ranked(results)
        if name in against
    ]
    return {
        "scores": forest({"": compared}, results["baseline"]),
        "losses": figure_of(labels, 2, lambda *axes: _draw_losses(results, *axes)),
        "lengths": figure_of(labels, 1, lambda axes: _draw_scores(axes, systems, *of_lengths)),
        "joined": figure_of(labels, panels, lambda *axes: _draw_joined(results, systems, *axes)),
    } | ({"tuning": figure_of(labels, 1, lambda axes: _draw_tuning(results, axes))} if results.get("tuning") else {})


def beside(comparisons: Mapping[str, Results]) -> Figure:
    """The plot "joined" of :func:`plots` for each of *comparisons*, by its title; of documents, if the texts have any.

    A system looks the same in all of them.
    """
    systems = list(dict.fromkeys(system for results in comparisons.values() for system in results["systems"]))

    def draw(*all_axes: Axes) -> None:
        for axes, (title, results) in zip(all_axes, comparisons.items(), strict=True):
            sentences = None if has_documents(results) else axes
            _draw_joined(results, systems, sentences, axes)
            axes.set_title(title)
        highest = max(axes.get_ylim()[1] for axes in all_axes)
        for axes in all_axes:
            axes.set_ylim(0, highest)

    return figure_of({system: system for system in systems}, len(comparisons), draw)


def rendered(figure: Figure, kind: str) -> bytes:
    """*figure* as svg, png or pdf: the same bytes each time."""
    drawn = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    # Publishers require TrueType, which matplotlib calls 42.
    with rc_context({"svg.hashsalt": "0", "pdf.fonttype": 42}):
        figure.savefig(drawn, format=kind, metadata=undated)
    return drawn.getvalue()


def figure_of(labels: Mapping[str, str], count: int, draw: Callable[..., None]) -> Figure:
    """A figure of *count* axes, up to three in a row, that *draw* fills, with one legend of all *labels* below them."""
    for name in ("matplotlib", "fontTools"):  # fairseq makes them log everything
        logging.getLogger(name).setLevel(logging.WARNING)
    across = min(count, 3)
    down = math.ceil(count / across)
    width = 5 * across + 1
    columns = max(1, int(width / (0.8 + 0.09 * max(map(len, labels.values())))))  # inches of the longest entry
    height = 3.8 * down + 0.25 * math.ceil(len(labels) / columns)
    figure = Figure(figsize=(width, height), dpi=110, layout="constrained")
    panels = [figure.add_subplot(down, across, n + 1) for n in range(count)]
    draw(*panels)
    handles = {}
    for axes in panels:
        axes.grid(alpha=0.3)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles[label] = handle
    figure.legend(handles.values(), [labels[name] for name in handles], loc="outside lower center", ncols=columns)
    return figure


def style(systems: Sequence[str], system: str) -> dict[str, Any]:
    """Colour, dashes and marker of *system*, one of *systems*. They do not depend on the scores."""
    number = systems.index(system)
    looks = {"color": COLOURS, "linestyle": DASHES, "marker": MARKERS}
    return {"linewidth": 1.2, "markersize": 5, **{key: values[number % len(values)] for key, values in looks.items()}}


def _draw_losses(results: Results, by_updates: Axes, by_time: Axes) -> None:
    trainings = {
        system: [run["training"] for run in runs]
        for system, runs in per_system(results, lambda run: run).items()
        if runs[0].get("training_of") not in results["systems"]
    }
    for system, over_seeds in trainings.items():
        for number, training in enumerate(over_seeds):
            look = {**style(results["systems"], system), "label": None if number else system, "alpha": 0.8}
            look["markevery"] = _with_marker(training["losses"])
            by_updates.plot(training["updates"], training["losses"], **look)
            by_time.plot([seconds / 60 for seconds in training["seconds"]], training["losses"], **look)
    all_losses = [loss for over_seeds in trainings.values() for training in over_seeds for loss in training["losses"]]
    lowest = min(filter(math.isfinite, all_losses), default=0.0)  # a diverged loss is not finite
    for axes, unit in ((by_updates, "updates"), (by_time, "minutes")):
        axes.set(xlabel=unit, ylabel="label-smoothed validation loss (bits a token)", ylim=(lowest - 0.1, lowest + 2.5))


def _draw_tuning(results: Results, axes: Axes) -> None:
    """Draw the lowest validation loss of each system against the tuned value."""
    tuning = results["tuning"]
    for system, outcome in tuning["systems"].items():
        points = [(float(run["value"]), run["loss"]) for run in outcome["runs"] if run["loss"] is not None]
        axes.plot(*zip(*points, strict=True), label=system, **style(results["systems"], system)) if points else None
    values = [float(value) for value in tuning["values"]]
    if min(values) > 0:
        axes.set_xscale("log")
    axes.set_xticks(values, tuning["values"])
    axes.minorticks_off()
    axes.set(xlabel=tuning["setting"], ylabel="lowest validation loss (bits a token)")


def _with_marker(losses: Sequence[float]) -> list[int]:
    """The numbers of the points that have a marker: at most six before the last one, which marks the end."""
    points = [number for number, loss in enumerate(losses) if math.isfinite(loss)]
    return [*points[:-1][:: len(points) // 6 + 1], *points[-1:]]


def _draw_joined(
    results: Results, systems: Sequence[str], of_sentences: Axes | None, of_documents: Axes | None = None
) -> None:
    """Draw the scores of the test set in lines of several lengths."""
    by_length = sets_by_length(results)
    xlabel = "subwords a line, at most" if has_documents(results) else "sentences a line"
    kinds = (of_sentences, "scores", "sacreBLEU"), (of_documents, "document_scores", "sacreBLEU of documents")
    for axes, key, ylabel in kinds:
        if axes is not None and key in results["joined"][0]:
            scores = {
                name: zip(*(joined[key][name] for joined in by_length.values()), strict=True)
                for name in ranked(results)
            }
            _draw_scores(axes, systems, scores, [*by_length], xlabel, ylabel)


def _draw_scores(
    axes: Axes,
    systems: Sequence[str],
    scores: Mapping[str, Iterable[Sequence[float]]],
    places: Sequence[str],
    xlabel: str,
    ylabel: str = "sacreBLEU",
) -> None:
    """Draw a line for each system through the means over seeds of *scores* (system: seed, place), ± their deviation."""
    step = min(0.06, 0.6 / len(scores))
    for number, (system, seeds) in enumerate(scores.items()):
        values = list(zip(*seeds, strict=True))  # place, seed
        means = [statistics.mean(over_seeds) for over_seeds in values]
        deviations = [statistics.stdev(over_seeds) if len(over_seeds) > 1 else 0 for over_seeds in values]
        positions = [n + step * (number - (len(scores) - 1) / 2) for n in range(len(places))]
        axes.errorbar(positions, means, yerr=deviations, capsize=3, label=system, **style(systems, system))
    axes.set_xticks(range(len(places)), places)
    axes.set(xlabel=xlabel, ylabel=f"{ylabel} (mean ± SD over seeds)")


def main(argv: Sequence[str] | None = None) -> None:
    """Draw comparisons side by side. Exits with status 1 and one sentence if a file cannot be read or written."""
    description = "Draw the scores of comparisons by the length of the input."
    parser = RunParser(prog="recipes.compare.plots", description=description)
    parser.add_argument("results", nargs="+", metavar="TITLE=FILE", help="the results.json of a comparison")
    kinds = (".svg", ".png", ".pdf")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=f"ends with {', '.join(kinds)}")
    args = parser.parse_args(argv)
    if args.output.suffix not in kinds:
        parser.error(f"--output {args.output}: must end with {', '.join(kinds)}")
    named = [argument.partition("=")[::2] for argument in args.results]
    for argument, (title, path) in zip(args.results, named, strict=True):
        if not title or not path or [title for title, _ in named].count(title) > 1:
            parser.error(f"{argument}: must be TITLE=FILE, and no title may occur twice")
    with reading("recipes.compare.plots", *(Path(path) for _, path in named)) as comparisons:
        by_title = dict(zip((title for title, _ in named), comparisons, strict=True))
        drawn = rendered(beside(by_title), args.output.suffix[1:])
        with written_whole(str(args.output)) as (file,):
            file.write(drawn)


if __name__ == "__main__":
    main()
