"""recipes/compare: two architectures from several seeds, and the report of how they differ."""

import html.parser
import json
import re
import shutil
import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
import sacrebleu
import torch

from recipes.compare import page
from recipes.compare.__main__ import main
from recipes.compare.bootstrap import corpus_bleu, paired_bootstrap, statistics
from recipes.compare.curves import read_history

from ..commands import ENVIRONMENT, ROOT
from .test_pipeline import SMALL

ARCHS = ["transformer", "transformer_rope"]
SETTINGS = [*SMALL, "corpus_heldout=17", "max_epochs=2", "average_checkpoints=1"]  # 17 = 2 * 8 + 1


def compare(work, *flags):
    """Run the comparison in the folder *work*; returns what it printed."""
    settings = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "recipes.compare", "demo", "--work-dir", str(work), *settings, *flags]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """The work folder, and what runs printed: of one seed, and then of two."""
    work = tmp_path_factory.mktemp("compare")
    printed = [compare(work, "--seeds", "1")]
    first = json.loads((work / "compare" / "results.json").read_text())
    return work, [*printed, compare(work, "--seeds", "2")], first


@pytest.fixture
def results(compared):
    return json.loads((compared[0] / "compare" / "results.json").read_text())


def lines(path):
    return path.read_text().splitlines()


def test_more_seeds_go_on_from_those_that_are_there(compared, results):
    work, (first, second), first_results = compared
    trained = [re.findall(r"\$ fairseq-train .*--arch (\w+) .*--seed (\d)", text) for text in (first, second)]
    assert trained == [[(arch, "1") for arch in ARCHS], [(arch, "2") for arch in ARCHS]]
    assert first_results["seeds"] == [1] and results["seeds"] == [1, 2]
    assert results["systems"][0] == first_results["systems"][0]


def test_a_run_with_nothing_to_do_does_nothing(compared):
    report = compared[0] / "compare" / "report.html"
    before = report.stat().st_mtime_ns
    assert "$" not in compare(compared[0], "--seeds", "2")
    assert report.stat().st_mtime_ns == before


def test_scores_are_sacrebleus(compared, results):
    work = compared[0]
    references = lines(work / "raw" / "test.de")
    for pair, seed in zip(results["systems"], (1, 2), strict=True):
        for system, arch in zip(pair, ARCHS, strict=True):
            assert (system["architecture"], system["seed"]) == (arch, seed)
            hypotheses = lines(work / f"{arch}.seed{seed}" / "hypotheses.de")
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
        for arch, scores in zip(ARCHS, joined["scores"], strict=True):
            folder = work / f"{arch}.seed2"
            file = folder / "joined" / f"{times}.de" if times > 1 else folder / "hypotheses.de"
            assert scores[1] == pytest.approx(sacrebleu.corpus_bleu(lines(file), [references]).score)
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
    found = Page((compared[0] / "compare" / "report.html").read_text())
    assert found.tags["img"] == 3 and found.tags["script"] == found.tags["link"] == 0
    assert all(load.startswith("data:image/png;base64,") for load in found.loads)
    for arch in ARCHS:
        assert arch in found.text
    assert results["signature"] in found.text and "fairseq-train" in found.text
    assert page.verdict(results)[0] in found.text


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
    path.write_text((compared[0] / "compare" / "report.html").read_text() + probe)
    flags = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --window-size=1280,900 --virtual-time-budget=5000"
    )
    own = f"--user-data-dir={tmp_path / 'profile'}"
    command = [browser, *flags.split(), own, "--dump-dom", path.as_uri()]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    title = re.search("<title>(.*?)</title>", shown, re.DOTALL)
    assert title is not None, shown[:1000]
    told = json.loads(title.group(1))
    assert len(told["sizes"]) == 3 and min(told["sizes"]) > 100_000 and not told["wide"]
    assert told["tables"] > 50


def test_the_table_for_results_has_every_seed_and_the_verdict(compared, results):
    text = (compared[0] / "compare" / "results.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows} == {5}
    assert [row[0] for row in rows[2:5]] == ["| seed 1", "| seed 2", "| all seeds"]
    assert page.verdict(results)[0] in text and "recipes.compare demo" in text


def test_systems_of_other_settings_are_not_compared(compared, tmp_path):
    work = tmp_path / "work"
    shutil.copytree(compared[0], work)
    begun = work / "transformer.seed2" / "checkpoints" / "begun.json"
    begun.write_text(begun.read_text().replace('"width": 32', '"width": 64'))
    (work / "stamps" / "23.json").unlink()
    with pytest.raises(AssertionError, match="trained on other data or with other settings"):
        compare(work, "--seeds", "2")


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--seeds", "0"], "--seeds 0: must be 1 or more"),
        (["--archs", "transformer"], "--archs transformer: must be two or more, all different"),
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
    return {"valid_loss": str(loss), "valid_num_updates": str(updates)}


def train(updates, wall, speed=100):
    told = {"train_loss": "9", "train_num_updates": updates, "train_wall": wall, "train_wps": speed}
    return {key: str(value) for key, value in told.items()}


def test_of_what_was_trained_twice_the_later_counts(tmp_path):
    path = history(
        tmp_path,
        *(valid(10, 8.0), train(10, 60, 90), valid(20, 7.5), train(20, 120, 110)),
        '{"valid_loss": "7.1", "valid_num',  # killed here
        "\n",
        *(valid(20, 7.4), train(20, 150, 100), valid(30, 7.0), train(30, 210, 300)),
    )
    found = read_history(path)
    assert found.updates == [10, 20, 30] and found.losses == [8.0, 7.4, 7.0]
    assert found.seconds == [60, 150, 210] and found.tokens_per_second == 100


def test_validations_within_an_epoch_get_their_share_of_its_time(tmp_path):
    path = history(tmp_path, valid(5, 9.0), valid(10, 8.0), train(20, 100), valid(30, 7.0), train(40, 300))
    assert read_history(path).seconds == [25, 50, 200]


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
