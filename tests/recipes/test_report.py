"""recipes/report: the statistics, the tables and the files of a comparison, beside plain computations of them."""

import csv
import html
import json
import math
import random
import re
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import sacrebleu

from fairseq_rope.errors import InputError
from fairseq_rope.metrics import SOURCE_WORDS, score_sentences
from fairseq_rope.tools.score import Sentences, build_report
from recipes.report import contents, page, plots
from recipes.report.comparison import compared, in_order
from recipes.report.history import read_history
from recipes.report.results import results_of
from recipes.report.sentences import sentences_on
from recipes.report.significance import corpus_bleu, draw, holm, paired_test, scores_of_draws, statistics

WORDS = "the a dog cat sees takes red blue big old house book".split()


def corpus(seed, sentences, wrong):
    """References, and hypotheses in which a fraction *wrong* of the words is replaced."""
    draw = np.random.default_rng(seed)
    references = [list(draw.choice(WORDS, draw.integers(5, 15))) for _ in range(sentences)]
    hypotheses = [[draw.choice(WORDS) if draw.random() < wrong else word for word in words] for words in references]
    return [" ".join(sentence) for sentence in references], [" ".join(sentence) for sentence in hypotheses]


def test_statistics_add_up_to_the_corpus():
    references, hypotheses = corpus(1, 30, 0.3)
    hypotheses[3] = ""
    unlike = ["the zebra a zebra dog zebra cat zebra"] * 30  # unigrams match, but no longer n-grams
    for hyps in (hypotheses, unlike, ["the dog"] * 30, [""] * 30):
        for expected in ([references], [references, hypotheses[::-1]]):
            bleu = corpus_bleu(statistics(hyps, *expected).sum(axis=0))
            assert bleu == pytest.approx(sacrebleu.corpus_bleu(hyps, expected).score)


def test_the_test_over_sentences_draws_them_with_all_their_seeds():
    references, first = corpus(2, 20, 0.4)
    systems = [[first, corpus(2, 20, 0.3)[1]], [corpus(2, 20, 0.2)[1], corpus(2, 20, 0.25)[1]]]
    drawn = draw(20, resamples=40)
    of_each = [[scores_of_draws(statistics(seed, references), drawn) for seed in seeds] for seeds in systems]

    def differences(chosen):
        drawn = [references[n] for n in chosen]
        scores = [[sacrebleu.corpus_bleu([h[n] for n in chosen], [drawn]).score for h in seeds] for seeds in systems]
        return np.subtract(*scores[::-1])

    resampled = [differences(chosen) for chosen in np.random.default_rng(12345).integers(20, size=(40, 20))]
    for seeds in (1, 2):
        result = paired_test(*(scores[:seeds] for scores in of_each))
        measured = differences(range(20))[:seeds]
        assert result["difference"] == pytest.approx(np.mean(measured))
        assert result["p_value"] == pytest.approx(p_of(measured, [np.mean(one[:seeds]) for one in resampled]))


def p_of(differences, resampled):
    """The larger p of two tests of the *differences* of one or two seeds, from the formulas of their distributions."""
    difference = abs(np.mean(differences))
    over_sentences = math.erfc(difference / np.std(resampled) / math.sqrt(2))
    if len(differences) == 1:
        return over_sentences
    error = abs(differences[0] - differences[1]) / 2
    return max(over_sentences, 1 - 2 / math.pi * math.atan2(difference, error))  # with two seeds, t is Cauchy's


def test_the_test_over_seeds_is_students():
    rope, alibi = ([np.full(11, score) for score in scores] for scores in ((2.39, 1.46, 0.66), (1.22, 1.26, 0.42)))
    result = paired_test(alibi, rope)
    error = np.std([1.17, 0.20, 0.24], ddof=1) / math.sqrt(3)
    assert result["p_value"] == pytest.approx(0.232, abs=1e-3)
    assert result["high"] == pytest.approx(1.61 / 3 + 4.3027 * error, abs=1e-3)  # from a table of t
    assert paired_test(rope, rope) == {"difference": 0, "low": 0, "high": 0, "p_value": 1}


@pytest.mark.parametrize("lines", [500, 1000])
@pytest.mark.parametrize("seeds, least, most", [(1, 0.2, 0.5), (2, 0.01, 0.06), (3, 0.01, 0.06)])
def test_equal_systems_whose_trainings_differ_are_seldom_called_different(seeds, least, most, lines):
    """The noise is that of Multi30k, in sacreBLEU: 0.7 between trainings, and 10.8 between sentences."""
    made, drawn, significant = np.random.default_rng(1), draw(lines, 200) / lines, 0
    for _ in range(1000):
        scores = drawn @ made.normal(0, 10.8, (lines, 2 * seeds)) + made.normal(0, 0.7, 2 * seeds)
        significant += paired_test(scores.T[:seeds], scores.T[seeds:])["p_value"] <= 0.05
    assert least <= significant / 1000 <= most


@pytest.mark.parametrize("seeds", [1, 2, 3])
def test_an_interval_contains_0_exactly_if_its_p_is_above_0_05(seeds):
    made, significant = np.random.default_rng(3), []
    for _ in range(200):
        of = paired_test(np.zeros((seeds, 41)), made.normal(size=(seeds, 41)) + made.normal(scale=5))
        significant.append(of["p_value"] <= 0.05)
        assert significant[-1] != (of["low"] <= 0 <= of["high"]), of
    assert 20 < sum(significant) < 180


def test_holm_corrects_as_in_worked_examples():
    # The example of Wikipedia's article: at 0.05, the first and the last hypothesis are rejected.
    corrected = holm([0.01, 0.04, 0.03, 0.005])
    assert [p <= 0.05 for p in corrected] == [True, False, False, True]
    # By hand: 3 * 0.01; 1 * 0.04, raised to the 0.06 of the one before it; 2 * 0.03; 4 * 0.005.
    assert corrected == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([0.3]) == [0.3] and holm([]) == []


def test_systems_are_compared_over_the_seeds_that_both_have():
    seeds = {"a": (1, 2), "b": (2, 3), "c": (4,), "d": (1, 2)}  # c shares no seed with the baseline, so it is not best
    made = np.random.default_rng(1)
    draws = {system: {seed: made.normal(30, 1, 101) for seed in own} for system, own in seeds.items()}
    draws["c"][4] += 20
    result = compared("a", draws)
    against, of = result["against_baseline"], lambda system, *seeds: [draws[system][seed] for seed in seeds]
    for system, common in (("b", (2,)), ("d", (1, 2))):
        expected = {"seeds": [*common], **paired_test(of("a", *common), of(system, *common))}
        assert expected.items() <= against[system].items()
    assert [one["p_holm"] for one in against.values()] == holm([one["p_value"] for one in against.values()])
    assert result["best"] in "abd" and [*against] == ["b", "d"] and result["scores"]["c"] == {4: draws["c"][4][0]}


@pytest.mark.parametrize(
    "scores, differences, expected",
    [
        ({"base": [30, 31], "rope": [31, 32]}, {"rope": 1.0}, ["rope", "base"]),
        # The third seed gives higher scores: the mean of "rope" is the highest, its difference is not.
        ({"base": [30, 30], "rope": [30.41, 30.41, 33], "alibi": [30.51] * 2}, {"rope": 0.41, "alibi": 0.51},
         ["alibi", "rope", "base"]),
        ({"base": [30], "apart": [40], "other": [41], "rope": [20]}, {"rope": -10}, ["base", "rope", "other", "apart"]),
    ],
)  # fmt: skip
def test_systems_are_in_the_order_of_their_differences_over_common_seeds(scores, differences, expected):
    by_seed = {system: dict(enumerate(over_seeds)) for system, over_seeds in scores.items()}
    against = {system: {"difference": difference} for system, difference in differences.items()}
    assert in_order(by_seed, "base", against) == expected


def history(folder, *entries):
    """A folder whose log has the *entries*."""
    with (folder / "log").open("a") as log:
        log.writelines(entry if isinstance(entry, str) else json.dumps(entry) + "\n" for entry in entries)
    return folder


def valid(updates, loss):
    return {"valid_loss": str(loss), "valid_num_updates": str(updates), "epoch": updates // 10}


def train(updates, wall, speed=100):
    entry = {"train_loss": "9", "train_num_updates": updates, "train_wall": wall, "train_wps": speed}
    return {key: str(value) for key, value in entry.items()}


def test_the_later_of_two_trainings_of_an_epoch_counts_up_to_the_last_update(tmp_path):
    path = history(
        tmp_path,
        *(valid(10, 8.0), train(10, 60, 90), valid(20, 7.5), train(20, 120, 110)),
        '{"valid_loss": "7.1", "valid_num',  # killed here
        "\n",
        {"peak_memory_mib": 900},
        {"process": {"commit": "b"}},
        "5\n",
        {"process": {"commit": "c"}},
        *(valid(20, 7.4), train(20, 40, 100), valid(30, 7.0), train(30, 110, 300)),
        {"peak_memory_mib": 800},
        {"process": {"commit": "d"}},  # a longer training goes on
        *(valid(40, math.nan), train(40, 60, 1)),
        {"peak_memory_mib": 1000},
    )
    training = read_history(path, 30)
    assert training["validated_at"] == [10, 20, 30] and training["losses"] == [8.0, 7.4, 7.0]
    assert training["seconds"] == [60, 100, 170] and training["tokens_per_second"] == 100
    assert training["processes"] == [{"commit": "c"}] and training["peak_memory_mib"] == 900
    longer = read_history(path, 40)
    assert longer["losses"] == [8.0, 7.4, 7.0, None] and longer["seconds"][-1] == 230
    assert longer["processes"] == [{"commit": "c"}, {"commit": "d"}] and longer["peak_memory_mib"] == 1000


@pytest.mark.parametrize(
    "entries, seconds",
    [
        # The next process starts at 0, even if its first epoch took longer.
        ([{"process": {}}, valid(10, 8.0), train(10, 60), {"process": {}}, valid(20, 7.0), train(20, 90)], [60, 150]),
        # Validations within an epoch are interpolated.
        ([valid(5, 9.0), valid(10, 8.0), train(20, 100), valid(30, 7.0), train(40, 300)], [25, 50, 200]),
        # fairseq's log has six digits: the last update was 1,234,567.
        ([{**valid(10, 9.0), "valid_num_updates": "1.23457e+06"},
          {**train(10, 7), "train_num_updates": "1.23457e+06"}], [7]),
    ],
)  # fmt: skip
def test_seconds_count_from_the_start_of_the_training(tmp_path, entries, seconds):
    assert read_history(history(tmp_path, *entries), 1_234_567)["seconds"] == seconds


@pytest.mark.parametrize("entries", [[], [train(10, 60)], [valid(10, 8.0)]])
def test_a_history_without_a_curve_is_refused(tmp_path, entries):
    with pytest.raises(InputError, match="/log"):
        read_history(history(tmp_path, *entries), 99)


SEEDS = {"base": (1, 2), "<other>": (1, 2), "third": (2,)}
PROCESS = {
    "commit": "0123abc", "versions": {"torch": "2.13.0"}, "hardware": {"gpus": []}, "command": "fairseq-train <&>",
    "batches": {"device": "the CPU", "precision": "fp32", "max_tokens": 64},
}  # fmt: skip
SETS = {"news": 50, "long": 12}  # lines


def write(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row}\n" for row in rows))
    return path


def lines(path):
    return path.read_text().splitlines()


def unlike(line):  # the score of a sentence by a made-up program
    return float(len(set(line.split())))


def make_contents(folder):
    """A report of three systems on two test sets; the second one has two references."""
    draw, sets = random.Random(4), []
    for name, count in SETS.items():
        source = [" ".join(draw.choices(WORDS, k=draw.randint(4, 13))) for _ in range(count)]
        references = [source, [" ".join(line.split()[1:]) for line in source]][: len(sets) + 1]
        paths = [write(folder / f"{name}.{n}.de", texts) for n, texts in enumerate(references)]
        sets.append(contents.TestSet(name, write(folder / f"{name}.en", source), tuple(paths)))
    right = enumerate(SEEDS.items(), 2)
    runs = {one: [make_run(folder, draw, one, seed, n, sets) for seed in seeds] for n, (one, seeds) in right}
    first = contents.Sweep("learning_rate", {"1e-3": 2.0, "2e-3": 2.125, "4e-3": None}, "1e-3")
    middle = contents.Sweep("learning_rate", {"1e-3": 2.5, "2e-3": 2.25, "4e-3": 3.0}, "2e-3")
    return contents.Contents(
        recipe="known", command="python -m recipes known systems=a.yaml", settings={"beam": 4, "width": 8}, runs=runs,
        definitions={system: {"arch": f"arch_{system}"} for system in SEEDS} | {"third": {"arch": "x|y", "beam": 9}},
        test_sets=sets, train_sources=write(folder / "train.en", ["a b", "w " * 12]), tokenize="13a",
        sweeps={"<other>": first, "base": middle}, missing={"third, seed 1": "train failed\nout of <memory>"},
    )  # fmt: skip


def make_run(folder, draw, system, seed, right, sets):
    """A finished run of *system*. Its words are those of the references with the odds of *right* to 1."""
    training, paths = folder / f"train-{system}-seed{seed}", ({}, {}, {})
    write(training / "log", ["num. shared model params: 12,345 (num. trained: 12,345)"])
    curve = [valid(10, 8.0), train(10, 60), valid(20, 7 - seed / 8), train(20, 60 + 60 * seed)]
    history(training, {"process": PROCESS}, *curve, {"peak_memory_mib": 700 + seed})
    for one in sets:
        references, source = [lines(path) for path in one.references], lines(one.source)
        hypotheses = [" ".join(draw.choice([*[word] * right, "the"]) for word in line.split()) for line in source]
        texts = [Sentences("", text) for text in references]
        report = build_report({system: Sentences("", hypotheses)}, texts, "de", "13a", source)
        report["systems"][0]["metrics"] += [
            {**row, "name": "unlike", "signature": "unlike {hypothesis}", "what": "the mean: lower is better"}
            for row in score_sentences([[*map(unlike, hypotheses)]])
        ]
        printed = [f"S-{n}\t{line}\nH-{n}\t-0.5\t{line}" for n, line in enumerate(source)]
        for kind, rows in enumerate((hypotheses, [json.dumps(report)], printed)):
            paths[kind][one.name] = write(training / f"{one.name}.{kind}", rows)
    settings = {"beam": 9 if system == "third" else 4, "width": 8, "patience": 3}
    return contents.FinishedRun(system, seed, settings, training, 20, 2, *paths)


@pytest.fixture(scope="module")
def known(tmp_path_factory):
    """The contents of a report, the folder that has it, and its numbers. Tests must not change them."""
    folder = tmp_path_factory.mktemp("report")
    made = make_contents(folder / "work")
    page.write(folder, made)
    return made, folder, results_of(made)


def test_all_scores_are_sacrebleus(known):
    made, _, results = known
    assert results["longest_in_training"] == 12
    for one, test_set in zip(results["test_sets"], made.test_sets, strict=True):
        references, source = [lines(path) for path in test_set.references], lines(test_set.source)
        sizes = [len(line.split()) for line in source]
        assert one["lines"] == len(source) and one["subwords a line"] == pytest.approx(np.mean(sizes))
        assert one["lines longer than in training"] == sizes.count(13) > 0
        for run in (run for runs in made.runs.values() for run in runs):
            hypotheses = lines(run.hypotheses[test_set.name])
            bleu = sacrebleu.corpus_bleu(hypotheses, references)
            metrics = {**one["metrics"], **one["scorers"]}.items()
            actual = {name: metric["scores"][run.system][run.seed] for name, metric in metrics}
            assert actual["unlike"] == pytest.approx(np.mean([*map(unlike, hypotheses)]))
            assert one["sacreBLEU"]["scores"][run.system][run.seed] == pytest.approx(bleu.score)
            assert one["length_ratios"][run.system][run.seed] == pytest.approx(bleu.sys_len / bleu.ref_len)
            assert actual["chrF2++"] == sacrebleu.corpus_chrf(hypotheses, references, word_order=2).score
            assert actual["TER"] == sacrebleu.corpus_ter(hypotheses, references).score
            for words, bucket in one["by_length"].items():
                chosen = [n for n, size in enumerate(sizes) if size in SOURCE_WORDS[words]]
                texts = [[text[n] for n in chosen] for text in (hypotheses, *references)]
                assert bucket["sentences"] == len(chosen)
                expected = sacrebleu.corpus_bleu(texts[0], texts[1:]).score
                assert bucket["scores"][run.system][run.seed] == pytest.approx(expected)


def test_the_scores_of_a_program_have_the_test_of_bleu(known):
    made, _, results = known
    one = results["test_sets"][0]["scorers"]["unlike"]
    base, other = (
        np.array([[*map(unlike, lines(run.hypotheses["news"]))] for run in made.runs[system]])
        for system in ("base", "<other>")
    )
    differences, against = other - base, one["against_baseline"]["<other>"]
    draws = np.random.default_rng(12345).integers(50, size=(1000, 50))
    assert against["difference"] == pytest.approx(differences.mean()) and one["lower_is_better"]
    expected = p_of(differences.mean(axis=1), [differences[:, chosen].mean() for chosen in draws])
    assert against["p_value"] == pytest.approx(expected)
    assert one["best"] == in_order(one["scores"], "base", one["against_baseline"], lower_is_better=True)[0]


def rows_of(text, table):
    """The rows of a *table* of the page as {first cell: {head: cell}}."""
    (source,) = re.findall(rf'<table id="{re.escape(table)}">(.*?)</table>', text, re.DOTALL)
    cells = [re.findall("<t[hd]>(.*?)</t[hd]>", row) for row in re.findall("<tr>.*?</tr>", source)]
    head, *rows = [[html.unescape(cell) for cell in row] for row in cells]
    return {row[0]: dict(zip(head, row, strict=True)) for row in rows}


def best_first(results):
    differences = results["test_sets"][0]["sacreBLEU"]["against_baseline"]
    return sorted(SEEDS, key=lambda name: -differences.get(name, {"difference": 0})["difference"])


def test_the_tables_have_the_means_deviations_and_differences_of_scores_and_the_costs(known):
    made, folder, results = known
    text = (folder / "report.html").read_text()
    sets, runs = rows_of(text, "test-sets"), rows_of(text, "runs")
    assert [*runs] == [f"{name}, seed {seed}" for name in best_first(results) for seed in SEEDS[name]]
    for n, one in enumerate(made.test_sets, 1):
        references, title = [lines(path) for path in one.references], f"{one.name}: difference to base (95%)"
        bleu = {
            system: [sacrebleu.corpus_bleu(lines(run.hypotheses[one.name]), references) for run in of_system]
            for system, of_system in made.runs.items()
        }
        ratio = np.mean([run.sys_len / run.ref_len for run in bleu["<other>"]])
        base, other, third = ([run.score for run in bleu[system]] for system in SEEDS)
        mean, difference = f"{np.mean(other):.2f} ± {np.std(other, ddof=1):.2f}", np.mean(other) - np.mean(base)
        scores = rows_of(text, f"scores-{n}")
        assert [*scores["<other>"].values()][1:3] == ["1, 2", mean]
        assert [*scores["third †"].values()][1:3] == ["2", f"{third[0]:.2f}"]
        assert scores["<other>"]["difference to base (95%)"].startswith(f"{difference:+.2f} (")
        assert sets["<other>"][title].startswith(f"{difference:+.2f} (")
        assert sets["<other>"][one.name] == f"{mean} ({ratio:.2f})"
        assert runs["<other>, seed 2"][one.name] == f"{other[1]:.2f} ({other[1] - base[1]:+.2f})"
    # 120 and 180 seconds, losses of 6.875 and 6.75
    costs = ["12,345", "20 ± 0", "2.5 ± 0.7", "100 ± 0", "6.81 ± 0.09", "702"]
    assert [*rows_of(text, "costs")["<other>"].values()][1:] == costs
    systems, sweeps = (rows_of(text, name) for name in ("systems", "sweeps"))
    assert [*systems["third"].values()][1:3] == ["x|y", "9"] and sweeps["base"]["chosen"] == "2e-3"
    assert sweeps["<other>"]["chosen"].startswith("1e-3 (")  # the end of the range


def test_the_csv_has_the_unrounded_numbers_of_each_run_and_test_set(known):
    _, folder, results = known
    rows = [*csv.DictReader((folder / "results.csv").read_text().splitlines())]
    runs = [(name, str(seed), one) for name, seeds in SEEDS.items() for seed in seeds for one in SETS]
    assert [(row["system"], row["seed"], row["test_set"]) for row in rows] == runs
    row, one = rows[3], results["test_sets"][1]
    scores = {"sacreBLEU": one["sacreBLEU"], "TER": one["metrics"]["TER"], "unlike": one["scorers"]["unlike"]}
    expected = {name: of["scores"]["base"][2] for name, of in scores.items()}
    expected |= {"sacreBLEU, 0-10 words": one["by_length"]["0-10"]["scores"]["base"][2], "last_loss": 6.75}
    expected |= {"minutes": 3, "updates": 20, "epochs": 2, "parameters": 12345, "peak_memory_mib": 702, "beam": 4}
    assert {key: float(row[key]) for key in expected} == expected and row["arch"] == "arch_base"


def test_the_folder_has_the_same_files_each_time_with_all_tables_and_loads_no_others(known, tmp_path):
    made, folder, results = known
    page.write(tmp_path, made)
    names = {path.name for path in tmp_path.iterdir()}
    assert {path.name for path in folder.iterdir()} == names | {"work"}
    assert all((folder / name).read_bytes() == (tmp_path / name).read_bytes() for name in names)
    text = (folder / "report.html").read_text()
    sources = re.findall(r"""(?:src|href)=["']?([^"' >]{,30})""", text)
    assert len(sources) == 3 and all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "<other>" not in text and "<memory>" not in text and "fairseq-train &lt;&amp;&gt;" in text
    numbers = json.loads((folder / "results.json").read_text())
    assert numbers.pop("verdict") == page.verdict(folder)
    assert numbers == json.loads(json.dumps(results))
    markdown = (folder / "results.md").read_text()
    tables = [one.splitlines() for one in re.findall(r"^(?:\|.*\n)+", markdown, re.MULTILINE)]
    assert len(tables) == text.count("<table id=")
    for table in tables:
        assert len({len(re.split(r"(?<!\\)\|", row)) for row in table}) == 1 and len(table) > 2
    assert r"| third | x\|y | 9 |" in markdown and r"| \<other\> |" in markdown and str(folder) not in markdown


def test_the_verdict_names_systems_missing_runs_and_what_limits_the_result(known):
    verdict = "\n".join(page.verdict(known[1]))
    assert verdict.startswith(f"{known[2]['test_sets'][0]['sacreBLEU']['best']} ")
    scores = rows_of((known[1] / "report.html").read_text(), "scores-1")
    assert "one seed: sentences only" in scores["third †"]["p (Holm)"]
    assert "third, seed 1 " in verdict and "train failed out of <memory>" in verdict
    assert "0.50 bits" in verdict, "8 at update 10 and 6.75 at 20: 7.25 at 16"
    assert "learning_rate of <other>" in verdict and "learning_rate of base" not in verdict


def test_scores_below_5_have_no_verdict(known):
    results = deepcopy(known[2])
    for scores in results["test_sets"][0]["sacreBLEU"]["scores"].values():
        scores.update(dict.fromkeys(scores, 4.9))
    best = known[2]["test_sets"][1]["sacreBLEU"]["best"]
    first, second, *_ = sentences_on(results)
    assert not any(name in first for name in SEEDS) and "5" in first and second.startswith(f"{best} ")


def test_other_hardware_and_translations_of_another_length_are_named(known, tmp_path):
    made = known[0]
    process = {**PROCESS, "hardware": {"gpus": ["H200"]}}
    history(tmp_path, {"process": process}, valid(10, 8.0), train(10, 60), valid(20, math.inf), train(20, 120))
    run = replace(made.runs["base"][0], training=tmp_path)
    two = replace(made, runs={"base": [run], "<other>": made.runs["<other>"][:1]}, test_sets=made.test_sets[1:])
    results = results_of(two)
    assert results["runs"]["base"][0]["losses"] == [8.0, None]
    assert "hardware (gpus H200; gpus none)" in "\n".join(sentences_on(results))
    page.write(tmp_path, replace(two, runs={"base": [run]}, sweeps={}))
    shorter = write(tmp_path / "hypotheses", lines(run.hypotheses["long"])[1:])
    with pytest.raises(InputError, match="hypotheses .*11 .*long.0.de .*12"):
        results_of(replace(two, runs={"base": [replace(run, hypotheses={"long": shorter})]}))


def test_the_plot_of_differences_has_them_in_the_order_of_the_tables(known):
    _, _, results = known
    panels = plots.plots(results)["score-differences"].axes
    names = [name for name in best_first(results) if name != "base"]
    assert [label.get_text().removesuffix(" †") for label in panels[0].get_yticklabels()] == names
    for axes, one in zip(panels, results["test_sets"], strict=True):
        against = [one["sacreBLEU"]["against_baseline"][name] for name in names]
        bars = [bar.lines[2][0].get_segments()[0].tolist() for bar in axes.containers]
        np.testing.assert_allclose(bars, [[[of["low"], row], [of["high"], row]] for row, of in enumerate(against)])
        assert [bar.lines[0].get_xdata()[0] for bar in axes.containers] == [of["difference"] for of in against]
        assert axes.get_title() == one["name"] and axes.get_ylim() == (1.5, -0.5), "the best system is at the top"


def test_the_plots_have_every_training_once_and_no_small_bucket(known):
    results, figures = known[2], plots.plots(known[2])
    _, by_time = figures["training-curves"].axes
    curves = [(list(line.get_xdata()), list(line.get_ydata())) for line in by_time.get_lines()]
    assert len(curves) == 5 and ([1.0, 2.0], [8.0, 6.875]) in curves and ([1.0, 3.0], [8.0, 6.75]) in curves
    bucket, axes = results["test_sets"][0]["by_length"]["0-10"], figures["scores-by-length"].axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == [f"0-10\n({bucket['sentences']})"]
    (drawn,) = [bar.lines[0].get_ydata() for bar in axes.containers if bar.get_label() == "<other>"]
    assert drawn == pytest.approx([np.mean([*bucket["scores"]["<other>"].values()])])
