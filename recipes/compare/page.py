"""The report as one page that needs nothing else, and as rows of a table.

Its numbers are those of results.json (stage23_report.py).
"""

import base64
import html as markup
import io
import logging
import statistics
from collections.abc import Sequence
from typing import Any

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Results = dict[str, Any]
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by the colour-blind, too

STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222;
       background: #fff }
table { border-collapse: collapse; margin: 1em 0 }
th, td { padding: .2em .8em; border-bottom: 1px solid #ccc }
td { text-align: right; font-variant-numeric: tabular-nums } th, td:first-child { text-align: left }
img { max-width: 100% } pre { overflow-x: auto; background: #f4f4f4; padding: .6em; font-size: 13px }
"""


def scores(results: Results, metric: str = "sacreBLEU") -> list[list[float]]:
    """The *metric* of every architecture, a list over the seeds each."""
    by_seed = [[system["metrics"][metric]["score"] for system in pair] for pair in results["systems"]]
    return [list(seeds) for seeds in zip(*by_seed, strict=True)]


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation, as text; of one value, that value."""
    if len(values) == 1:
        return f"{values[0]:.2f}"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def verdict(results: Results) -> list[str]:
    """For every architecture but the baseline, what the pooled seeds say, in one sentence."""
    baseline, *others = results["architectures"]
    said = []
    for arch, found in zip(others, results["joined"][0]["against_baseline"], strict=True):
        chance = "more than chance gives" if found["p_value"] < 0.05 else "no more than chance can give"
        said.append(
            f"{arch} scores {found['difference']:+.2f} sacreBLEU against {baseline}, the mean of "
            f"{len(results['seeds'])} seed{'s' * (len(results['seeds']) > 1)} (95% interval "
            f"{found['low']:+.2f} to {found['high']:+.2f}, p = {found['p_value']:.3f}): {chance} on this "
            "test set."
        )
    return said


# -- figures ---------------------------------------------------------------------------------------


def _figure(draw: Any, describe: str, count: int = 1) -> str:
    """An <img> of what *draw* makes of *count* axes, inside the page itself."""
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq, once imported, lets all be said
    figure = Figure(figsize=(5 * count + 1, 3.8), dpi=110, layout="constrained")
    axes = [figure.add_subplot(1, count, n + 1) for n in range(count)]
    draw(*axes)
    for each in axes:
        each.grid(alpha=0.3)
        each.legend()
    png = io.BytesIO()
    figure.savefig(png, format="png")
    content = base64.b64encode(png.getvalue()).decode()
    return f'<img alt="{markup.escape(describe)}" src="data:image/png;base64,{content}">'


def _draw_losses(results: Results, by_updates: Axes, by_time: Axes) -> None:
    for number, arch in enumerate(results["architectures"]):
        for n, pair in enumerate(results["systems"]):
            training, label = pair[number]["training"], arch if n == 0 else None
            style = {"color": COLOURS[number], "label": label, "alpha": 0.8, "linewidth": 1.2}
            by_updates.plot(training["updates"], training["losses"], **style)
            by_time.plot([s / 60 for s in training["seconds"]], training["losses"], **style)
    lowest = min(min(system["training"]["losses"]) for pair in results["systems"] for system in pair)
    for axes, what in ((by_updates, "updates"), (by_time, "minutes")):
        axes.set(xlabel=what, ylabel="validation loss (bits a token)", ylim=(lowest - 0.1, lowest + 2.5))


def _draw_scores(
    axes: Axes, results: Results, of_all: Sequence[list[list[float]]], places: list[str]
) -> None:
    """A line for each architecture through the means over seeds of *of_all* (place, architecture, seed)."""
    for number, arch in enumerate(results["architectures"]):
        seeds = [place[number] for place in of_all]
        means = [statistics.mean(values) for values in seeds]
        # A mean of equal numbers can differ from them in its last digit.
        below = [max(0, m - min(v)) for m, v in zip(means, seeds, strict=True)]
        above = [max(0, max(v) - m) for m, v in zip(means, seeds, strict=True)]
        x = [n + 0.06 * (number - 0.5) for n in range(len(places))]
        style = {"color": COLOURS[number], "label": arch, "capsize": 3, "marker": "o"}
        axes.errorbar(x, means, yerr=[below, above], **style)
    axes.set_xticks(range(len(places)), places)
    axes.set_ylabel("sacreBLEU")


# -- tables ----------------------------------------------------------------------------------------


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{markup.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    return f"<table>{row(head, 'th')}{''.join(row(cells, 'td') for cells in rows)}</table>"


def _score_rows(results: Results) -> list[list[str]]:
    rows = []
    for seed, pair in zip(results["seeds"], results["systems"], strict=True):
        baseline, *others = (system["metrics"]["sacreBLEU"] for system in pair)
        row = [f"seed {seed}", f"{baseline['score']:.2f}"]
        for other in others:
            difference = other["score"] - baseline["score"]
            row += [f"{other['score']:.2f}", f"{difference:+.2f}", f"{other['p_value']:.3f}"]
        rows.append(row)
    baseline, *others = scores(results)
    row = ["all seeds", spread(baseline)]
    for values, found in zip(others, results["joined"][0]["against_baseline"], strict=True):
        interval = f"{found['difference']:+.2f} ({found['low']:+.2f} to {found['high']:+.2f})"
        row += [spread(values), interval, f"{found['p_value']:.3f}"]
    return [*rows, row]


def _by_length(results: Results) -> list[tuple[str, int, list[list[float]]]]:
    """Of every bucket its words, its sentences, and the scores (architecture, seed)."""
    first = results["systems"][0][0]["by_length"]
    return [
        (
            bucket["words"],
            bucket["sentences"],
            [
                [pair[number]["by_length"][n]["score"] for pair in results["systems"]]
                for number in range(len(results["architectures"]))
            ],
        )
        for n, bucket in enumerate(first)
    ]


def _joined_rows(results: Results) -> list[list[str]]:
    rows = []
    for joined in results["joined"]:
        row = [str(joined["times"]), str(joined["lines"]), f"{joined['subwords']:.0f}"]
        row.append(spread(joined["scores"][0]))
        for values, found in zip(joined["scores"][1:], joined["against_baseline"], strict=True):
            interval = f"{found['difference']:+.2f} ({found['low']:+.2f} to {found['high']:+.2f})"
            row += [spread(values), interval, f"{found['p_value']:.3f}"]
        rows.append(row)
    return rows


def _training_rows(results: Results) -> list[list[str]]:
    rows = []
    for pair in results["systems"]:
        for system in pair:
            training = system["training"]
            last = ", ".join(f"{loss:.3f}" for loss in training["losses"][-5:])
            rows.append(
                [
                    f"{system['architecture']}, seed {system['seed']}",
                    f"{system['parameters']:,}" if system["parameters"] else "not in the log",
                    str(training["updates"][-1]),
                    f"{training['seconds'][-1] / 60:.1f}",
                    f"{training['tokens_per_second']:,.0f}",
                    last,
                ]
            )
    return rows


# -- the whole -------------------------------------------------------------------------------------


def html(results: Results) -> str:
    """The page."""
    baseline, *others = results["architectures"]
    compared = [word for arch in others for word in (arch, "difference", "p")]
    names = " and ".join(results["architectures"])
    buckets = _by_length(results)
    joined = results["joined"]
    title = f"{names} on {results['recipe']}"
    machine = {**results["machine"], "settings": results["settings"]}
    commands = "\n\n".join(system["command"] for system in results["systems"][0])
    parts = [
        f"<h1>{markup.escape(title)}</h1>",
        *(f"<p><strong>{markup.escape(sentence)}</strong></p>" for sentence in verdict(results)),
        "<h2>Scores</h2>",
        _table(["", baseline, *compared], _score_rows(results)),
        f"<p>sacreBLEU, cased and detokenised: {markup.escape(results['signature'])}. ± is the standard "
        "deviation between seeds. p is that of a paired bootstrap: how often chance gives as large a "
        "difference. Of one seed it is sacrebleu's; of all, sentences are drawn with the translations of all "
        f"seeds, {results['bootstrap']['resamples']} times, and the interval holds 95% of the differences "
        "that were drawn. It says how sure these trainings differ on sentences like these, and not what "
        "other seeds would give: for that there is the standard deviation.</p>",
        "<h2>Other metrics</h2>",
        _table(
            ["", *results["architectures"]],
            [
                [metric, *(spread(values) for values in scores(results, metric))]
                for metric in results["systems"][0][0]["metrics"]
                if metric != "sacreBLEU"
            ],
        ),
        "<p>chrF2++ as sacreBLEU, higher is better; TER lower.</p>",
        "<h2>Training</h2>",
        _figure(
            lambda *axes: _draw_losses(results, *axes),
            f"Validation loss of {names} against updates and against minutes, a line for each seed",
            count=2,
        ),
        _table(
            ["", "parameters", "updates", "minutes", "tokens/s", "validation loss, the last five"],
            _training_rows(results),
        ),
        "<p>Minutes are those that fairseq-train ran, validation included, and what else the machine did "
        "meanwhile shows in them. The loss is label-smoothed. All systems have the same data, settings, "
        "batches and, seed by seed, the same initial weights.</p>",
        "<h2>By the length of the source</h2>",
        _figure(
            lambda axes: (
                _draw_scores(axes, results, [b[2] for b in buckets], [b[0] for b in buckets]),
                axes.set_xlabel("words of the source"),
            ),
            f"sacreBLEU of {names} by the length of the source",
        ),
        _table(
            ["words", "sentences", *results["architectures"]],
            [[words, str(count), *map(spread, of_each)] for words, count, of_each in buckets],
        ),
        "<h2>Inputs longer than in training</h2>",
        "<p>Sentences of the test set one after another in one line, their references likewise. The longest "
        f"source in training has {results['longest_in_training']} subwords. Points are means over seeds, "
        "bars reach from the lowest to the highest.</p>",
        _figure(
            lambda axes: (
                _draw_scores(axes, results, [j["scores"] for j in joined], [str(j["times"]) for j in joined]),
                axes.set_xlabel("sentences a line"),
            ),
            f"sacreBLEU of {names} on 1, 2, 4 and 8 sentences a line",
        ),
        _table(["sentences a line", "lines", "subwords a line", baseline, *compared], _joined_rows(results)),
        "<h2>How it was made</h2>",
        f"<pre>{markup.escape(yaml.safe_dump(machine, sort_keys=False, allow_unicode=True))}</pre>",
        f"<p>The first trainings; the others have other seeds.</p><pre>{markup.escape(commands)}</pre>",
    ]
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{markup.escape(title)}</title>'
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def table(results: Results) -> str:
    """The rows for RESULTS.md."""
    baseline, *others = results["architectures"]
    compared = [word for arch in others for word in (f"`{arch}`", "difference", "p")]
    head = ["", f"`{baseline}`", *compared]
    joined = [
        [f"{row[0]} sentences a line ({row[1]} lines of {row[2]} subwords)", *row[3:]]
        for row in _joined_rows(results)[1:]
    ]
    rows = [head, ["---"] * len(head), *_score_rows(results), *joined]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([f"`{results['machine']['command']}`", "", *lines, "", *verdict(results)]) + "\n"
