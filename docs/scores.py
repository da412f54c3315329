"""Draw docs/scores.svg from the first table of docs/results.md: ``python docs/scores.py``."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = ROOT / "docs" / "results.md", ROOT / "docs" / "scores.svg"
GREY = "#777777"  # readable on white and on black, with which GitHub shows a page in dark mode
DIFFERENCE = re.compile(r"([+-][\d.]+) \(([+-][\d.]+) to ([+-][\d.]+)\)")


def cells(text: str) -> list[list[str]]:
    """Return the cells of the first table of *text*, by the row; the heads are the first row."""
    table = re.search(r"(?:^\|.*\n)+", text, re.M)
    assert table is not None, f"{PAGE} has no table"
    head, _, *rows = ([cell.strip(" `") for cell in row.strip("|").split("|")] for row in table[0].splitlines())
    return [head, *rows]


def panels(text: str) -> dict[str, list[tuple[str, float, float, float]]]:
    """Return the differences to the baseline in the first table of *text*, with their intervals, by the data set."""
    head, *rows = cells(text)
    titles = {place: head[place - 1] for place, name in enumerate(head) if name == "difference (95%)"}
    return {
        title: [(row[0], *map(float, found.groups())) for row in rows if (found := DIFFERENCE.search(row[place]))]
        for place, title in titles.items()
    }


def baseline(text: str) -> str:
    """Return the system in the first table of *text* that has no differences."""
    (name,) = (row[0] for row in cells(text)[1:] if not any(map(DIFFERENCE.search, row)))
    return name


def picture() -> bytes:
    """Return the picture as SVG, without a background."""
    from matplotlib import rc_context

    from recipes.report.plots import as_svg, forest
    from recipes.report.results import BLEU

    of_text = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = {**dict.fromkeys(of_text, GREY), "figure.facecolor": "none", "axes.facecolor": "none"}
    text = PAGE.read_text(encoding="utf-8")
    test_sets = []
    for title, rows in panels(text).items():
        against = {name: {"difference": value, "low": low, "high": high} for name, value, low, high in rows}
        scores: dict[str, dict[int, float]] = {name: {} for name in (baseline(text), *against)}
        test_sets.append({"name": title, BLEU: {"scores": scores, "against_baseline": against}})
    with rc_context(style):
        return as_svg(forest({"baseline": baseline(text), "runs": scores, "test_sets": test_sets}))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PICTURE.write_bytes(picture())
