"""The table and the figure of a study."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from recipes.compare.plots import figure_of, style
from recipes.compare.tables import spread
from recipes.paper.runs import PaperRun
from recipes.run import precision
from recipes.run.history import number_of

Rows = Mapping[str, Mapping[str, Mapping[int, float]]]  # system: column: seed: value
Panels = Mapping[str, Mapping[str, Sequence[tuple[Sequence[int], Sequence[float]]]]]  # y axis: system: curves


def curves_of(runs: Sequence[PaperRun], training: str) -> dict[str, list[tuple[list[int], list[float]]]]:
    """The validation losses of a training, as updates and losses, of each run by system."""
    curves: dict[str, list[tuple[list[int], list[float]]]] = {}
    for run in runs:
        curves.setdefault(run.system, []).append(curve_of(run.validations(training), "loss"))
    return curves


def curve_of(validations: list[dict[str, str]], metric: str) -> tuple[list[int], list[float]]:
    """The updates and the values of *metric* of the *validations* in fairseq's log, in order.

    If an interrupted run validated at the same update twice, the later one counts.
    """
    by_update = {number_of(entry["valid_num_updates"]): float(entry[f"valid_{metric}"]) for entry in validations}
    return sorted(by_update), [by_update[update] for update in sorted(by_update)]


def trained_in(runs: Sequence[PaperRun]) -> str:
    """A paragraph with precision and device of all trainings of *runs*; "" if none has noted them."""
    histories = [run.folder(training) / "history.jsonl" for run in runs for training in run.trainings]
    kinds = dict.fromkeys(precision.described(precision.last_process(path)) for path in histories)
    kinds.pop("", None)
    differ = "The trainings differ in precision or device: " if len(kinds) > 1 else "Trained in "
    return f"{differ}{', '.join(kinds)}.\n\n" if kinds else ""


def as_markdown(rows: Rows) -> str:
    """A table of *rows*: means over seeds with standard deviations, and the differences to the first system.

    A difference is that of each common seed, and then their mean and standard deviation. A column has as many decimals
    as its values.
    """
    first, columns = next(iter(rows)), list(next(iter(rows.values())))
    head = ["system", "seeds", *(cell for column in columns for cell in (column, f"difference to {first}"))]
    lines = [head, ["---", "---", *("---:" for _ in head[2:])]]
    for system, values in rows.items():
        cells = [system, ", ".join(map(str, values[columns[0]]))]
        for column in columns:
            of_first = rows[first][column]
            digits = decimals(value for row in rows.values() for value in row[column].values())
            differences = [value - of_first[seed] for seed, value in values[column].items() if seed in of_first]
            cells.append(spread([*values[column].values()], digits))
            cells.append("" if system == first else spread_of_differences(differences, digits))
        lines.append(cells)
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def decimals(values: Iterable[float]) -> int:
    """The number of decimals of *values*, which fairseq has rounded in its log: from 1 to 3."""
    return max((len(f"{value:.3f}".rstrip("0").partition(".")[2]) for value in values), default=0) or 1


def spread_of_differences(differences: Sequence[float], digits: int) -> str:
    """Mean and standard deviation of *differences*, with a sign."""
    if not differences:
        return "no common seed"
    spreads = f" ± {statistics.stdev(differences):.{digits}f}" if len(differences) > 1 else ""
    return f"{statistics.mean(differences):+.{digits}f}{spreads}"


def draw(panels: Panels) -> Any:
    """A figure with one plot for each of *panels*: a line for each seed, against updates."""
    systems = list(dict.fromkeys(system for panel in panels.values() for system in panel))

    def fill(*all_axes: Any) -> None:
        for axes, (label, panel) in zip(all_axes, panels.items(), strict=True):
            for system, curves in panel.items():
                for number, (updates, values) in enumerate(curves):
                    look = {**style(systems, system), "label": None if number else system, "alpha": 0.8}
                    axes.plot(updates, values, **look)
            axes.set(xlabel="updates", ylabel=label)

    return figure_of({system: system for system in systems}, len(panels), fill)
