"""The report as one page that needs nothing else, and as rows of a table.

Its numbers are those of results.json (stage23_report.py), where null stands for what is no number.
"""

import base64
import html as markup
import io
import logging
import math
import shlex
import statistics
from collections.abc import Sequence
from typing import Any

import yaml
from matplotlib.axes import Axes
from matplotlib.figure import Figure

Results = dict[str, Any]
NOTED = ("commit", "versions", "hardware", "batches")  # of every process that trained
FEWEST = 20  # sentences of a bucket that is drawn
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # told apart by the colour-blind, too

STYLE = """
body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222;
       background: #fff }
.wide { overflow-x: auto } .wide img { min-width: 34em }
table { border-collapse: collapse; margin: 1em 0 } p { overflow-wrap: anywhere }
th, td { padding: .2em .8em; border-bottom: 1px solid #ccc }
td { text-align: right; font-variant-numeric: tabular-nums } th, td:first-child { text-align: left }
img { max-width: 100% } pre { overflow-x: auto; background: #f4f4f4; padding: .6em; font-size: 13px }
"""


def scores(results: Results, metric: str = "sacreBLEU") -> list[list[float]]:
    """The *metric* of every architecture, a list over the seeds each."""
    by_seed = [[system["metrics"][metric]["score"] for system in pair] for pair in results["systems"]]
    return [list(seeds) for seeds in zip(*by_seed, strict=True)]


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation, as text; of one value, or of some that are no numbers, these values."""
    if len(values) == 1 or not all(map(math.isfinite, values)):
        return ", ".join(f"{value:.2f}" for value in values)
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def chance(results: Results, p_value: float) -> str:
    """*p_value* as text; the smallest that so many resamples can give is a bound."""
    least = 1 / (results["bootstrap"]["resamples"] + 1)
    return f"≤ {least:.3f}" if p_value <= least * 1.0001 else f"{p_value:.3f}"


def between_seeds(baseline: Sequence[float], system: Sequence[float]) -> str:
    """The differences *system* - *baseline*, seed by seed, and how they spread."""
    differences = [b - a for a, b in zip(baseline, system, strict=True)]
    each = ", ".join(f"{difference:+.2f}" for difference in differences)
    return f"{each}; standard deviation {statistics.stdev(differences):.2f}" if len(differences) > 1 else each


def verdict(results: Results) -> list[str]:
    """For every architecture but the baseline, what was found, and what was drawn anew to say how surely."""
    baseline, *others = results["architectures"]
    first, *rest = scores(results)
    said = []
    for arch, of_arch, found in zip(others, rest, results["joined"][0]["against_baseline"], strict=True):
        seeds = (
            f"the mean of {len(first)} seeds ({between_seeds(first, of_arch)})"
            if len(first) > 1
            else "of one seed: what others would give is not known"
        )
        said.append(
            f"{arch} scores {found['difference']:+.2f} sacreBLEU against {baseline}, {seeds}. With these "
            f"trainings, and sentences drawn anew from the test set, 95% of the differences are "
            f"{found['low']:+.2f} to {found['high']:+.2f} (p {chance(results, found['p_value'])})."
        )
    return said + unlike(results)


def processes(results: Results) -> list[dict[str, Any]]:
    """What trained: of all systems all processes."""
    return [one for pair in results["systems"] for system in pair for one in system["training"]["processes"]]


def unlike(results: Results) -> list[str]:
    """A sentence if the trainings were not all made by the same code, versions, hardware and batches."""
    differ = [
        f"{name} ({'; '.join(kinds)})"
        for name in NOTED
        if len(kinds := dict.fromkeys(_plain(one.get(name, "not noted")) for one in processes(results))) > 1
    ]
    return [f"Not all trainings were made alike. They differ in {', '.join(differ)}."] if differ else []


def _plain(value: Any) -> str:
    """*value*, of a process, as words."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {_plain(one)}" for name, one in value.items())
    return ", ".join(map(str, value)) or "none" if isinstance(value, list) else str(value)


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
    image = f'<img alt="{markup.escape(describe)}" src="data:image/png;base64,{content}">'
    return f'<div class="wide">{image}</div>'


def _draw_losses(results: Results, by_updates: Axes, by_time: Axes) -> None:
    for number, arch in enumerate(results["architectures"]):
        for n, pair in enumerate(results["systems"]):
            training, label = pair[number]["training"], arch if n == 0 else None
            style = {"color": COLOURS[number], "label": label, "alpha": 0.8, "linewidth": 1.2}
            by_updates.plot(training["updates"], training["losses"], **style)
            by_time.plot([s / 60 for s in training["seconds"]], training["losses"], **style)
    all_losses = [loss for pair in results["systems"] for one in pair for loss in one["training"]["losses"]]
    lowest = min(filter(math.isfinite, all_losses), default=0.0)  # not all, if one came to nothing
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

    rows_of_cells = "".join(row(cells, "td") for cells in rows)
    return f'<div class="wide"><table>{row(head, "th")}{rows_of_cells}</table></div>'


def _score_rows(results: Results) -> list[list[str]]:
    baseline, *others = scores(results)
    joined = results["joined"][0]
    rows = []
    for n, seed in enumerate(results["seeds"]):
        row = [f"seed {seed}", f"{baseline[n]:.2f}"]
        for values, found in zip(others, joined["by_seed"], strict=True):
            row += [f"{values[n]:.2f}", *_against(results, found[n])]
        rows.append(row)
    if len(rows) > 1:
        row = ["all seeds", spread(baseline)]
        for values, found in zip(others, joined["against_baseline"], strict=True):
            row += [spread(values), *_against(results, found)]
        rows.append(row)
    return rows


def _against(results: Results, found: dict[str, float]) -> list[str]:
    """Two cells of a bootstrap: the difference with its interval, and p."""
    interval = f"{found['difference']:+.2f} ({found['low']:+.2f} to {found['high']:+.2f})"
    return [interval, chance(results, found["p_value"])]


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
        row.append(str(joined["longer_than_in_training"]))
        of_each = [
            f"{spread(values)} ({statistics.mean(lengths):.2f})"
            for values, lengths in zip(joined["scores"], joined["length_ratio"], strict=True)
        ]
        row.append(of_each[0])
        for cell, found in zip(of_each[1:], joined["against_baseline"], strict=True):
            row += [cell, *_against(results, found)]
        rows.append(row)
    return rows


def _training_rows(results: Results) -> list[list[str]]:
    rows = []
    for pair in results["systems"]:
        for system in pair:
            training = system["training"]
            last = ", ".join(f"{loss:.3f}" for loss in training["losses"][-5:])
            commits = dict.fromkeys(str(process["commit"]) for process in training["processes"])
            gap = "" if system["curve_is_whole"] else " (the end of the curve is lost)"
            rows.append(
                [
                    f"{system['architecture']}, seed {system['seed']}",
                    _parameters(system),
                    f"{training['updates'][-1]}{gap}",
                    f"{training['seconds'][-1] / 60:.1f}",
                    f"{training['tokens_per_second']:,.0f}",
                    last,
                    ", ".join(commits) or "not noted",
                ]
            )
    return rows


def _parameters(system: dict[str, Any]) -> str:
    return f"{system['parameters']:,}" if system["parameters"] else "not in the log"


# -- the whole -------------------------------------------------------------------------------------


def html(results: Results) -> str:
    """The page."""
    baseline, *others = results["architectures"]
    compared = [word for arch in others for word in (arch, "difference", "p")]
    names = " and ".join(results["architectures"])
    buckets = _by_length(results)
    drawn = [bucket for bucket in buckets if bucket[1] >= FEWEST] or buckets
    joined = results["joined"]
    title = f"{names} on {results['recipe']}"
    signature = results["signatures"]["sacreBLEU"]
    made = {"command": results["command"], "settings": results["settings"]}
    trained = [system["training"]["processes"][-1:] for system in results["systems"][0]]
    commands = "\n\n".join(one["command"] for of_system in trained for one in of_system)
    noted = {key: trained[0][0].get(key) for key in NOTED} if trained[0] else "not noted"
    parts = [
        f"<h1>{markup.escape(title)}</h1>",
        *(f"<p><strong>{markup.escape(sentence)}</strong></p>" for sentence in verdict(results)),
        "<h2>Scores</h2>",
        _table(["", baseline, *compared], _score_rows(results)),
        f"<p>sacreBLEU, cased and detokenised: {markup.escape(signature)}. ± is the "
        "standard deviation between seeds. Intervals and p are those of a paired bootstrap: sentences are "
        f"drawn, with the translations of all seeds of the row, {results['bootstrap']['resamples']} times; "
        "the interval holds 95% of the differences that were drawn, and p is how often chance alone gives "
        "one as large. That is about sentences, with these trainings, and not about what other seeds would "
        "give: for that there are the differences from seed to seed.</p>",
        "<h2>Other metrics</h2>",
        _table(
            ["", *results["architectures"]],
            [
                [
                    f"{metric} ({results['signatures'][metric]})",
                    *(spread(values) for values in scores(results, metric)),
                ]
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
            ["", "parameters", "updates", "minutes", "tokens/s", "validation loss, the last five", "commit"],
            _training_rows(results),
        ),
        "<p>Minutes are those that fairseq-train ran, validation included, and what else the machine did "
        "meanwhile shows in them; of an interrupted run, up to its last whole epoch. The loss is "
        "label-smoothed. All systems have the same data, settings and number of updates; those of a seed "
        "have the same batches, unless the top of this page says that they differ in these; weights are "
        "drawn in the same order.</p>",
        "<h2>By the length of the source</h2>",
        _figure(
            lambda axes: (
                _draw_scores(axes, results, [b[2] for b in drawn], [f"{b[0]}\n({b[1]})" for b in drawn]),
                axes.set_xlabel("words of the source (sentences)"),
            ),
            f"sacreBLEU of {names} by the length of the source",
        ),
        "<p>Points are means over seeds, bars reach from the lowest to the highest. Lengths of fewer than "
        f"{FEWEST} sentences are not drawn.</p>",
        _table(
            ["words", "sentences", *results["architectures"]],
            [[words, str(count), *map(spread, of_each)] for words, count, of_each in buckets],
        ),
        "<h2>Several sentences a line</h2>",
        "<p>Sentences of the test set one after another in one line, their references likewise: of a kind "
        "that training did not have, if its lines are single sentences, and some longer than any there (its "
        f"longest source has {results['longest_in_training']} subwords). Beside a score stands in brackets "
        "the length of the outputs as a share of the references': where it is far below 1, sentences are "
        "left out, and BLEU's penalty for that is most of the score.</p>",
        _figure(
            lambda axes: (
                _draw_scores(axes, results, [j["scores"] for j in joined], [str(j["times"]) for j in joined]),
                axes.set_xlabel("sentences a line"),
            ),
            f"sacreBLEU of {names} on 1, 2, 4 and 8 sentences a line",
        ),
        _table(
            ["sentences a line", "lines", "subwords a line", "longer than in training", baseline, *compared],
            _joined_rows(results),
        ),
        "<h2>How it was made</h2>",
        f"<pre>{markup.escape(_yaml(made))}</pre>",
        "<p>What trained the first system, and the commands of the first seed; others have their own.</p>",
        f"<pre>{markup.escape(_yaml(noted))}</pre><pre>{markup.escape(commands)}</pre>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{markup.escape(title)}</title>"
        f"<style>{STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _yaml(value: Any) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=10**6)


def table(results: Results) -> str:
    """The rows for RESULTS.md, and below them what they were made with."""
    baseline, *others = results["architectures"]
    compared = [word for arch in others for word in (f"`{arch}`", "difference (95%)", "p")]
    head = ["", f"`{baseline}`", *compared]
    joined = [
        [
            f"{row[0]} sentences a line: {row[1]} of {row[2]} subwords, {row[3]} of them longer than any "
            f"in training, {results['longest_in_training']} (length ratio)",
            *row[4:],
        ]
        for row in _joined_rows(results)[1:]
    ]

    def plain(title: str, cells: Sequence[str]) -> list[str]:
        first, *rest = cells
        return [title, first, *(word for cell in rest for word in (cell, "", ""))]

    metrics = [name for name in results["systems"][0][0]["metrics"] if name != "sacreBLEU"]
    of_metrics = [plain(name, [spread(values) for values in scores(results, name)]) for name in metrics]
    lengths = [
        plain(f"sources of {words} words ({count})", [spread(values) for values in of_each])
        for words, count, of_each in _by_length(results)
    ]
    trainings = [[pair[n]["training"] for pair in results["systems"]] for n in range(1 + len(others))]
    last = [spread([one["losses"][-1] for one in seeds]) for seeds in trainings]
    minutes = [spread([one["seconds"][-1] / 60 for one in seeds]) for seeds in trainings]
    speeds = [spread([one["tokens_per_second"] for one in seeds]) for seeds in trainings]
    sizes = [_parameters(system) for system in results["systems"][0]]
    updates = [f"{seeds[0]['updates'][-1]:,}" for seeds in trainings]  # as many in all, or it is refused
    training = [
        plain("updates", updates),
        plain("validation loss at the end", last),
        plain("minutes of training", minutes),
        plain("tokens a second", speeds),
        plain("parameters", sizes),
    ]
    rows = [head, ["---"] * len(head), *_score_rows(results), *of_metrics, *lengths, *joined, *training]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    first = next(iter(processes(results)), {})
    trained = "; ".join(f"{name}: {_plain(first.get(name, 'not noted'))}" for name in NOTED)
    below = [
        *verdict(results),
        f"sacreBLEU's signature is `{results['signatures']['sacreBLEU']}`; ± is the standard deviation "
        "between seeds; intervals and p are of a paired bootstrap over sentences, "
        f"{results['bootstrap']['resamples']} resamples, seed {results['bootstrap']['seed']}. The loss is "
        "label-smoothed, in bits a token.",
        f"Trained with {trained}.",
    ]
    return "\n".join([f"`{_without_places(results['command'])}`", "", *lines, "", *below]) + "\n"


def _without_places(command: str) -> str:
    """*command* without the flags that say where things lie on one machine."""
    words = shlex.split(command)
    places = {"--data-dir", "--work-dir", "--manifest"}
    kept = [
        word
        for word, before in zip(words, ["", *words], strict=False)
        if before not in places and word.partition("=")[0] not in places
    ]
    return shlex.join(kept)
