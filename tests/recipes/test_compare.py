"""recipes/compare: two architectures from several seeds, and the report of how they differ."""

import cmath
import hashlib
import html.parser
import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import sacrebleu
import torch
from matplotlib.figure import Figure

from recipes.compare import page, stage21_join, stage23_report
from recipes.compare.__main__ import main
from recipes.compare.bootstrap import corpus_bleu, paired_bootstrap, statistics
from recipes.compare.curves import read_history
from recipes.pipeline.experiment import StageError
from tests.commands import ENVIRONMENT, ROOT
from tests.recipes.small_demo import SMALL, describe, label, small_corpus

ARCHS = ["transformer", "transformer_rope"]
SETTINGS = [*SMALL, "max_epochs=2", "average_checkpoints=1"]
LABEL = label("demo", SETTINGS)
REPORT = f"compare.{LABEL}"


def compare(work, *flags, test_pairs=17):  # 2 * 8 + 1
    """Run the comparison in the folder *work*; returns what it printed."""
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    where = ["--data-dir", str(small_corpus(200, test_pairs)), "--work-dir", str(work)]
    command = [sys.executable, "-m", "recipes.compare", "demo", *where, *settings, *flags]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The work folder, and what runs printed: of one seed, and then of two."""
    work = tmp_path_factory.mktemp("compare")
    printed = [compare(work, "--seeds", "1")]
    first = json.loads((work / REPORT / "results.json").read_text())
    return work, [*printed, compare(work, "--seeds", "2")], first


@pytest.fixture
def results(compared):
    return json.loads((compared[0] / REPORT / "results.json").read_text())


def lines(path):
    return path.read_text().splitlines()


def test_more_seeds_go_on_from_those_that_are_there(compared, results):
    work, (first, second), first_results = compared
    trained = [re.findall(r"\$ fairseq-train .*--arch (\w+) .*--seed (\d)", text) for text in (first, second)]
    assert trained == [[(arch, "1") for arch in ARCHS], [(arch, "2") for arch in ARCHS]]
    assert first_results["seeds"] == [1] and results["seeds"] == [1, 2]
    assert results["systems"][0] == first_results["systems"][0]


def test_a_run_with_nothing_to_do_does_nothing(compared):
    report = compared[0] / REPORT / "report.html"
    before = report.stat().st_mtime_ns
    assert "$" not in compare(compared[0], "--seeds", "2")
    assert report.stat().st_mtime_ns == before


def test_fewer_seeds_than_are_trained_do_not_replace_the_report_of_all(compared, results):
    said = compare(compared[0], "--seeds", "1")
    assert "== seeds 1 to 2" in said and "fairseq-train" not in said
    assert json.loads((compared[0] / REPORT / "results.json").read_text()) == results


def test_the_report_names_a_command_that_trains_its_seeds(compared, tmp_path):
    work = tmp_path / "work"
    shutil.copytree(compared[0], work)
    (work / "stamps" / "23.json").unlink()
    compare(work, "--seeds", "1")
    found = json.loads((work / REPORT / "results.json").read_text())
    assert found["seeds"] == [1, 2] and found["command"].endswith(" --seeds 2")


def test_scores_are_sacrebleus(compared, results):
    work = compared[0]
    references = lines(work / "raw" / "test.de")
    for pair, seed in zip(results["systems"], (1, 2), strict=True):
        for system, arch in zip(pair, ARCHS, strict=True):
            assert (system["architecture"], system["seed"]) == (arch, seed)
            hypotheses = lines(work / f"{arch}.seed{seed}.{LABEL}" / "hypotheses.de")
            expected = sacrebleu.corpus_bleu(hypotheses, [references]).score
            assert system["metrics"]["sacreBLEU"]["score"] == pytest.approx(expected)
            assert len(system["training"]["losses"]) == 2 and system["parameters"] > 10_000


def test_joined_sentences_are_those_of_the_test_set_and_translated_in_order(compared, results):
    work = compared[0]
    for joined, times in zip(results["joined"], (1, 2, 4, 8), strict=True):
        groups = 17 // times
        assert (joined["times"], joined["lines"]) == (times, groups)
        for lang in ("en", "de"):
            single = lines(work / "raw" / f"test.{lang}")
            expected = [" ".join(single[n * times : (n + 1) * times]) for n in range(groups)]
            if times > 1:
                assert lines(work / "joined" / f"{times}.{lang}") == expected
        references = expected
        means = [np.mean(scores) for scores in joined["scores"]]
        assert joined["against_baseline"][0]["difference"] == pytest.approx(means[1] - means[0])
        by_seed = [found["difference"] for found in joined["by_seed"][0]]
        assert by_seed == pytest.approx(np.subtract(*reversed(joined["scores"])))
        name = ("joined", f"{times}.bpe.en") if times > 1 else ("bpe", "test.en")
        training = max(len(line.split()) for line in lines(work / "bpe" / "train.en"))
        sizes = [len(line.split()) for line in lines(work.joinpath(*name))]
        assert results["longest_in_training"] == training
        assert joined["longer_than_in_training"] == len([size for size in sizes if size > training])
        assert joined["subwords"] == pytest.approx(np.mean(sizes))
        for arch, scores in zip(ARCHS, joined["scores"], strict=True):
            folder = work / f"{arch}.seed2.{LABEL}"
            file = folder / "joined" / f"{times}.de" if times > 1 else folder / "hypotheses.de"
            expected = sacrebleu.corpus_bleu(lines(file), [references])
            assert scores[1] == pytest.approx(expected.score)
            ratio = joined["length_ratio"][ARCHS.index(arch)][1]
            assert ratio == pytest.approx(expected.sys_len / expected.ref_len)
            if times > 1:  # the line that fairseq-generate gives a source is that of its number
                printed = (folder / "joined" / f"{times}.generate.txt").read_text()
                sources = dict(re.findall(r"^S-(\d+)\t(.*)$", printed, re.MULTILINE))
                joined_sources = lines(work / "joined" / f"{times}.en")
                assert [sources[str(n)] for n in range(groups)] == joined_sources


class Page(html.parser.HTMLParser):
    """What a page is made of, and all that it loads."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.loads, self.text = Counter(), [], ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags[tag] += 1
        self.loads += [value for name, value in attributes if name in ("src", "href")]

    def handle_data(self, data):
        self.text += data


def test_the_page_needs_nothing_but_itself(compared, results):
    found = Page((compared[0] / REPORT / "report.html").read_text())
    assert found.tags["img"] == 3 and found.tags["script"] == found.tags["link"] == 0
    assert all(load.startswith("data:image/png;base64,") for load in found.loads)
    for arch in ARCHS:
        assert arch in found.text
    assert results["signatures"]["sacreBLEU"] in found.text and "fairseq-train" in found.text
    assert page.verdict(results)[0] in found.text
    trainings = [system["training"] for pair in results["systems"] for system in pair]
    assert all(len(training["processes"]) == 1 for training in trainings)
    for arch, training in zip(ARCHS, trainings, strict=False):
        process = training["processes"][0]
        assert process["commit"] in found.text and process["command"] in found.text
        assert f"--arch {arch} " in process["command"]
        tokens, frequency = process["batches"]["max_tokens"], process["batches"]["update_freq"]
        assert f"--max-tokens {tokens} --update-freq {frequency} " in process["command"]
    assert not page.unlike(results)


def test_a_browser_shows_the_page_and_its_plots(compared, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium, chromium-browser or google-chrome is on the PATH to look at the page with")
    probe = """<script>onload = () => {
        const sizes = [...document.images].map(i => i.complete ? i.naturalWidth * i.naturalHeight : 0);
        const wide = document.documentElement.scrollWidth > innerWidth;
        document.title = JSON.stringify({sizes, wide, tables: document.querySelectorAll("td").length});
    }</script>"""
    path = tmp_path / "report.html"
    path.write_text((compared[0] / REPORT / "report.html").read_text() + probe)
    flags = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --virtual-time-budget=5000"
    )
    own = f"--user-data-dir={tmp_path / 'profile'}"
    for size in ("1280,900", "500,900"):
        command = [browser, *flags.split(), own, f"--window-size={size}", "--dump-dom", path.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
        title = re.search("<title>(.*?)</title>", shown, re.DOTALL)
        assert title is not None, shown[:1000]
        told = json.loads(title.group(1))
        assert len(told["sizes"]) == 3 and min(told["sizes"]) > 100_000 and not told["wide"], size
        assert told["tables"] > 50


def test_the_table_for_results_has_every_seed_and_the_verdict(compared, results):
    text = (compared[0] / REPORT / "results.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows} == {5}
    assert [row[0] for row in rows[2:5]] == ["| seed 1", "| seed 2", "| all seeds"]
    assert page.verdict(results)[0] in text and "recipes.compare demo --set" in text
    assert str(compared[0]) not in text and "--work-dir" not in text


def test_systems_that_were_not_trained_as_long_are_not_compared(compared, tmp_path):
    work = tmp_path / "work"
    shutil.copytree(compared[0], work)
    checkpoints = work / f"transformer_rope.seed1.{LABEL}" / "checkpoints"
    (checkpoints / "checkpoint2.pt").rename(checkpoints / "checkpoint5.pt")
    flags = [word for setting in SETTINGS for word in ("--set", setting)]
    x = [describe("demo", "--work-dir", str(work), "--arch", arch, *flags) for arch in ARCHS]
    with pytest.raises(
        StageError, match=r"transformer_rope.seed1.* was trained until \[5\] and .* until \[2\]"
    ):
        stage23_report._refuse_unequal_lengths(x)


def test_another_order_is_another_report(compared, tmp_path):
    work = tmp_path / "work"
    shutil.copytree(compared[0], work)
    printed = compare(work, "--seeds", "2", "--archs", *reversed(ARCHS))
    assert "stage 7: train: done before, skipped" in printed
    found = json.loads((work / REPORT / "results.json").read_text())
    before = json.loads((compared[0] / REPORT / "results.json").read_text())
    ours, theirs = (r["joined"][0]["against_baseline"][0]["difference"] for r in (found, before))
    assert ours == pytest.approx(-theirs) and found["architectures"] == [*reversed(ARCHS)]


def test_translations_that_lack_lines_are_told(compared, tmp_path):
    work = tmp_path / "work"
    shutil.copytree(compared[0], work)
    path = work / f"transformer.seed1.{LABEL}" / "joined" / "2.de"
    path.write_text(path.read_text().partition("\n")[2])
    stamp = work / f"transformer.seed1.{LABEL}" / "stamps" / "22.json"
    made = json.loads(stamp.read_text())
    made["made"][f"transformer.seed1.{LABEL}/joined/2.de"] = (
        "sha256:" + hashlib.sha256(path.read_bytes()).hexdigest()
    )
    stamp.write_text(json.dumps(made))
    with pytest.raises(AssertionError, match=r"joined/2.de has 7 lines, and .*joined/2.de has 8: remove it"):
        compare(work, "--seeds", "2")


def test_a_test_set_too_small_to_join_is_told_before_the_training(tmp_path):
    with pytest.raises(AssertionError, match="the test set has 5 lines, and 8 at least") as refused:
        compare(tmp_path, "--seeds", "1", test_pairs=5)
    assert "fairseq-train" not in str(refused.value)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--archs", "transformer", "transfomer_rope"], "--archs transfomer_rope: fairseq has no such arch"),
        (["--archs", "transformer", "lstm"], "--archs lstm: .*unrecognized arguments: .*-ffn-embed-dim"),
        (["--", "--no-such-flag"], "--archs transformer: .*unrecognized arguments: --no-such-flag"),
    ],
)
def test_what_fairseq_cannot_train_is_told_before_all_stages(tmp_path, flags, said):
    with pytest.raises(AssertionError, match=said) as refused:
        compare(tmp_path, *flags)
    assert "stage 1" not in str(refused.value)


def test_room_for_joined_sentences_has_to_be_in_the_model_and_in_the_search(tmp_path):
    (tmp_path / "bpe").mkdir()
    x = describe("demo", "--work-dir", str(tmp_path))
    (tmp_path / "bpe" / "test.en").write_text("a\n" * 8)
    (tmp_path / "bpe" / "test.de").write_text("a " * 1100 + "\n" + "a\n" * 7)
    roomy = "--max-source-positions 4096 --max-target-positions 4096"
    for train, generate in (("", ""), ("", roomy), (roomy, "")):
        x.settings.fairseq_train_flags, x.settings.fairseq_generate_flags = train, generate
        with pytest.raises(StageError, match=r"8 lines of 1108 tokens \(.*test.de\), more than the 1024"):
            stage21_join.check(x)
    x.settings.fairseq_train_flags = x.settings.fairseq_generate_flags = roomy
    stage21_join.check(x)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--seeds", "0"], "--seeds 0: must be 1 or more"),
        (["--archs", "transformer"], "--archs transformer: must be 2 to 4, all different"),
        (["--archs", *"abcde"], "--archs a b c d e: must be 2 to 4"),
        (["--", "--seed", "7"], "--seed among the flags for fairseq-train"),
        (["--", "--seed=7"], "--seed=7 among the flags for fairseq-train"),
        (["--set", "fairseq_train_flags=--fp16 --seed=7"], "--seed=7 among the flags for fairseq-train"),
        (["--", "--arch", "transformer"], "--arch among the flags for fairseq-train"),
        (["--", "-a", "transformer"], "-a among the flags for fairseq-train"),
        (["--", "--save-dir", "x"], "--save-dir among the flags for fairseq-train"),
        (["--archs", "transformer", "transformer"], "all different"),
        (["--archs", "transformer", "no-such"], "--arch no-such: must be a name"),
        (["--set", "width=no"], "--set width=no: must be of type int"),
    ],
)
def test_wrong_flags_are_refused_by_name(capsys, flags, said):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", *flags])
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_without_matplotlib_it_says_so_before_it_trains():
    code = (
        "import runpy, sys; sys.modules['matplotlib'] = None; sys.argv[0] = '-m'; "
        "runpy.run_module('recipes.compare', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code, "demo"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "recipes.compare: matplotlib is not installed: pip install -e '.[plots]'"
    )


# -- bootstrap.py ----------------------------------------------------------------------------------

WORDS = "the a dog cat sees takes red blue big old house book".split()


def corpus(seed, sentences, wrong):
    """References, and a translation of them in which a share *wrong* of the words is another."""
    draw = np.random.default_rng(seed)
    references = [list(draw.choice(WORDS, draw.integers(5, 15))) for _ in range(sentences)]
    given = [
        [draw.choice(WORDS) if draw.random() < wrong else word for word in words] for words in references
    ]
    return [" ".join(sentence) for sentence in references], [" ".join(sentence) for sentence in given]


def test_statistics_add_up_to_the_corpus():
    references, hypotheses = corpus(1, 30, 0.3)
    hypotheses[3] = ""
    unlike = ["the zebra a zebra dog zebra cat zebra"] * 30  # words that match, and nothing longer
    for hyps in (hypotheses, unlike, ["the dog"] * 30, [""] * 30):
        found = corpus_bleu(statistics(hyps, references).sum(axis=0))
        assert found == pytest.approx(sacrebleu.corpus_bleu(hyps, [references]).score)


def test_statistics_are_of_the_tokens_that_are_asked_for():
    references, hypotheses = ["我们去北京。", "他看书。"], ["我们北京。", "他看了书。"]
    found = corpus_bleu(statistics(hypotheses, references, "zh").sum(axis=0))
    assert found == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references], tokenize="zh").score)
    assert found != pytest.approx(corpus_bleu(statistics(hypotheses, references).sum(axis=0)))


def test_the_bootstrap_is_that_of_koehn_with_all_seeds_of_a_sentence():
    references, first = corpus(2, 20, 0.4)
    systems = [[first, corpus(2, 20, 0.3)[1]], [corpus(2, 20, 0.2)[1], corpus(2, 20, 0.25)[1]]]
    of_each = [[statistics(seed, references) for seed in seeds] for seeds in systems]
    found = paired_bootstrap(*of_each, resamples=40)

    def mean(seeds, chosen):
        drawn = [references[n] for n in chosen]
        return np.mean([sacrebleu.corpus_bleu([h[n] for n in chosen], [drawn]).score for h in seeds])

    draws = np.random.default_rng(12345).integers(20, size=(40, 20))
    differences = np.array([mean(systems[1], chosen) - mean(systems[0], chosen) for chosen in draws])
    difference = mean(systems[1], range(20)) - mean(systems[0], range(20))
    assert found["difference"] == pytest.approx(difference)
    assert (found["low"], found["high"]) == pytest.approx(tuple(np.percentile(differences, [2.5, 97.5])))
    as_large = np.abs(differences - differences.mean()) >= abs(difference)
    assert found["p_value"] == pytest.approx((as_large.sum() + 1) / 41)


def test_chance_is_told_from_a_difference():
    references, good = corpus(3, 200, 0.1)
    bad = corpus(3, 200, 0.3)[1]
    same = [statistics(good, references)]
    assert paired_bootstrap(same, same) == {"difference": 0.0, "low": 0.0, "high": 0.0, "p_value": 1.0}
    apart = paired_bootstrap([statistics(bad, references)], same)
    assert apart["low"] > 0 and apart["p_value"] < 0.01


# -- curves.py -------------------------------------------------------------------------------------


def history(tmp_path, *told):
    path = tmp_path / "history.jsonl"
    path.write_text("".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in told))
    return path


def valid(updates, loss):
    return {"valid_loss": str(loss), "valid_num_updates": str(updates), "epoch": updates // 10}


def train(updates, wall, speed=100):
    told = {"train_loss": "9", "train_num_updates": updates, "train_wall": wall, "train_wps": speed}
    return {key: str(value) for key, value in told.items()}


def test_of_what_was_trained_twice_the_later_counts(tmp_path):
    path = history(
        tmp_path,
        *(valid(10, 8.0), train(10, 60, 90), valid(20, 7.5), train(20, 120, 110)),
        '{"valid_loss": "7.1", "valid_num',  # killed here
        "\n",
        {"process": {"commit": "b"}},
        "5\n",
        {"process": {"commit": "c"}},
        *(valid(20, 7.4), train(20, 40, 100), valid(30, 7.0), train(30, 110, 300)),
        {"process": {"commit": "d"}},
    )
    found = read_history(path)
    assert found.updates == [10, 20, 30] and found.losses == [8.0, 7.4, 7.0]
    assert found.seconds == [60, 100, 170] and found.tokens_per_second == 100
    assert found.last_epoch == 3 and found.processes == [{"commit": "c"}]


def test_seconds_go_on_in_the_next_process_even_if_its_first_epoch_took_longer(tmp_path):
    process = {"process": {}}
    path = history(tmp_path, process, valid(10, 8.0), train(10, 60), process, valid(20, 7.0), train(20, 90))
    assert read_history(path).seconds == [60, 150]


@pytest.mark.parametrize(
    "told, lacks", [([], "validation"), ([train(10, 60)], "validation"), ([valid(10, 8.0)], "whole epoch")]
)
def test_a_history_without_a_curve_is_told(tmp_path, told, lacks):
    with pytest.raises(StageError, match=f"history.jsonl: tells of no {lacks}"):
        read_history(history(tmp_path, *told))


# -- page.py ---------------------------------------------------------------------------------------


@pytest.fixture
def known():
    """Results of two seeds made by hand: the second system is better in the first and worse in the second."""

    def system(arch, seed, score, losses):
        training = {
            "updates": [10, 20], "seconds": [60.0, 120.0], "losses": losses, "last_epoch": 2,
            "tokens_per_second": 1000.0 * seed,
            "processes": [
                {
                    "commit": f"c{seed}", "versions": {"torch": "2.13.0"}, "hardware": {"gpus": []},
                    "batches": {"max_tokens": 64}, "command": f"fairseq-train {arch} <&>",
                }
            ],
        }  # fmt: skip
        by_length = [
            {"words": "0-10", "sentences": 30, "score": score + 1},
            {"words": "11-20", "sentences": 3, "score": score - 1},
        ]
        return {
            "architecture": arch, "seed": seed, "parameters": 1234567,
            "metrics": {"sacreBLEU": {"score": score}, "TER": {"score": 100 - score}},
            "by_length": by_length, "training": training, "curve_is_whole": seed == 1,
        }  # fmt: skip

    def against(difference, low, high, p_value):
        return {"difference": difference, "low": low, "high": high, "p_value": p_value}

    def joined(times, base, other):
        return {
            "times": times, "lines": 60 // times, "subwords": 11.0 * times, "scores": [base, other],
            "longer_than_in_training": times - 1, "length_ratio": [[0.5, 0.7], [0.8, 1.0]],
            "against_baseline": [against(0.5, -0.25, 1.25, 0.125)],
            "by_seed": [[against(2.0, 1.5, 2.5, 1 / 1001), against(-1.0, -1.75, 0.125, 0.25)]],
        }  # fmt: skip

    return {
        "recipe": "known", "architectures": ["base", "<other>"], "seeds": [1, 2], "settings": {},
        "systems": [
            [system("base", 1, 30.0, [5.0, 4.0]), system("<other>", 1, 32.0, [4.5, 3.5])],
            [system("base", 2, 31.0, [5.0, 4.2]), system("<other>", 2, 30.0, [math.nan, 3.7])],
        ],
        "signatures": {"sacreBLEU": "s", "TER": "t"},
        "bootstrap": {"resamples": 1000, "seed": 1},
        "joined": [joined(1, [30.0, 31.0], [32.0, 30.0]), joined(2, [20.0, 22.0], [10.0, 11.0])],
        "longest_in_training": 55,
        "command": "python -m recipes.compare known --work-dir /a/b --seeds 2 --data-dir=/c",
    }  # fmt: skip


def test_the_page_says_what_the_results_are(known):
    text = page.html(known)
    cells = [
        [re.sub("<.*?>", "", cell) for cell in re.findall("<t[hd]>.*?</t[hd]>", row)]
        for row in re.findall("<tr>.*?</tr>", text)
    ]
    rows = {row[0]: row[1:] for row in cells}
    assert rows["seed 1"] == ["30.00", "32.00", "+2.00 (+1.50 to +2.50)", "≤ 0.001"]
    assert rows["seed 2"] == ["31.00", "30.00", "-1.00 (-1.75 to +0.12)", "0.250"]
    assert rows["all seeds"] == ["30.50 ± 0.71", "31.00 ± 1.41", "+0.50 (-0.25 to +1.25)", "0.125"]
    assert rows["TER (t)"] == ["69.50 ± 0.71", "69.00 ± 1.41"]
    assert rows["0-10"] == ["30", "31.50 ± 0.71", "32.00 ± 1.41"]
    assert rows["11-20"] == ["3", "29.50 ± 0.71", "30.00 ± 1.41"]
    assert rows["2"] == [
        *("30", "22", "1", "21.00 ± 1.41 (0.60)", "10.50 ± 0.71 (0.90)"),
        *("+0.50 (-0.25 to +1.25)", "0.125"),
    ]
    assert rows["base, seed 1"] == ["1,234,567", "20", "2.0", "1,000", "5.000, 4.000", "c1"]
    gap = "20 (the end of the curve is lost)"
    assert rows["&lt;other&gt;, seed 2"] == ["1,234,567", gap, "2.0", "2,000", "nan, 3.700", "c2"]
    assert "<other>" not in text and "<&>" not in text and "fairseq-train base &lt;&amp;&gt;" in text
    assert "longest source has 55 subwords" in text


def test_the_verdict_tells_seeds_from_sentences(known):
    assert page.verdict(known) == [
        "<other> scores +0.50 sacreBLEU against base, the mean of 2 seeds (+2.00, -1.00; standard deviation "
        "2.12). With these trainings, and sentences drawn anew from the test set, 95% of the differences are "
        "-0.25 to +1.25 (p 0.125).",
        "Not all trainings were made alike. They differ in commit (c1; c2).",
    ]


def test_what_the_trainings_differ_in_is_said(known):
    trained = [system["training"]["processes"] for pair in known["systems"] for system in pair]
    for of_system in trained:
        of_system[0]["commit"] = "c1"
    assert page.unlike(known) == []
    trained[3][0]["batches"] = {"max_tokens": 32}
    trained[1].append({**trained[1][0], "hardware": {"gpus": ["H200"]}})
    assert page.unlike(known) == [
        "Not all trainings were made alike. They differ in hardware (gpus none; gpus H200), "
        "batches (max_tokens 64; max_tokens 32)."
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_written_as_it_is(known, value):
    known["systems"][0][1]["training"]["losses"][-1] = value
    known["systems"][0][0]["parameters"] = None
    text = page.table(known)
    assert f"| {value:.2f}, 3.70 |" in text and "not in the log" in text
    assert f"4.500, {value:.3f}" in page.html(known)


def test_the_table_says_what_the_results_are(known):
    text = page.table(known)
    rows = {
        row.split(" | ")[0]: row.strip(" |").split(" | ")[1:] for row in text.splitlines() if row[:1] == "|"
    }
    assert rows["| all seeds"] == ["30.50 ± 0.71", "31.00 ± 1.41", "+0.50 (-0.25 to +1.25)", "0.125"]
    assert rows["| validation loss at the end"][:2] == ["4.10 ± 0.14", "3.60 ± 0.14"]
    (joined,) = (row for row in rows if row.startswith("| 2 sentences a line: 30 of 22 subwords, 1 of them"))
    assert rows[joined][0] == "21.00 ± 1.41 (0.60)" and "than any in training, 55 (length" in joined
    assert rows["| updates"][0] == "20" and rows["| parameters"][0] == "1,234,567"
    assert "`python -m recipes.compare known --seeds 2`" in text and "/a/b" not in text and "/c" not in text
    assert "Trained with commit: c1; versions: torch 2.13.0; hardware: gpus none; batches: max" in text


def test_plots_have_the_curve_of_each_and_no_small_bucket(known, monkeypatch):
    drawn = []
    monkeypatch.setattr(page, "_figure", lambda draw, describe, count=1: drawn.append((draw, count)) or "")
    page.html(known)
    figure = Figure()
    axes = [[figure.add_subplot() for _ in range(count)] for _, count in drawn]
    for (draw, _), each in zip(drawn, axes, strict=True):
        draw(*each)
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes[0][0].get_lines()]
    assert ([10, 20], [5.0, 4.0]) in lines and ([10, 20], [4.5, 3.5]) in lines and len(lines) == 4
    assert ([1.0, 2.0], [5.0, 4.2]) in [
        (list(one.get_xdata()), list(one.get_ydata())) for one in axes[0][1].lines
    ]
    assert [label.get_text() for label in axes[1][0].get_xticklabels()] == ["0-10\n(30)"]
    means = [list(one.lines[0].get_ydata()) for one in axes[2][0].containers]
    assert means == [[30.5, 21.0], [31.0, 10.5]]
    for seeds, bars in zip(([[30, 31], [20, 22]], [[30, 32], [10, 11]]), axes[2][0].containers, strict=True):
        ends = [sorted(point[1] for point in segment) for segment in bars.lines[2][0].get_segments()]
        assert ends == [pytest.approx(sorted(of)) for of in seeds]


def test_validations_within_an_epoch_get_their_share_of_its_time(tmp_path):
    path = history(tmp_path, valid(5, 9.0), valid(10, 8.0), train(20, 100), valid(30, 7.0), train(40, 300))
    assert read_history(path).seconds == [25, 50, 200]


# -- docs/decay.py -----------------------------------------------------------------------------------


def decay(*flags):
    return subprocess.run(
        [sys.executable, "docs/decay.py", *map(str, flags)],
        cwd=ROOT, env={**ENVIRONMENT, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip


def test_the_decay_is_drawn_from_the_papers_sums(tmp_path):
    done = decay("--output", tmp_path / "decay.png")
    assert done.returncode == 0 and (tmp_path / "decay.png").read_bytes()[:4] == b"\x89PNG", done.stderr
    spec = importlib.util.spec_from_file_location("decay", ROOT / "docs" / "decay.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = module.bound(8, 100.0, farthest=20)
    for distance in range(21):
        angles = [distance * 100.0 ** (-2 * i / 8) for i in range(4)]
        sums = [sum(cmath.exp(1j * angle) for angle in angles[: j + 1]) for j in range(4)]
        assert found[distance].item() == pytest.approx(sum(map(abs, sums)) / 4, abs=1e-5)


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--base", "1"], "--base 1.0: must be a number above 1"),
        (["--base", "nan"], "--base nan: must be a number above 1"),
        (
            ["--output", "none/decay.png"],
            "--output none/decay.png: must be a .png, .svg or .pdf file in a folder",
        ),
        (["--output", "decay.txt"], "--output decay.txt: must be a .png, .svg or .pdf file in a folder"),
    ],
)
def test_flags_of_the_decay_are_checked(flags, said):
    done = decay(*flags)
    assert done.returncode == 2 and said in done.stderr


# -- what makes the comparison fair ------------------------------------------------------------------


def test_both_architectures_begin_with_the_same_weights(build):
    states = []
    for arch in ("transformer_tiny", "transformer_rope_tiny"):
        torch.manual_seed(7)
        states.append(build(arch, share_all_embeddings=True).state_dict())
    first, second = states
    of_positions = {name for name in first if "embed_positions" in name}
    assert set(first) - of_positions == set(second)
    for name, weight in second.items():
        assert torch.equal(weight, first[name]), name
