"""recipes/compare: training two architectures from several seeds, and the report."""

import contextlib
import csv
import dataclasses
import gzip
import html
import io
import json
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from copy import copy
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import sacrebleu

from fairseq_rope.scorers import Scorer
from fairseq_rope.tools import score
from recipes.compare import collect, page, stage13_join, stage15_report, stages
from recipes.compare.__main__ import Comparison, main
from recipes.compare.bootstrap import corpus_bleu, draw, holm, paired_bootstrap, scores_of_draws, statistics
from recipes.compare.collect import numbers_of_run, tokeniser_of
from recipes.compare.comparison import compared_by_program, compared_sets
from recipes.compare.curves import read_history
from recipes.compare.stage12_score_with import ScoreWith
from recipes.compare.stage14_translate_joined import TranslateJoined
from recipes.compare.stage15_report import Report, of_equal_length
from recipes.compare.tuning import Tuning
from recipes.pipeline.settings import check_values, read_settings
from recipes.pipeline.stages import AVERAGE, TRAIN
from recipes.run import launch
from recipes.run.moves import Moves
from recipes.run.run import StageError
from recipes.run.runner import Runner
from recipes.run.shell import Shell
from recipes.run.stamps import Stamps, differences
from recipes.text import segments
from tests.commands import LIMIT, ROOT, outputs
from tests.recipes.small_demo import (
    SHORT_OUTPUTS,
    SMALL,
    describe,
    label,
    run_here,
    setting_flags,
    small_corpus,
    usage_error,
)

ARCHS = ["transformer", "transformer_rope"]
SETTINGS = [*SMALL, *SHORT_OUTPUTS, "max_epochs=2", "average_checkpoints=1"]
FLAGS = setting_flags(*SETTINGS)
TIMES = (2, 4, 8)
LABEL = label("demo", SETTINGS)


def lines(path):
    return path.read_text().splitlines()


def seeds_of(results):
    return {system: [run["seed"] for run in runs] for system, runs in results["runs"].items()}


def against_baseline(results, system, times=1):
    (joined,) = (one for one in results["joined"] if one["times"] == times)
    return joined["against_baseline"][system]


# -- trained ---------------------------------------------------------------------------------------


def words_for(work, *flags):
    where = ["--data-dir", str(small_corpus(200, 17)), "--work-dir", str(work)]  # 17 = 2 * 8 + 1
    return ["demo", *where, *FLAGS, *flags]


def compare(work, *flags):
    """Run the comparison in the folder *work* in this process, and return its output."""
    return run_here(words_for(work, *flags), main=main)


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
    assert seeds_of(first) == dict.fromkeys(ARCHS, [1]) and seeds_of(second) == dict.fromkeys(ARCHS, [1, 2])
    assert all(second["runs"][arch][0] == first["runs"][arch][0] for arch in ARCHS)
    assert not (report / "earlier").exists()

    before = (report / "report.html").stat().st_mtime_ns
    again = compare(tmp_path, "--seeds", "1")  # fewer seeds than are trained
    assert "== report: transformer from seeds 1, 2; transformer_rope from seeds 1, 2" in again
    assert "$" not in again and results() == second
    assert (report / "report.html").stat().st_mtime_ns == before
    (tmp_path / "stamps" / "15.json").unlink()
    compare(tmp_path, "--seeds", "1")
    assert seeds_of(results()) == seeds_of(second) and results()["command"].endswith(" --seeds 2")

    text = words_of(report / "report.html")
    for arch in ARCHS:
        training = second["runs"][arch][0]["training"]
        (process,) = training["processes"]
        assert process["commit"] in text and process["command"] in text
        assert f"--arch {arch} " in process["command"] and len(training["losses"]) == 2
        assert training["peak_memory_mib"] > 0
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

    (tmp_path / "words.py").write_text(WORDS_SHARED)
    scorer = f"words={sys.executable} {tmp_path}/words.py {{hypothesis}} {{reference}}"
    printed = compare(tmp_path, "--seeds", "2", "--archs", *reversed(ARCHS), "--scorer", scorer)
    assert "stage 7: train: done before, skipped" in printed and "earlier/1" in printed
    reversed_results = results()
    assert reversed_results["scorers"]["words"]["seeds"] == dict.fromkeys(ARCHS, [1, 2])
    assert reversed_results["baseline"] == ARCHS[1] and reversed_results["systems"] == [*reversed(ARCHS)]
    ours, theirs = against_baseline(reversed_results, ARCHS[0]), against_baseline(second, ARCHS[1])
    assert ours["difference"] == pytest.approx(-theirs["difference"])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--archs", "transformer", "transfomer_rope"], "--archs transfomer_rope: fairseq has no such arch"),
        (["--archs", "transformer", "lstm"], "--archs lstm: .*-ffn-embed-dim: is a flag of other values of --arch"),
        (["--", "--no-such-flag"], "--archs transformer: .*--no-such-flag: unknown flag"),
    ],
)
def test_flags_that_fairseq_rejects_are_refused_before_the_first_stage(tmp_path, capsys, flags, message):
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    with pytest.raises(SystemExit, match=message):
        main(["demo", "--work-dir", str(tmp_path), *FLAGS, *flags])
    assert {number: signal.getsignal(number) for number in handlers} == handlers, "those of the caller"
    assert "stage 1" not in capsys.readouterr().out


def test_a_dry_run_shows_every_command_and_the_report_that_would_be_moved(tmp_path, capsys, monkeypatch):
    def dry_run(*flags):
        main(["demo", "--work-dir", str(tmp_path), "--dry-run", *flags])
        return capsys.readouterr().out

    printed = dry_run("--seeds", "2")
    trained = re.findall(r"\$ fairseq-train .*--arch (\w+) .*--seed (\d)", printed)
    assert trained == [(arch, seed) for seed in "12" for arch in ARCHS]
    assert (printed.count("stage 13: join"), printed.count("stage 14: translate joined")) == (1, 4)
    assert re.findall(r"\$ fairseq-train .*--seed (\d)", dry_run("--seeds", "2-3", "--only", ARCHS[1])) == ["2", "3"]
    assert "stage 13: join" in printed.partition("stage 7: train")[0], "joining comes before training"
    assert not [*tmp_path.iterdir()] and "moved" not in printed
    report = tmp_path / "compare"
    report.mkdir()
    known = {"recipe": "demo", "settings": asdict(describe("demo").settings), "baseline": ARCHS[0]}
    known["runs"] = {arch: [{"seed": 1, "architecture": arch, "flags": ""}] for arch in ARCHS}
    known["signatures"] = {"sacreBLEU": "nrefs:1|tok:13a|version:2"}
    (report / "results.json").write_text(json.dumps(known))
    scorer = ["--scorer", "a=cat {hypothesis}"]
    printed = dry_run("--seeds", "1", *scorer)
    assert "moved" not in printed and printed.count(f"--json {shlex.join(scorer)} > ") == 2
    # A report with a second seed, which is not trained now, but finished: nothing is moved.
    more = {arch: [{**known["runs"][arch][0], "seed": seed} for seed in (1, 2)] for arch in ARCHS}
    (report / "results.json").write_text(json.dumps({**known, "runs": more}))
    assert "(differs in seeds): would be moved" in dry_run("--seeds", "1")
    for arch in ARCHS:
        (tmp_path / f"{arch}.seed2").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr("recipes.compare.__main__.finished", lambda run: run.seed == 2)
        for flags in (["--seeds", "1"], ["--seeds", "1", "--only", ARCHS[1]], ["--seeds", "3-3"]):
            moved = "moved" in dry_run(*flags)
            assert moved == (flags != ["--seeds", "1"]), "a seed that is not trained and not finished is missing"
    (report / "results.json").write_text(json.dumps(known))
    for flags, differs in ((["--set", "beam=5"], "settings"), (["--tokenize", "char"], "signatures")):
        moved = f"results.json is another report (differs in {differs}): would be moved to {report}/earlier/1/results"
        assert dry_run("--seeds", "2", *flags).count(moved) == 1
    assert [path.name for path in report.iterdir()] == ["results.json"]


def test_each_system_starts_from_a_checkpoint_of_its_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("recipes.pipeline.experiment.read_sharing", lambda *_: "")
    data, systems = tmp_path / "data", tmp_path / "systems.yaml"
    data.mkdir()
    for name in ("dict.en.txt", "dict.de.txt", "bpecodes"):
        (data / name).touch()
    search = {"of": "half", "generate": "--beam 1"}
    systems.write_text(json.dumps({"one": "--arch transformer", "half": "--arch transformer_rope", "search": search}))
    start = setting_flags(f"start_checkpoint={tmp_path}/{{system}}.seed{{seed}}.pt", f"start_data={data}")
    run = ["demo", "--work-dir", str(tmp_path / "work"), "--systems", str(systems), "--seeds", "2", "--dry-run", *start]
    checkpoints = [f"{tmp_path}/{system}.seed{seed}.pt" for seed in "12" for system in ("one", "half")]
    for path in checkpoints:
        missing = f"--set start_checkpoint={path}: must be a file that exists"
        assert missing in usage_error(capsys, main, run)
        Path(path).touch()
    main(run)
    assert re.findall(r"old_model checkpoint --input (\S+)", capsys.readouterr().out) == checkpoints
    second = [str(tmp_path / "one.seed2.pt"), *setting_flags(f"start_checkpoint={tmp_path}/one.seed{{seed}}.pt")]
    Path(checkpoints[0]).unlink()
    main([*run, "--seeds", "2-2", *second[1:]])
    assert re.findall(r"old_model checkpoint --input (\S+)", capsys.readouterr().out) == second[:1] * 2


def test_a_system_of_another_one_does_not_take_the_name_of_an_earlier_training(tmp_path, capsys):
    systems = tmp_path / "systems.yaml"
    systems.write_text(json.dumps({"one": "--arch transformer", "two": {"of": "one", "generate": "--beam 1"}}))
    run = ["demo", "--work-dir", str(tmp_path), "--systems", str(systems), "--seeds", "2", "--dry-run"]
    main(run)
    checkpoints = tmp_path / "two.seed2" / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "checkpoint_last.pt").touch()
    refusal = f"two is of one, and {checkpoints} has the checkpoints of an earlier training: give the system another"
    assert refusal in usage_error(capsys, main, run)


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
    monkeypatch.setattr(stage15_report.bootstrap, "paired_bootstrap", lambda *_: nothing)


def make_report(work, source="en", target="de", words=None, tokenize="13a", documents=0, recipe="demo", more=()):
    """A report.

    Args:
        more: further flags of the command
        documents: 0, or the number of sentences in each document of the test set. The report then also has a system
            "search" with the model of the second one.
    """
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
    flags += [*setting_flags(f"segment_tokens={20 if documents else 0}"), *more]
    runs = {arch: [describe(recipe, *flags, "--arch", arch, "--seed", seed) for seed in (1, 2)] for arch in ARCHS}
    for lang in (source, target):
        rows = sentences(17)
        if documents:
            write(work / "raw" / f"test.sentences.{lang}", rows)
            of_documents = [rows[n : n + documents] for n in range(0, 17, documents)]
            write(work / "raw" / f"test.documents.{lang}", map(" ".join, of_documents))
            write(work / "segments" / f"train.{lang}", ["word " * 12])
            write(work / "segments" / f"valid.{lang}", ["word"] * 3)
            write(work / "segments" / f"test.{lang}", rows)
            rows = "\n\n".join(map("\n".join, of_documents)).split("\n")
        write(work / "raw" / f"test.{lang}", rows)
        write(work / "bpe" / f"test.{lang}", rows)
        write(work / "bpe" / f"train.{lang}", ["word " * 12])
        write(work / "bpe" / f"valid.{lang}", ["word"] * 3)
    for further in runs[ARCHS[0]][0].with_references[1:]:
        write(work / "raw" / f"{further}.{target}", sentences(17))
    if documents:
        search = {"system": "search", "training_of": ARCHS[1]}
        runs["search"] = [replace(run, **search, settings=copy(run.settings)) for run in runs[ARCHS[1]]]
        for run in runs["search"]:
            run.settings.fairseq_generate_flags = "--lenpen 2"
    with mock.patch.object(Shell, "command", lambda _, line, *more, **options: run_unless_binarising(line)):
        stage13_join.Join().run(runs[ARCHS[0]][0], Shell(stage13_join.Join()))
    for run in (runs[arch][n] for n in (0, 1) for arch in runs):
        write(run.hypotheses, distorted(lines(run.test_references[0])))
        written = [("", run.hypotheses)]
        for length in stage13_join.lengths(run):
            path = run.model / "joined" / f"{length}.{target}"
            write(path, distorted(lines(stage13_join.texts(run, length)[1])))
            written.append((f"{length}.", path))
        for name, path in written if documents else ():
            folder, rows = path.parent, lines(path)
            joined = (" ".join(rows[n : n + documents]) for n in range(0, 17, documents))
            write(folder / f"{name}documents.{target}", joined)
            write(folder / f"{name}separators.json", [json.dumps({"segments": 8, "with_other_separators": run.seed})])
        entries = [{"process": PROCESS}, valid(10, 8.0), train(10, 60), valid(20, 7.5), train(20, 120)]
        entries.append({"peak_memory_mib": 700 + run.seed})
        write(run.history, map(json.dumps, entries))
        write(run.checkpoints / "checkpoint2.pt", [])
        write(Runner(run).log(TRAIN), ["num. shared model params: 12,345 (num. trained: 12,345)"])
        flags = ["--sys", run.hypotheses, "--ref", *run.test_references, "--src", run.test_source]
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            score.main([*map(str, flags), "--target-lang", target, "--json"])
        run.score.write_text(printed.getvalue())
    command = f"python -m recipes.compare {shlex.join([recipe, '--work-dir', str(work), *more, '--set', 'beam=4'])}"
    (work / "run.yaml").write_text(json.dumps({"command": command}))
    return Report(runs, recipe)


def run_unless_binarising(line):
    if line.startswith("python -m recipes.text.segments "):
        with contextlib.redirect_stdout(io.StringIO()):
            segments.main(shlex.split(line)[3:])
    elif "data-bin" not in line:
        subprocess.run(line, shell=True, check=True, timeout=LIMIT)


PROCESS = {
    "commit": "0123abc", "versions": {"torch": "2.13.0"}, "hardware": {"gpus": []},
    "batches": {"max_tokens": 64}, "command": "fairseq-train data-bin",
}  # fmt: skip


def run_report(report):
    """Write the report. Returns its folder and its results."""
    experiment = report.experiments[0]
    report.run(experiment, Shell(report))
    return report.folder(experiment), json.loads((report.folder(experiment) / "results.json").read_text())


def test_scores_of_a_report_are_those_of_all_references(tmp_path):
    report = make_report(tmp_path, more=setting_flags("test_files=test.{lang}.gz,second.{lang}.gz"))
    _, results = run_report(report)
    for joined, times in zip(results["joined"], (None, *TIMES), strict=True):
        for system, of_system in report.runs.items():
            for n, run in enumerate(of_system):
                texts = run.test_references if times is None else stage13_join.texts(run, times)[1:]
                hypotheses = run.hypotheses if times is None else run.model / "joined" / f"{times}.de"
                first, second = map(lines, texts)
                expected = sacrebleu.corpus_bleu(lines(hypotheses), [first, second]).score
                assert joined["scores"][system][n] == pytest.approx(expected)
                assert expected != pytest.approx(sacrebleu.corpus_bleu(lines(hypotheses), [first]).score)


def test_scores_equal_sacrebleus_and_joined_lines_are_consecutive_sentences(written):
    report, _, results = written
    work = report.experiments[0].work
    assert seeds_of(results) == dict.fromkeys(ARCHS, [1, 2]) and results["systems"] == ARCHS
    assert results["command"].endswith(f"recipes.compare demo --work-dir {work} --set beam=4 --seeds 2")
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
        for arch in ARCHS:
            for seed in (1, 2):
                folder = work / f"{arch}.seed{seed}"
                name = f"joined/{times}.de" if times > 1 else "hypotheses.de"
                expected = sacrebleu.corpus_bleu(lines(folder / name), [references])
                assert joined["scores"][arch][seed - 1] == pytest.approx(expected.score)
                ratio = joined["length_ratio"][arch][seed - 1]
                assert ratio == pytest.approx(expected.sys_len / expected.ref_len)
                if times == 1:
                    run = results["runs"][arch][seed - 1]
                    assert (run["architecture"], run["flags"], run["seed"]) == (arch, "", seed)
                    assert run["parameters"] == 12345 and run["training"]["peak_memory_mib"] == 700 + seed
                    assert run["metrics"]["sacreBLEU"]["score"] == pytest.approx(expected.score)
        base, other = (joined["scores"][arch] for arch in ARCHS)
        against = joined["against_baseline"][ARCHS[1]]
        assert against["difference"] == pytest.approx(np.mean(other) - np.mean(base))
        assert against["p_holm"] == against["p_value"], "one comparison needs no correction"
        by_seed = [bootstrap["difference"] for bootstrap in joined["by_seed"][ARCHS[1]]]
        assert by_seed == pytest.approx(np.subtract(other, base))


def test_a_text_with_documents_is_scored_by_sentences_and_documents_in_segments_of_all_lengths(tmp_path, no_bootstrap):
    report = make_report(tmp_path, documents=5)
    results = report.results(report.experiments[0])
    assert [joined["tokens"] for joined in results["joined"]] == [20, 1, 64, 128, 256, 512, 1000]
    sizes = [max(len(side.split()) for side in pair) for pair in zip(*map(lines, texts_of(tmp_path)), strict=True)]
    assert [joined["lines"] for joined in results["joined"][1:3]] == [17, len(greedy_segments(sizes, 5, 64))]
    for joined in results["joined"]:
        own = joined is results["joined"][0]
        for system, of_system in report.runs.items():
            for n, run in enumerate(of_system):
                folder = run.model if own else run.model / "joined"
                name = "hypotheses.de" if own else f"{joined['tokens']}.de"
                sentences, references = lines(folder / name), lines(texts_of(tmp_path)[1])
                expected = sacrebleu.corpus_bleu(sentences, [references])
                assert joined["scores"][system][n] == pytest.approx(expected.score)
                assert joined["length_ratio"][system][n] == pytest.approx(expected.sys_len / expected.ref_len)
                documents = [[" ".join(side[n : n + 5]) for n in range(0, 17, 5)] for side in (sentences, references)]
                expected = sacrebleu.corpus_bleu(documents[0], [documents[1]]).score
                assert joined["document_scores"][system][n] == pytest.approx(expected)
                assert joined["other_separators"][system][n] == run.seed / 8
    # The bootstrap draws the sentences of a segment together.
    run = report.runs[ARCHS[0]][0]
    numbers, references = numbers_of_run(run)["sets"][3]["statistics"], lines(texts_of(tmp_path)[1])
    segments = [*map(len, (greedy_segments(sizes[:n], 5, 128) for n in range(1, 18))), 0]
    ends = [n for n in range(1, 18) if segments[n] != segments[n - 1]]  # the next sentence begins a segment
    assert len(numbers) == len(ends) < 17
    for row, begin, end in zip(numbers, [0, *ends], ends, strict=False):
        expected = sacrebleu.corpus_bleu(lines(run.model / "joined" / "128.de")[begin:end], [references[begin:end]])
        assert [*row] == [*expected.counts, *expected.totals, expected.sys_len, expected.ref_len]
    assert results["longest_in_training"] == 12
    for text in texts(results):
        assert f"training of {ARCHS[1]}" in text and "--lenpen 2" in text
    for run in results["runs"]["search"]:
        assert run["parameters"] == 12345 and run["curve_is_whole"], "those of the training"


WORDS_SHARED = """
import sys
for pair in zip(*map(open, sys.argv[1:]), strict=True):
    print(len(set.intersection(*({*line.split()} for line in pair))))
"""


@pytest.fixture
def three(tmp_path, monkeypatch):
    """The runs of three systems by their names; their stages run ``fairseq-rope score`` in this process."""
    runs = make_report(tmp_path).runs
    runs["third"] = [replace(run, system="third") for run in runs[ARCHS[1]]]
    for run, of in zip(runs["third"], runs[ARCHS[1]], strict=True):
        shutil.copytree(of.model, run.model)
        run.hypotheses.write_text("".join(line + "\n" for line in reversed(lines(of.hypotheses))))
    (tmp_path / "words.py").write_text(WORDS_SHARED)

    def score_here(shell, line, makes=()):
        *words, _, _, _, _, _, path = shlex.split(line)  # … > FILE.tmp && mv FILE.tmp FILE
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            score.main(words[words.index("score") + 1 :])
        Path(path).write_text(printed.getvalue())

    monkeypatch.setattr(Shell, "command", score_here)
    monkeypatch.setattr(stage15_report.bootstrap, "RESAMPLES", 50)
    return runs


def scored(runs, *scorers):
    """*runs* with *scorers*, and whether each stage 12 of them ran now."""
    runs = {name: [replace(run, scorers=scorers) for run in of] for name, of in runs.items()}
    return runs, [Runner(run).ensure(ScoreWith(one)) for of in runs.values() for run in of for one in scorers]


@pytest.mark.parametrize("lower_is_better", [False, True])
def test_scores_of_a_program_have_the_bootstrap_and_the_correction_of_bleu(three, tmp_path, lower_is_better):
    command = f"{sys.executable} -S {tmp_path}/words.py {{hypothesis}} {{reference}}"
    runs, _ = scored(three, Scorer("words", command, lower_is_better))
    program = shlex.join(["python", "-m", "recipes.compare", "demo", "--scorer", command.replace(" ", "\n")])
    (tmp_path / "run.yaml").write_text(json.dumps({"command": program}))
    results = Report(runs, "demo").results(runs[ARCHS[0]][0])
    reference = [{*line.split()} for line in lines(tmp_path / "raw" / "test.de")]

    def mean(system, chosen):
        hypotheses = [lines(tmp_path / f"{system}.seed{seed}" / "hypotheses.de") for seed in (1, 2)]
        return np.mean([[len({*of_seed[n].split()} & reference[n]) for n in chosen] for of_seed in hypotheses])

    draws = [range(17), *np.random.default_rng(12345).integers(17, size=(50, 17))]
    scores = {name: [mean(name, drawn) for drawn in draws] for name in runs}
    against, p_values = results["scorers"]["words"]["against_baseline"], {}
    for name in (ARCHS[1], "third"):
        difference, *resampled = np.subtract(scores[name], scores[ARCHS[0]])
        p_values[name] = p_of(difference, resampled)
        (radius,) = np.sort(np.abs(resampled - np.mean(resampled)))[-2:-1]  # 1 of 50 is larger: p is at most 0.05
        expected = [difference, difference - radius, difference + radius, p_values[name]]
        assert [against[name][key] for key in ("difference", "low", "high", "p_value")] == pytest.approx(expected)
    (one, smallest), (other, largest) = sorted(p_values.items(), key=lambda item: item[1])
    corrected = {one: min(1, 2 * smallest), other: min(1, max(2 * smallest, largest))}  # Holm 1979, of two tests
    assert {name: of["p_holm"] for name, of in against.items()} == pytest.approx(corrected)

    web, markdown = texts(results)
    table = re.sub("</?span>", "", web.partition("<h2>words</h2>")[2].partition("</table>")[0])
    rows = [re.findall("<td[^>]*>(.*?)</td>", row) for row in table.split("<tr>")[2:]]
    assert [row[0] for row in rows] == sorted(runs, key=lambda name: scores[name][0], reverse=not lower_is_better)
    assert rows[0][1] == "1, 2" and rows[0][2].startswith(f"{scores[rows[0][0]][0]:.4f} ± ") and rows[0][5] == "best"
    worse = [results["scorers"]["words"]["against_best"][row[0]]["p_holm"] <= 0.05 for row in rows[1:]]
    assert [row[5].startswith("worse") for row in rows[1:]] == worse and any(worse)
    assert f"\n    python -m recipes.compare demo --scorer '{command}' --seeds 2\n" in markdown
    assert f"words, where {'lower' if lower_is_better else 'higher'} scores are better, is the mean" in markdown


def test_a_program_scores_again_if_its_command_or_the_texts_change(three, tmp_path, capsys):
    """A run that it has not scored is in the report, but not in the table of that program."""
    command = f"{sys.executable} -S {tmp_path}/words.py {{hypothesis}}"
    one, two = Scorer("one", command), Scorer("two", f"{command} {{source}}")
    assert scored(three, one)[1] == [True] * 6
    runs, ran = scored(three, one, replace(two, lower_is_better=True))
    assert ran == [False, True] * 6
    runs["third"][1].hypotheses.write_text("changed\n" * 17)
    assert scored(runs, one)[1] == [False] * 5 + [True]
    changed = replace(one, command=f"{command} {{reference}}")
    assert scored({ARCHS[0]: runs[ARCHS[0]]}, changed)[1] == [True] * 2
    before = runs[ARCHS[0]][0].model / "earlier" / "1" / "scorer.one.json"
    assert json.loads(before.read_text())["systems"][0]["metrics"][-1]["signature"] == command

    report = Report(runs, "demo")
    results = report.results(replace(report.experiments[0], scorers=(one, two, Scorer("none", command))))
    assert {name: of["seeds"] for name, of in results["scorers"].items()} == {
        "one": {ARCHS[1]: [1, 2], "third": [1, 2]}, "two": {ARCHS[0]: [1, 2], ARCHS[1]: [1, 2], "third": [1]},
    }  # fmt: skip
    assert "third †" in texts(results)[0].partition("<h2>two</h2>")[2] and results["systems"][-1] == "third"
    rows = csv.DictReader(page.texts(results, dict.fromkeys(page.IMAGES, b""))["results.csv"].splitlines())
    assert [row["score by two"] == "" for row in rows] == [False] * 5 + [True]
    report.folder(report.experiments[0]).mkdir()
    (report.folder(report.experiments[0]) / "results.json").write_text(json.dumps(results))
    for scorers, differ in (((one, two), False), ((changed, two), True)):
        report = Report({name: [replace(run, scorers=scorers) for run in of] for name, of in runs.items()}, "demo")
        report.prepare(dry := replace(report.experiments[0], dry_run=True), Runner(dry).stamps, Moves(dry))
        assert ("is another report (differs in scorers)" in capsys.readouterr().out) == differ


def test_a_program_that_fails_does_not_stop_the_others(three, tmp_path, monkeypatch):
    command = f"{sys.executable} -S {tmp_path}/words.py {{hypothesis}}"
    bad, good = Scorer("bad", command), Scorer("good", command)
    score_here = Shell.command

    def fail(shell, line, makes=()):
        if "bad=" in line:
            raise StageError("no memory")
        score_here(shell, line, makes)

    monkeypatch.setattr(Shell, "command", fail)
    run = replace(three[ARCHS[0]][0], scorers=(bad, good))
    assert launch.run_stages(run, lambda run: [*map(ScoreWith, run.scorers)], "x") == "no memory"
    assert [ScoreWith(scorer).is_done(run) for scorer in run.scorers] == [False, True]


def test_an_interrupted_translation_of_joined_lines_continues(report, monkeypatch):
    run = report.experiments[0]
    stage = TranslateJoined()
    shutil.rmtree(run.model / "joined")
    for path in stage.inputs(run):
        path.parent.mkdir(exist_ok=True, parents=True)
        path.touch()
    written = []

    def translate(_, line, *more):
        path = Path(shlex.split(line)[-1])
        if path.suffix:
            path.write_text("translated")
            written.append(path.name)
        else:
            path.mkdir(exist_ok=True)

    def interrupt(stage, line, *more):
        if "4.generate" in line:
            raise KeyboardInterrupt
        translate(stage, line)

    monkeypatch.setattr("recipes.run.shell.run_logged", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Runner(run).ensure(stage)
    assert written == ["2.generate.txt", "2.de"]
    monkeypatch.setattr("recipes.run.shell.run_logged", translate)
    Runner(run).ensure(stage)
    assert written[2:] == ["2.de", "4.generate.txt", "4.de", "8.generate.txt", "8.de"]
    assert Runner(run).stamps.is_done(stage) and not (run.model / "earlier").exists()


def test_runs_count_in_any_precision_and_are_named_if_other_settings_have_changed(report, monkeypatch):
    run, other = report.runs[ARCHS[0]]
    stamps = Stamps(run)
    stamps.path(TRAIN).parent.mkdir()
    stamps.path(TRAIN).write_text(json.dumps({"of": stamps.of(TRAIN), "made": stamps.made(TRAIN)}))
    monkeypatch.setattr(stages, "stages_of", lambda _: [TRAIN])

    def changed(**values):
        return replace(run, settings=replace(run.settings, **values))

    for same in (run, changed(precision="bf16"), changed(tokens_per_device=7)):
        assert stages.finished(same) and stages.outdated(same) == ""
    longer = changed(max_epochs=99, precision="bf16")
    assert not stages.finished(longer) and stages.outdated(longer) == "max_epochs changed"
    assert not stages.finished(other) and stages.outdated(other) == "", "it has never ended"
    search = replace(changed(precision="bf16"), system="search", training_of=ARCHS[0])
    monkeypatch.setattr(stages, "stages_of", lambda run: [TRAIN] if run.training is run else [AVERAGE])
    path = Stamps(search).path(AVERAGE)
    path.parent.mkdir(parents=True)
    as_before = Stamps(replace(run, system="search", training_of=ARCHS[0]))
    path.write_text(json.dumps({"of": as_before.of(AVERAGE), "made": as_before.made(AVERAGE)}))
    assert stages.finished(search), "a system with the model of another one, too"
    monkeypatch.setattr(stages, "stages_of", lambda run: [TRAIN, AVERAGE])
    assert stages.outdated(longer) == "", "one of its stages has never ended"
    monkeypatch.setattr(stages, "stages_of", lambda _: [TRAIN])

    comparison = Comparison(Namespace(), "", {ARCHS[0]: longer, ARCHS[1]: report.runs[ARCHS[1]][0]}, [other])
    why = "max_epochs changed since its end: repeat the command with this seed (--seeds) and this system (--only)"
    message = f"the baseline, {ARCHS[0]}, has no finished run: {ARCHS[0]}, seed 1: {why}"
    with pytest.raises(StageError, match=f"{re.escape(message)}$"):
        comparison.report(None, must_be=True)
    assert comparison.report(None, must_be=False) == {f"{ARCHS[0]}, seed 1": why}


def test_a_report_is_written_again_if_only_its_settings_have_changed(report):
    experiment = report.experiments[0]
    before = Stamps(experiment).of(report)
    for run in report.experiments:
        run.settings.max_len_b = 60
    assert differences(before, Stamps(experiment).of(report)) == "settings changed"


def texts(results):
    """The page and the Markdown, without plots."""
    written = page.texts(results, dict.fromkeys(page.IMAGES, b""))
    return written["report.html"], written["results.md"]


def texts_of(work):
    return [work / "raw" / f"test.sentences.{lang}" for lang in ("en", "de")]


def greedy_segments(sizes, document, tokens):
    """The sizes of the segments of sentences with *sizes*, in documents of *document* sentences."""
    segments = []
    for number, size in enumerate(sizes):
        if number % document and segments[-1] + 1 + size <= tokens:
            segments[-1] += 1 + size
        else:
            segments.append(size)
    return segments


@pytest.mark.parametrize("target, asked", [("zh", "zh"), ("zh", "13a"), ("de", "13a")])
def test_the_bootstrap_uses_the_tokeniser_of_the_scores(tmp_path, no_bootstrap, target, asked):
    report = make_report(tmp_path, target=target, words="我们 去 北京。 他 看书".split(), tokenize=asked)
    results = report.results(report.experiments[0])
    for system, runs in results["runs"].items():
        expected = [run["metrics"]["sacreBLEU"]["score"] for run in runs]
        assert results["joined"][0]["scores"][system] == pytest.approx(expected)


def test_documents_are_scored_with_the_tokeniser_of_the_scores(tmp_path, no_bootstrap):
    words = "我们 去 北京。 他 看书".split()
    report = make_report(tmp_path, target="zh", words=words, tokenize="zh", documents=5)
    joined = report.results(report.experiments[0])["joined"][0]
    for system, runs in report.runs.items():
        for run, actual in zip(runs, joined["document_scores"][system], strict=True):
            texts = [lines(run.hypotheses), lines(tmp_path / "raw" / "test.sentences.zh")]
            documents = [[" ".join(side[n : n + 5]) for n in range(0, 17, 5)] for side in texts]
            expected, other = (
                sacrebleu.corpus_bleu(documents[0], [documents[1]], tokenize=name).score for name in ("zh", "13a")
            )
            assert actual == pytest.approx(expected) != pytest.approx(other)


@pytest.mark.parametrize("name", ["13a", "zh", "intl", "char", "none", "ja-mecab", "ko-mecab"])
def test_the_tokeniser_is_read_from_a_signature(name):
    try:
        bleu = sacrebleu.metrics.BLEU(tokenize=name, force=True)
    except RuntimeError as missing:
        pytest.skip(f"sacreBLEU's tokeniser {name}: {' '.join(str(missing).split())}")
    bleu.corpus_score(["a b"], [["a b"]])
    assert tokeniser_of(str(bleu.get_signature())) == name


def collected(seed, *sets):
    """The collected numbers of a run, whose translations of each of *sets* are those lines."""
    return {"seed": seed, "sets": [{"statistics": statistics(*texts).tolist()} for texts in sets], "scorers": {}}


def test_a_program_s_scores_of_a_segment_are_drawn_together():
    """The score is the mean of the sentences of the drawn segments; here two segments of 1 and 3 sentences."""
    rows = {"a": [(2.0, 1), (9.0, 3)], "b": [(3.0, 1), (9.0, 3)]}
    runs = {system: [{"seed": 1, "scorers": {"x": of_segments}}] for system, of_segments in rows.items()}
    compared = compared_by_program(Scorer("x", "x {hypothesis}"), runs, "a")
    assert compared["scores"] == {"a": [11 / 4], "b": [12 / 4]}
    drawn = draw(2, 1000)
    sums = {system: (drawn @ np.array(of_segments)).T for system, of_segments in rows.items()}
    means = {system: [of[0] / of[1]] for system, of in sums.items()}
    assert compared["against_baseline"]["b"]["p_value"] == paired_bootstrap(means["a"], means["b"])["p_value"]


def test_collected_numbers_are_compared_without_files():
    draw_words = random.Random(6)
    reference = [" ".join(draw_words.choices(WORDS, k=12)) for _ in range(9)]
    hypotheses = {
        (system, seed): [line.replace(" ", " x ", draw_words.randint(0, wrong)) for line in reference]
        for system, wrong, seeds in (("a", 3, (1, 2)), ("b", 2, (2, 3)), ("c", 1, (4,)))
        for seed in seeds
    }
    runs = {}
    for (system, seed), lines_ in hypotheses.items():
        runs.setdefault(system, []).append(collected(seed, (lines_, reference), (lines_[:4], reference[:4])))
    data = {"sets": [{"times": 1, "lines": 9}, {"times": 2, "lines": 4}]}
    for compared, count in zip(compared_sets(data, runs, "a"), (9, 4), strict=True):
        bleu = {
            run: sacrebleu.corpus_bleu(lines_[:count], [reference[:count]]).score for run, lines_ in hypotheses.items()
        }
        for system, of_system in compared["scores"].items():
            assert of_system == pytest.approx([score for (name, _), score in bleu.items() if name == system])
        assert {name: against["seeds"] for name, against in compared["against_baseline"].items()} == {"b": [2]}
        assert compared["against_baseline"]["b"]["difference"] == pytest.approx(bleu["b", 2] - bleu["a", 2])
        # c shares no seed with the baseline, so it cannot be the best.
        assert compared["best"] == max("ab", key=lambda name: bleu[name, 2])


def test_systems_with_different_seeds_are_compared_by_the_seeds_that_both_have(report):
    """The second system has seed 2 only; a third one and the failed run are named."""
    base, other = report.runs.values()
    experiment = report.experiments[0]
    results = Report({ARCHS[0]: base, ARCHS[1]: other[1:]}, "demo").results(experiment)
    joined = results["joined"][0]
    assert [len(joined["scores"][arch]) for arch in ARCHS] == [2, 1]
    against = against_baseline(results, ARCHS[1])
    assert against["seeds"] == [2]
    assert against["difference"] == pytest.approx(joined["scores"][ARCHS[1]][0] - joined["scores"][ARCHS[0]][1])
    (of_seed,) = joined["by_seed"][ARCHS[1]]
    assert of_seed["seed"] == 2 and of_seed["difference"] == against["difference"]
    fewer = Report({ARCHS[0]: base, ARCHS[1]: other[:1]}, "demo").results(experiment)["command"]
    assert re.findall("beam=4 (.*)", fewer) == ["--seeds 1", f"--seeds 2 --only {ARCHS[0]}"]
    assert re.findall("beam=4 (.*)", results["command"]) == [f"--seeds 2 --only {ARCHS[0]}", "--seeds 2-2"]

    with_gap = [replace(run, seed=seed) for run, seed in zip(base, (1, 3), strict=True)]
    gap = Report({ARCHS[0]: with_gap, ARCHS[1]: other[:1]}, "demo")._command(experiment)
    assert re.findall("beam=4 (.*)", gap) == ["--seeds 1", f"--seeds 3-3 --only {ARCHS[0]}"]

    failed = {f"{ARCHS[1]}, seed 2": "stage 7 (train)\nfailed"}
    apart = Report({ARCHS[0]: base[:1], ARCHS[1]: other[1:], "broken": []}, "demo", failed).results(experiment)
    assert apart["systems"] == ARCHS and apart["joined"][0]["against_baseline"] == {} == apart["joined"][0]["by_seed"]
    assert f"{ARCHS[1]}, seed 2 is missing: stage 7 (train) failed" in page.verdict(apart)
    for text in texts(apart):
        assert "no common seed" in text and "have no seed in common" not in text and "failed" in text
    without_baseline = Report({ARCHS[0]: [], ARCHS[1]: other}, "demo").results(experiment)
    assert without_baseline["systems"] == [ARCHS[1]] and without_baseline["baseline"] == ARCHS[0]
    missing = f"The baseline {ARCHS[0]} has no finished run. The report has no differences to it."
    assert missing in page.verdict(without_baseline)
    texts(without_baseline)
    with pytest.raises(StageError, match="no training has finished"):
        Report({ARCHS[0]: []}, "demo").results(experiment)


def with_seeds(report, *seeds):
    """*report* with the first N runs of each system, one N for each; 0: without the system."""
    counts = zip(report.runs.items(), seeds, strict=True)
    return Report({system: runs[:count] for (system, runs), count in counts if count}, "demo")


def test_an_earlier_report_with_other_settings_or_more_runs_is_moved(report, capsys, monkeypatch, no_bootstrap):
    monkeypatch.setattr(page, "rendered", lambda figure, kind: b"")
    folder, first = run_report(report)
    assert run_report(report)[1] == first and not (folder / "earlier").exists()
    run_report(with_seeds(report, 2, 1))  # fewer seeds of one system
    assert "differs in seeds" in capsys.readouterr().out
    assert json.loads((folder / "earlier" / "1" / "results.json").read_text()) == first
    run_report(report)  # more seeds: the new report contains the earlier one
    assert sorted(path.name for path in (folder / "earlier").iterdir()) == ["1"]
    for run in report.experiments:
        run.settings.beam = 8
    run_report(report)
    run_report(Report(dict(reversed(report.runs.items())), "demo"))
    run_report(Report({ARCHS[1]: report.runs[ARCHS[1]]}, "demo"))  # fewer systems
    for run in report.runs[ARCHS[0]]:
        run.settings.fairseq_train_flags = "--activation-fn gelu"
    run_report(Report(dict(reversed(report.runs.items())), "demo"))  # more systems
    for run in report.runs[ARCHS[0]]:
        run.settings.fairseq_train_flags = "--activation-fn relu"
    run_report(Report(dict(reversed(report.runs.items())), "demo"))
    (folder / "results.json").write_text("cut off")
    run_report(report)
    printed = capsys.readouterr().out
    reasons = re.findall(r"report.html is another report \(differs in (.*)\): moved to .*/earlier/(\d)/", printed)
    why = ["settings", "baseline", "systems", "systems", "results.json, which cannot be read"]
    assert reasons == [(reason, str(number)) for number, reason in enumerate(why, start=2)]
    for number in "123456":
        names = sorted(path.name for path in (folder / "earlier" / number).iterdir())
        assert names == sorted([*page.TEXTS, *page.IMAGES, "results.json"])


def words_of(page_path):
    """The text that a browser shows."""
    return html.unescape(re.sub("<[^>]*>", "", page_path.read_text()))


def test_the_page_loads_no_other_files_and_the_table_names_no_folder(written):
    _, folder, results = written
    source = (folder / "report.html").read_text()
    assert source.count("<img ") == 4 and "<script" not in source and "<link" not in source
    assert all(load.startswith("data:image/svg+xml;base64,") for load in re.findall('(?:src|href)="([^"]*)', source))
    facts = [*ARCHS, results["signatures"]["sacreBLEU"], "0123abc", "fairseq-train data-bin", *page.verdict(results)]
    assert all(fact in words_of(folder / "report.html") for fact in facts)
    text = (folder / "results.md").read_text()
    names = [row.split(" | ")[0] for row in text.splitlines()]
    assert all(f"| {arch}, seed {seed}" in names for arch in ARCHS for seed in (1, 2))
    assert page.verdict(results)[0] in text and "recipes.compare demo --set beam=4 --seeds 2\n\n" in text
    assert str(folder) not in text and "--work-dir" not in text


def test_the_report_of_a_users_own_texts_names_them_and_a_command_that_runs(tmp_path, no_bootstrap, capsys):
    """The recipe's own data are another corpus, which it would download."""
    own = tmp_path / "my texts"
    own.mkdir()
    more = ["--data-dir", str(own), "--manifest", "none"]
    more += setting_flags(*(f"{name}_files={name}.{{lang}}" for name in ("train", "valid", "test")))
    for name in ("train.en", "train.de", "valid.en", "valid.de", "test.en", "test.de"):
        (own / name).write_text("a\n")
    report = make_report(tmp_path / "work", recipe="multi30k_en_de", more=more)
    web, markdown = texts(report.results(report.experiments[0]))
    title = "transformer and transformer_rope on my texts (en-de)"
    assert f"<h1>{title}</h1>" in web and f"<title>{title}</title>" in web and f"# {title}\n" in markdown
    assert "| train | train.en, train.de | 1 pairs after cleaning |\n" in markdown
    assert "| valid | valid.en, valid.de | 3 pairs |\n" in markdown
    assert "| test | test.en, test.de | 17 sentences |" in markdown and str(tmp_path / "work") not in markdown
    (command,) = re.findall("^    (python .*)", markdown, re.M)
    words = shlex.split(command)
    assert words[:4] == ["python", "-m", "recipes.compare", "multi30k_en_de"] and words[4:8] == more[:4]
    main([*words[3:], "--dry-run", "--work-dir", str(tmp_path / "other")])
    assert str(own) in capsys.readouterr().out


def test_translations_that_lack_lines_are_refused(report):
    path = report.runs[ARCHS[0]][0].model / "joined" / "2.de"
    path.write_text(path.read_text().partition("\n")[2])
    with pytest.raises(StageError, match=r"joined/2.de has 7 lines, and .*joined/2.de has 8: remove it"):
        run_report(report)


def test_a_run_that_another_process_has_finished_is_not_missing(report, monkeypatch):
    first = {arch: runs[0] for arch, runs in report.runs.items()}
    failed = {f"{ARCHS[1]}, seed {seed}": "it could not be submitted" for seed in (2, 3)}
    comparison = Comparison(Namespace(recipe="demo"), "", first, report.experiments, failed)
    monkeypatch.setattr("recipes.compare.__main__.finished", lambda run: run.seed <= 2 and not run.scorers)
    monkeypatch.setattr(Report, "summary", lambda *_: "")
    written = []
    comparison.report(SimpleNamespace(ensure=written.append, run=None), must_be=True)
    assert [*written[0].failed] == [f"{ARCHS[1]}, seed 3"] and written[0].runs == report.runs

    comparison.experiments = {arch: replace(run, scorers=(Scorer("one", "one"),)) for arch, run in first.items()}
    comparison.failed = {f"{ARCHS[1]}, seed 2": "stage 12 failed"}  # the program, not the run
    comparison.report(SimpleNamespace(ensure=written.append, run=None), must_be=True)
    assert written[1].failed == {f"A score of {ARCHS[1]}, seed 2": "stage 12 failed"}
    assert [run.title for run in written[1].experiments] == [run.title for run in written[0].experiments]


def test_finished_runs_are_found_beyond_seeds_that_are_not_trained(report, monkeypatch):
    base = report.runs[ARCHS[0]][0]
    comparison = Comparison(Namespace(), "", {}, [base])
    shutil.copytree(base.model, replace(base, seed=12).model)
    shutil.copytree(base.model, replace(base, seed=5).model)
    monkeypatch.setattr("recipes.compare.__main__.finished", lambda run: run.seed != 5)
    assert [run.seed for run in comparison.finished_runs(base)] == [1, 2, 12]


def test_the_report_follows_the_last_run_of_each_seed(monkeypatch):
    first, second = ([Namespace(system=name, seed=seed) for name in ("sinusoidal", "rope")] for seed in (1, 2))
    comparison = Comparison(Namespace(), "", {}, [*first, *second])
    ended, reports = [], []

    def run_side_by_side(runs, *_):
        for run in (second[1], first[0], second[0], first[1]):  # the third one ends seed 2
            ended.append(run)
            yield run, ""

    monkeypatch.setattr(launch, "outcomes", run_side_by_side)
    monkeypatch.setattr(comparison, "report", lambda runner, must_be: reports.append((len(ended), must_be)) or {})
    comparison.train(None)
    assert reports == [(3, False), (4, True)]


def test_a_report_that_fails_does_not_stop_the_other_trainings(monkeypatch, capsys):
    runs = [Namespace(system=name, seed=seed) for seed in (1, 2) for name in ("sinusoidal", "rope")]
    comparison, trained = Comparison(Namespace(), "", {}, runs), []

    def run_one_by_one(runs, *_):
        for run in runs:
            trained.append(run)
            yield run, ""

    def fail(*_, must_be):
        raise StageError(f"history.jsonl: has no whole epoch {must_be}")

    monkeypatch.setattr(launch, "outcomes", run_one_by_one)
    monkeypatch.setattr(comparison, "report", fail)
    with pytest.raises(StageError, match="has no whole epoch True"):
        comparison.train(None)
    assert trained == runs
    assert "no report of these runs yet, the others go on: history.jsonl" in capsys.readouterr().err


def test_a_tuning_chooses_the_lowest_finite_loss_of_a_finished_training(tmp_path):
    """A system that translates with the model of another one has the value of that one."""
    losses = {  # by value: those of rope, and of sinusoidal
        "1e-3": (["4.0", "3.5", "nan"], ["nan"]),
        "2e-3": (["nan", "nan"], ["4.4", "4.6"]),
        "4e-3": (["3.0"], ["4.6"]),  # not finished
        "8e-3": (["3.6"], ["4.4"]),  # as low as with 2e-3, the smaller value
    }
    experiments = {}
    for value, of_value in losses.items():
        experiments[value] = {}
        for system, history in zip(("rope", "sinusoidal"), of_value, strict=True):
            run = replace(describe("demo", "--gpus", 0, "--name", value.replace("-", "")), work=tmp_path, system=system)
            run.checkpoints.mkdir(parents=True)
            lines = [{"epoch": n, "valid_loss": loss, "valid_num_updates": n} for n, loss in enumerate(history, 1)]
            lines.append({"epoch": 1, "train_num_updates": 1, "train_wall": 1, "train_wps": 9})
            run.history.write_text("".join(json.dumps(line) + "\n" for line in lines))
            experiments[value][system] = run
        experiments[value]["rope-linear"] = replace(
            experiments[value]["rope"], system="rope-linear", training_of="rope"
        )
    tuning = Tuning("learning_rate", experiments)
    chosen = tuning.chosen(lambda run: "4e-3" not in run.tuned)
    values = {name: next(v for v in losses if experiments[v][name] is run) for name, run in chosen.items()}
    assert values == {"rope": "1e-3", "rope-linear": "1e-3", "sinusoidal": "2e-3"}
    outcomes = tuning.outcomes(lambda run: "4e-3" not in run.tuned)
    assert set(outcomes) == {"rope", "sinusoidal"}
    assert [run["loss"] for run in outcomes["sinusoidal"]["runs"]][1:] == [4.4, None, 4.4]
    assert tuning.chosen(lambda run: False) == {}


def test_a_tuning_without_the_baseline_is_refused_before_it_trains(monkeypatch):
    baseline, other = (Namespace(system=name, seed=1) for name in ("sinusoidal", "rope"))
    tuning = Tuning("learning_rate", {})
    monkeypatch.setattr(Tuning, "chosen", lambda *_: {})
    monkeypatch.setattr(launch, "outcomes", lambda *_: pytest.fail("a run was trained"))
    comparison = Comparison(Namespace(), "", {"sinusoidal": baseline, "rope": other}, [other], tuning=tuning)
    message = "--tune learning_rate: no training of the baseline sinusoidal can be chosen: none has ended .*--only"
    with pytest.raises(StageError, match=message):
        comparison.train(None)


def test_runs_of_another_length_are_not_compared(report):
    first, second = report.runs.values()
    assert of_equal_length({**report.runs, "none": []}) == ({ARCHS[0]: [*first], ARCHS[1]: [*second]}, {})
    checkpoints = second[0].checkpoints
    (checkpoints / "checkpoint2.pt").rename(checkpoints / "checkpoint5.pt")
    equal, others = of_equal_length(report.runs)
    assert equal == {ARCHS[0]: [*first], ARCHS[1]: [*second[1:]]}
    ((name, why),) = others.items()
    assert name == f"{ARCHS[1]}, seed 1"
    first[0].settings.fairseq_train_flags = "--patience 3"  # of one system alone
    assert of_equal_length(report.runs)[1] == others
    first[0].settings.fairseq_train_flags = ""
    assert why.startswith(f"its training ended at 5 and that of {ARCHS[0]}, seed 1, at 2 (epochs or updates; ")
    for run in report.experiments:
        run.settings.fairseq_train_flags = "--patience 3"
    assert of_equal_length(report.runs) == ({ARCHS[0]: [*first], ARCHS[1]: [*second]}, {})


def test_a_test_set_that_cannot_be_joined_is_refused(tmp_path):
    """The flags of both the model and the search must allow long lines."""
    (tmp_path / "bpe").mkdir()
    experiment = describe("demo", "--work-dir", tmp_path)
    texts = experiment.texts("bpe", ["test"])
    for path in texts:
        path.write_text("a\n" * 7)
    with pytest.raises(StageError, match="the test set has 7 lines, and at least 8"):
        stage13_join.check(experiment)
    texts[0].write_text("a\n" * 8)
    texts[1].write_text("a " * 1100 + "\n" + "a\n" * 7)
    roomy = "--max-source-positions 4096 --max-target-positions 4096"
    settings = experiment.settings
    for settings.fairseq_train_flags, settings.fairseq_generate_flags in (("", ""), ("", roomy), (roomy, "")):
        with pytest.raises(StageError, match=r"8 lines of 1108 tokens \(.*test.de\), more than the 1024"):
            stage13_join.check(experiment)
    settings.fairseq_generate_flags = roomy
    stage13_join.check(experiment)
    settings.fairseq_generate_flags = f"{roomy} --max-tokens 1107"
    with pytest.raises(StageError, match=r"8 lines of 1108 tokens \(.*test.de\), more than the 1107 of a batch: set"):
        stage13_join.check(experiment)
    settings.fairseq_generate_flags, settings.segment_tokens = "", 512
    with pytest.raises(StageError, match=r"a segment of 1101 tokens \(.*test.de\), more than the 1024"):
        stage13_join.check(experiment)
    # stage 13 joins these 8 sentences, with a token between two, to a segment
    texts[1].write_text(f"{'a ' * 100}\n" * 8)
    settings.fairseq_train_flags = "--max-source-positions 1024 --max-target-positions 256"
    with pytest.raises(StageError, match=r"a segment of 808 tokens \(.*test.de\), more than the 256"):
        stage13_join.check(experiment)
    settings.fairseq_train_flags = ""
    stage13_join.check(experiment)


def test_lines_are_measured_as_they_are_joined_and_for_each_system(tmp_path):
    """The last four lines are in no group of eight."""
    (tmp_path / "bpe").mkdir()
    short = describe("demo", "--work-dir", tmp_path)
    short.settings.fairseq_train_flags = "--max-source-positions 512"
    runs = [
        dataclasses.replace(describe("demo", "--work-dir", tmp_path), system="a"),
        dataclasses.replace(short, system="b"),
    ]
    comparison = Comparison(None, "", {run.system: run for run in runs}, runs)
    comparison.check_joined_lines()  # without the files, nothing is measured
    for length, refusal in (
        (127, ""),
        (128, "513 .* 512 .* flags of b"),
        (255, "1021 .* 512 .* flags of b"),
        (256, "1025 .* 1024 that fairseq takes"),
    ):
        for path in short.texts("bpe", ["test"]):
            path.write_text("a\n" * 8 + f"{'a ' * length}\n" * 4)
        if not refusal:
            comparison.check_joined_lines()
            continue
        with pytest.raises(StageError, match=f"has 4 lines of {refusal}: set --max-source-positions"):
            comparison.check_joined_lines()


@pytest.mark.slow
def test_each_system_is_trained_further_with_the_value_that_has_the_lowest_validation_loss(tmp_path):
    of = {"old": "--arch transformer", "new": "--arch transformer_rope"}
    flags = ["--seeds", "2", "--tune", "learning_rate=5e-2,1e-7"]
    flags += [word for name, given in of.items() for word in ("--system", f"{name}={given}")]
    printed = compare(tmp_path, *flags, "--", "--patience", "1")
    trained = re.findall(
        r"\$ fairseq-train .*--lr (\S+) .*--save-dir \S*/(old|new)\.seed(\d)\.\w+/checkpoints", printed
    )
    tuned, further = trained[:4], trained[4:]
    assert tuned == [(lr, system, "1") for lr in ("1e-07", "0.05") for system in of]

    def losses(system, seed, lr):  # from fairseq's own lines
        for path in tmp_path.glob(f"{system}.seed{seed}.*/checkpoints/history.jsonl"):
            entries = [json.loads(line) for line in path.read_text().splitlines() if line]
            if f"--lr {lr} " in entries[0]["process"]["command"]:
                return [float(one["valid_loss"]) for one in entries if "valid_loss" in one], path.parents[1]

    (report,) = tmp_path.glob("compare.*")
    results = json.loads((report / "results.json").read_text())
    written = {"1e-07": "1e-7", "0.05": "5e-2"}
    for system in of:
        by_rate = {lr: losses(system, 1, lr) for lr in written}
        best = min(by_rate, key=lambda lr: min(by_rate[lr][0]))
        assert best == "0.05", "the other learns nothing"
        assert [lr for lr, name, seed in further if (name, seed) == (system, "2")] == [best]
        translated = [lr for lr, (_, folder) in by_rate.items() if (folder / "generate.txt").exists()]
        assert translated == [best], "the test set has no part in the choice"
        outcome = results["tuning"]["systems"][system]
        assert outcome["chosen"] == written[best]
        assert {run["value"]: run["loss"] for run in outcome["runs"]} == {
            written[lr]: min(of_rate) for lr, (of_rate, _) in by_rate.items()
        }
        assert [run["patience"] for run in results["runs"][system]] == [1, 1]
        assert [run["training"]["losses"] for run in results["runs"][system]] == [
            losses(system, seed, best)[0] for seed in (1, 2)
        ]
    assert results["settings"]["learning_rate"] == "1e-7, 5e-2"
    text = words_of(report / "report.html")
    assert "learning_rate 1e-7" in text
    assert text.count("(end of the range)") == 2
    assert (report / "tuning.svg").exists()


BY_UPDATES = ["--set", "save_every_updates=8", "--set", "max_updates=32"]


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--set", "test_files="], "--set test_files=: a comparison needs a test set"),
        (["--seeds", "0"], "--seeds 0: must be N, for seeds 1 to N, or FIRST-LAST, from 1 to 2147483647"),
        (["--seeds", "1-3000000000"], "--seeds 1-3000000000: must be N, for seeds 1 to N, or FIRST-LAST, from 1 to"),
        (["--seeds", "3-2"], "--seeds 3-2: must be N, for seeds 1 to N, or FIRST-LAST"),
        (["--seeds", "0-2"], "--seeds 0-2: must be N"),
        (["--seeds", "two"], "--seeds two: must be N"),
        (["--archs", "transformer"], "--archs transformer: a comparison needs a second system; add transformer_rope"),
        (
            ["--system", "alibi=--arch transformer_alibi"],
            "--system alibi: a comparison needs a second system; add --sys",
        ),
        (["--", "--seed", "7"], "--seed among the flags for fairseq-train"),
        (["--set", "fairseq_train_flags=--fp16 --seed=7"], "--seed=7 among the flags for fairseq-train"),
        (["--", "--arch", "transformer"], "--arch among the flags for fairseq-train"),
        (["--", "-a", "transformer"], "-a among the flags for fairseq-train"),
        (["--", "--save-dir", "x"], "--save-dir among the flags for fairseq-train"),
        (["--", "--max-epoch", "9"], "--max-epoch among the flags for fairseq-train: set max_epochs=N instead"),
        (["--", "--max-update=9"], "--max-update=9 among the flags for fairseq-train: set max_updates=N instead"),
        (["--", "--restore-file", "x.pt"], "--restore-file among the flags for fairseq-train: set start_checkpoint"),
        (["--", "--save-interval", "2"], "--save-interval 2 among the flags for fairseq-train: stage 8 averages the"),
        (["--", "--no-epoch-checkpoints"], "--no-epoch-checkpoints among the flags for fairseq-train: stage 8"),
        (["--", "--keep-last-epochs=1"], "--keep-last-epochs 1 among the flags for fairseq-train"),
        (["--", "--checkpoint-suffix", "x"], "--checkpoint-suffix x among the flags for fairseq-train"),
        (
            ["--system", "a=--arch x --no-save", "--system", "b=--arch t"],
            "stage 8 averages the last 2 checkpoints; use",
        ),
        ([*BY_UPDATES, "--", "--save-interval-updates", "9"], "--save-interval-updates 9 among the flags for fairseq"),
        ([*BY_UPDATES, "--", "--keep-interval-updates", "1"], "--keep-interval-updates 1 among the flags for fairse"),
        (["--", "--disable-validation"], "--disable-validation among the flags for fairseq-train: the report needs"),
        (["--", "--log-format=simple"], "--log-format simple among the flags for fairseq-train: must be json"),
        (["--seed", "3"], "--seed: unknown flag; did you mean --seeds?"),
        (["--only", "transformer", "--only", "none"], "--only none: must be one of transformer, transformer_rope"),
        (["--archs", "transformer", "--archs", "transformer"], "names transformer twice"),
        (["--archs", "transformer", "transformer"], "names transformer twice"),
        (["--tune", "learning_rate"], "--tune learning_rate: each value must be a number, of type float"),
        (["--tune", "vocab_size=3,4"], "--tune vocab_size=3,4: must be KEY=VALUE,VALUE…, and KEY one of layers, width"),
        (["--tune", "layers=2,2.5"], "--tune layers=2,2.5: each value must be a number, of type int"),
        (["--tune", "dropout=0.1,0.10"], "--tune dropout=0.1,0.10: must have 2 or more values, all different"),
        (["--tune", "dropout=0.1,0.2", "--tune", "heads=2,4"], "--tune heads=2,4: one setting can be tuned at a time"),
        (["--tune", "learning_rate=nan,1"], "--tune learning_rate=nan,1: each value must be finite"),
        (["--tune", "label_smoothing=0,0.1"], "--tune label_smoothing=0,0.1: must be KEY=VALUE,VALUE…, and KEY one of"),
        (["--tune", "learning_rate=1,0.1", "--", "--lr", "2"], "the flags of transformer contain --lr; drop one"),
        (["--tune", "dropout=0,0.1", "--name", "a"], "--name a: --tune trains each value in a folder of its own"),
        (["--tune", "dropout=0.1,2"], "--set dropout=2.0: must be 0 to 1"),
        (["--tune", "dropout=0,0.1", "--set", "dropout=0"], "--set has a value for dropout too; drop one of them"),
        (
            ["--tune", "learning_rate=1,0.1", "--system", "a=--arch transformer --lr 2", "--system", "b=--arch t"],
            "--tune learning_rate: the flags of a contain --lr; drop one of them",
        ),
        (
            ["--tune", "learning_rate=1,0.1", "--", "--lr=2"],
            "the flags of transformer contain --lr=2; drop one of them",
        ),
        (["--scorer", "a=no-such {hypothesis}"], "--scorer a=no-such {hypothesis}: the program no-such does not exist"),
        (["--scorer", "a=recipes/no-such {hypothesis}"], "the program recipes/no-such does not exist"),
        (["--scorer", "TER=cat {hypothesis}"], "TER is the name of a metric that is built in"),
    ],
)
def test_wrong_flags_are_refused_by_name(capsys, flags, message):
    assert message in usage_error(capsys, main, ["demo", *flags])


@pytest.mark.parametrize(
    "by_updates, flags",
    [
        (False, "--keep-last-epochs 12 --save-interval 1 --save-interval-updates 9 --keep-interval-updates 1"),
        (False, "--keep-last-epochs=2 --no-progress-bar"),
        (False, "--keep-last-epochs -1"),
        (True, "--keep-last-epochs 1 --no-epoch-checkpoints --save-interval 5 --keep-interval-updates 3"),
        (True, "--save-interval-updates 8"),
    ],
)
def test_flags_that_keep_the_averaged_checkpoints_are_taken(by_updates, flags):
    overrides = BY_UPDATES[1::2] if by_updates else []
    settings = read_settings(ROOT / "recipes/demo/settings.yaml", [*overrides, f"fairseq_train_flags={flags}"])
    check_values(settings)


def test_a_search_with_a_flag_that_the_recipe_sets_itself_is_refused(tmp_path, capsys):
    path = tmp_path / "systems.yaml"
    path.write_text("a: --arch transformer\nb: {of: a, generate: --beam 2 --gen-subset valid}\n")
    message = "--gen-subset among the flags for fairseq-generate"
    assert message in usage_error(capsys, main, ["demo", "--systems", str(path)])


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_a_missing_package_is_reported_before_training(package):
    code = (
        f"import runpy, sys; sys.modules['{package}'] = None; sys.argv[0] = '-m'; "
        "runpy.run_module('recipes.compare', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, "demo"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
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
        for expected in ([references], [references, hypotheses[::-1]]):
            bleu = corpus_bleu(statistics(hyps, *expected).sum(axis=0))
            assert bleu == pytest.approx(sacrebleu.corpus_bleu(hyps, expected).score)


def test_the_bootstrap_resamples_sentences_with_all_their_seeds():
    references, first = corpus(2, 20, 0.4)
    systems = [[first, corpus(2, 20, 0.3)[1]], [corpus(2, 20, 0.2)[1], corpus(2, 20, 0.25)[1]]]
    drawn = draw(20, resamples=40)
    of_each = [[scores_of_draws(statistics(seed, references), drawn) for seed in seeds] for seeds in systems]
    bootstrap = paired_bootstrap(*of_each)

    def mean(seeds, chosen):
        drawn = [references[n] for n in chosen]
        return np.mean([sacrebleu.corpus_bleu([h[n] for n in chosen], [drawn]).score for h in seeds])

    draws = np.random.default_rng(12345).integers(20, size=(40, 20))
    differences = np.array([mean(systems[1], chosen) - mean(systems[0], chosen) for chosen in draws])
    difference = mean(systems[1], range(20)) - mean(systems[0], range(20))
    assert bootstrap["difference"] == pytest.approx(difference)
    assert bootstrap["p_value"] == pytest.approx(p_of(difference, differences))
    # The interval has the true differences that the test does not reject.
    for true, rejected in (
        *((bootstrap["low"] - 1e-6, True), (bootstrap["low"] + 1e-6, False)),
        *((bootstrap["high"] - 1e-6, False), (bootstrap["high"] + 1e-6, True)),
    ):
        assert (p_of(difference - true, differences) <= 0.05) == rejected


def p_of(difference, resampled):
    """The probability of a *difference* as large by chance, from the *resampled* ones (Koehn 2004)."""
    as_large = [abs(one - np.mean(resampled)) >= abs(difference) for one in resampled]
    return (sum(as_large) + 1) / (len(as_large) + 1)


@pytest.mark.parametrize("resamples", [40, 199, 1000])
def test_an_interval_contains_0_exactly_if_its_p_is_above_0_05(resamples):
    """Resampled differences can be skewed, and their mean can differ from the measured difference."""
    draw = np.random.default_rng(3)
    significant, by_percentiles = [], []
    for _ in range(200):
        resampled = draw.gamma(2, size=resamples) + draw.normal(scale=0.5)
        difference = resampled.mean() + draw.normal(scale=1.5)
        of = paired_bootstrap([np.zeros(1 + resamples)], [np.array([difference, *resampled])])
        significant.append(of["p_value"] <= 0.05)
        assert significant[-1] != (of["low"] <= 0 <= of["high"]), of
        low, high = np.percentile(resampled, [2.5, 97.5])
        by_percentiles.append(not low <= 0 <= high)
    assert 20 < sum(significant) < 180 and by_percentiles != significant, "another interval contradicts p"


def test_holm_corrects_as_in_worked_examples():
    # The example of Wikipedia's article: at 0.05, the first and the last hypothesis are rejected.
    corrected = holm([0.01, 0.04, 0.03, 0.005])
    assert [p <= 0.05 for p in corrected] == [True, False, False, True]
    # By hand: 3 * 0.01; 1 * 0.04, raised to the 0.06 of the one before it; 2 * 0.03; 4 * 0.005.
    assert corrected == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.01, 0.02, 0.03, 0.04, 0.05]) == pytest.approx([0.05, 0.08, 0.09, 0.09, 0.09])
    assert holm([0.9, 0.8]) == [1.0, 1.0] and holm([0.3]) == [0.3] and holm([]) == []


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
        {"peak_memory_mib": 900},
        {"process": {"commit": "b"}},
        "5\n",
        {"process": {"commit": "c"}},
        *(valid(20, 7.4), train(20, 40, 100), valid(30, 7.0), train(30, 110, 300)),
        {"peak_memory_mib": 800},
        {"process": {"commit": "d"}},
    )
    training = read_history(path)
    assert training.updates == [10, 20, 30] and training.losses == [8.0, 7.4, 7.0]
    assert training.seconds == [60, 100, 170] and training.tokens_per_second == 100
    assert training.last_epoch == 3 and training.processes == [{"commit": "c"}] and training.peak_memory_mib == 900


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


def test_a_validation_line_that_is_too_long_is_named_before_a_training_starts(tmp_path, monkeypatch):
    shutil.copytree(small_corpus(), tmp_path / "corpus")
    for lang in ("en", "de"):
        path = tmp_path / "corpus" / f"valid.{lang}.gz"
        lines = gzip.decompress(path.read_bytes()).splitlines()
        path.write_bytes(gzip.compress(b"\n".join([*lines, b"x " * 1024]) + b"\n"))
    monkeypatch.setattr(launch, "outcomes", lambda *_: pytest.fail("a training has started"))
    data = ["--data-dir", str(tmp_path / "corpus"), "--manifest", "none", "--work-dir", str(tmp_path / "work")]
    flags = ["--seeds", "1", "--gpus", "0", *setting_flags(*SMALL, "fairseq_train_flags=--max-target-positions 1200")]
    line = r"bpe/valid.en, line 13, has \d+ tokens, more than the "
    with pytest.raises(SystemExit, match=f"{line}1024 that fairseq takes"):
        run_here(["demo", *data, *flags], main=main)
    longer = setting_flags(
        "fairseq_train_flags=--max-source-positions 9999 --max-target-positions 9999", "tokens_per_device=512"
    )
    with pytest.raises(
        SystemExit, match=f"{line}512 of a batch: .* set larger tokens_per_update and tokens_per_device"
    ):
        run_here(["demo", *data, *flags, *longer], main=main)


@pytest.mark.parametrize("has_documents", [False, True])
def test_the_bootstrap_draws_segments_if_the_text_has_documents(tmp_path, monkeypatch, has_documents):
    (tmp_path / "subwords").write_text("one two <sep> three\nfour\nfive <sep> six <sep> seven\n")
    monkeypatch.setattr(collect, "_in_subwords", lambda *_: tmp_path / "subwords")
    run = SimpleNamespace(unit=SimpleNamespace(has_documents=has_documents))
    scores = np.array([(score, 1) for score in (0.1, 0.2, 0.4, 0.8, 1.6, 3.2)])
    rows = collect._by_line(run, None, scores)
    expected = [(0.3, 2), (0.4, 1), (5.6, 3)] if has_documents else scores
    assert rows == pytest.approx(np.array(expected))


def test_the_report_of_a_run_without_its_log_lacks_only_the_number_of_parameters(report):
    run = report.runs[ARCHS[0]][0]
    assert numbers_of_run(run)["parameters"] == 12345
    Runner(run).log(TRAIN).unlink()
    assert numbers_of_run(run)["parameters"] is None
    report.results(report.experiments[0])
