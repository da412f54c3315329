"""Draw the pictures of the documentation from the tables in docs/data/: ``python docs/pictures.py``.

An encoding has the same colour and place in all of them. GREY can be read on white and on black, because GitHub shows
a page in either, and the background is transparent.
"""

import csv
import io
import re
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parent
GREY = "#808080"
COLOURS = {
    "rope": "#1f83d1",
    "sinusoidal": "#d55e00",
    "transformer-xl": "#009e73",
    "shaw": "#cc79a7",
    "t5": "#c9940a",
    "alibi": "#56b4e9",
    "deberta": "#9a6fd0",
    "tupe": "#a6761d",
    "nezha": "#66a61e",
    "kerple": "#e7298a",
    "learned": "#17a2a2",
    "none": GREY,
}
STYLE: dict[Any, Any] = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "legend.facecolor"), "none"),
    "legend.edgecolor": "none",
    "axes.grid": True,
    "grid.color": GREY,
    "grid.alpha": 0.25,
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.titlesize": 9,
    "figure.constrained_layout.w_pad": 0.1,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "0",  # the same bytes each time
}
Row = dict[str, str]


def table(name: str) -> list[Row]:
    """Return the rows of docs/data/NAME.tsv."""
    with (DOCS / "data" / f"{name}.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def values(rows: list[Row], column: str) -> list[str]:
    """Return the different values of *column*; encodings have the order of COLOURS."""
    order = list(COLOURS)
    found = list(dict.fromkeys(row[column] for row in rows))
    return sorted(found, key=lambda value: order.index(value) if value in order else -1)


def panels(count: int, across: int, width: float, height: float, **shared: Any) -> tuple[Figure, list[Axes]]:
    """Return a figure and its *count* panels, each of *width* times *height* inches."""
    down = -(-count // across)
    figure = Figure(figsize=(width * across, height * down + 0.5), layout="constrained")
    return figure, list(figure.subplots(down, across, squeeze=False, **shared).flat)


def legend(figure: Figure, axes: list[Axes]) -> None:
    """Add one legend of the systems in all *axes* below the panels."""
    handles = {label: handle for one in axes for handle, label in zip(*one.get_legend_handles_labels(), strict=True)}
    names = [name for name in COLOURS if name in handles] + [name for name in handles if name not in COLOURS]
    figure.legend([handles[name] for name in names], names, loc="outside lower center", ncols=7)


def scores() -> Figure:
    """Return the differences to RoPE: a point for each seed, and their mean ± standard deviation."""
    rows = table("scores")
    figure, all_axes = panels(4, 2, 3.7, 1.35, sharex=True)
    systems = [name for name in values(rows, "system") if name != "rope"]
    for axes, comparison in zip(all_axes, values(rows, "comparison"), strict=True):
        score = {(r["system"], r["seed"]): float(r["sacrebleu"]) for r in rows if r["comparison"] == comparison}
        for place, system in enumerate(systems):
            points = [value - score["rope", seed] for (name, seed), value in score.items() if name == system]
            if points:
                look: dict[str, Any] = {"color": COLOURS[system], "markersize": 4}
                axes.plot(points, [place + 0.2] * len(points), "o", alpha=0.5, **look)
                axes.errorbar(statistics.mean(points), place, xerr=statistics.stdev(points), fmt="D", capsize=3, **look)
        axes.axvline(0, color=GREY, linewidth=1)
        axes.set(title=comparison, ylim=(len(systems) - 0.5, -0.5), yticks=range(len(systems)), yticklabels=systems)
    for axes in all_axes[2:]:
        axes.set_xlabel("sacreBLEU minus that of rope")
    return figure


def documents() -> Figure:
    """Return the scores of documents against the length of the translated segments, a panel for each training."""
    rows = table("documents")
    lengths, titles = values(rows, "subwords"), values(rows, "trained_on")
    figure, all_axes = panels(len(titles), 3, 2.9, 2.6, sharey=True)
    for axes, title in zip(all_axes, titles, strict=True):
        of_panel = [row for row in rows if row["trained_on"] == title]
        for system in values(of_panel, "system"):
            points = [row for row in of_panel if row["system"] == system]
            encoding, _, scaling = system.partition("-")
            axes.errorbar(
                [lengths.index(row["subwords"]) for row in points],
                [float(row["sacrebleu"]) for row in points],
                yerr=[float(row["sd"] or 0) for row in points],
                color=COLOURS[encoding],
                linestyle={"": "-", "dynamic": "--", "yarn": ":"}[scaling],
                linewidth=1.2,
                capsize=2,
                label=system,
            )
        what = "single paragraphs" if title == "single" else f"segments of up {title}"
        axes.set(xlabel="subwords in a line", title=f"trained on {what}")
        axes.set_xticks(range(len(lengths)), ["one\nparagraph", *lengths[1:]])
    all_axes[0].set_ylabel("sacreBLEU of documents")
    legend(figure, all_axes)
    return figure


def losses() -> Figure:
    """Return the validation losses against updates, a line for each seed."""
    rows = table("losses")
    units = {"translation (LO-Help)": "token", "language model": "character", "masked language model": "masked token"}
    figure, all_axes = panels(3, 3, 2.9, 2.5)
    for axes, (experiment, unit) in zip(all_axes, units.items(), strict=True):
        of_panel = [row for row in rows if row["experiment"] == experiment]
        for system in values(of_panel, "system"):
            for seed in values(of_panel, "seed"):
                points = [row for row in of_panel if (row["system"], row["seed"]) == (system, seed)]
                updates, loss = ([float(row[column]) for row in points] for column in ("updates", "loss"))
                axes.plot(updates, loss, color=COLOURS[system], linewidth=1, label=system)
        axes.set(xlabel="updates", ylabel=f"bits a {unit}", title=experiment)
    legend(figure, all_axes)
    return figure


def encodings_scores() -> Figure:
    """Return what positions add to the scores of each head, a panel for each encoding."""
    rows = table("encodings_scores")
    systems = values(rows, "encoding")
    figure, all_axes = panels(len(systems), 5, 1.8, 1.5, sharex=True)
    for axes, system in zip(all_axes, systems, strict=True):
        for number, row in enumerate(row for row in rows if row["encoding"] == system):
            distances = [column for column in row if column not in ("encoding", "head")]
            scores = [float(row[distance]) for distance in distances]
            shade: dict[str, Any] = {"color": COLOURS[system], "alpha": 1 - 0.2 * number, "linewidth": 1}
            axes.plot([int(distance) for distance in distances], scores, **shade)
        axes.set(title=system, xticks=(-40, 0, 40))
        axes.locator_params(axis="y", nbins=3)
    figure.supxlabel("distance of the key from the query, in tokens", fontsize=9)
    return figure


def as_svg(draw: Callable[[], Figure]) -> str:
    """Return the picture that *draw* returns: a line for each group, and coordinates with one decimal."""
    drawn = io.StringIO()
    with rc_context(STYLE):
        draw().savefig(drawn, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<!DOCTYPE[^>]*>", "", drawn.getvalue(), flags=re.S)
    text = re.sub(r"\d+\.\d\d+", lambda number: f"{float(number[0]):.1f}", text)
    text = re.sub(r">\s+<", "><", re.sub(r"\s*\n\s*", " ", text))
    return re.sub(r'(<g id="|</svg>)', r"\n\1", text).strip() + "\n"


PICTURES: dict[str, Callable[[], Figure]] = {
    "scores": scores,
    "long_context": documents,
    "losses": losses,
    "encodings_scores": encodings_scores,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (DOCS / f"{name}.svg").write_text(as_svg(draw), encoding="utf-8")
