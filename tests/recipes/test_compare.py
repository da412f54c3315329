"""recipes/compare: training two architectures from several seeds, and the report."""

import contextlib
import html
import io
import json
import math
import random
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import sacrebleu
from matplotlib.figure import Figure

from fairseq_rope.tools import score
from recipes.compare import page, stage21_join, stage23_report
from recipes.compare.__main__ import main
from recipes.compare.bootstrap import corpus_bleu, paired_bootstrap, statistics
from recipes.compare.curves import read_history
from recipes.compare.stage23_report import Report
from recipes.pipeline.commands import Shell
from recipes.pipeline.experiment import StageError
from recipes.pipeline.runner import Runner
from recipes.pipeline.stages import TRAIN
from tests.commands import ENVIRONMENT, ROOT, outputs
from tests.recipes.small_demo import SMALL, check_flags_here, describe, label, setting_flags, small_corpus, usage_error

ARCHS = ["transformer", "transformer_rope"]
SETTINGS = [*SMALL, "max_epochs=2", "average_checkpoints=1"]
FLAGS = setting_flags(*SETTINGS)
TIMES = (2, 4, 8)
LABEL = label("demo", SETTINGS)


def lines(path):
    return path.read_text().splitlines()


# -- trained ---------------------------------------------------------------------------------------


def compare(work, *flags):
    """Run the comparison in the folder *work*, and return its output."""
    where = ["--data-dir", str(small_corpus(200, 17)), "--work-dir", str(work)]  # 17 = 2 * 8 + 1
    command = [sys.executable, "-m", "recipes.compare", "demo", *where, *FLAGS, *flags]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, text=True, capture_output=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_comparison_resumes_with_more_seeds_and_reports_all_of_them(tmp_path):
    report = tmp_path / f"compare.{LABEL}"

    def results():
        return json.loads((report / "results.json").read_text())

    printed = [compare(tmp_path, "--seeds", "1")]
    first = results()
    printed.append(compare(tmp_path, "--seeds", "2"))
    second = results()
    trained = [re.findall(r"\$ fairseq-train .*--arch (\w+) .*--seed (\d)", text) for text in printed]
    assert trained == [[(arch, "1") for arch in ARCHS], [(arch, "2") for arch in ARCHS]]
    assert first["seeds"] == [1] and second["seeds"] == [1, 2] and second["systems"][0] == first["systems"][0]
    assert not (report / "earlier").exists()

    before = (report / "report.html").stat().st_mtime_ns
    again = compare(tmp_path, "--seeds", "1")  # fewer seeds than are trained
    assert "== seeds 1 to 2" in again and "$" not in again and results() == second
    assert (report / "report.html").stat().st_mtime_ns == before
    (tmp_path / "stamps" / "23.json").unlink()
    compare(tmp_path, "--seeds", "1")
    assert results()["seeds"] == [1, 2] and results()["command"].endswith(" --seeds 2")

    text = words_of(report / "report.html")
    for arch, system in zip(ARCHS, second["systems"][0], strict=True):
        (process,) = system["training"]["processes"]
        assert process["commit"] in text and process["command"] in text
        assert f"--arch {arch} " in process["command"] and len(system["training"]["losses"]) == 2
        tokens, frequency = process["batches"]["max_tokens"], process["batches"]["update_freq"]
        assert f"--max-tokens {tokens} --update-freq {frequency} " in process["command"]
    assert not page.training_differences(second)
    for times in TIMES:
        sources = lines(tmp_path / "joined" / f"{times}.en")
        for arch in ARCHS:  # fairseq-generate's numbers are the lines of the joined text
            folder = tmp_path / f"{arch}.seed2.{LABEL}" / "joined"
            generated = outputs((folder / f"{times}.generate.txt").read_text(), "S")
            assert sorted(generated) == [*range(17 // times)] == [*range(len(sources))]
            for number, source in enumerate(sources):  # unknown characters are missing
                words = re.findall("[A-Za-z]{3,}", source)
                assert sum(word in generated[number][0] for word in words) > 0.8 * len(words)
            assert len(lines(folder / f"{times}.de")) == len(sources)

    printed = compare(tmp_path, "--seeds", "2", "--archs", *reversed(ARCHS))
    assert "stage 7: train: done before, skipped" in printed and "earlier/1" in printed
    ours, theirs = (r["joined"][0]["against_baseline"][0]["difference"] for r in (results(), second))
    assert ours == pytest.approx(-theirs) and results()["architectures"] == [*reversed(ARCHS)]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--archs", "transformer", "transfomer_rope"], "--archs transfomer_rope: fairseq has no such arch"),
        (["--archs", "transformer", "lstm"], "--archs lstm: .*unrecognized arguments: .*-ffn-embed-dim"),
        (["--", "--no-such-flag"], "--archs transformer: .*unrecognized arguments: --no-such-flag"),
    ],
)
def test_flags_that_fairseq_rejects_are_refused_before_the_first_stage(tmp_path, capsys, monkeypatch, flags, message):
    check_flags_here(monkeypatch)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with pytest.raises(SystemExit, match=message):
        main(["demo", "--work-dir", str(tmp_path), *FLAGS, *flags])
    for number, handler in handlers.items():
        signal.signal(number, handler)
    assert "stage 1" not in capsys.readouterr().out


def test_a_dry_run_shows_every_command_and_the_report_that_would_be_moved(tmp_path, capsys):
    def dry_run(*flags):
        main(["demo", "--work-dir", str(tmp_path), "--dry-run", *flags])
        return capsys.readouterr().out

    printed = dry_run("--seeds", "2")
    assert re.findall(r"\$ fairseq-train .*--arch (\w+) .*--seed (\d)", printed) == [
        (arch, seed) for seed in "12" for arch in ARCHS
    ]
    assert printed.count("stage 21: join") == printed.count("stage 22: translate joined") == 4
    assert "stage 21: join" in printed.partition("stage 7: train")[0], "joining comes before training"
    assert not [*tmp_path.iterdir()] and "moved" not in printed
    report = tmp_path / "compare"
    report.mkdir()
    known = {"recipe": "demo", "settings": asdict(describe("demo").settings), "architectures": ARCHS, "seeds": [1]}
    known["signatures"] = {"sacreBLEU": "nrefs:1|tok:13a|version:2"}
    (report / "results.json").write_text(json.dumps(known))
    assert "moved" not in dry_run("--seeds", "1")
    for flags, differs in ((["--set", "beam=5"], "settings"), (["--tokenize", "char"], "signatures")):
        moved = f"results.json is another report (differs in {differs}): would be moved to {report}/earlier/1/results"
        assert dry_run("--seeds", "2", *flags).count(moved) == 1
    assert [path.name for path in report.iterdir()] == ["results.json"]


# -- the report of hand-made outputs -----------------------------------------------------------------


@pytest.fixture
def report(tmp_path):
    """The report of two architectures and two seeds, on hand-made outputs of the stages."""
    return make_report(tmp_path)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """A :func:`report`, its folder and its results. Tests must not write to the folder."""
    report = make_report(tmp_path_factory.mktemp("report"))
    return report, *run_report(report)


@pytest.fixture
def no_bootstrap(monkeypatch):
    """Make reports without resampling, which takes seconds."""
    nothing = {"difference": 0.0, "low": 0.0, "high": 0.0, "p_value": 1.0}
    monkeypatch.setattr(stage23_report, "paired_bootstrap", lambda *_: nothing)


def make_report(work, source="en", target="de", words=None, tokenize="13a"):
    words = words or WORDS
    draw = random.Random(4)

    def write(path, rows):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(row + "\n" for row in rows))

    def sentences(count):
        return [" ".join(draw.choices(words, k=draw.randint(1, 9))) for _ in range(count)]

    def distorted(rows):
        return [" ".join(draw.choice([word, word, *words[:2]]) for word in row.split()) for row in rows]

    flags = ["--work-dir", work, "--tokenize", tokenize]
    flags += setting_flags(f"source_lang={source}", f"target_lang={target}", "average_checkpoints=1")
    systems = [[describe("demo", *flags, "--arch", arch, "--seed", seed) for arch in ARCHS] for seed in (1, 2)]
    for lang in (source, target):
        rows = sentences(17)
        write(work / "raw" / f"test.{lang}", rows)
        write(work / "bpe" / f"test.{lang}", rows)
        write(work / "bpe" / f"train.{lang}", ["word " * 12])
    with mock.patch.object(Shell, "command", lambda _, line: run_unless_binarising(line)):
        stage21_join.Join().run(systems[0][0], Shell(stage21_join.Join()))
    for system in (system for pair in systems for system in pair):
        write(system.hypotheses, distorted(lines(system.test_reference)))
        for times in TIMES:
            name = Path("joined", f"{times}.{target}")
            write(system.model / name, distorted(lines(work / name)))
        entries = [{"process": PROCESS}, valid(10, 8.0), train(10, 60), valid(20, 7.5), train(20, 120)]
        write(system.history, map(json.dumps, entries))
        write(system.checkpoints / "checkpoint2.pt", [])
        write(Runner(system).log(TRAIN), ["num. shared model params: 12,345 (num. trained: 12,345)"])
        flags = ["--sys", system.hypotheses, "--ref", system.test_reference, "--src", system.test_source]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            score.main([*map(str, flags), "--target-lang", target, "--json"])
        system.score.write_text(printed.getvalue())
    (work / "run.yaml").write_text(f"command: python -m recipes.compare demo --work-dir {work} --set beam=4\n")
    return Report(systems, "demo")


def run_unless_binarising(line):
    if "data-bin" not in line:
        subprocess.run(line, shell=True, check=True)


PROCESS = {
    "commit": "0123abc", "versions": {"torch": "2.13.0"}, "hardware": {"gpus": []},
    "batches": {"max_tokens": 64}, "command": "fairseq-train data-bin",
}  # fmt: skip


def run_report(report):
    """Write the report. Returns its folder and its results."""
    experiment = report.pairs[0][0]
    report.run(experiment, Shell(report))
    return report.folder(experiment), json.loads((report.folder(experiment) / "results.json").read_text())


def test_scores_equal_sacrebleus_and_joined_lines_are_consecutive_sentences(written):
    report, _, results = written
    work = report.pairs[0][0].work
    assert results["seeds"] == [1, 2] and results["architectures"] == ARCHS
    assert results["command"].endswith(f"recipes.compare --seeds 2 demo --work-dir {work} --set beam=4")
    for joined, times in zip(results["joined"], (1, *TIMES), strict=True):
        groups = 17 // times
        assert (joined["times"], joined["lines"]) == (times, groups)
        for lang in ("en", "de"):
            single = lines(work / "raw" / f"test.{lang}")
            references = [" ".join(single[n * times : (n + 1) * times]) for n in range(groups)]
            if times > 1:
                assert lines(work / "joined" / f"{times}.{lang}") == references
        subwords = [len(line.split()) for line in lines(work / "bpe" / "test.en")]
        sizes = [sum(subwords[n * times : (n + 1) * times]) for n in range(groups)]
        assert results["longest_in_training"] == 12
        assert joined["longer_than_in_training"] == len([size for size in sizes if size > 12])
        assert joined["subwords"] == pytest.approx(np.mean(sizes))
        for number, arch in enumerate(ARCHS):
            for seed in (1, 2):
                folder = work / f"{arch}.seed{seed}"
                name = f"joined/{times}.de" if times > 1 else "hypotheses.de"
                expected = sacrebleu.corpus_bleu(lines(folder / name), [references])
                assert joined["scores"][number][seed - 1] == pytest.approx(expected.score)
                ratio = joined["length_ratio"][number][seed - 1]
                assert ratio == pytest.approx(expected.sys_len / expected.ref_len)
                if times == 1:
                    system = results["systems"][seed - 1][number]
                    assert (system["architecture"], system["seed"]) == (arch, seed)
                    assert system["parameters"] == 12345
                    assert system["metrics"]["sacreBLEU"]["score"] == pytest.approx(expected.score)
        means = [np.mean(scores) for scores in joined["scores"]]
        assert joined["against_baseline"][0]["difference"] == pytest.approx(means[1] - means[0])
        by_seed = [bootstrap["difference"] for bootstrap in joined["by_seed"][0]]
        assert by_seed == pytest.approx(np.subtract(*reversed(joined["scores"])))


@pytest.mark.parametrize("target, asked", [("zh", "zh"), ("zh", "13a"), ("de", "13a")])
def test_the_bootstrap_uses_the_tokeniser_of_the_scores(tmp_path, no_bootstrap, target, asked):
    report = make_report(tmp_path, target=target, words="我们 去 北京。 他 看书".split(), tokenize=asked)
    results = report.results(report.pairs[0][0])
    scores = [[system["metrics"]["sacreBLEU"]["score"] for system in pair] for pair in results["systems"]]
    assert np.transpose(results["joined"][0]["scores"]) == pytest.approx(np.array(scores))


@pytest.mark.parametrize("name", ["13a", "zh", "intl", "char", "none", "ja-mecab", "ko-mecab"])
def test_the_tokeniser_is_read_from_a_signature(name):
    try:
        bleu = sacrebleu.metrics.BLEU(tokenize=name, force=True)
    except RuntimeError as missing:
        pytest.skip(str(missing))
    bleu.corpus_score(["a b"], [["a b"]])
    assert stage23_report._tokeniser(str(bleu.get_signature())) == name


def test_an_earlier_report_with_other_settings_or_more_seeds_is_moved(report, capsys, monkeypatch, no_bootstrap):
    monkeypatch.setattr(page, "plots", lambda results: dict.fromkeys(("losses", "lengths", "joined"), ""))
    folder, first = run_report(report)
    assert run_report(report)[1] == first and not (folder / "earlier").exists()
    run_report(Report(report.pairs[:1], "demo"))  # fewer seeds
    assert "differs in seeds" in capsys.readouterr().out
    assert json.loads((folder / "earlier" / "1" / "results.json").read_text()) == first
    run_report(report)  # more seeds: the new report contains the earlier one
    assert sorted(path.name for path in (folder / "earlier").iterdir()) == ["1"]
    for pair in report.pairs:
        for system in pair:
            system.settings.beam = 8
    run_report(report)
    run_report(Report([pair[::-1] for pair in report.pairs], "demo"))
    (folder / "results.json").write_text("cut off")
    run_report(report)
    printed = capsys.readouterr().out
    reasons = re.findall(r"report.html is another report \(differs in (.*)\): moved to .*/earlier/(\d)/", printed)
    assert reasons == [("settings", "2"), ("architectures", "3"), ("results.json, which cannot be read", "4")]
    for number in "1234":
        names = sorted(path.name for path in (folder / "earlier" / number).iterdir())
        assert names == ["report.html", "results.json", "results.md"]


def words_of(page_path):
    """The text that a browser shows."""
    return html.unescape(re.sub("<[^>]*>", "", page_path.read_text()))


def test_the_page_loads_no_other_files_and_the_table_names_no_folder(written):
    _, folder, results = written
    source = (folder / "report.html").read_text()
    assert source.count("<img ") == 3 and "<script" not in source and "<link" not in source
    assert all(load.startswith("data:image/png;base64,") for load in re.findall('(?:src|href)="([^"]*)', source))
    facts = [*ARCHS, results["signatures"]["sacreBLEU"], "0123abc", "fairseq-train data-bin", *page.verdict(results)]
    assert all(fact in words_of(folder / "report.html") for fact in facts)
    text = (folder / "results.md").read_text()
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")]
    assert {len(row) for row in rows} == {5}
    assert [row[0] for row in rows[2:5]] == ["| seed 1", "| seed 2", "| all seeds"]
    assert page.verdict(results)[0] in text and "recipes.compare --seeds 2 demo --set" in text
    assert str(folder) not in text and "--work-dir" not in text


def test_a_browser_shows_the_page_and_its_plots(written, tmp_path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no chromium, chromium-browser or google-chrome is on the PATH to look at the page with")
    probe = """<script>onload = () => {
        const sizes = [...document.images].map(i => i.complete ? i.naturalWidth * i.naturalHeight : 0);
        const wide = document.documentElement.scrollWidth > innerWidth;
        document.title = JSON.stringify({sizes, wide, tables: document.querySelectorAll("td").length});
    }</script>"""
    path = tmp_path / "report.html"
    path.write_text((written[1] / "report.html").read_text() + probe)
    flags = "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking".split()
    flags += "--disable-component-update --disable-sync --virtual-time-budget=5000".split()
    flags.append(f"--user-data-dir={tmp_path / 'profile'}")
    for size in ("1280,900", "500,900"):
        command = [browser, *flags, f"--window-size={size}", "--dump-dom", path.as_uri()]
        shown = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
        title = re.search("<title>(.*?)</title>", shown, re.DOTALL)
        assert title is not None, shown[:1000]
        measured = json.loads(title.group(1))
        assert len(measured["sizes"]) == 3 and min(measured["sizes"]) > 100_000 and not measured["wide"], size
        assert measured["tables"] > 50


def test_unequal_trainings_and_translations_that_lack_lines_are_refused(report):
    path = report.pairs[0][0].model / "joined" / "2.de"
    path.write_text(path.read_text().partition("\n")[2])
    with pytest.raises(StageError, match=r"joined/2.de has 7 lines, and .*joined/2.de has 8: remove it"):
        run_report(report)
    checkpoints = report.pairs[0][1].checkpoints
    (checkpoints / "checkpoint2.pt").rename(checkpoints / "checkpoint5.pt")
    with pytest.raises(StageError, match=r"transformer_rope.seed1 was trained until \[5\] and .* until \[2\]"):
        run_report(report)


def test_a_test_set_that_cannot_be_joined_is_refused(tmp_path):
    """The flags of both the model and the search must allow long lines."""
    (tmp_path / "bpe").mkdir()
    experiment = describe("demo", "--work-dir", tmp_path)
    texts = experiment.texts("bpe", ["test"])
    for path in texts:
        path.write_text("a\n" * 7)
    with pytest.raises(StageError, match="the test set has 7 lines, and at least 8"):
        stage21_join.check(experiment)
    texts[0].write_text("a\n" * 8)
    texts[1].write_text("a " * 1100 + "\n" + "a\n" * 7)
    roomy = "--max-source-positions 4096 --max-target-positions 4096"
    settings = experiment.settings
    for settings.fairseq_train_flags, settings.fairseq_generate_flags in (("", ""), ("", roomy), (roomy, "")):
        with pytest.raises(StageError, match=r"8 lines of 1108 tokens \(.*test.de\), more than the 1024"):
            stage21_join.check(experiment)
    settings.fairseq_generate_flags = roomy
    stage21_join.check(experiment)


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--seeds", "0"], "--seeds 0: must be 1 or more"),
        (["--archs", "transformer"], "--archs transformer: must be 2 to 4, all different"),
        (["--archs", *"abcde"], "--archs a b c d e: must be 2 to 4"),
        (["--", "--seed", "7"], "--seed among the flags for fairseq-train"),
        (["--set", "fairseq_train_flags=--fp16 --seed=7"], "--seed=7 among the flags for fairseq-train"),
        (["--", "--arch", "transformer"], "--arch among the flags for fairseq-train"),
        (["--", "-a", "transformer"], "-a among the flags for fairseq-train"),
        (["--", "--save-dir", "x"], "--save-dir among the flags for fairseq-train"),
        (["--archs", "transformer", "transformer"], "all different"),
    ],
)
def test_wrong_flags_are_refused_by_name(capsys, flags, message):
    assert message in usage_error(capsys, main, ["demo", *flags])


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_reported_before_training(package):
    code = (
        f"import runpy, sys; sys.modules['{package}'] = None; sys.argv[0] = '-m'; "
        "runpy.run_module('recipes.compare', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code, "demo"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error == f"recipes.compare: {package} is not installed: pip install -e '.[compare]'"


# -- bootstrap.py ----------------------------------------------------------------------------------

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
        bleu = corpus_bleu(statistics(hyps, references).sum(axis=0))
        assert bleu == pytest.approx(sacrebleu.corpus_bleu(hyps, [references]).score)


def test_statistics_use_the_requested_tokeniser():
    references, hypotheses = ["我们去北京。", "他看书。"], ["我们北京。", "他看了书。"]
    bleu = corpus_bleu(statistics(hypotheses, references, "zh").sum(axis=0))
    assert bleu == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references], tokenize="zh").score)
    assert bleu != pytest.approx(corpus_bleu(statistics(hypotheses, references).sum(axis=0)))


def test_the_bootstrap_resamples_sentences_with_all_their_seeds():
    references, first = corpus(2, 20, 0.4)
    systems = [[first, corpus(2, 20, 0.3)[1]], [corpus(2, 20, 0.2)[1], corpus(2, 20, 0.25)[1]]]
    of_each = [[statistics(seed, references) for seed in seeds] for seeds in systems]
    bootstrap = paired_bootstrap(*of_each, resamples=40)

    def mean(seeds, chosen):
        drawn = [references[n] for n in chosen]
        return np.mean([sacrebleu.corpus_bleu([h[n] for n in chosen], [drawn]).score for h in seeds])

    draws = np.random.default_rng(12345).integers(20, size=(40, 20))
    differences = np.array([mean(systems[1], chosen) - mean(systems[0], chosen) for chosen in draws])
    difference = mean(systems[1], range(20)) - mean(systems[0], range(20))
    assert bootstrap["difference"] == pytest.approx(difference)
    assert (bootstrap["low"], bootstrap["high"]) == pytest.approx(tuple(np.percentile(differences, [2.5, 97.5])))
    as_large = np.abs(differences - differences.mean()) >= abs(difference)
    assert bootstrap["p_value"] == pytest.approx((as_large.sum() + 1) / 41)


def test_the_bootstrap_separates_chance_from_a_difference():
    references, good = corpus(3, 200, 0.1)
    bad = corpus(3, 200, 0.3)[1]
    same = [statistics(good, references)]
    assert paired_bootstrap(same, same) == {"difference": 0.0, "low": 0.0, "high": 0.0, "p_value": 1.0}
    apart = paired_bootstrap([statistics(bad, references)], same)
    assert apart["low"] > 0 and apart["p_value"] < 0.01


# -- curves.py -------------------------------------------------------------------------------------


def history(tmp_path, *entries):
    path = tmp_path / "history.jsonl"
    path.write_text("".join(entry if isinstance(entry, str) else json.dumps(entry) + "\n" for entry in entries))
    return path


def valid(updates, loss):
    return {"valid_loss": str(loss), "valid_num_updates": str(updates), "epoch": updates // 10}


def train(updates, wall, speed=100):
    entry = {"train_loss": "9", "train_num_updates": updates, "train_wall": wall, "train_wps": speed}
    return {key: str(value) for key, value in entry.items()}


def test_the_later_of_two_trainings_of_an_epoch_counts(tmp_path):
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
    training = read_history(path)
    assert training.updates == [10, 20, 30] and training.losses == [8.0, 7.4, 7.0]
    assert training.seconds == [60, 100, 170] and training.tokens_per_second == 100
    assert training.last_epoch == 3 and training.processes == [{"commit": "c"}]


@pytest.mark.parametrize(
    "entries, seconds",
    [
        # The next process starts at 0, even if its first epoch took longer.
        ([{"process": {}}, valid(10, 8.0), train(10, 60), {"process": {}}, valid(20, 7.0), train(20, 90)], [60, 150]),
        # Validations within an epoch are interpolated.
        ([valid(5, 9.0), valid(10, 8.0), train(20, 100), valid(30, 7.0), train(40, 300)], [25, 50, 200]),
    ],
)
def test_seconds_count_from_the_start_of_the_training(tmp_path, entries, seconds):
    assert read_history(history(tmp_path, *entries)).seconds == seconds


@pytest.mark.parametrize(
    "entries, missing", [([], "validation"), ([train(10, 60)], "validation"), ([valid(10, 8.0)], "whole epoch")]
)
def test_a_history_without_a_curve_is_refused(tmp_path, entries, missing):
    with pytest.raises(StageError, match=f"history.jsonl: has no {missing}"):
        read_history(history(tmp_path, *entries))


# -- page.py ---------------------------------------------------------------------------------------


@pytest.fixture
def known():
    """Hand-made results: the second system is better in the first seed and worse in the second."""

    def system(arch, seed, score, losses):
        training = {
            "updates": [10, 20], "seconds": [60.0, 120.0], "losses": losses, "last_epoch": 2,
            "tokens_per_second": 1000.0 * seed,
            "processes": [{**PROCESS, "commit": f"c{seed}", "command": f"fairseq-train {arch} <&>"}],
        }  # fmt: skip
        buckets = [("0-10", 30, score + 1), ("11-20", 3, score - 1)]
        return {
            "architecture": arch, "seed": seed, "parameters": 1234567,
            "metrics": {"sacreBLEU": {"score": score}, "TER": {"score": 100 - score}},
            "by_length": [dict(zip(("words", "sentences", "score"), bucket, strict=True)) for bucket in buckets],
            "training": training, "curve_is_whole": seed == 1,
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


def test_the_page_shows_the_results(known):
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
    gap = "20 (the end of the curve is missing)"
    assert rows["&lt;other&gt;, seed 2"] == ["1,234,567", gap, "2.0", "2,000", "nan, 3.700", "c2"]
    assert "<other>" not in text and "<&>" not in text and "fairseq-train base &lt;&amp;&gt;" in text
    assert "longest source has 55 subwords" in text


def test_the_verdict_reports_seeds_bootstrap_and_differences_between_trainings(known):
    assert page.verdict(known) == [
        "<other> differs from base by +0.50 sacreBLEU, the mean over 2 seeds (+2.00, -1.00; standard "
        "deviation 2.12). When the test sentences are resampled, 95% of the differences between these "
        "trainings are from -0.25 to +1.25 (p 0.125).",
        "The trainings differ in commit (c1; c2).",
    ]
    trained = [system["training"]["processes"] for pair in known["systems"] for system in pair]
    for of_system in trained:
        of_system[0]["commit"] = "c1"
    assert page.training_differences(known) == []
    trained[3][0]["batches"] = {"max_tokens": 32}
    trained[1].append({**trained[1][0], "hardware": {"gpus": ["H200"]}})
    assert page.training_differences(known) == [
        "The trainings differ in hardware (gpus none; gpus H200), batches (max_tokens 64; max_tokens 32)."
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_written_as_nan_or_inf(known, value):
    known["systems"][0][1]["training"]["losses"][-1] = value
    known["systems"][0][0]["parameters"] = None
    text = page.table(known)
    assert f"| {value:.2f}, 3.70 |" in text and "not in the log" in text
    assert f"4.500, {value:.3f}" in page.html(known)


def test_the_table_shows_the_results(known):
    text = page.table(known)
    rows = {row.split(" | ")[0]: row.strip(" |").split(" | ")[1:] for row in text.splitlines() if row[:1] == "|"}
    assert rows["| all seeds"] == ["30.50 ± 0.71", "31.00 ± 1.41", "+0.50 (-0.25 to +1.25)", "0.125"]
    assert rows["| validation loss at the end"][:2] == ["4.10 ± 0.14", "3.60 ± 0.14"]
    (joined,) = (row for row in rows if row.startswith("| 2 sentences a line: 30 of 22 subwords, 1 of them"))
    assert rows[joined][0] == "21.00 ± 1.41 (0.60)" and "than any in training, 55 (length" in joined
    assert rows["| updates"][0] == "20" and rows["| parameters"][0] == "1,234,567"
    assert "`python -m recipes.compare known --seeds 2`" in text and "/a/b" not in text and "/c" not in text
    assert "Trained with commit: c1; versions: torch 2.13.0; hardware: gpus none; batches: max" in text


def test_plots_have_every_training_and_no_small_bucket(known, monkeypatch):
    drawn = []
    monkeypatch.setattr(page, "_png", lambda draw, count=1: drawn.append((draw, count)) or "")
    page.html(known)
    figure = Figure()
    axes = [[figure.add_subplot() for _ in range(count)] for _, count in drawn]
    for (draw, _), each in zip(drawn, axes, strict=True):
        draw(*each)
    lines = [(list(line.get_xdata()), list(line.get_ydata())) for line in axes[0][0].get_lines()]
    assert ([10, 20], [5.0, 4.0]) in lines and ([10, 20], [4.5, 3.5]) in lines and len(lines) == 4
    assert ([1.0, 2.0], [5.0, 4.2]) in [(list(one.get_xdata()), list(one.get_ydata())) for one in axes[0][1].lines]
    assert [label.get_text() for label in axes[1][0].get_xticklabels()] == ["0-10\n(30)"]
    means = [list(one.lines[0].get_ydata()) for one in axes[2][0].containers]
    assert means == [[30.5, 21.0], [31.0, 10.5]]
    for seeds, bars in zip(([[30, 31], [20, 22]], [[30, 32], [10, 11]]), axes[2][0].containers, strict=True):
        ends = [sorted(point[1] for point in segment) for segment in bars.lines[2][0].get_segments()]
        assert ends == [pytest.approx(sorted(of)) for of in seeds]
