"""The numbers as CSV, and a table as LaTeX, for use in other documents."""

import csv
import io
import re
from typing import Any

from recipes.compare.results import (
    Results,
    all_runs,
    has_documents,
    lowest_loss,
    sets_by_length,
    trained_in,
    tuned_value,
)
from recipes.compare.tables import Table

LATEX = {
    **{character: f"\\{character}" for character in "&%$#_{}"},
    **{"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"},
    **{"<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}"},
    **{"±": r"$\pm$", "≤": r"$\leq$", "†": r"$^\dagger$"},
}


def as_csv(results: Results) -> str:
    """The unrounded numbers of *results* as CSV, a row for each run."""
    rows = []
    numbers = dict.fromkeys(results["runs"], 0)  # for each system, how many of its runs have a row
    length_unit = "subwords a line, at most" if has_documents(results) else "sentences a line"
    for system, run in all_runs(results):
        training, number = run["training"], numbers[system]
        row: dict[str, Any] = {"system": system, "seed": run["seed"]}
        row |= {key: run.get(key, "") for key in ("architecture", "flags", "training_of", "generate", "parameters")}
        row |= {"trained_in": "; ".join(trained_in([run]))}
        row |= {results["tuning"]["setting"]: tuned_value(results, system)} if results.get("tuning") else {}
        row |= {name: metric["score"] for name, metric in run["metrics"].items()}
        for name, scorer in results.get("scorers", {}).items():
            by_seed = dict(zip(scorer["seeds"].get(system, []), scorer["scores"].get(system, []), strict=True))
            row[f"score by {name}"] = by_seed.get(run["seed"], "")
        row |= {"updates": training["updates"][-1], "minutes": training["seconds"][-1] / 60}
        row |= {key: training[key] for key in ("tokens_per_second", "peak_memory_mib")}
        lowest, update = lowest_loss(training)
        row |= {"validation_loss": training["losses"][-1]}
        row |= {"lowest_validation_loss": lowest, "update_of_lowest_validation_loss": update}
        row |= {f"sacreBLEU, {bucket['words']} words": bucket["score"] for bucket in run["by_length"]}
        for length, joined in sets_by_length(results).items():
            row[f"sacreBLEU, {length} {length_unit}"] = joined["scores"][system][number]
        rows.append(row)
        numbers[system] += 1
    text = io.StringIO()
    writer = csv.DictWriter(text, rows[0], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def as_latex(table: Table) -> str:
    """*table* as a tabular environment of the LaTeX package booktabs."""
    head, *rows = (" & ".join(map(_in_latex, row)) + r" \\" for row in (table.head, *table.rows))
    columns = "".join(side[0] for side in table.aligned)
    lines = [r"% \usepackage{booktabs}", rf"\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule", *rows]
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _in_latex(cell: str) -> str:
    escaped = re.sub(".", lambda character: LATEX.get(character[0], character[0]), " ".join(cell.split()))
    return re.sub(r"(?<![\w-])-(?=\d)", "$-$", escaped)
