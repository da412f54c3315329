"""The files of the report: the page, the tables in Markdown, the numbers as CSV and JSON, and the figures."""

import base64
import json
import re
from pathlib import Path

import jinja2
import yaml

from recipes.report.contents import Contents
from recipes.report.plots import FEWEST, as_svg, plots
from recipes.report.results import Results, all_runs, results_of
from recipes.report.sentences import NOTED, listed, plain, sentences_on
from recipes.report.significance import SIGNIFICANT
from recipes.report.tables import as_csv, score_tables, training_tables

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: name == "report.html.j2",
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
# Characters with a meaning in Markdown, and an underscore that begins or ends a word.
MARKDOWN = re.compile(r"([\\`*<>\[\]|#&~]|(?<!\w)_|_(?!\w))")
TEMPLATES.filters["escaped"] = lambda text: MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def write(folder: Path, contents: Contents) -> None:
    """Write the files of the report into *folder*: report.html, results.md, .csv and .json, and the figures as SVG."""
    results = results_of(contents)
    results["verdict"] = sentences_on(results)
    images = {f"{name}.svg": as_svg(figure) for name, figure in plots(results).items()}
    texts = {"results.json": json.dumps(results, indent=1, default=str) + "\n", "results.csv": as_csv(results)}
    texts |= {name: _rendered(name, results, images) for name in ("report.html", "results.md")}
    for name, data in {**images, **{name: text.encode("utf-8") for name, text in texts.items()}}.items():
        (folder / name).write_bytes(data)


def verdict(folder: Path) -> list[str]:
    """Return the sentences of the report in *folder* that summarise the comparison."""
    return json.loads((folder / "results.json").read_text(encoding="utf-8"))["verdict"]


def _rendered(name: str, results: Results, images: dict[str, bytes]) -> str:
    """Return the text of the file *name*, for which there is a template."""
    systems = results["systems"]
    names = listed(systems) if len(systems) < 4 else f"{len(systems)} systems"
    last = [run["processes"][-1] for _, run in all_runs(results) if run["processes"]]
    noted = {key: last[0].get(key, "not noted") for key in NOTED} if last else {}
    made = {"settings": results["settings"], "trained with": noted}
    return TEMPLATES.get_template(f"{name}.j2").render(
        **results,
        title=f"{names} on {results['recipe']}",
        score_tables=score_tables(results),
        training_tables=training_tables(results),
        images={name: base64.b64encode(image).decode() for name, image in images.items()},
        fewest=FEWEST,
        significant=SIGNIFICANT,
        trained_with="; ".join(f"{key}: {plain(value)}" for key, value in noted.items()) or "not noted",
        made=yaml.safe_dump(json.loads(json.dumps(made, default=str)), sort_keys=False, allow_unicode=True, width=999),
        commands="\n\n".join(dict.fromkeys(process.get("command", "") for process in last)),
    )
