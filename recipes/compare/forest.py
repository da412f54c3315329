"""The forest plot of the report: each system's difference to the baseline, with its 95% interval."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOUR = "#1f88d1"  # of the points, on white and on black; the zero line has that of the axes


class Difference(NamedTuple):
    """The difference of a system's score to that of the baseline, and its interval."""

    system: str
    difference: float
    low: float
    high: float


def forest(panels: Mapping[str, Sequence[Difference]], baseline: str) -> Figure:
    """Return a figure with a panel for each title, all with the same scale and the same systems.

    The systems are in the order of the first panel. With one scale, equal differences have equal lengths in all panels.

    Args:
        panels: the differences by the title of their panel. A system that a panel lacks has an empty row there.
        baseline: the system at 0
    """
    systems = list(dict.fromkeys(row.system for rows in panels.values() for row in rows))
    width = 1.2 + 0.08 * max(map(len, systems), default=0) + 3.6 * len(panels)
    figure = Figure(figsize=(width, 1.1 + 0.34 * max(1, len(systems))), dpi=110, layout="constrained")
    all_axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    for axes, (title, rows) in zip(all_axes, panels.items(), strict=True):
        _draw(axes, rows, systems)
        axes.set(title=title, xlabel=f"sacreBLEU minus that of {baseline} (95% intervals)")
    all_axes[0].set_yticks(range(len(systems)), systems)
    all_axes[0].set_ylim(len(systems) - 0.5 if systems else 0.5, -0.5)  # the first system is at the top
    return figure


def _draw(axes: Axes, rows: Sequence[Difference], systems: Sequence[str]) -> None:
    for row in rows:
        errors = [[row.difference - row.low], [row.high - row.difference]]
        axes.errorbar(row.difference, systems.index(row.system), xerr=errors, fmt="o", capsize=3, color=COLOUR)
    axes.axvline(0, linewidth=1, color=axes.xaxis.label.get_color())
    axes.grid(axis="x", alpha=0.3)
