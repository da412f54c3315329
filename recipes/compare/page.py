"""The sentences of the report, and its files: the page, the Markdown, and the tables and plots for other documents.

    python -m recipes.compare.page results.json [--output DIR]

writes them again without training. The wording is in the templates beside this file. The numbers come from results.json
(stage15_report.py).
"""

import argparse
import base64
import math
import re
import shlex
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import yaml

from fairseq_rope.files import written_whole
from recipes.compare.bootstrap import SIGNIFICANT
from recipes.compare.csv_latex import as_csv, as_latex
from recipes.compare.plots import FEWEST, plots, rendered
from recipes.compare.results import (
    Results,
    all_runs,
    at_end,
    by_precision,
    converged,
    has_documents,
    of_fewer_seeds,
    ranked,
    reading,
    without,
)
from recipes.compare.tables import as_good, p_text, spread, tables

# The files of the report besides results.json.
TEXTS = ("report.html", "results.md", "results.csv", "scores.tex")
KINDS = ("svg", "pdf")
IMAGES = tuple(f"{name}.{kind}" for name in ("scores", "losses", "lengths", "joined") for kind in KINDS)
IMAGES_OF_TUNING = tuple(f"tuning.{kind}" for kind in KINDS)
NOTED = ("commit", "versions", "hardware", "batches")  # facts about every training process
LOW = 5  # sacreBLEU; below it, texts share few words with their references
EARLY = "This is early: longer training can change the order."
STEEP = 0.1  # bits a token that the loss falls in the last fifth of the updates

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=lambda name: name == "report.html.j2",
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
)
# Characters with a meaning in Markdown, and an underscore that begins or ends a word.
MARKDOWN = re.compile(r"([\\`*<>\[\]|#&~]|(?<!\w)_|_(?!\w))")
# Words of a table's cell that stay on one line: a range, a mean ± its deviation, p and its value.
TOGETHER = re.compile(r"\(not significant\)|(?:\(?p |≤ )*\S+(?: (?:to|±|at update) \S+)*(?: †)?")
TEMPLATES.filters["parts"] = lambda cell: [(part, " " in part) for part in TOGETHER.findall(cell)]
TEMPLATES.filters["escaped"] = lambda text: MARKDOWN.sub(r"\\\1", " ".join(text.split()))


def listed(words: Sequence[str]) -> str:
    """*words* as in "a, b and c"."""
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


# -- sentences -------------------------------------------------------------------------------------


def verdict(results: Results) -> list[str]:
    """Sentences on the systems, on missing runs, and on trainings that are not comparable."""
    compared = results["joined"][0]["against_baseline"]
    sentences = _of_two(results, *compared) if len(compared) == 1 == len(results["systems"]) - 1 else _of_many(results)
    fewer = [name for name in of_fewer_seeds(results) if name in (*compared, results["baseline"])]
    if fewer and compared:
        sentences.append(
            f"{listed(fewer)} {'has' if len(fewer) == 1 else 'have'} fewer seeds than others: compare the differences, "
            "which are over the seeds that both systems have, and not the means."
        )
    missing = [f"{run} is missing: {' '.join(reason.split())}" for run, reason in results["failed"].items()]
    sentences += different_precisions(results) + early(results) + ends_of_range(results)
    return sentences + missing + training_differences(results)


def early(results: Results) -> list[str]:
    """A paragraph if the systems are trained too briefly for conclusions."""
    sentences, systems = [], ranked(results)
    if max(statistics.mean(results["joined"][0]["scores"][system]) for system in systems) < LOW:
        sentences.append(f"No system reaches {LOW} sacreBLEU.")
    limited = [name for name, run in all_runs(results) if run.get("patience") and not converged(run)]
    if limited:
        reached = f"Trainings of {listed(list(dict.fromkeys(limited)))} reached the limit of epochs or updates"
        sentences.append(f"{reached} before the validation loss stopped falling.")
    falls = {
        system: max(0.0 if converged(run) else _last_fall(run["training"]) for run in results["runs"][system])
        for system in systems
    }
    steep = [system for system in systems if falls[system] > STEEP]
    if steep:
        largest_fall = max(falls[system] for system in steep)
        which = "every system" if len(steep) == len(systems) else listed(steep)
        fell = f"the validation loss of {which} fell by up to {largest_fall:.2f} bits a token"
        sentences.append(f"In the last fifth of the updates, {fell}.")
    return [" ".join([*sentences, EARLY])] if sentences else []


def ends_of_range(results: Results) -> list[str]:
    """A sentence if a system's chosen value is the lowest or highest one: a better value can be beyond it."""
    tuning = results.get("tuning") or {"setting": "", "systems": {}}
    ends = [name for name, outcome in tuning["systems"].items() if at_end(outcome)]
    if not ends:
        return []
    which = f"The chosen {tuning['setting']} of {listed(ends)} is at an end of the range"
    return [f"{which}: a value outside it can be better."]


def _last_fall(training: Mapping[str, Any]) -> float:
    """How much the validation loss fell in the last fifth of the updates; 0 if it is not finite there."""
    updates, losses = training["updates"], training["losses"]
    fall = float(np.interp(0.8 * updates[-1], updates, losses)) - losses[-1]
    return fall if math.isfinite(fall) else 0.0


def _of_two(results: Results, system: str) -> list[str]:
    joined, baseline = results["joined"][0], results["baseline"]
    against = joined["against_baseline"][system]
    differences = [bootstrap["difference"] for bootstrap in joined["by_seed"][system]]
    seeds = "from one seed: other seeds may differ"
    if len(differences) > 1:
        by_seed = ", ".join(f"{difference:+.2f}" for difference in differences)
        deviation = statistics.stdev(differences)
        seeds = f"the mean over {len(differences)} seeds ({by_seed}; standard deviation {deviation:.2f})"
    significant = "significant" if against["p_holm"] <= SIGNIFICANT else "not significant"
    return [
        f"{system} differs from {baseline} by {against['difference']:+.2f} sacreBLEU, {seeds}. "
        f"For these trainings, the difference is {significant} (p {p_text(results, against)}), with a 95% interval "
        f"from {against['low']:+.2f} to {against['high']:+.2f} over the test sentences."
    ]


def _of_many(results: Results) -> list[str]:
    joined, baseline, systems = results["joined"][0], results["baseline"], ranked(results)
    best, compared = joined["best"], joined["against_baseline"]
    leads = best != baseline and best in compared
    lead = f", {compared[best]['difference']:+.2f} against {baseline}" if leads else ""
    sentences = [f"{best} has the best result: sacreBLEU {spread(joined['scores'][best])}{lead}."]
    if joined["against_best"]:
        tested = [name for name in systems if name in joined["against_best"]]  # those with a seed of the best
        equal = [name for name in tested if as_good(joined["against_best"][name])]
        claim = f"shows that {listed(tested)} {'is' if len(tested) == 1 else 'are'} worse"
        if len(tested) == len(systems) - 1:
            claim = "shows that every other system is worse"
        if equal:
            claim = f"does not show that {listed(equal)} {'is' if len(equal) == 1 else 'are'} worse"
        sentences.append(f"The test {claim}.")
    kinds: dict[str, list[str]] = {"better than": [], "worse than": [], "indistinguishable from": []}
    for name in systems:
        if name in compared:
            difference, significant = compared[name]["difference"], compared[name]["p_holm"] <= SIGNIFICANT
            kind = ("better than" if difference > 0 else "worse than") if significant else "indistinguishable from"
            kinds[kind].append(f"{name} ({difference:+.2f})")
    sentences += [
        f"{listed(names)} {'is' if len(names) == 1 else 'are'} {kind} the baseline {baseline}."
        for kind, names in kinds.items()
        if names
    ]
    not_compared = [name for name in systems if name not in (*compared, baseline)]
    if baseline not in systems:
        sentences.append(f"The baseline {baseline} has no finished run. The report has no differences to it.")
    elif not_compared:
        has = "has" if len(not_compared) == 1 else "have"
        sentences.append(f"{listed(not_compared)} {has} no seed in common with the baseline.")
    single = [name for name in systems if len(joined["scores"][name]) == 1]
    if single:
        which = "Every system" if len(single) == len(systems) else listed(single)
        has = "has" if len(single) in (1, len(systems)) else "have"
        sentences.append(f"{which} {has} one seed: other seeds may differ.")
    return sentences


def different_precisions(results: Results) -> list[str]:
    """A sentence if the systems are trained in several precisions."""
    systems = by_precision(results)
    if len(systems) < 2:
        return []
    in_each = "; ".join(f"{listed(names)} in {precision}" for precision, names in systems.items())
    note = "A difference between such runs can come from this alone."
    return [f"The precisions of the trainings differ: {in_each}. {note}"]


def training_differences(results: Results) -> list[str]:
    """A sentence if code, versions, hardware or batches differ between the trainings."""
    differing = []
    for name in NOTED:
        values = dict.fromkeys(_plain(process.get(name, "not noted")) for process in _processes(results))
        if len(values) > 1:
            differing.append(f"{name} ({'; '.join(values)})")
    return [f"The trainings differ in {', '.join(differing)}."] if differing else []


def _processes(results: Results) -> list[dict[str, Any]]:
    """The training processes of all runs."""
    return [process for _, run in all_runs(results) for process in run["training"]["processes"]]


def _plain(value: Any) -> str:
    """*value*, a fact about a process, as words."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(item)}" for name, item in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


# -- texts -----------------------------------------------------------------------------------------


def files(results: Results) -> dict[str, bytes]:
    """The contents of TEXTS and IMAGES by the names of the files."""
    images = {f"{name}.{kind}": rendered(figure, kind) for name, figure in plots(results).items() for kind in KINDS}
    return {name: text.encode("utf-8") for name, text in texts(results, images).items()} | images


def texts(results: Results, images: Mapping[str, bytes]) -> dict[str, str]:
    """The contents of TEXTS by the names of the files. The page contains the SVG files of *images*."""
    systems, process_lists = results["systems"], [runs[0]["training"]["processes"] for runs in results["runs"].values()]
    first = next(iter(_processes(results)), {})
    last = [processes[-1] for processes in process_lists if processes]
    names = listed(systems) if len(systems) < 4 else f"{len(systems)} systems"
    shared = {**results, "tables": tables(results), "verdict": verdict(results), "significant": SIGNIFICANT}
    shared |= {"documents": has_documents(results), "fewer": of_fewer_seeds(results)}
    shared |= {"tuning": results.get("tuning"), "patience": max(run.get("patience", 0) for _, run in all_runs(results))}
    shared["scorers"] = results.get("scorers", {})
    shared |= {"names": names, "title": f"{names} on {results['data']['title']}"}
    page = TEMPLATES.get_template("report.html.j2").render(
        shared,
        images={name: base64.b64encode(image).decode() for name, image in images.items() if name.endswith(".svg")},
        fewest=FEWEST,
        made=_yaml({"command": results["command"], "settings": results["settings"]}),
        noted=_yaml({key: last[0].get(key) for key in NOTED} if last else "not noted"),
        commands="\n\n".join(dict.fromkeys(process["command"] for process in last)),
    )
    lines = (shlex.split(line) for line in results["command"].splitlines())
    markdown = TEMPLATES.get_template("results.md.j2").render(
        shared,
        commands=[shlex.join(without(words, {"--work-dir": 1})) for words in lines],
        trained_with="; ".join(f"{name}: {_plain(first.get(name, 'not noted'))}" for name in NOTED),
    )
    return dict(zip(TEXTS, (page, markdown, as_csv(results), as_latex(shared["tables"]["scores"])), strict=True))


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10**6)


def write(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Write all files of *contents* into *folder*, or none of them."""
    folder.mkdir(parents=True, exist_ok=True)
    with written_whole(*(str(folder / name) for name in contents)) as opened:
        for file, content in zip(opened, contents.values(), strict=True):
            file.write(content)


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the report again. Exits with status 1 and one sentence if the file has no results or cannot be drawn."""
    parser = argparse.ArgumentParser(prog="recipes.compare.page", description="Draw a report again, without training.")
    parser.add_argument("results", type=Path, help="the results.json of a comparison")
    parser.add_argument("--output", type=Path, metavar="DIR", help="default: the folder of results.json")
    args = parser.parse_args(argv)
    with reading("recipes.compare.page", args.results) as (results,):
        write(args.output or args.results.parent, files(results))


if __name__ == "__main__":
    main()
