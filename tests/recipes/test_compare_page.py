"""recipes/compare: the tables, plots and sentences of made-up results, and the page in a browser."""

import csv
import html
import json
import math
import re
import shutil
import statistics
import subprocess
import sys

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from recipes.compare import page, plots, stage15_report
from recipes.compare.forest import Difference, forest
from recipes.compare.results import KEYS, all_runs, in_order
from tests.commands import ENVIRONMENT, LIMIT, ROOT
from tests.recipes.small_demo import usage_error

EARLY = "bits a token. This is early: longer training can change the order."
LEAST = 1 / 1001  # the smallest p that 1000 resamples can give


def made_up(scores, against_baseline, against_best=None, by_seed=None):
    """Results of systems with *scores* {system: {seed: sacreBLEU}}, the baseline first.

    The bootstraps are {system: (difference, low, high, p_value, p_holm)}, or in *by_seed*, {system: {seed: (difference,
    low, high, p_value)}}.
    """

    def run(system, seed, score):
        process = {"commit": "c1", "versions": {"torch": "2.13.0"}, "hardware": {"gpus": []}}
        process |= {"batches": {"max_tokens": 64}, "command": f"fairseq-train {system} <&>"}
        training = {
            "updates": [10, 20], "seconds": [60.0, 120.0], "losses": [5.0, 34 - score], "last_epoch": 2,
            "tokens_per_second": 1000.0 * seed, "processes": [process], "peak_memory_mib": 1230.0 + seed,
        }  # fmt: skip
        buckets = [{"words": "0-10", "sentences": 30, "score": score + 1}]
        buckets.append({"words": "11-20", "sentences": 3, "score": score - 1})
        return {
            "seed": seed, "architecture": f"arch_{system}", "flags": f"--flag {system}", "parameters": 1234567,
            "metrics": {"sacreBLEU": {"score": score}, "TER": {"score": 100 - score}},
            "by_length": buckets, "training": training, "curve_is_whole": seed == 1,
        }  # fmt: skip

    def named(values):
        return dict(zip(("difference", "low", "high", "p_value", "p_holm"), values, strict=False))

    def joined(times):
        return {
            "times": times, "lines": 60 // times, "subwords": 11.0 * times, "longer_than_in_training": times - 1,
            "scores": {system: [score / times for score in of.values()] for system, of in scores.items()},
            "length_ratio": {system: [1 - 0.1 * seed for seed in of] for system, of in scores.items()},
            "best": max(scores, key=lambda system: statistics.mean(scores[system].values())),
            "against_baseline": {system: named(values) for system, values in against_baseline.items()},
            "against_best": {system: named(values) for system, values in (against_best or against_baseline).items()},
            "by_seed": {
                system: [{"seed": seed, **named(values)} for seed, values in of.items()]
                for system, of in (by_seed or {}).items()
            },
        }  # fmt: skip

    return {
        "recipe": "known", "baseline": next(iter(scores)), "settings": {"beam": 4}, "failed": {},
        "systems": [*scores],
        "runs": {system: [run(system, seed, score) for seed, score in of.items()] for system, of in scores.items()},
        "signatures": {"sacreBLEU": "s", "TER": "t"}, "bootstrap": {"resamples": 1000, "seed": 1},
        "joined": [joined(1), joined(2)], "longest_in_training": 55,
        "data": {"title": "known", "files": {"train": ["a"], "test": ["b.en", "b.de"]}},
        "sizes": {"train": 9000, "valid": 500, "test": 60},
        "command": "python -m recipes.compare known --work-dir /a/b --seeds 2 --data-dir=/c",
    }  # fmt: skip


@pytest.fixture
def two():
    """Two systems: the second one is better in the first seed and worse in the second."""
    scores = {"base": {1: 30.0, 2: 31.0}, "<other>": {1: 32.0, 2: 30.0}}
    by_seed = {"<other>": {1: (2.0, 1.5, 2.5, LEAST), 2: (-1.0, -1.75, 0.125, 0.25)}}
    results = made_up(scores, {"<other>": (0.5, -0.25, 1.25, 0.125, 0.125)}, by_seed=by_seed)
    # The best system is compared with the baseline.
    results["joined"][0]["against_best"] = {"base": dict(results["joined"][0]["against_baseline"]["<other>"])}
    results["joined"][0]["against_best"]["base"]["difference"] = -0.5
    results["runs"]["<other>"][1]["training"]["losses"][0] = math.nan
    return results


def test_the_report_of_a_tuning_shows_the_losses_and_marks_values_at_the_end_of_the_range(two):
    def outcome(chosen, *losses):
        runs = zip(("1e-3", "2e-3", "4e-3"), losses, strict=True)
        return {"chosen": chosen, "runs": [{"value": v, "loss": x, "update": x and 1200} for v, x in runs]}

    systems = {"base": outcome("2e-3", 2.5, 2.25, 3.0), "<other>": outcome("1e-3", 2.0, 2.125, None)}
    two["tuning"] = {"setting": "learning_rate", "values": ["1e-3", "2e-3", "4e-3"], "systems": systems}
    head, rows = page.tables(two)["tuning"]
    assert head == ["system", "learning_rate 1e-3", "learning_rate 2e-3", "learning_rate 4e-3", "chosen"]
    assert sorted(rows) == [
        [
            "<other>",
            "2.000 at update 1,200",
            "2.125 at update 1,200",
            "no finished training",
            "1e-3 (end of the range)",
        ],
        ["base", "2.500 at update 1,200", "2.250 at update 1,200", "3.000 at update 1,200", "2e-3"],
    ]
    end = "The chosen learning_rate of <other> is at an end of the range: a value outside it can be better."
    assert end in page.verdict(two)
    axes = plots.plots(two)["tuning"].axes[0]
    drawn = {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}
    assert drawn["base"] == [[0.001, 2.5], [0.002, 2.25], [0.004, 3.0]] and drawn["<other>"] == [
        [0.001, 2],
        [0.002, 2.125],
    ]
    web = page.files(two)
    assert "tuning.svg" in web and "Tuning" in web["report.html"].decode()
    two["runs"]["base"][0]["training_of"], two["runs"]["base"][0]["generate"] = "<other>", "--beam 9"
    head, rows = page.tables(two)["systems"]
    assert {row[0]: row[head.index("learning_rate")] for row in rows} == {"<other>": "1e-3", "base": "1e-3"}
    rows = csv.DictReader(web["results.csv"].decode().splitlines())
    assert {row["system"]: row["learning_rate"] for row in rows} == {"base": "2e-3", "<other>": "1e-3"}


@pytest.mark.parametrize(
    "losses, is_limited",
    [
        ([5.0, 4.0, 4.1, 4.2], False),  # two validations after the best one
        ([5.0, 4.5, 4.6, 4.0], True),
        ([5.0, 4.1, 4.0, math.nan], True),
    ],
)
def test_a_training_has_converged_if_it_ended_by_its_patience(two, losses, is_limited):
    for _, run in all_runs(two):
        run["patience"] = 2
        run["training"] |= {"updates": [10, 20, 30, 40], "losses": losses, "seconds": [1, 2, 3, 4]}
    sentences = "\n".join(page.early(two))
    limited = "reached the limit of epochs or updates before the validation loss stopped falling."
    assert (limited in sentences) == is_limited and sentences.count("This is early") == is_limited
    assert "when its validation loss has not fallen for 2 validations" in page.files(two)["report.html"].decode()


@pytest.fixture
def ten():
    """Ten systems with seed 1; the first five also have seeds 2 and 3. The eighth shares no seed."""
    scores = {f"transformer_system_{n}": {1: 30.0 + n / 10} for n in range(10)}
    names = [*scores]
    for name in names[:5]:
        scores[name] |= {2: scores[name][1] + 0.2, 3: scores[name][1] - 0.2}
    scores[names[7]] = {4: 20.0}
    against_baseline = {name: (n / 10, n / 10 - 0.2, n / 10 + 0.2, 0.01, 0.08) for n, name in enumerate(names) if n % 7}
    against_baseline[names[9]] = (0.9, 0.7, 1.1, LEAST, 8 * LEAST)
    against_baseline[names[1]] = (-0.5, -0.7, -0.3, 0.002, 0.014)
    against_best = {name: (n / 10 - 0.9, -1.5, 0.0, 0.001 * 5**n, min(1, 0.009 * 5**n)) for n, name in enumerate(names)}
    del against_best[names[9]], against_best[names[7]]
    results = made_up(scores, against_baseline, against_best)
    results["failed"] = {f"{names[6]}, seed 2": "stage 7 (train) failed\nout of memory", "lost, seed 1": "no node"}
    return results


def texts(results):
    """The texts of the report, with empty plots."""
    return page.texts(results, dict.fromkeys(page.IMAGES, b""))


def rows_of(text, table):
    """The rows of a *table* of the page as {first cell: {head: cell}}."""
    (source,) = re.findall(rf'<table id="{table}">(.*?)</table>', text, re.DOTALL)
    source = re.sub("</?span>", "", source)
    cells = [re.findall("<t[hd] class=[^>]*>(.*?)</t[hd]>", row) for row in re.findall("<tr>.*?</tr>", source)]
    head, *rows = [[html.unescape(cell) for cell in row] for row in cells]
    assert [row[0] for row in rows] == [*dict.fromkeys(row[0] for row in rows)], "no row occurs twice"
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def values(row):
    return [*row.values()][1:]


def test_the_page_shows_the_results_of_two_systems(two):
    text = texts(two)["report.html"]
    scores = rows_of(text, "scores")
    assert [*scores] == ["<other>", "base"], "the best first"
    row = scores["<other>"]
    assert values(row) == ["1, 2", "31.00 ± 1.41", "+0.50 (-0.25 to +1.25)", "0.125 (not significant)", "best"]
    row = rows_of(text, "costs")["<other>"]
    assert (row["parameters"], row["updates"], row["minutes"]) == ("1,234,567", "20", "2.0 ± 0.0")
    assert (row["tokens/s"], row["peak memory (MiB)"]) == ("1,500 ± 707", "1,232")
    assert row["validation loss at the end"] == "3.00 ± 1.41"
    assert values(scores["base"]) == ["1, 2", "30.50 ± 0.71", "the baseline", "", "indistinguishable (p 0.125)"]
    runs, trainings = rows_of(text, "runs"), rows_of(text, "trainings")
    assert values(runs["<other>, seed 1"]) == ["32.00", "+2.00 (+1.50 to +2.50)", "≤ 0.001", "2.000 at update 20"]
    assert values(trainings["<other>, seed 1"]) == ["20", "2.0", "1,000", "1,231", "5.000, 2.000", "c1"]
    insignificant = ["-1.00 (-1.75 to +0.12)", "0.250 (not significant)"]
    assert values(runs["<other>, seed 2"]) == ["30.00", *insignificant, "4.000 at update 20"]
    gap = "20 (the end of the curve is missing)"
    assert values(trainings["<other>, seed 2"]) == [gap, "2.0", "2,000", "1,232", "nan, 4.000", "c1"]
    assert values(runs["base, seed 2"])[:3] == ["31.00", "", ""]
    data = {name: values(row) for name, row in rows_of(text, "data").items()}
    assert data["valid"] == ["held out from the training set", "500 pairs"]
    assert (data["train"], data["test"]) == (["a", "9,000 pairs after cleaning"], ["b.en, b.de", "60 sentences"])
    assert [*rows_of(text, "systems")] == ["<other>", "base"]
    # The lowest losses are 2 and 4.
    assert values(rows_of(text, "systems")["<other>"]) == ["arch_<other>", "--flag <other>", "fp32", "3.000 ± 1.414"]
    assert rows_of(text, "metrics")["base"]["TER (t)"] == "69.50 ± 0.71"
    assert values(rows_of(text, "lengths")["<other>"]) == ["32.00 ± 1.41", "30.00 ± 1.41"]
    assert [*rows_of(text, "lengths")["base"]] == ["system", "0-10 (30)", "11-20 (3)"]
    joined = rows_of(text, "joined")
    assert [row["2"] for row in joined.values()] == ["30", "22", "1", "15.50 ± 0.71 (0.85)", "15.25 ± 0.35 (0.85)"]
    assert rows_of(text, "differences")["<other>"]["2"] == "+0.50 (-0.25 to +1.25), p 0.125 (not significant)"
    assert "<other>" not in text and "<&>" not in text and "fairseq-train base &lt;&amp;&gt;" in text
    assert "longest source has 55 subwords" in re.sub(r"\s+", " ", text)


def test_the_page_of_a_text_with_documents_has_segments_of_all_lengths(two):
    """The first results are those of the recipe's own segments. The second system has the model of the first one."""
    of_two = two["joined"]
    for tokens, one in zip((1, 1000), of_two, strict=True):
        one["tokens"] = tokens
        one["document_scores"] = {"base": [20.0, 22.0], "<other>": [25.0 - tokens / 1000] * 2}
        one["other_separators"] = {"base": [0.25, 0.5], "<other>": [0.125, 0.125]}
        del one["times"]
    two["joined"] = [{**of_two[0], "tokens": 128}, *of_two]
    for run in two["runs"]["<other>"]:
        run |= {"training_of": "base", "generate": "--beam 9"}
    texts_of_two = texts(two)
    web = texts_of_two["report.html"]
    joined, documents = (rows_of(web, table) for table in ("joined", "documents"))
    assert [*joined["base"]] == ["subwords a line, at most", "single", "1,000"] == [*documents["base"]]
    assert joined["base"]["1,000"] == "15.25 ± 0.35 (0.85)"
    assert [*documents] == ["<other>", "base"], "the system with the best sentences first, as in all tables"
    assert values(documents["base"]) == ["21.00 ± 1.41 (37.5%)"] * 2
    assert values(documents["<other>"]) == ["25.00 ± 0.00 (12.5%)", "24.00 ± 0.00 (12.5%)"]
    assert values(rows_of(web, "differences")["<other>"])[1] == "+0.50 (-0.25 to +1.25), p 0.125 (not significant)"
    assert values(rows_of(web, "systems")["<other>"])[:3] == ["training of base", "--beam 9", "fp32"]
    assert "in segments of up to 128 subwords" in web
    assert r"| \<other\> | 25.00 ± 0.00 (12.5%) | 24.00 ± 0.00 (12.5%) |" in texts_of_two["results.md"]
    figures = plots.plots(two)
    for axes, means in zip(figures["joined"].axes, ([30.5, 15.25], [21, 21]), strict=True):
        assert [label.get_text() for label in axes.get_xticklabels()] == ["single", "1,000"]
        bars = {one.get_label(): one for one in axes.containers}
        assert list(bars["base"].lines[0].get_ydata()) == means
    assert [line.get_label() for line in figures["losses"].axes[0].get_lines()][::2] == ["base"], "each training once"


def test_the_verdict_on_two_systems_reports_seeds_bootstrap_and_differences_between_trainings(two):
    assert page.verdict(two) == [
        "<other> differs from base by +0.50 sacreBLEU, the mean over 2 seeds (+2.00, -1.00; standard "
        "deviation 2.12). For these trainings, the difference is not significant (p 0.125), with a 95% interval from "
        "-0.25 to +1.25 over the test sentences.",
        # 5.0 at update 10 and 2.0 at 20: 3.2 at 16
        f"In the last fifth of the updates, the validation loss of every system fell by up to 1.20 {EARLY}",
    ]
    trained = [run["training"]["processes"] for _, run in all_runs(two)]
    trained[3][0]["batches"] = {"max_tokens": 32}
    trained[1].append({**trained[1][0], "hardware": {"gpus": ["H200"]}})
    assert page.verdict(two)[2:] == [
        "The trainings differ in hardware (gpus none; gpus H200), batches (max_tokens 64; max_tokens 32)."
    ]


def test_the_report_says_the_precision_of_each_system_and_that_they_differ(two):
    trained = [run["training"]["processes"] for _, run in all_runs(two)]
    for (process,) in trained[:2]:
        process["command"] += " --cpu"
    for (process,) in trained[2:]:
        process["batches"] |= {"precision": "bf16", "device": "the CPU"}
    trained[2][0]["command"] += " --bf16 "
    sentence = (
        "The precisions of the trainings differ: <other> in bf16; base in fp32. A difference between such runs can "
        "come from this alone."
    )
    assert page.verdict(two).count(sentence) == 1
    texts_of_two = texts(two)
    assert html.unescape(texts_of_two["report.html"]).count(sentence) == 1
    before_scores = texts_of_two["results.md"].partition("| system | seeds | sacreBLEU")[0]
    assert sentence.replace("<other>", r"\<other\>") in before_scores
    rows = rows_of(texts_of_two["report.html"], "systems")
    assert [row["trained in"] for row in rows.values()] == ["bf16 on the CPU", "fp32 on the CPU"]
    rows = [*csv.DictReader(texts_of_two["results.csv"].splitlines())]
    assert [row["trained_in"] for row in rows] == ["fp32 on the CPU"] * 2 + ["bf16 on the CPU"] * 2

    for (process,) in trained:
        process |= {"batches": {"precision": "fp32", "device": "the CPU"}, "command": "fairseq-train --cpu"}
    trained[1][0]["batches"]["device"] = "1 GPU"
    assert not [one for one in page.verdict(two) if one.startswith("The precisions")]
    rows = rows_of(texts(two)["report.html"], "systems")
    assert rows["base"]["trained in"] == "fp32 on the CPU; fp32 on 1 GPU"


def test_the_report_of_ten_systems_names_the_best_the_differences_and_the_missing_runs(ten):
    name = "transformer_system_{}".format
    assert page.verdict(ten) == [
        f"{name(9)} has the best result: sacreBLEU 30.90, +0.90 against {name(0)}.",
        f"The test does not show that {name(8)}, {name(6)}, {name(5)}, {name(4)}, {name(3)} and {name(2)} are worse.",
        f"{name(9)} (+0.90) is better than the baseline {name(0)}.",
        f"{name(1)} (-0.50) is worse than the baseline {name(0)}.",
        f"{name(8)} (+0.80), {name(6)} (+0.60), {name(5)} (+0.50), {name(4)} (+0.40), {name(3)} (+0.30) and "
        f"{name(2)} (+0.20) are indistinguishable from the baseline {name(0)}.",
        f"{name(7)} has no seed in common with the baseline.",
        f"{name(9)}, {name(8)}, {name(6)}, {name(5)} and {name(7)} have one seed: other seeds may differ.",
        f"{name(9)}, {name(8)}, {name(6)} and {name(5)} have fewer seeds than others: compare the differences, which "
        "are over the seeds that both systems have, and not the means.",
        "In the last fifth of the updates, the validation loss of "
        f"{', '.join(map(name, (9, 8, 6, 5, 4, 3, 2, 0)))} and {name(1)} fell by up to 0.76 {EARLY}",
        f"{name(6)}, seed 2 is missing: stage 7 (train) failed out of memory",
        "lost, seed 1 is missing: no node",
    ]
    texts_of_ten = texts(ten)
    assert all(sentence in html.unescape(texts_of_ten["report.html"]) for sentence in page.verdict(ten))
    scores = rows_of(texts_of_ten["report.html"], "scores")
    marks = ["9 †", "8 †", "6 †", "5 †", *"43201", "7 †"]
    assert values(scores[name("8 †")])[3] == "0.080 (not significant)" and values(scores[name(1)])[3] == "0.014"
    assert [*scores] == [name(mark) for mark in marks]
    columns = [row["compared with the best"] for row in scores.values()]
    assert columns[0] == "best" and columns[-1] == "no common seed"
    assert columns[1] == "indistinguishable (p 1.000)" and columns[6] == "indistinguishable (p 0.225)"
    assert columns[7:9] == ["worse (p 0.009)", "worse (p 0.045)"]
    assert values(scores[name("9 †")])[2:4] == ["+0.90 (+0.70 to +1.10)", "≤ 0.008"]
    assert values(scores[name("7 †")])[2:4] == ["no common seed", ""]
    assert values(scores[name(1)])[:2] == ["1, 2, 3", "30.10 ± 0.20"]
    assert len(rows_of(texts_of_ten["report.html"], "runs")) == 20
    # Better than the best system in the seeds that both have.
    ten["joined"][0]["against_best"][name(0)]["difference"] = 0.1
    assert f" and {name(0)} are worse." in page.verdict(ten)[1]
    worse = ten["joined"][0]["against_best"][name(1)]
    ten["joined"][0]["against_best"] = {system: worse for system in ten["systems"] if system != name(9)}
    assert page.verdict(ten)[1] == "The test shows that every other system is worse."
    # The others share no seed with the best system.
    ten["joined"][0]["against_best"] = {name(0): worse}
    assert page.verdict(ten)[1] == f"The test shows that {name(0)} is worse."
    ten["joined"][0]["against_best"] = {name(0): worse, name(1): worse}
    assert page.verdict(ten)[1] == f"The test shows that {name(0)} and {name(1)} are worse."


def test_the_markdown_has_the_tables_and_names_no_folder(two):
    two["runs"]["base"][0]["flags"] = "--a b|c"
    text = texts(two)["results.md"]
    parts = [part.strip().splitlines() for part in text.split("\n\n")]
    tables = [rows for rows in parts if rows and rows[0].startswith("| ")]
    assert len(tables) == 10
    for head, rule, *rows in tables:
        assert re.fullmatch(r"\|---\|(---:?\|)+", rule)
        cells = {len(re.split(r"(?<!\\)\|", row)) for row in (head, rule, *rows)}
        assert len(cells) == 1 and rows
    assert r"| \<other\> | 1, 2 | 31.00 ± 1.41 | +0.50 (-0.25 to +1.25) | 0.125 (not significant) | best |" in text
    assert "\n    python -m recipes.compare known --seeds 2 --data-dir=/c\n\n" in text and "/a/b" not in text
    assert "Trained with commit: c1; versions: torch 2.13.0; hardware: gpus none; batches: max" in text


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_values_that_are_missing_or_not_finite_are_named(two, value):
    run = two["runs"]["<other>"][0]
    run["training"]["losses"][-1] = value
    run["training"]["peak_memory_mib"] = run["parameters"] = None
    text = texts(two)["report.html"]
    row = rows_of(text, "costs")["<other>"]
    assert row["validation loss at the end"] == f"{value:.2f}, 4.00" and row["parameters"] == "not in the log"
    assert row["peak memory (MiB)"] == "1,232", "of the other seed"
    row = rows_of(text, "trainings")["<other>, seed 1"]
    assert row["validation loss, the last five"] == f"5.000, {value:.3f}" and row["peak memory (MiB)"] == "not noted"


@pytest.mark.parametrize(
    "scores, differences, expected",
    [
        ({"base": [30, 31], "rope": [31, 32]}, {"rope": 1.0}, ["rope", "base"]),
        ({"base": [30, 31], "rope": [29, 30]}, {"rope": -1.0}, ["base", "rope"]),
        # The third seed gives higher scores: the mean of "rope" is the highest, its difference is not.
        ({"base": [30, 30], "rope": [30.41, 30.41, 33], "alibi": [30.51] * 2}, {"rope": 0.41, "alibi": 0.51},
         ["alibi", "rope", "base"]),
        ({"base": [30], "apart": [40], "other": [41], "rope": [20]}, {"rope": -10}, ["base", "rope", "other", "apart"]),
        ({"one": [30], "two": [40]}, {}, ["two", "one"]),  # the baseline has no finished run
    ],
)  # fmt: skip
def test_systems_are_in_the_order_of_their_differences_over_common_seeds(scores, differences, expected):
    against = {system: {"difference": difference} for system, difference in differences.items()}
    assert in_order(scores, "base", against) == expected


@pytest.mark.parametrize(
    "scores, losses, sentences",
    [
        ([4.9, 4.8], [5.0, 5.0], [f"No system reaches 5 sacreBLEU. {EARLY[14:]}"]),
        ([5.1, 4.8], [5.0, 4.8], []),  # 4.88 at update 16: it fell by 0.08
        ([5.1, 4.8], [5.0, 4.7],
         [f"In the last fifth of the updates, the validation loss of every system fell by up to 0.12 {EARLY}"]),
        ([5.1, 4.8], [math.nan, 4.7], []),
    ],
)  # fmt: skip
def test_the_verdict_says_that_it_is_early(scores, losses, sentences):
    of_systems, against = {"base": {1: scores[0]}, "other": {1: scores[1]}}, (-0.1, -0.2, 0.1, 0.5)
    results = made_up(of_systems, {"other": (*against, 0.5)}, by_seed={"other": {1: against}})
    for _, run in all_runs(results):
        run["training"]["losses"] = losses
    assert page.verdict(results)[1:] == sentences


def test_the_page_says_nothing_twice_and_has_blanks_between_sentences(two):
    """These results have every paragraph: they are early, in two precisions, and have patience, documents and more."""
    for process, flag in zip((run["training"]["processes"][0] for _, run in all_runs(two)), ("", "", *["--bf16"] * 2)):
        process |= {"command": f"fairseq-train {flag} ", "hardware": {"gpus": [flag]}}
    for _, run in all_runs(two):
        run["patience"] = 3
        run["training"]["losses"] = [5.0, 4.0]
    two["joined"][0]["scores"] = {"base": [3.0, 3.0], "<other>": [3.5, 3.0]}
    two["failed"] = {"base, seed 3": "stopped"}
    two["scorers"] = {"words": {**two["joined"][0], "command": "c", "lower_is_better": False}}
    two["scorers"]["words"]["seeds"] = {"base": [1, 2], "<other>": [1, 2]}
    early = page.verdict(two)[2]
    assert early.startswith("No system reaches 5 sacreBLEU. Trainings of ") and early.endswith(EARLY[14:])
    for documents in (False, True):
        for one in two["joined"] if documents else ():
            one["tokens"] = one.pop("times")
            one["document_scores"] = one["scores"]
            one["other_separators"] = one["length_ratio"]
        for text in (texts(two)["report.html"].partition("</style>")[2], texts(two)["results.md"]):
            assert not re.findall(r"[a-z)][.:,;][A-Z][a-z].*", text)
            words = re.sub(r"<h2>How to reproduce.*|<table.*?</table>", "", html.unescape(text), flags=re.DOTALL)
            prose = re.sub(r"^\|.*", "", re.sub("</?(?!/?strong)[^>]*>", "", words), flags=re.MULTILINE)
            sentences = [" ".join(one.split()) for one in re.split(r"(?<=[.:])\s+(?=[A-Z])|\n\n", prose)]
            assert [one for one in {*sentences} if one and sentences.count(one) > 1] == []


def test_markdown_shows_what_logs_contain_as_it_is(two):
    logged = "stage 7: <b>*a* _b_ `c` [d](e) | # &amp; ~x~ \\ a_b\n\n# head"
    two["failed"] = {"base, seed 3": logged}
    two["runs"]["base"][0]["flags"] = logged
    text = texts(two)["results.md"]
    escaped = r"stage 7: \<b\>\*a\* \_b\_ \`c\` \[d\](e) \| \# \&amp; \~x\~ \\ a_b \# head"
    assert f"\nbase, seed 3 is missing: {escaped}\n" in text and f"| {escaped} |" in text


def test_the_numbers_are_in_a_csv_file(two):
    other = next(row for row in csv.DictReader(texts(two)["results.csv"].splitlines()) if row["system"] == "<other>")
    run = two["runs"]["<other>"][0]
    assert (other["seed"], other["flags"], other["parameters"]) == ("1", "--flag <other>", "1234567")
    expected = {"sacreBLEU": 32, "TER": 68, "validation_loss": 2, "sacreBLEU, 11-20 words": 31, "minutes": 2}
    expected |= {"lowest_validation_loss": 2, "update_of_lowest_validation_loss": 20}
    expected |= {"sacreBLEU, 2 sentences a line": 16, "updates": 20, "tokens_per_second": 1000, "peak_memory_mib": 1231}
    assert {key: float(other[key]) for key in expected} == expected and run["seed"] == 1
    rows = [row for row in csv.DictReader(texts(two)["results.csv"].splitlines()) if row["system"] == "<other>"]
    of_each_seed = two["joined"][1]["scores"]["<other>"]
    assert [float(row["sacreBLEU, 2 sentences a line"]) for row in rows] == of_each_seed and len({*of_each_seed}) == 2


def test_the_main_table_is_in_a_latex_file(two):
    two = json.loads(json.dumps(two).replace('"base"', '"a_b"'))
    del two["runs"]["a_b"][1], two["joined"][0]["scores"]["a_b"][1]
    two["joined"][0]["against_best"]["a_b"] |= {"p_value": LEAST, "p_holm": 0.001}
    first, begin, *lines, end = texts(two)["scores.tex"].splitlines()
    assert (first, begin, end) == (r"% \usepackage{booktabs}", r"\begin{tabular}{lrrrrl}", r"\end{tabular}")
    assert [lines[0], lines[2], lines[-1]] == [r"\toprule", r"\midrule", r"\bottomrule"]
    cells = [line.removesuffix(r" \\").split(" & ") for line in (lines[1], *lines[3:-1])]
    assert cells[0][3] == r"difference to a\_b (95\%)"
    rest = [r"31.00 $\pm$ 1.41", "+0.50 ($-$0.25 to +1.25)", "0.125 (not significant)", "best"]
    assert cells[1] == [r"\textless{}other\textgreater{}", "1, 2", *rest]
    assert cells[2] == [r"a\_b $^\dagger$", "1", "30.00", "the baseline", "", r"worse (p $\leq$ 0.001)"]


# -- plots -----------------------------------------------------------------------------------------


def test_plots_have_every_training_and_no_small_bucket(two):
    figures = plots.plots(two)
    by_updates, by_time = figures["losses"].axes
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in by_updates.get_lines()]
    assert ([10, 20], [5.0, 4.0]) in lines and ([10, 20], [5.0, 2.0]) in lines and len(lines) == 4
    assert ([1.0, 2.0], [5.0, 3.0]) in [(list(one.get_xdata()), list(one.get_ydata())) for one in by_time.lines]
    (lengths,), (joined,) = figures["lengths"].axes, figures["joined"].axes
    assert [label.get_text() for label in lengths.get_xticklabels()] == ["0-10\n(30)"]
    bars = {one.get_label(): one for one in joined.containers}
    for system, means, deviations in (
        ("base", [30.5, 15.25], [1 / 2**0.5, 0.5 / 2**0.5]),  # of 30 and 31, and of halves of them
        ("<other>", [31.0, 15.5], [2**0.5, 2**0.5 / 2]),
    ):
        assert list(bars[system].lines[0].get_ydata()) == means
        ends = [sorted(point[1] for point in segment) for segment in bars[system].lines[2][0].get_segments()]
        expected = zip(means, deviations, strict=True)
        assert ends == [pytest.approx([mean - deviation, mean + deviation]) for mean, deviation in expected]
    assert joined.get_ylabel() == lengths.get_ylabel() == "sacreBLEU (mean ± SD over seeds)"
    assert by_updates.get_ylabel() == by_time.get_ylabel() == "label-smoothed validation loss (bits a token)"
    assert [line.get_markevery()[-1] for line in by_updates.get_lines()] == [1] * 4, "the end of each line has a marker"


def test_the_plot_of_scores_has_a_row_for_each_difference_in_the_order_of_the_table(ten):
    (axes,) = plots.plots(ten)["scores"].axes
    against = ten["joined"][0]["against_baseline"]
    best_first = sorted(against, key=lambda name: -against[name]["difference"])
    names = [f"{name} †" if len(ten["runs"][name]) == 1 else name for name in best_first]
    assert [label.get_text() for label in axes.get_yticklabels()] == names
    bars = [one.lines[2][0].get_segments()[0].tolist() for one in axes.containers]
    ends = [[[against[name][end], row] for end in ("low", "high")] for row, name in enumerate(best_first)]
    assert bars == ends
    points = [one.lines[0].get_xdata()[0] for one in axes.containers]
    assert points == [against[name]["difference"] for name in best_first]
    top, bottom = axes.transData.transform([(0, 0), (0, len(names) - 1)])[:, 1]
    assert top > bottom, "the best system is at the top"
    assert axes.get_xlabel() == f"sacreBLEU minus that of {ten['baseline']} (95% intervals)"


def test_the_plot_of_scores_has_one_order_and_one_scale_in_all_panels():
    rows = {"A": [Difference("a", 2, 1, 3), Difference("b", 1, 0, 2)], "B": [Difference("b", 4, 3, 5)]}
    left, right = forest(rows, "base").axes
    assert [(one.lines[0].get_xdata()[0], one.lines[0].get_ydata()[0]) for one in right.containers] == [(4, 1)]
    assert left.get_ylim() == right.get_ylim() == (1.5, -0.5)
    assert left.get_xlim() == right.get_xlim(), "the same difference is as long in each"
    assert (left.get_title(), right.get_title()) == ("A", "B")
    assert forest({"": []}, "base").axes[0].get_yticklabels() == [], "a comparison of one system"


def test_each_of_many_systems_has_its_own_look_in_all_plots(ten):
    ten["systems"] = [*ten["systems"], *map(str, range(20))]
    looks = [plots.style(ten["systems"], system) for system in ten["systems"]]
    assert len({(look["color"], look["linestyle"]) for look in looks[:28]}) == 28
    assert len({tuple(look.values()) for look in looks}) == 30


@pytest.mark.parametrize("length", [0, 30])
def test_the_legend_names_every_system_and_overlaps_nothing(ten, length):
    longer = {name: f"{name}{'_long' * (length // 5)}" for name in ten["systems"]}
    ten = json.loads(re.sub("|".join(longer), lambda match: longer[match.group()], json.dumps(ten)))
    for name, figure in plots.plots(ten).items():
        if name == "scores":  # names are at its axis
            continue
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        (legend,) = figure.legends
        names = [f"{system} †" if len(runs) == 1 else system for system, runs in sorted(ten["runs"].items())]
        assert sorted(text.get_text() for text in legend.get_texts()) == names
        assert not any(axes.get_legend() for axes in figure.axes)
        box = legend.get_window_extent()
        assert figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 and figure.bbox.y0 <= box.y0, name
        drawn = [axes.get_tightbbox(canvas.get_renderer()) for axes in figure.axes]  # with ticks and labels
        assert not any(box.overlaps(axes) for axes in drawn), name
        assert not any(one.overlaps(other) for n, one in enumerate(drawn) for other in drawn[:n]), name
        assert all(axes.get_window_extent().height > 200 for axes in figure.axes), name


# -- drawn again -----------------------------------------------------------------------------------


def test_the_page_is_drawn_again_from_its_results(two, tmp_path):
    two["runs"]["base"][0]["training"]["tokens_per_second"] = math.nan
    (tmp_path / "results.json").write_text(json.dumps(stage15_report._finite(two)))
    page.main([str(tmp_path / "results.json"), "--output", str(tmp_path / "elsewhere")])
    expected = page.files(two)
    folder = tmp_path / "elsewhere"
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == expected
    assert [*expected] == [*page.TEXTS, *page.IMAGES]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "results.json"]
    command = [sys.executable, "-m", "recipes.compare.page", str(tmp_path / "results.json")]
    subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, check=True, timeout=LIMIT)
    assert (tmp_path / "report.html").read_bytes() == expected["report.html"]
    assert all((tmp_path / name).read_bytes() == expected[name] for name in page.IMAGES), "the same files each time"


def test_all_files_of_a_report_are_written_or_none(two, tmp_path):
    before = {name: f"old {name}".encode() for name in ("a.svg", "b.pdf")}
    page.write(tmp_path, before)
    with pytest.raises(TypeError):
        page.write(tmp_path, {"a.svg": b"new", "b.pdf": None})
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "No such file or directory$"),
        ("cut off", "it is not JSON"),
        ("[1, 2]", "it lacks recipe, baseline"),
        ('{"recipe": "demo", "systems": [], "command": ""}', "it lacks baseline, runs, failed, settings"),
        # Reports without "sizes" have other intervals than the page explains.
        (json.dumps(dict.fromkeys(key for key in KEYS if key != "sizes")), "earlier version: it lacks sizes$"),
        (json.dumps({**dict.fromkeys(KEYS), "runs": {"a": [{}]}}), "its runs cannot be read"),
        (json.dumps({**dict.fromkeys(KEYS, {}), "joined": []}), "IndexError"),
    ],
)
def test_a_file_without_results_is_refused_in_one_sentence(tmp_path, content, message):
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match=f"^recipes.compare.page: {path}: .*{message}"):
        page.main([str(path)])
    assert not (tmp_path / "report.html").exists()


def test_a_folder_that_cannot_be_written_is_refused_in_one_sentence(two, tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps(stage15_report._finite(two)))
    with pytest.raises(SystemExit, match=f"^recipes.compare.page: {path}.*: .*exists|Not a directory"):
        page.main([str(path), "--output", str(path)])


def test_a_run_whose_losses_are_all_undefined_is_drawn(two):
    two["runs"]["base"][0]["training"]["losses"] = [math.nan, math.nan]
    assert plots.rendered(plots.plots(two)["losses"], "png")


# -- several comparisons side by side --------------------------------------------------------------


def test_comparisons_are_drawn_side_by_side(two, tmp_path):
    other = made_up({"<other>": {1: 12.0}, "third": {1: 10.0}}, {"third": (-2.0, -3.0, -1.0, LEAST, LEAST)})
    other["joined"] = [{**one, "tokens": 64 * n} for n, one in enumerate(other["joined"])]
    for one in other["joined"]:
        one["document_scores"] = {"<other>": [7.0], "third": [6.5]}
    left, right = plots.beside({"a": two, "b": other}).axes
    assert (left.get_title(), right.get_title()) == ("a", "b")
    assert left.get_ylim() == right.get_ylim() and left.get_ylim()[0] == 0
    labels = [(axes.get_xlabel(), axes.get_ylabel()) for axes in (left, right)]
    assert labels == [
        ("sentences a line", "sacreBLEU (mean ± SD over seeds)"),
        ("subwords a line, at most", "sacreBLEU of documents (mean ± SD over seeds)"),
    ]
    drawn = [{one.get_label(): one.lines[0] for one in axes.containers} for axes in (left, right)]
    assert list(drawn[0]["base"].get_ydata()) == [30.5, 15.25]
    assert list(drawn[1]["third"].get_ydata()) == [6.5]
    assert drawn[0]["<other>"].get_color() == drawn[1]["<other>"].get_color()
    assert len({line.get_color() for of in drawn for line in of.values()}) == 3
    (legend,) = left.figure.legends
    assert sorted(text.get_text() for text in legend.get_texts()) == ["<other>", "base", "third"]

    for name, results in (("a", two), ("b", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(stage15_report._finite(results)))
    named = [f"{name}={tmp_path / name}.json" for name in ("a", "b")]
    for number in (1, 2):
        plots.main([*named, "--output", str(tmp_path / f"{number}.svg")])
    assert (tmp_path / "1.svg").read_bytes() == (tmp_path / "2.svg").read_bytes()
    assert "third" in (tmp_path / "1.svg").read_text()


@pytest.mark.parametrize(
    "words, message",
    [
        (["a=results.json", "--output", "x.doc"], "--output x.doc: must end with .svg, .png, .pdf"),
        (["results.json", "--output", "x.svg"], "results.json: must be TITLE=FILE, and no title may occur twice"),
        (["a=1", "a=2", "--output", "x.svg"], "a=1: must be TITLE=FILE, and no title may occur twice"),
    ],
)
def test_wrong_arguments_of_the_plot_are_refused_by_name(capsys, words, message):
    assert message in usage_error(capsys, plots.main, words)


@pytest.mark.parametrize("content", [None, json.dumps({**dict.fromkeys(KEYS, {}), "joined": []})])
def test_the_plot_refuses_files_without_results_in_one_sentence(tmp_path, content):
    path = tmp_path / "results.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match=f"^recipes.compare.plots: .*{path}.*: (No such|is not the results.json)"):
        plots.main([f"a={path}", "--output", str(tmp_path / "x.svg")])
    assert not (tmp_path / "x.svg").exists()


# -- in a browser ----------------------------------------------------------------------------------

PROBE = """<script>onload = () => {
    const shown = frames[0].document;
    const tables = [...shown.querySelectorAll("table")].map(table => {
        const wide = table.parentElement, inside = wide.clientWidth, first = table.querySelector("td");
        wide.scrollLeft = 100000;
        const edges = [wide, first].map(one => Math.round(one.getBoundingClientRect().left));
        return {id: table.id, overflow: getComputedStyle(wide).overflowX, wider: wide.scrollWidth > inside,
            scrolled: wide.scrollLeft, inside, edges, first: first.offsetWidth};
    });
    const sizes = [...shown.images].map(i => i.complete ? i.naturalWidth * i.naturalHeight : 0);
    const page = [shown.documentElement.scrollWidth, frames[0].innerWidth];
    document.title = JSON.stringify({sizes, tables, page, cells: shown.querySelectorAll("td").length});
}</script>"""


@pytest.mark.parametrize("systems", ["two", "ten"])
def test_a_browser_shows_the_page_its_plots_and_tables_that_scroll(systems, request, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium, chromium-browser or google-chrome is on the PATH to look at the page with")
    results = request.getfixturevalue(systems)
    for system, run in all_runs(results):  # cells as long as those of real trainings
        run["training"] |= {"losses": [5.1234] * 6, "updates": [*range(10_001, 10_007)], "seconds": [60_000.0] * 6}
        run["training"]["processes"][0]["commit"] = "0123456789ab-dirty"
        against = {"difference": -1.25, "low": -2.5, "high": 0.125, "p_value": 0.125}
        results["joined"][0]["by_seed"].setdefault(system, []).append({"seed": run["seed"], **against})
    source = html.escape(page.files(results)["report.html"].decode())
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking".split()
    flags += "--disable-component-update --disable-sync --virtual-time-budget=5000 --window-size=1400,900".split()
    flags.append(f"--user-data-dir={tmp_path / 'profile'}")
    path = tmp_path / "report.html"
    for width in (1100, 375):  # a window cannot be as narrow as a phone, but a frame can
        path.write_text(f'{PROBE}<iframe width="{width}" height="800" frameborder="0" srcdoc="{source}"></iframe>')
        command = [browser, *flags, "--dump-dom", path.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT).stdout
        title = re.search("<title>(.*?)</title>", shown, re.DOTALL)
        assert title is not None, shown[:1000]
        measured = json.loads(title.group(1))
        of_scores, *others = measured["sizes"]  # a row for each system
        assert of_scores > 50_000 and len(others) == 3 and min(others) > 100_000, width
        scroll_width, inner_width = measured["page"]
        assert inner_width == width and scroll_width <= width, "only the tables scroll"
        assert len(measured["tables"]) == 10 and measured["cells"] > 50
        for table in measured["tables"]:
            assert table["overflow"] == "auto"
            assert (table["scrolled"] > 0) == table["wider"], table
            assert table["edges"][0] == table["edges"][1], f"the name of the system stays visible: {table}"
            assert table["first"] < 0.6 * table["inside"] or not table["wider"], table
        wider = {table["id"] for table in measured["tables"] if table["wider"]}
        assert (not wider) if width > 375 else {"scores", "runs", "trainings", "differences"} <= wider
