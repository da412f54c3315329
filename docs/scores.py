"""Draw docs/scores.svg from the first table of docs/results.md: ``python docs/scores.py``."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE, PICTURE = ROOT / "docs" / "results.md", ROOT / "docs" / "scores.svg"
GREY = "#777777"  # readable on white and on black, with which GitHub shows a page in dark mode
DIFFERENCE = re.compile(r"([+-][\d.]+) \(([+-][\d.]+) to ([+-][\d.]+)\)")


def panels(text: str) -> dict[str, list[tuple[str, float, float, float]]]:
    """Return the differences to the baseline in the first table of *text*, with their intervals, by the data set."""
    table = re.search(r"(?:^\|.*\n)+", text, re.M)
    assert table is not None, f"{PAGE} has no table"
    head, _, *rows = ([cell.strip(" `") for cell in row.strip("|").split("|")] for row in table[0].splitlines())
    titles = {place: head[place - 1] for place, name in enumerate(head) if name == "difference (95%)"}
    return {
        title: [(row[0], *map(float, found.groups())) for row in rows if (found := DIFFERENCE.search(row[place]))]
        for place, title in titles.items()
    }


def picture() -> bytes:
    """Return the picture as SVG, without a background."""
    from matplotlib import rc_context

    from recipes.compare.forest import Difference, forest
    from recipes.compare.plots import rendered

    of_text = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    style = {**dict.fromkeys(of_text, GREY), "figure.facecolor": "none", "axes.facecolor": "none"}
    with rc_context(style):
        rows = panels(PAGE.read_text(encoding="utf-8"))
        by_title = {title: [Difference(*row) for row in of_title] for title, of_title in rows.items()}
        return rendered(forest(by_title, "sinusoidal"), "svg")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    PICTURE.write_bytes(picture())
