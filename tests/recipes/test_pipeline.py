"""recipes/pipeline: the stages, run on a small corpus of the demo's grammar."""

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from recipes.pipeline import stage06_binarise, stage09_translate
from recipes.pipeline.__main__ import STAGES, build_parser, experiment, parse
from recipes.pipeline.experiment import Experiment, StageError
from recipes.pipeline.settings import SettingsError, read_settings
from tests.commands import ENVIRONMENT, ROOT

# Small enough for seconds; everything else is the demo's own.
SMALL = [
    "corpus_pairs=200",
    "corpus_heldout=12",
    "vocab_size=200",
    "width=32",
    "ffn_width=32",
    "max_epochs=5",
]


def label(recipe, settings):
    """What these settings add to the name of a model's folder."""
    parser = build_parser()
    args, train_flags = parse(
        parser, [recipe, *(word for setting in settings for word in ("--set", setting))]
    )
    return experiment(parser, args, "transformer", 1, train_flags).label


MODEL = f"transformer_rope.seed1.{label('demo', SMALL)}"


def recipe(work, *flags, check=True, wait=True, before=None):
    """Run recipes/demo/run.sh in the folder *work*; returns the finished process.

    *before*, a function, is called in the process before it becomes the recipe.
    """
    settings = [word for setting in SMALL for word in ("--set", setting)]
    command = ["bash", "recipes/demo/run.sh", "--work-dir", str(work), *settings, *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=before,
    )  # fmt: skip
    if not wait:
        return process
    out, err = process.communicate()
    done = subprocess.CompletedProcess(command, process.returncode, out, err)
    if check:
        assert done.returncode == 0, out + err
    return done


def kill_all_of(work, process):
    """What a power cut does: kill -9 of the runner and of every command whose words name *work*."""
    for pid in running(work):
        os.kill(int(pid), signal.SIGKILL)
    process.communicate()


def running(work):
    """The commands that run now and name *work*."""
    found = subprocess.run(["pgrep", "-f", str(work)], capture_output=True, text=True)
    return found.stdout.split()


def wait_for(path, process):
    deadline = time.time() + 180
    while not path.exists():
        assert process.poll() is None and time.time() < deadline, process.communicate()
        time.sleep(0.02)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    work = tmp_path_factory.mktemp("demo")
    return work, recipe(work)


def test_it_goes_from_text_to_bleu(finished):
    work, done = finished
    model = work / MODEL
    lines = done.stdout.strip().splitlines()
    score = json.loads((model / "score.json").read_text())
    (system,) = score["systems"]
    bleu = system["metrics"][0]
    assert lines[-1] == f"sacreBLEU {bleu['score']:.2f}"
    assert bleu["signature"].startswith("nrefs:1|case:mixed") and bleu["signature"] in done.stdout
    hypotheses = (model / "hypotheses.de").read_text().splitlines()
    assert len(hypotheses) == 12
    shown = [line.split(maxsplit=1) for line in lines if line.startswith(("     source", "  reference"))]
    assert len(shown) == 10
    references = (work / "raw" / "test.de").read_text().splitlines()
    assert [text for label, text in shown if label == "reference"] == [references[n] for n in range(0, 10, 2)]
    assert str(work) in done.stdout
    for stage in ("1: fetch", "3: normalise and tokenise", "5: BPE", "7: train", "10: score"):
        assert f"stage {stage}\n" in done.stdout


def test_score_is_that_of_hypotheses_in_the_order_of_the_test_set(finished):
    import sacrebleu

    work, _ = finished
    model = work / MODEL
    generated = (model / "generate.txt").read_text()
    numbered = {int(n): text for n, text in re.findall(r"^D-(\d+)\t\S+\t(.*)$", generated, re.MULTILINE)}
    hypotheses = [numbered[n] for n in range(12)]
    assert (model / "hypotheses.de").read_text().splitlines() == hypotheses
    references = (work / "raw" / "test.de").read_text().splitlines()
    expected = sacrebleu.corpus_bleu(hypotheses, [references]).score
    (system,) = json.loads((model / "score.json").read_text())["systems"]
    assert system["metrics"][0]["score"] == pytest.approx(expected, abs=1e-9)


def test_every_command_is_printed_and_kept_as_a_script_that_runs(finished):
    work, done = finished
    scripts = sorted((work / "commands").glob("*.sh")) + sorted(work.glob(f"{MODEL}/commands/*.sh"))
    kept = [line for script in scripts for line in script.read_text().splitlines()[3:]]
    assert kept == re.findall(r"^  \$ (.*)$", done.stdout, re.MULTILINE)
    score = work / MODEL / "score.json"
    before = score.read_text()
    score.unlink()
    subprocess.run(["bash", str(scripts[-1])], check=True, env=ENVIRONMENT)
    assert score.read_text() == before


def test_a_second_run_skips_all_and_gives_the_same_score(finished):
    work, first = finished
    again = recipe(work)
    assert again.stdout.count("done before, skipped") == 10
    assert "$ " not in again.stdout
    assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]


def test_a_changed_setting_reruns_its_stage_and_what_follows_and_no_more(finished):
    work, _ = finished
    changed = recipe(work, "--set", "beam=1")
    assert "stage 8: average the last checkpoints: done before, skipped" in changed.stdout
    assert "stage 9: translate the test set (again, since beam changed)" in changed.stdout
    assert "\nstage 10: score\n" in changed.stdout
    recipe(work)  # for the other tests


def test_the_baseline_shares_the_data_and_has_its_own_folder(finished):
    work, _ = finished
    baseline = recipe(
        work, "--arch", "transformer", "--set", "average_checkpoints=1", "--set", "max_epochs=1"
    )
    assert baseline.stdout.count("done before, skipped") == 6
    assert "--arch transformer " in baseline.stdout
    assert (work / MODEL.replace("_rope", "") / "score.json").exists()


def test_stage_11_writes_what_translates_as_fairseq_did(finished):
    work, _ = finished
    done = recipe(work, "--stage", "11", "--set", "export_quantization=float32")
    model = work / MODEL
    assert "differ from the checkpoint's by" in done.stdout and "stage 10" not in done.stdout
    translate = [sys.executable, "-m", "fairseq_rope", "translate", "--model", model / "ctranslate2"]
    given = (work / "raw" / "test.en").read_text()
    found = subprocess.run(translate, cwd=ROOT, input=given, capture_output=True, text=True, check=True)
    # fairseq-generate lets all of a batch grow as long as its longest may: that one is to be the same.
    sizes = [len(line.split()) for line in (work / "bpe" / "test.en").read_text().splitlines()]
    lines, expected = found.stdout.splitlines(), (model / "hypotheses.de").read_text().splitlines()
    assert len(lines) == len(expected) == len(sizes)
    longest = [n for n, size in enumerate(sizes) if size == max(sizes)]
    assert [lines[n] for n in longest] == [expected[n] for n in longest]


def test_settings_are_kept_with_the_model(finished):
    work, _ = finished
    kept = yaml.safe_load((work / MODEL / "settings.yaml").read_text())
    assert kept["width"] == 32 and kept["label_smoothing"] == 0.1


def test_a_killed_training_goes_on_from_its_last_checkpoint(tmp_path):
    process = recipe(tmp_path, wait=False)
    checkpoints = tmp_path / MODEL / "checkpoints"
    wait_for(checkpoints / "checkpoint2.pt", process)
    kill_all_of(tmp_path, process)
    resumed = recipe(tmp_path)
    assert resumed.stdout.count("done before, skipped") == 6
    log = (tmp_path / MODEL / "logs" / "stage07_train.log").read_text()
    assert "Loaded checkpoint" in log
    assert resumed.stdout.splitlines()[-1].startswith("sacreBLEU ")


def test_a_checkpoint_that_is_gone_is_told_with_what_to_do(finished, tmp_path):
    work = tmp_path / "work"
    shutil.copytree(finished[0], work)
    (work / MODEL / "checkpoints" / "checkpoint3.pt").unlink()
    done = recipe(work, check=False)
    assert f"stage 7: train (again, since {MODEL}/checkpoints/checkpoint3.pt" in done.stdout
    assert "has [1, 2, 4, 5] of the epochs to average" in done.stderr
    assert "train longer, or anew with --name NAME" in done.stderr


def test_flags_for_fairseq_train_stand_after_a_lone_dash(finished):
    done = recipe(finished[0], "--dry-run", "--", "--clip-norm", "1.5")
    assert re.search(r"\$ fairseq-train .* --clip-norm 1.5", done.stdout)
    refused = recipe(finished[0], "--clip-norm", "1.5", check=False)
    assert refused.returncode == 2
    assert "--clip-norm: no flag of this; flags for fairseq-train stand after" in refused.stderr


def test_changed_data_is_trained_on_anew(tmp_path):
    few = ["--set", "max_epochs=1", "--set", "average_checkpoints=1", "--stop-stage", "8"]
    recipe(tmp_path, *few)
    averaged = tmp_path / MODEL / "averaged.pt"
    before = averaged.read_bytes()
    # Another order of the same sentences: the dictionary stays, and the old checkpoints would fit.
    for lang in ("en", "de"):
        path = tmp_path / "raw" / f"train.{lang}"
        path.write_text("".join(reversed(path.read_text().splitlines(keepends=True))))
    again = recipe(tmp_path, *few, "--stage", "3")
    assert re.search(rf"{MODEL} is of other settings or data: moved to \S+{MODEL}\.old-", again.stdout)
    assert "stage 8: average the last checkpoints\n" in again.stdout
    assert averaged.read_bytes() != before


def test_a_touched_file_of_the_same_contents_reruns_nothing(finished):
    work, _ = finished
    (work / "raw" / "train.en").touch()
    assert recipe(work).stdout.count("done before, skipped") == 10


@pytest.fixture
def binarised(finished, tmp_path):
    """A work folder whose stages 1 to 6 are done."""
    work = tmp_path / "work"
    shutil.copytree(finished[0], work, ignore=shutil.ignore_patterns("transformer*"))
    return work


def interruptible():
    """SIGINT may be ignored where the tests run, as in a shell's background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_terminated_run_takes_its_training_along(binarised, number):
    process = recipe(binarised, wait=False, before=interruptible)
    wait_for(binarised / MODEL / "checkpoints" / "checkpoint1.pt", process)
    process.send_signal(number)
    _, said = process.communicate()
    assert process.returncode == 128 + number
    assert said.splitlines()[-1] == "recipes: stopped; the same command goes on from here"
    deadline = time.time() + 20
    while running(binarised) and time.time() < deadline:
        time.sleep(0.1)
    assert not running(binarised)


def test_a_folder_is_held_by_a_run_and_by_a_command_that_outlives_it(binarised):
    process = recipe(binarised, "--set", "max_epochs=1000", wait=False)
    wait_for(binarised / MODEL / "checkpoints" / "checkpoint1.pt", process)
    holders = []
    for _ in range(2):
        other = recipe(binarised, check=False)
        assert other.returncode == 1 and other.stderr.count("\n") == 1
        held = (
            rf"another run is at work in {binarised}: (its command, )?process (\d+), since \d{{4}}-\d\d-\d\d "
        )
        holders.append(re.search(held, other.stderr).groups())
        process.kill()  # the recipe's process; fairseq-train goes on
        process.wait()
    assert holders[0] == (None, str(process.pid))
    assert holders[1][0] and holders[1][1] in running(binarised)
    kill_all_of(binarised, process)


def test_epochs_that_a_training_finished_alone_are_in_its_history(binarised):
    process = recipe(binarised, wait=False)
    checkpoints = binarised / MODEL / "checkpoints"
    wait_for(checkpoints / "checkpoint1.pt", process)
    process.kill()  # the recipe's process; fairseq-train goes on
    process.communicate()
    deadline = time.time() + 180
    while running(binarised) and time.time() < deadline:
        time.sleep(0.2)
    assert (checkpoints / "checkpoint5.pt").exists()
    recipe(binarised, "--stop-stage", "7")
    told = [json.loads(line) for line in (checkpoints / "history.jsonl").read_text().split("\n") if line]
    for what in ("valid_loss", "train_loss"):
        assert [line["epoch"] for line in told if what in line] == [1, 2, 3, 4, 5]
    assert len([line for line in told if "process" in line]) == 2


@pytest.mark.parametrize(
    "flags, said",
    [
        (
            ["--arch", "transfomer_rope"],
            "--arch transfomer_rope: fairseq has no such architecture; the nearest is transformer_rope",
        ),
        (["--", "--foo"], "--arch transformer_rope: fairseq-train: error: unrecognized arguments: --foo"),
        (
            ["--set", "fairseq_generate_flags=--bream 5"],
            "fairseq-generate: error: unrecognized arguments: --bream 5",
        ),
        (["--tokenize", "ko-mecab"], "--tokenize ko-mecab: Korean tokenization requires extra dependencies"),
    ],
)
def test_a_typo_is_told_before_the_first_stage(tmp_path, flags, said):
    done = recipe(tmp_path, *flags, check=False)
    assert done.returncode == 1 and "stage 1" not in done.stdout
    assert said in done.stderr.splitlines()[-1]
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock"]


@pytest.mark.parametrize("number, inputs, interrupted", [(3, "raw", 3), (5, "clean", 4)])
def test_an_interrupted_text_stage_goes_on_with_the_file_that_it_was_at(
    finished, tmp_path, monkeypatch, capsys, number, inputs, interrupted
):
    """*interrupted*: the number of the command that is cut; stage 5 learns before its six files."""
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    shutil.copytree(finished[0] / inputs, tmp_path / inputs)
    (stage,) = [stage for stage in STAGES if stage.NUMBER == number]
    settings = read_settings(ROOT / "recipes" / "demo" / "settings.yaml", SMALL)
    x, run, tools = Experiment(settings, tmp_path, "transformer_rope", 1), Experiment._run, []

    def cut(self, stage, command, on_line):
        if command.startswith("python"):
            tools.append(command)
            if len(tools) == interrupted:
                raise KeyboardInterrupt
        run(self, stage, command, on_line)

    monkeypatch.setattr(Experiment, "_run", cut)
    with pytest.raises(KeyboardInterrupt):
        x.ensure(stage)
    first = [path for path in stage.outputs(x) if path.exists()]
    assert len(first) == interrupted - 1
    dates = [path.stat().st_mtime_ns for path in first]
    assert x.ensure(stage)
    assert [path.stat().st_mtime_ns for path in first] == dates
    assert len(tools) == len(stage.outputs(x)) + 1, "the one that was cut ran twice, the others once"
    assert capsys.readouterr().out.count("made before the interruption: ") == interrupted - 1
    for path in stage.outputs(x):
        assert path.read_bytes() == (finished[0] / path.relative_to(tmp_path)).read_bytes()
    (script,) = (tmp_path / "commands").glob("*.sh")
    assert script.read_text().count("\npython -m ") == len(stage.outputs(x)), "all of it is kept"


def test_what_an_interrupted_stage_made_of_other_inputs_is_made_again(finished, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    shutil.copytree(finished[0] / "raw", tmp_path / "raw")
    stage = STAGES[2]
    settings = read_settings(ROOT / "recipes" / "demo" / "settings.yaml", SMALL)
    x, run = Experiment(settings, tmp_path, "transformer_rope", 1), Experiment._run

    def cut(self, stage, command, on_line):
        if "valid.en" in command:
            raise KeyboardInterrupt
        run(self, stage, command, on_line)

    monkeypatch.setattr(Experiment, "_run", cut)
    with pytest.raises(KeyboardInterrupt):
        x.ensure(stage)
    monkeypatch.setattr(Experiment, "_run", run)
    (tmp_path / "raw" / "train.en").write_text("Another text.\n" * 200)
    x.ensure(stage)
    assert set((tmp_path / "tokenised" / "train.en").read_text().splitlines()) == {"Another text ."}


def test_a_disk_that_is_full_is_told_in_one_sentence_and_the_rerun_works(binarised):
    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, 400_000))  # of a file: a checkpoint is larger

    done = recipe(binarised, check=False, before=limit)
    assert done.returncode == 1
    (sentence,) = [line for line in done.stderr.splitlines() if line.startswith("recipes/demo: ")]
    assert "stage 7 (train) failed" in sentence and "checkpoint1.pt: could not be written whole" in sentence
    assert not list((binarised / MODEL / "checkpoints").glob("*.pt*"))
    assert recipe(binarised).stdout.splitlines()[-1].startswith("sacreBLEU ")


def test_an_output_that_changed_is_made_again(finished, tmp_path):
    work = tmp_path / "work"
    shutil.copytree(finished[0], work)
    damaged = work / "data-bin" / "test.en-de.en.bin"
    whole = damaged.read_bytes()
    damaged.write_bytes(bytes(len(whole)))
    again = recipe(work)
    assert "stage 6: binarise (again, since data-bin/test.en-de.en.bin changed)" in again.stdout
    assert damaged.read_bytes() == whole
    assert again.stdout.splitlines()[-1] == finished[1].stdout.splitlines()[-1]


def test_translations_that_are_missing_are_noticed(finished, tmp_path):
    work = tmp_path / "work"
    shutil.copytree(finished[0], work)
    settings = read_settings(ROOT / "recipes" / "demo" / "settings.yaml")
    x = Experiment(settings, work, "transformer_rope", 1, name=MODEL.rpartition(".")[2])
    hypotheses = stage09_translate.outputs(x)[1]
    hypotheses.write_text("".join(hypotheses.read_text().splitlines(keepends=True)[1:]))
    x.command = lambda *_, **__: None  # as if the commands had left that behind
    with pytest.raises(StageError, match="hypotheses.de has 11 lines, and .*test.en 12"):
        stage09_translate.run(x)


def test_a_stage_without_its_inputs_says_where_to_begin(tmp_path):
    done = recipe(tmp_path, "--stage", "5", check=False)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    said = "stage 5: BPE needs stage 1 (fetch) to run first, which has not ended yet: run with --stage 1"
    assert said in done.stderr


def test_a_stage_in_the_middle_refuses_what_was_made_with_other_settings(finished):
    work, _ = finished
    done = recipe(work, "--stage", "6", "--set", "vocab_size=190", check=False)
    assert done.returncode == 1
    said = "stage 6: binarise needs stage 5 (BPE) to run first, since vocab_size changed: run with --stage 5"
    assert said in done.stderr
    sentencepiece = recipe(work, "--stage", "6", "--bpe", "sentencepiece", check=False)
    assert (
        "stage 6: binarise needs stage 3 (normalise and tokenise) to run first, since --bpe"
        in sentencepiece.stderr
    )


def test_an_input_that_is_gone_names_the_stage_that_makes_it(finished, tmp_path):
    work = tmp_path / "work"
    shutil.copytree(finished[0], work)
    (work / "clean" / "train.de").unlink()
    done = recipe(work, "--stage", "5", check=False)
    assert "which stage 4 (clean and split) makes: run with --stage 4" in done.stderr


def test_a_stage_depends_on_every_setting_that_it_reads():
    everybodys = {"source_lang", "target_lang", "train_files", "valid_files", "test_files"}
    only_checked = {(7, "fairseq_generate_flags")}
    for stage in STAGES:
        source = Path(stage.__file__).read_text().split("# -- the tool")[0]
        read = set(re.findall(r"(?:\bs|settings)(?:\.get\(|\[)[\"'](\w+)[\"']", source))
        read -= everybodys | {name for number, name in only_checked if number == stage.NUMBER}
        assert read <= set(stage.SETTINGS), stage.__name__


def test_counts_of_sentences_that_differ_are_told(finished, tmp_path):
    work = tmp_path / "work"
    shutil.copytree(finished[0], work)
    x = Experiment(read_settings(ROOT / "recipes" / "demo" / "settings.yaml"), work, "transformer_rope", 1)
    log = tmp_path / "preprocess.log"
    counted = "".join(
        f"[en] {path}: {len(path.read_text().splitlines())} sents, 9 tokens\n" for path in x.texts("bpe")
    )
    log.write_text(counted)
    stage06_binarise.check_counts(x, log)
    log.write_text(counted.replace(" 200 sents", " 199 sents"))
    with pytest.raises(StageError, match=r"train.en has 200 lines, but .* counts others"):
        stage06_binarise.check_counts(x, log)


def test_a_moved_folder_reruns_nothing_and_loses_no_checkpoint(finished, tmp_path):
    work, first = finished
    moved = tmp_path / "moved"
    shutil.copytree(work, moved)
    again = recipe(moved)
    assert again.stdout.count("done before, skipped") == 10
    assert again.stdout.splitlines()[-1] == first.stdout.splitlines()[-1]


def test_fewer_checkpoints_to_average_do_not_train_anew(finished):
    work, _ = finished
    fewer = recipe(work, "--set", "average_checkpoints=2", "--stop-stage", "8")
    assert "stage 7: train (again, since average_checkpoints changed)" in fewer.stdout
    assert "started anew" not in fewer.stdout
    recipe(work)


def test_what_is_kept_beside_a_score_is_of_the_run_that_made_it(finished):
    work, _ = finished
    kept = work / MODEL / "run.yaml"
    before = kept.read_text()
    recipe(work, "--stage", "9")
    assert kept.read_text() == before
    assert yaml.safe_load(before)["command"].startswith("bash recipes/demo/run.sh --work-dir")


def test_a_stamp_that_cannot_be_read_counts_for_none(finished):
    work, _ = finished
    (work / "stamps" / "04.json").write_text("")
    again = recipe(work)
    assert "stage 4: clean and split\n" in again.stdout
    assert again.stdout.count("done before, skipped") == 9


def test_a_copied_recipe_runs_with_its_own_settings_from_any_folder(tmp_path):
    own = ROOT / "recipes" / f"copy_of_demo_{os.getpid()}"
    shutil.copytree(ROOT / "recipes" / "demo", own, ignore=shutil.ignore_patterns("work"))
    try:
        settings = own / "settings.yaml"
        settings.write_text(settings.read_text().replace("vocab_size: 1000", "vocab_size: 123"))
        (tmp_path / "recipes" / "pipeline").mkdir(parents=True)
        (tmp_path / "recipes" / "pipeline" / "__main__.py").write_text("raise SystemExit('the wrong one')")
        done = subprocess.run(
            ["bash", str(own / "run.sh"), "--dry-run"],
            cwd=tmp_path,
            env=ENVIRONMENT,
            text=True,
            capture_output=True,
        )
        assert done.returncode == 0, done.stderr
        assert "--vocab-size 123" in done.stdout and f"recipes/{own.name}/work/" in done.stdout
    finally:
        shutil.rmtree(own)


def test_a_failing_command_ends_the_run_with_its_last_words(tmp_path):
    done = recipe(tmp_path, "--set", "corpus_pairs=-1", check=False)
    assert done.returncode == 1
    (sentence,) = done.stderr.splitlines()
    assert re.match(
        r"recipes/demo: stage 1 \(fetch\) failed with status \d+: .*--pairs is -1.*"
        rf"\(all that it said: {re.escape(str(tmp_path))}/logs/stage01_fetch.log\)$",
        sentence,
    )
    assert not (tmp_path / "stamps").exists()


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--set", "widht=64"], "settings.yaml has no widht; the nearest it has is width"),
        (["--set", "width"], "--set width: must have the form KEY=VALUE"),
        (["--set", "tokens_per_update=0"], "--set tokens_per_update=0: must be 1 or more"),
        (["--set", "average_checkpoints=9"], "--set average_checkpoints=9: training keeps 5 by"),
        (["--set", "target_lang=Portuguese"], "--set target_lang=Portuguese: must be a language's code"),
        (["--set", "train_files=a'b"], "--set train_files=a'b: no closing quotation"),
        (
            ["--set", "holdout_every=9"],
            "valid_files=valid.{lang}: must name files or holdout_every be above 0",
        ),
        (["--set", "test_files="], "--set test_files=: must name files"),
        (["--set", "holdout_every=1"], "--set holdout_every=1: must be 0 or above 1"),
        (["--set", "target_lang=en"], "--set target_lang=en: must not be source_lang too"),
        (["--set", "adam_betas=(0.9,0.98"], "--set adam_betas=(0.9,0.98: must look like (0.9, 0.98)"),
        (["--set", "length_penalty=nan"], "--set length_penalty=nan: must be -inf or more"),
        (["--set", "fairseq_train_flags='x"], "--set fairseq_train_flags='x: no closing quotation"),
        (["--set", "save_every_updates=9"], "--set save_every_updates=9: checkpoints of updates need max_up"),
        (["--set", "precision=int4"], "--set precision=int4: must be one of auto, fp32, fp16, bf16"),
        (["--set", "normalise_punctuation=de"], "must be one of none, source, target, both"),
        (["--seed", "-1"], "--seed -1: must be 0 or more"),
        (["--arch", "x; touch y"], "--arch x; touch y: must be a name"),
        (
            ["--data-dir", "tests"],
            "--data-dir, --manifest: demo writes its corpus itself",
        ),
        (["--manifest", "no.tsv"], "--manifest no.tsv: must be a file that exists, or none"),
        (["--set", "width=wide"], "--set width=wide: must be of type int, like the recipe's own 128"),
        (
            ["--stage", "8", "--stop-stage", "3"],
            "--stage 8 --stop-stage 3: must be 1 <= stage <= stop-stage <= 11",
        ),
    ],
)
def test_wrong_flags_are_refused_by_name(tmp_path, flags, said):
    done = recipe(tmp_path, *flags, check=False)
    assert done.returncode == 2
    assert said in done.stderr.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []


def test_a_setting_takes_the_type_of_the_recipes_own(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("rate: 0.5\nname: a\nflags: ''\ncount: 3\n")
    assert read_settings(file, ["rate=1e-3", "name=7", "flags=--fp16 --x 1", "count=4"]) == {
        "rate": 0.001, "name": "7", "flags": "--fp16 --x 1", "count": 4,
    }  # fmt: skip
    with pytest.raises(SettingsError, match="count=true: must be of type int"):
        read_settings(file, ["count=true"])
