"""recipes/pipeline: the stages, run on a few pairs of the demo's corpus."""

import contextlib
import fcntl
import itertools
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import sacrebleu
import torch
import yaml

import fairseq_rope.__main__
from fairseq_rope.serving import shortlist
from recipes.pipeline import __main__ as pipeline
from recipes.pipeline import check_flags as checking
from recipes.pipeline import stage11_export
from recipes.pipeline.experiment import LEARNT
from recipes.pipeline.settings import FIELDS, Settings
from recipes.pipeline.stage02_extract import Extract, ExtractTest
from recipes.pipeline.stage05_bpe import Bpe
from recipes.pipeline.stage06_binarise import Binarise, check_counts
from recipes.pipeline.stages import SCORE, STAGES, TRAIN, needed
from recipes.run.lock import locked_when_free
from recipes.run.run import StageError
from recipes.run.runner import Runner
from recipes.run.shell import Shell
from recipes.run.stamps import Stamps, differences
from tests.commands import ENVIRONMENT, LIMIT, ROOT, default_signals
from tests.recipes.small_demo import SMALL, describe, label, run_here, setting_flags, small_corpus, usage_error

MODEL = f"transformer_rope.seed1.{label('demo', SMALL)}"


def words(work, *flags):
    """The flags of the small demo in the folder *work*."""
    return ["--data-dir", str(small_corpus()), "--work-dir", str(work), *setting_flags(*SMALL), *flags]


def small(work, *flags):
    """Run the small demo in this process."""
    pipeline.main(["demo", *words(work, *flags)])


def start(*command, **kwargs):
    """Start *command* from the project's root, in a new session."""
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs,
    )  # fmt: skip


def kill_all_of(work, process):
    """Simulate a power cut: kill -9 the runner and every command that names *work*."""
    for pid in running(work):
        os.kill(int(pid), signal.SIGKILL)
    process.communicate(timeout=LIMIT)
    with (work / ".lock").open() as lock:  # free when all of them have ended
        fcntl.flock(lock, fcntl.LOCK_EX)


def running(work):
    """The process ids of running commands that name *work*."""
    return subprocess.run(["pgrep", "-f", str(work)], capture_output=True, text=True, timeout=LIMIT).stdout.split()


def wait_for(path, process=None):
    """Wait until *path* exists, while *process* runs."""
    deadline = time.time() + 180
    while not path.exists():
        assert time.time() < deadline and (process is None or process.poll() is None), path
        time.sleep(0.02)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A work folder in which recipes/demo/run.sh has run all stages, and its output. Tests must not write to it."""
    work = tmp_path_factory.mktemp("demo")
    process = start("bash", "recipes/demo/run.sh", *words(work))
    printed, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 0, printed + errors
    return work, printed


@pytest.fixture
def copied(finished, tmp_path):
    """A copy of the work folder of :func:`finished`."""
    return shutil.copytree(finished[0], tmp_path / "work")


@pytest.fixture
def refused(capsys):
    """refused(work, *flags): the error message with which the small demo ends before its first stage."""

    def refused(work, *flags):
        with pytest.raises(SystemExit) as stopped:
            small(work, *flags)
        assert "\n" not in stopped.value.code and "stage" not in capsys.readouterr().out
        return stopped.value.code

    return refused


# -- from text to BLEU -------------------------------------------------------------------------------


def test_the_demo_runs_from_text_to_bleu(finished):
    work, printed = finished
    model = work / MODEL
    lines = printed.strip().splitlines()
    (system,) = json.loads((model / "score.json").read_text())["systems"]
    bleu = system["metrics"][0]
    assert lines[-1] == f"sacreBLEU {bleu['score']:.2f}"
    assert bleu["signature"].startswith("nrefs:1|case:mixed") and bleu["signature"] in printed
    generated = (model / "generate.txt").read_text()
    numbered = {int(n): text for n, text in re.findall(r"^D-(\d+)\t\S+\t(.*)$", generated, re.MULTILINE)}
    hypotheses = [numbered[n] for n in range(12)]
    assert (model / "hypotheses.de").read_text().splitlines() == hypotheses, "in the order of the test set"
    references = (work / "raw" / "test.de").read_text().splitlines()
    assert bleu["score"] == pytest.approx(sacrebleu.corpus_bleu(hypotheses, [references]).score, abs=1e-9)
    shown = [line.split(maxsplit=1) for line in lines if line.startswith(("     source", "  reference"))]
    assert len(shown) == 10
    assert [text for label, text in shown if label == "reference"] == [references[n] for n in range(0, 10, 2)]
    assert str(work) in printed
    for stage in ("1: fetch", "3: normalise and tokenise", "5: BPE", "7: train", "10: score"):
        assert f"stage {stage}\n" in printed
    settings = yaml.safe_load((model / "settings.yaml").read_text())
    assert settings["width"] == 32 and settings["label_smoothing"] == 0.1
    run = yaml.safe_load((model / "run.yaml").read_text())
    assert run["command"].startswith("bash recipes/demo/run.sh --data-dir")
    assert {"python", "torch", "sacrebleu", "sacremoses"} <= set(run["versions"])
    assert run["commit"] and run["hardware"]["cores"] == os.cpu_count()
    assert json.loads((model / "stamps" / "07.json").read_text())["seconds"] > 0


def test_every_command_is_printed_and_written_to_a_script_that_runs(finished, copied):
    work, printed = finished
    scripts = sorted((work / "commands").glob("*.sh")) + sorted(work.glob(f"{MODEL}/commands/*.sh"))
    in_all = [line for script in scripts for line in script.read_text().splitlines()]
    in_scripts = [line for line in in_all if not line.startswith(("set -", "cd ", "unset ", "export "))]
    assert in_scripts == re.findall(r"^  \$ (.*)$", printed, re.MULTILINE)
    assert len(in_scripts) > 20
    assert sum("fairseq-preprocess --user-dir fairseq_rope " in line for line in in_scripts) == 1, "it merges files"
    before = (copied / MODEL / "score.json").read_text()
    (copied / MODEL / "score.json").unlink()
    script = copied / MODEL / "commands" / "stage10_score.sh"
    script.write_text(script.read_text().replace(str(work), str(copied)))
    subprocess.run(["bash", str(script)], check=True, env=ENVIRONMENT, timeout=LIMIT)
    assert (copied / MODEL / "score.json").read_text() == before.replace(str(work), str(copied))


def test_the_exported_model_of_stage_11_translates_as_fairseq(copied, capsys):
    small(copied, "--stage", "11", "--set", "export_shortlist=true", "--dry-run")
    assert re.search(r"fairseq_rope export .* --shortlist$", capsys.readouterr().out, re.M)
    search = {"beam": 3, "length_penalty": 0.7, "max_len_b": 60}  # no defaults of fairseq-rope export
    changed = setting_flags("export_quantization=float32", *(f"{name}={value}" for name, value in search.items()))
    small(copied, "--stage", "11", *changed, "--dry-run")
    assert re.search(r"fairseq_rope export .* --beam 3 --lenpen 0.7 --max-len-b 60$", capsys.readouterr().out, re.M)
    printed = run_here(["demo", *words(copied, "--stage", "11", "--set", "export_quantization=float32")])
    model, translations = copied / MODEL, copied / "translations"
    assert "differ from the checkpoint's by" in printed and "stage 10" not in printed
    settings = model / "ctranslate2" / "fairseq_rope.json"
    before = settings.read_text()
    scaling = "--model-overrides \"{'rope_scaling': {'rope_type': 'linear', 'factor': 4}}\""
    scaled = setting_flags("export_quantization=float32", f"fairseq_generate_flags=--max-len-a=0 {scaling}")
    printed = run_here(["demo", *words(copied, "--stage", "11", *scaled)])
    assert "(again, since model_overrides changed)" in printed and "differ from the checkpoint's by" in printed
    assert "linear" in settings.read_text() and "linear" not in before
    run_here(["demo", *words(copied, "--stage", "11", "--set", "export_quantization=float32")])
    assert settings.read_text() == before
    files = ["--input", copied / "raw" / "test.en", "--output", translations]
    fairseq_rope.__main__.main(["translate", "--model", str(model / "ctranslate2"), *map(str, files)])
    lines = translations.read_text().splitlines()
    # fairseq-generate's length limit is that of the longest source of a batch, so only its translation is comparable.
    sizes = [len(line.split()) for line in (copied / "bpe" / "test.en").read_text().splitlines()]
    expected = (model / "hypotheses.de").read_text().splitlines()
    assert len(lines) == len(expected) == len(sizes)
    longest = [n for n, size in enumerate(sizes) if size == max(sizes)]
    assert [lines[n] for n in longest] == [expected[n] for n in longest]


def test_the_baseline_shares_the_data_and_has_its_own_folder(finished):
    baseline = describe("demo", *words(finished[0], "--arch", "transformer"))
    stamps = Runner(baseline).stamps
    assert [stage.number for stage in STAGES if stamps.is_done(stage)] == [1, 1, 2, 2, 3, 3, 4, 5, 5, 6, 6]
    assert baseline.model.name == MODEL.replace("_rope", "")


# -- what runs again ---------------------------------------------------------------------------------


def test_a_message_names_at_most_four_changes():
    new = dict.fromkeys("abcdef", 1)
    assert differences({"a": 1, "b": 2, "c": 1}, new) == "b, d, e, f changed"
    assert differences({}, new) == "a, b, c, 3 more changed"
    assert differences({}, {"clean/test.en": 1, "vocab_size": 4000}) == "vocab_size, clean/test.en changed"
    assert differences({"clean/test.en": 1}, {"clean/test.en": "none"}) == "clean/test.en is missing"


def test_a_second_run_in_a_moved_folder_repeats_only_damaged_stages(finished, copied, capsys):
    run_yaml = (copied / MODEL / "run.yaml").read_text()
    (copied / "raw" / "train.en").touch()  # the contents stay the same
    small(copied)
    again = capsys.readouterr().out
    assert again.count("done before, skipped") == 15
    assert "$ " not in again
    assert again.splitlines()[-1] == finished[1].splitlines()[-1]
    assert (copied / MODEL / "run.yaml").read_text() == run_yaml
    damaged = copied / "clean" / "valid.en"
    whole = damaged.read_bytes()
    damaged.write_bytes(bytes(len(whole)))
    (copied / "stamps" / "01.json").write_text("")
    small(copied)
    again = capsys.readouterr().out
    assert "stage 1: fetch\n" in again, "its stamp cannot be read"
    assert "stage 4: clean and split (again, since clean/valid.en changed)" in again
    assert again.count("done before, skipped") == 13
    assert damaged.read_bytes() == whole
    assert again.splitlines()[-1] == finished[1].splitlines()[-1]


def skipped(printed):
    """Whether each stage in what a run has *printed* was skipped, by its title."""
    titles = re.findall(r"^stage \d+: (.*?)(: done before, skipped)?$", printed, re.MULTILINE)
    return {title.partition(" (again")[0]: bool(rest) for title, rest in titles}


def test_a_finished_model_is_scored_on_another_test_set_without_training_again(finished, copied, tmp_path, monkeypatch):
    """The other test set is that of the user, somewhere on the disk, and has two references.

    A GPU has trained the model in fp16, which a CPU cannot resume. It translates on a CPU nevertheless.
    """
    history = copied / MODEL / "checkpoints" / "history.jsonl"
    on_a_gpu = {"process": {"batches": {"precision": "fp16"}, "hardware": {"gpus": ["a GPU"]}, "command": "--fp16"}}
    history.write_text(json.dumps(on_a_gpu) + "\n")
    stamp = copied / MODEL / "stamps" / "07.json"
    stamp.write_text(stamp.read_text().replace('"precision": "fp32"', '"precision": "fp16"'))
    folder = tmp_path / "users"
    folder.mkdir()
    texts = {lang: (finished[0] / "raw" / f"valid.{lang}").read_text().splitlines()[:5] for lang in ("en", "de")}
    texts["second"] = [" ".join(reversed(line.split())) for line in texts["de"]]
    for name, file in {"en": "news.en", "de": "news.de", "second": "second.de"}.items():
        (folder / file).write_text("".join(f"{line}\n" for line in texts[name]), encoding="utf-8")
    written = (copied / MODEL / "averaged.pt").stat().st_mtime_ns
    first = (copied / MODEL / "score.json").read_text()
    flags = ["--set", f"test_files={folder}/news.{{lang}},{folder}/second.{{lang}}", "--gpus", "0"]
    printed = run_here(["demo", *words(copied, *flags, "--set", "precision=fp16")])
    stages = skipped(printed)
    assert {title for title, was_done in stages.items() if not was_done} == {
        *("fetch the test set", "extract and check the test set", "normalise and tokenise the test set"),
        *("apply BPE to the test set", "binarise the test set", "translate the test set", "score"),
    }
    assert "train" in stages and (copied / MODEL / "averaged.pt").stat().st_mtime_ns == written
    assert (copied / MODEL / "earlier" / "1" / "score.json").read_text() == first
    hypotheses = (copied / MODEL / "hypotheses.de").read_text(encoding="utf-8").splitlines()
    (system,) = json.loads((copied / MODEL / "score.json").read_text())["systems"]
    bleu = system["metrics"][0]
    assert len(hypotheses) == 5 and "nrefs:2" in bleu["signature"]
    expected = sacrebleu.corpus_bleu(hypotheses, [texts["de"], texts["second"]]).score
    assert bleu["score"] == pytest.approx(expected, abs=1e-9)
    moved = {"generate.txt", "hypotheses.de", "score.json"}
    assert moved <= {path.name for path in (copied / MODEL / "earlier" / "1").iterdir()}
    (folder / "second.de").unlink()
    monkeypatch.setattr("recipes.pipeline.__main__.check_flags", None)  # slower, so files are looked for before
    with pytest.raises(SystemExit, match=f"stage 1 .fetch.: {folder}/second.de does not exist"):
        run_here(["demo", *words(tmp_path / "new", *flags)])


def test_a_recipe_without_a_test_set_ends_without_a_score_and_says_so(copied, capsys):
    for path in (copied / "raw").glob("test.*"):
        path.unlink()
    small(copied, "--set", "test_files=")
    printed = capsys.readouterr().out
    assert set(skipped(printed).values()) == {True} and "test set" not in printed.replace("test_files", "")
    assert list(skipped(printed))[-2:] == ["train", "average the last checkpoints"]
    last = f"test_files is empty, so the model has no score: {copied / MODEL / 'averaged.pt'}"
    assert printed.splitlines()[-1] == last
    small(copied, "--set", "test_files=", "--stage", "11", "--dry-run")
    assert "stage 11" in capsys.readouterr().out


def test_a_dry_run_shows_that_other_data_would_move_the_model(copied, capsys):
    model = copied / "transformer_rope.seed1.foo"
    (copied / MODEL).rename(model)
    small(copied, "--name", "foo", "--dry-run")
    assert "would be moved" not in capsys.readouterr().out
    small(copied, "--name", "foo", "--set", "vocab_size=240", "--dry-run")
    printed = capsys.readouterr().out
    assert re.findall(r"^  (\S+) has .* would be moved to (\S+)$", printed, re.MULTILINE) == [
        (str(model), next(iter(re.findall(rf"{model}\.old-\S+", printed))))
    ]
    assert model.exists()


class Idle(Shell):
    """A shell that runs nothing."""

    def command(self, *_, **__):
        return None


class Recording:
    """A view of settings that notes which of them are read."""

    def __init__(self, settings):
        self._settings, self.read = settings, set()

    def __getattr__(self, name):
        if name in FIELDS:
            self.read.add(name)
        return getattr(self._settings, name)

    templates = Settings.templates


def another(name, value):
    """Another value of the setting *name*, which changes what a stage makes of it."""
    if name == "fairseq_generate_flags":
        return f"{value} --model-overrides {{}}"
    if name.endswith("_files"):
        return "other.{lang}" if value == "" else ""
    if isinstance(value, str):
        return next((one for one in FIELDS[name].metadata.get("choices", ()) if one != value), value + "x")
    return not value if isinstance(value, bool) else value + 1


def test_another_value_of_any_setting_that_a_stage_reads_changes_its_stamp(finished, copied):
    """Each stage runs with an idle shell, on the finished outputs."""
    shutil.copytree(copied / "data-bin", copied / "data-bin.tmp")  # fairseq-preprocess writes its log there
    log = copied / "data-bin.tmp" / "preprocess.log"
    log.write_text(log.read_text().replace(str(finished[0]), str(copied)))
    of_test_set = copied / "data-bin.test.tmp" / "preprocess.log"
    of_test_set.parent.mkdir()
    of_test_set.write_text("".join(f"[{lang}] {copied}/bpe/test.{lang}: 12 sents,\n" for lang in ("en", "de")))
    for dry_run, stage in itertools.product((True, False), needed(STAGES, describe("demo", *words(copied)))):
        experiment = describe("demo", *words(copied, "--gpus", "0"))
        if stage is TRAIN:  # the settings of the device count until the training has ended
            Stamps(experiment).path(stage).unlink(missing_ok=True)
        settings, stamp = experiment.settings, Stamps(experiment).of(stage)
        experiment.dry_run, experiment.settings = dry_run, Recording(settings)
        stage.run(experiment, Idle(stage))
        # without a validation set; with documents
        assert experiment.settings.read >= {*stage.settings} - {"holdout_every", "segment_share"}, stage.title
        # Stage 1 finds missing files of all sets; stages 7 and 9, lines too long for the model or the search.
        only_checked = {
            **{1: {"train_files", "valid_files", "test_files"}, 7: {"fairseq_generate_flags", "test_files"}},
            9: {"fairseq_train_flags", "test_files"},
        }
        # user_dir says where classes are, and a change of their code changes no stamp either.
        for name in experiment.settings.read - only_checked.get(stage.number, set()) - {"user_dir"}:
            experiment.settings = replace(settings, **{name: another(name, getattr(settings, name))})
            with contextlib.suppress(FileNotFoundError):  # the other value adds an input
                assert Stamps(experiment).of(stage) != stamp, (stage.title, name)


def test_a_run_waits_for_the_comparison_that_trains_its_model(copied):
    """Jobs of a comparison that was killed can still train. They hold the lock of the model."""
    with locked_when_free(copied / "locks" / f"{MODEL}.lock"):
        waits = start(sys.executable, "-c", UNCHECKED, "demo", *words(copied, "--stop-stage", "7"))
        line = next(line for line in waits.stdout if "is locked by" in line)
        assert f"is locked by process {os.getpid()}" in line and waits.poll() is None
    assert "stage 7: train: done before, skipped" in waits.communicate(timeout=LIMIT)[0] and waits.returncode == 0


# -- precision ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_training_in_bf16_on_the_cpu_is_warned_of_and_resumes_in_bf16(copied, refused, capsys, monkeypatch):
    monkeypatch.setattr(pipeline, "check_flags", lambda *_, **__: None)
    name, few = ["--gpus", "0", "--name", "sixteen"], ["--set", "average_checkpoints=1", "--set"]
    printed = run_here(["demo", *words(copied, *name, *few, "max_epochs=1", "--set", "precision=bf16")])
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "warning" in line]
    assert line.startswith("recipes/demo: warning: --set precision=bf16: this CPU has no instructions for bf16 ")
    assert "  on the CPU in bf16: " in printed and printed.splitlines()[-1].startswith("sacreBLEU ")
    model = copied / "transformer_rope.seed1.sixteen"
    assert yaml.safe_load((model / "run.yaml").read_text())["training"] == {"device": "the CPU", "precision": "bf16"}
    state = torch.load(model / "checkpoints" / "checkpoint1.pt", weights_only=False)
    assert state["cfg"]["common"]["bf16"] and state["optimizer_history"][-1]["optimizer_name"] == "FP16Optimizer"

    assert "precision=fp32: the training in" in refused(copied, *name, *few, "max_epochs=2")
    longer = ["max_epochs=2", "--stop-stage", "7", "--set", "precision=auto"]
    printed = run_here(["demo", *words(copied, *name, *few, *longer)])
    warning = f"recipes/demo: warning: the training in {model}/checkpoints has the precision bf16: "
    assert warning in capsys.readouterr().err
    assert "  precision: auto keeps bf16, in which this training has begun\n" in printed
    history = [json.loads(line) for line in (model / "checkpoints" / "history.jsonl").read_text().splitlines() if line]
    assert [entry["epoch"] for entry in history if "valid_loss" in entry] == [1, 2]


# -- interruptions -----------------------------------------------------------------------------------


# A run that does not check flags.
UNCHECKED = "import recipes.pipeline.__main__ as run; run.check_flags = lambda *_, **__: None; run.main()"


@pytest.mark.slow
def test_training_resumes_after_a_full_disk_a_killed_recipe_and_a_power_cut(copied, capsys, monkeypatch):
    """A full disk and a power cut interrupt two runs; the third completes the training."""
    shutil.rmtree(copied / MODEL)
    flags = ["--set", "max_epochs=8", "--stop-stage", "7"]
    run = [sys.executable, "-c", UNCHECKED, "demo", *words(copied, *flags)]
    limit = (400_000, 400_000)  # maximum size of a file in bytes, less than a checkpoint
    process = start(*run, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    (sentence,) = [line for line in errors.splitlines() if line.startswith("recipes/demo: ")]
    assert "stage 7 (train) failed" in sentence and "checkpoint1.pt: could not be written" in sentence
    checkpoints = copied / MODEL / "checkpoints"
    assert not list(checkpoints.glob("*.pt*"))

    process = start(*run)
    wait_for(checkpoints / "checkpoint1.pt", process)
    process.kill()  # kills the recipe; fairseq-train continues
    wait_for(checkpoints / "checkpoint4.pt")
    kill_all_of(copied, process)

    monkeypatch.setattr(pipeline, "check_flags", lambda *_, **__: None)
    small(copied, *flags)
    assert (
        capsys.readouterr().out.count("done before, skipped") == 11
    )  # stages 1 to 6, five of them for the test set too
    assert Runner(describe("demo", *words(copied, *flags))).stamps.is_done(TRAIN)
    assert "Loaded checkpoint" in (copied / MODEL / "logs" / "stage07_train.log").read_text()
    history = [json.loads(line) for line in (checkpoints / "history.jsonl").read_text().split("\n") if line]
    for loss in ("valid_loss", "train_loss"):
        epochs = [entry["epoch"] for entry in history if loss in entry]
        # The power cut can come between a checkpoint and the lines about its epoch.
        assert epochs[-3:] == [6, 7, 8] and len({*range(1, 9)} - {*epochs}) <= 1
    assert len([entry for entry in history if "process" in entry]) == 3
    # Torch alone takes more than 100 MiB. The recipe of the other two processes was killed, or they failed.
    assert [entry["peak_memory_mib"] > 100 for entry in history if "peak_memory_mib" in entry] == [True]


# Prints the peak memory of three commands. Only the second one uses much, in the first part of a pipeline.
PEAKS = """
import sys
from pathlib import Path
from recipes.run.shell import run_logged
from recipes.pipeline.stages import TRAIN, needed

for size in (0, 300 << 20, 0):
    print(run_logged(TRAIN, f"{sys.executable} -c 'b = bytes([1]) * {size}' | cat", None, Path(sys.argv[1]), ()))
"""


def test_the_peak_memory_of_a_command_is_that_of_its_largest_process_alone(tmp_path):
    # In a small process: a command's peak is at least that of the process that starts it.
    done = start(sys.executable, "-c", PEAKS, str(tmp_path / "log"))
    before, large, after = map(float, done.communicate(timeout=LIMIT)[0].split())
    assert before < 200 and after < 200 and 300 < large < 400


# A run with one stage, whose command names the work folder and never ends.
WAITING = """
import sys
from recipes.pipeline import __main__ as run, session
from recipes.pipeline.translation_stage import TranslationStage

class Wait(TranslationStage):
    number, title, settings = 1, "wait", ()
    inputs = outputs = lambda self, experiment: []
    def run(self, experiment, shell):
        shell.command(f"touch {experiment.work}/begun && tail -f {experiment.work}/begun | cat")

run.STAGES = session.STAGES = [Wait()]
run.main(["demo", "--work-dir", sys.argv[1], "--stop-stage", "1"])
"""


def waiting(work, wait=True):
    process = start(sys.executable, "-c", WAITING, str(work), preexec_fn=default_signals)
    if wait:
        wait_for(work / "begun", process)
    return process


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_terminated_run_terminates_its_command(tmp_path, number):
    process = waiting(tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 128 + number
    assert errors.splitlines()[-1] == "recipes: stopped; run the same command to continue"
    deadline = time.time() + 20
    while running(tmp_path) and time.time() < deadline:
        time.sleep(0.1)
    assert not running(tmp_path)


def test_a_work_folder_is_locked_by_a_run_and_by_a_surviving_command(tmp_path):
    process = waiting(tmp_path)
    holders = []
    for _ in range(2):
        other = waiting(tmp_path, wait=False)
        _, errors = other.communicate(timeout=LIMIT)
        assert other.returncode == 1 and errors.count("\n") == 1
        message = rf"another run uses {tmp_path}: (its command, )?process (\d+), since \d{{4}}-\d\d-.*with --jobs N$"
        holders.append(re.search(message, errors, re.M).groups())
        process.kill()  # kills the run; its command continues
        process.wait(LIMIT)
    assert holders[0] == (None, str(process.pid))
    assert holders[1][0] and holders[1][1] in running(tmp_path)
    kill_all_of(tmp_path, process)


@pytest.mark.parametrize("stage, folder, interrupted", [(2, "raw", 2), (3, "tokenised", 4), (5, "bpe", 3)])
def test_an_interrupted_text_stage_continues_with_the_unfinished_file(finished, copied, stage, folder, interrupted):
    """*interrupted* is the number of the tool that Ctrl-C interrupts."""
    stamp = copied / "stamps" / f"{stage:02d}.json"
    flags = ["--stage", str(stage), "--stop-stage", str(stage)]
    written = {path.name: path.read_bytes() for path in (finished[0] / folder).iterdir()}

    def interrupt():
        shutil.rmtree(copied / folder)
        stamp.unlink()
        with pytest.raises(SystemExit):
            run_here(["demo", *words(copied, *flags)], stop_before=interrupted)
        return [path.stat() for path in sorted((copied / folder).iterdir())]

    before = interrupt()
    assert 0 < len(before) < len(written)
    again = run_here(["demo", *words(copied, *flags)])
    assert again.count("made before the interruption: ") == interrupted - 1
    after = [path.stat() for path in sorted((copied / folder).iterdir())]
    assert {one.st_ino for one in before} <= {one.st_ino for one in after}
    assert {path.name: path.read_bytes() for path in (copied / folder).iterdir()} == written
    interrupt()
    if stage == 5:  # outputs of other inputs are made again
        (copied / "clean" / "valid.en").write_text("Another text .\n")
        assert Runner(describe("demo", *words(copied))).ensure(Bpe())
        assert (copied / "bpe" / "valid.en").read_text().replace("@@ ", "") == "Another text .\n"


def test_a_failing_tool_prints_its_sentence_once_and_a_full_disk_is_named(tmp_path, capsys):
    shell = Shell(TRAIN, tmp_path / "commands" / "train.sh", tmp_path / "logs" / "train.log")
    with pytest.raises(StageError, match=r"^stage 7 .* failed with status 3: recipes.text.bpe: no \(full output: "):
        shell.tool("echo first; echo 'recipes.text.bpe: no'; exit 3")
    assert capsys.readouterr().out.splitlines()[1:] == ["    first"]
    with pytest.raises(StageError, match=f"No space left on device; the disk of {tmp_path} is full"):
        shell.command("cat /dev/zero > /dev/full")


def test_the_sides_of_a_corpus_can_be_in_two_folders(tmp_path):
    """A file of the same name in the other folder is another text."""
    for folder, name, text in (("en", "t.en", "a"), ("de", "t.de", "A"), ("en", "t.de", "wrong")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / name).write_text(f"{text}\n")
    files = setting_flags(*(f"{name}_files={tmp_path}/{{lang}}/t.{{lang}}" for name in ("train", "valid", "test")))
    experiment = describe("multi30k_en_de", "--work-dir", tmp_path / "work", *files)
    for stage in (Extract(), ExtractTest()):
        stage.run(experiment, Shell(stage, tmp_path / "run.sh", tmp_path / "run.log"))
    for name in ("train", "valid", "test"):
        assert [(tmp_path / "work" / "raw" / f"{name}.{lang}").read_text() for lang in ("en", "de")] == ["a\n", "A\n"]


def test_an_output_in_ascii_shows_every_command_of_a_dry_run(tmp_path):
    environment = {**ENVIRONMENT, "PYTHONIOENCODING": "ascii"}
    command = ["bash", "recipes/demo/run.sh", *words(tmp_path / "für", "--dry-run")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=180)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.decode("ascii")
    assert r"f\xfcr/raw" in printed and printed.index("stage 7") < printed.index("stage 10")


def test_a_command_prints_utf8_where_the_users_output_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    monkeypatch.setenv("PYTHONUTF8", "0")
    lines: list[str] = []
    shell = Shell(TRAIN, tmp_path / "train.sh", tmp_path / "train.log")
    shell.command("python -c 'print(\"für – ▁\")'", lines.append)
    repeated = subprocess.run(["bash", shell.script], capture_output=True, check=True, timeout=60)
    assert lines == [repeated.stdout.decode()] == ["für – ▁\n"]
    assert (tmp_path / "train.log").read_text(encoding="utf-8") == "für – ▁\n"


def test_a_python_without_a_package_that_the_recipes_import_is_not_taken(tmp_path):
    script = tmp_path / "recipes/pipeline/run.sh"
    script.parent.mkdir(parents=True)
    script.write_text((ROOT / "recipes/pipeline/run.sh").read_text())
    (script.parent / "__main__.py").write_text("print('taken')")
    (tmp_path / "bin").mkdir()
    for name in ("python3", "python"):  # without the packages that are installed
        (tmp_path / "bin" / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "packages")}
    printed = []
    for module in "fairseq sacrebleu sacremoses subword_nmt sentencepiece ruamel ruamel/yaml tqdm".split():
        (tmp_path / "packages" / module).mkdir(parents=True)
        (tmp_path / "packages" / module / "__init__.py").touch()
        done = subprocess.run(["bash", script], env=environment, capture_output=True, text=True, timeout=60)
        printed.append((done.returncode, done.stdout))
        assert done.returncode == 0 or "run 'make install' first" in done.stderr
    assert printed == [(1, "")] * 7 + [(0, "taken\n")]


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--", "--foo"], "--arch transformer_rope: fairseq-train: error: --foo: unknown flag"),
        (
            ["--set", "fairseq_generate_flags=--bream 5"],
            "fairseq-generate: error: --bream: unknown flag; the nearest one is --beam",
        ),
        (
            ["--set", "heads=3"],
            "--encoder-attention-heads 3: must divide --encoder-embed-dim 32 without remainder (settings: layers=2, "
            "width=32, ffn_width=32, heads=3)",
        ),
        (["--set", "heads=3", "--arch", "transformer"], "--arch transformer: embed_dim must be divisible by num_heads"),
        (["--", "--rope-fraction", "0.3"], "--rope-fraction 0.3 of a head of 8 dimensions leaves 2.4 to rotate"),
        (["--", "--help"], "--arch transformer_rope: fairseq ended with status 0 before it had read all flags"),
        (
            setting_flags("fairseq_generate_flags=--model-overrides rope"),
            "--model-overrides rope: must be a Python dictionary",
        ),
        (
            setting_flags("""fairseq_generate_flags=--model-overrides "{'rope_scaling': {'rope_type': 'linear'}}" """),
            "--model-overrides {'rope_scaling': {'rope_type': 'linear'}}: --rope-scaling ",
        ),
        (
            ["--arch", "transformer_xl_positions", "--stop-stage", "11"],
            "--arch transformer_xl_positions: stage 11 cannot export this model: its encoder has the position encoding "
            "transformer-xl, which CTranslate2 does not support",
        ),
        (["--tokenize", "ko-mecab"], "--tokenize ko-mecab: Korean tokenization requires extra dependencies"),
    ],
)
def test_unknown_flags_are_refused_before_the_first_stage(tmp_path, refused, flags, message):
    assert message in refused(tmp_path, *flags)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_program_that_exports_is_looked_for_before_the_first_stage(tmp_path, refused, monkeypatch):
    monkeypatch.setattr(shortlist, "ALIGNER", "no-such-aligner")
    shortlisted = [*setting_flags("export_shortlist=true"), "--stop-stage", "11"]
    assert (
        "stage 11 (export to CTranslate2): export_shortlist=true: needs the program no-such-aligner; install it"
        in refused(tmp_path, *shortlisted)
    )
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    monkeypatch.setattr(stage11_export, "find_spec", lambda name: None if name == "ctranslate2" else name)
    sentence = refused(tmp_path, "--stop-stage", "11")
    assert "stage 11 (export to CTranslate2): ctranslate2 is not installed: pip install 'ctranslate2>" in sentence


def test_an_unknown_architecture_and_a_killed_check_of_flags_are_refused(tmp_path, refused, monkeypatch):
    sentence = refused(tmp_path, "--arch", "transfomer_rope")
    assert "--arch transfomer_rope: fairseq has no such architecture; the nearest is transformer_rope" in sentence
    monkeypatch.setattr(checking.subprocess, "run", lambda words, **_: subprocess.CompletedProcess(words, -9, "", ""))
    assert "--arch transformer_rope: fairseq ended with status -9 before" in refused(tmp_path)


def test_an_architecture_whose_sizes_the_settings_replace_is_warned_about(tmp_path, capsys):
    big = describe("demo", "--work-dir", tmp_path, "--gpus", 0, "--arch", "transformer_rope_wmt_en_de_big")
    usual = describe("demo", "--work-dir", tmp_path, "--gpus", 0, "--arch", "transformer_rope")
    checking.check_flags([usual])
    assert capsys.readouterr().err == ""
    checking.check_flags([big])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("recipes: warning: --arch transformer_rope_wmt_en_de_big: the settings replace its own ")
    assert "encoder_embed_dim=1024 by 128" in line and "dropout=0.3 by 0.1" in line and "layers" not in line


def test_sentences_that_fairseq_skipped_are_reported(copied, tmp_path):
    experiment = describe("demo", *words(copied))
    log = tmp_path / "preprocess.log"
    texts = experiment.texts("bpe", LEARNT)
    counted = "".join(f"[en] {path}: {len(path.read_text().splitlines())} sents, 9 tokens\n" for path in texts)
    log.write_text(counted)
    check_counts(Binarise(), experiment, LEARNT, log)
    log.write_text(counted.replace(" 200 sents", " 199 sents"))
    with pytest.raises(StageError, match=r"train.en has 200 lines, but .* has another count"):
        check_counts(Binarise(), experiment, LEARNT, log)


def test_a_model_whose_translations_are_all_empty_has_0_bleu(copied):
    flags = setting_flags("fairseq_generate_flags=--max-len-a 0 --max-len-b 0 --min-len 0")
    printed = run_here(["demo", *words(copied, "--stage", "9", *flags)])
    model = copied / MODEL
    hypotheses = (model / "hypotheses.de").read_text()
    assert hypotheses and not hypotheses.strip()
    assert "all translations are empty" in printed and printed.endswith("\nsacreBLEU 0.00\n")
    (system,) = json.loads((model / "score.json").read_text())["systems"]
    assert system["name"] == str(model / "hypotheses.de") and "sacreBLEU_by_source_length" in system
    assert {row["name"]: row["score"] for row in system["metrics"]}["TER"] == 100
    script = model / "commands" / "stage10_score.sh"
    before = (model / "score.json").read_bytes()
    subprocess.run(["bash", str(script)], check=True, timeout=180, capture_output=True)
    assert (model / "score.json").read_bytes() == before, "the script is run by hand"


@pytest.mark.parametrize("error", [StageError, KeyboardInterrupt])
def test_a_failed_or_interrupted_command_leaves_no_temporary_file(tmp_path, monkeypatch, error):
    def fails(*_):
        raise KeyboardInterrupt

    result = tmp_path / "result"
    result.with_name("result.tmp").write_text("half")
    shell = Shell(SCORE, tmp_path / "script.sh", tmp_path / "log")
    if error is KeyboardInterrupt:
        monkeypatch.setattr("recipes.run.shell.run_logged", fails)
    with pytest.raises(error):
        shell.write("(echo half; false)", result)
    assert not [*tmp_path.glob("result*")]
    monkeypatch.undo()
    shell.write("echo whole", result)
    assert [path.name for path in tmp_path.glob("result*")] == ["result"] and result.read_text() == "whole\n"


def test_a_stage_without_current_inputs_names_the_stage_to_run(tmp_path, copied, refused):
    not_ended = "stage 5: BPE needs stage 1 (fetch) to run first, which has not ended yet: run with --stage 1"
    assert not_ended in refused(tmp_path / "new", "--stage", "5")
    changed = "stage 6: binarise needs stage 5 (BPE) to run first, since vocab_size changed: run with --stage 5"
    assert changed in refused(copied, "--stage", "6", "--set", "vocab_size=240")
    other_bpe = "stage 6: binarise needs stage 3 (normalise and tokenise) to run first, since --bpe changed"
    assert other_bpe in refused(copied, "--stage", "6", "--bpe", "sentencepiece")
    shutil.rmtree(copied / "tokenised")
    deleted = "stage 7: train needs stage 4 (clean and split) to run first, since max_words changed: run with --stage 4"
    assert deleted in refused(copied, "--stage", "7", "--set", "max_words=9")
    no_file = "stage 10: score needs stage 1 (fetch the test set) to run first, since test_files changed"
    assert no_file in refused(copied, "--stage", "10", "--set", "test_files=typo.{lang}")
    # Files of another --data-dir count as deleted.
    experiment = describe("demo", *words(copied))
    for folder in (experiment.data_dir, tmp_path / "empty", None):
        experiment.data_dir = folder
        Runner(experiment, STAGES).refuse_stale_inputs(TRAIN)
    (copied / "clean" / "train.de").unlink()
    missing = "which stage 4 (clean and split) makes: run with --stage 4"
    assert missing in refused(copied, "--stage", "5")


def test_the_error_message_has_the_last_line_of_a_failing_command(tmp_path, capsys):
    for lang in ("en", "de"):
        (tmp_path / f"valid.{lang}.gz").touch()
    with pytest.raises(SystemExit) as stopped:
        pipeline.main(["demo", "--data-dir", str(tmp_path), "--work-dir", str(tmp_path / "work"), "--stop-stage", "1"])
    form = r"recipes/demo: stage 1 \(fetch\) failed with status \d+: (.*train.en.gz is not in .*) \(full output: (.*)\)"
    sentence, log = re.fullmatch(form, stopped.value.code).groups()
    assert log == str(tmp_path / "work" / "logs" / "stage01_fetch.log")
    assert sentence not in capsys.readouterr().out
    assert not (tmp_path / "work" / "stamps").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--set", "learning_rate=0"], "--set learning_rate=0.0: must be above 0, up to 1"),
        (["--set", "fairseq_generate_flags=--beam 2 --gen-subset x"], "--gen-subset among the flags for fairseq-gen"),
        (["--set", "fairseq_generate_flags=--path=other.pt"], "--path=other.pt among the flags for fairseq-generate"),
        (["--set", "fairseq_train_flags=-s fr"], "-s among the flags for fairseq-train: use the recipe's own"),
        (["--workdir", "x"], "--workdir: unknown flag; did you mean --work-dir? Otherwise write flags for fairseq"),
        (["--set", "warmup_updates=0"], "--set warmup_updates=0: must be 1 or more"),
        (["--set", "widht=64"], "settings.yaml has no widht; the nearest it has is width"),
        (["--set", "width"], "--set width: must have the form KEY=VALUE"),
        (["--set", "tokens_per_update=0"], "--set tokens_per_update=0: must be 1 or more"),
        (["--set", "average_checkpoints=9"], "--set average_checkpoints=9: training writes only 5 with"),
        (["--set", "target_lang=Portuguese"], "--set target_lang=Portuguese: must be a language's code"),
        (["--set", "train_files=a'b"], "--set train_files=a'b: no closing quotation"),
        (["--set", "holdout_every=9"], "valid_files=valid.{lang}.gz: must name files, or holdout_every must be above"),
        (["--set", "test_files=a,b c"], "--set test_files=a,b c: must name as many references for each file"),
        (["--set", "test_files=a,,b"], "--set test_files=a,,b: must name as many references for each file"),
        (["--set", "test_files=", "--stage", "9", "--stop-stage", "10"], "--stage 9: needs a test set, and test_files"),
        (["--set", "holdout_every=1"], "--set holdout_every=1: must be 0 or above 1"),
        (["--set", "target_lang=en"], "--set target_lang=en: must differ from source_lang"),
        (["--set", "adam_betas=(0.9,0.98"], "--set adam_betas=(0.9,0.98: must be a pair like (0.9, 0.98)"),
        (["--set", "length_penalty=.nan"], "--set length_penalty=nan: must be a number"),
        (["--set", "fairseq_train_flags='x"], "--set fairseq_train_flags='x: no closing quotation"),
        (["--set", "save_every_updates=9"], "--set save_every_updates=9: checkpoints by updates need max_up"),
        (["--set", "precision=int4"], "--set precision=int4: must be one of auto, fp32, fp16, bf16"),
        (["--set", "normalise_punctuation=de"], "must be one of none, source, target, both"),
        (["--seed", "-1"], "--seed -1: must be from 0 to 2147483647"),
        (["--seed", "5000000000"], "--seed 5000000000: must be from 0 to 2147483647"),
        (["--set", "user_dir=~nobody-has-this-name/x"], "--set user_dir=~nobody-has-this-name/x: Could not"),
        (["--arch", "x; touch y"], "--arch x; touch y: must be a name"),
        (["--set", "disk_gb=nan"], "--set disk_gb=nan: must be of type float, like the recipe's own 0.3"),
        (["--set", "layers=2026-13-45"], "--set layers=2026-13-45: must be of type int"),
        (["--data-dir", "nowhere"], "--data-dir nowhere: must be a folder that exists"),
        (["--clip-norm", "1.5"], "--clip-norm: unknown flag; write flags for fairseq-train after a lone --"),
        (["--gpus", "-1"], "--gpus -1: must be 0 or more"),
        (["--name", "old-1"], "--name old-1: must consist of letters, digits, _ and -, and must not begin with old-"),
        (["--work-dir", "a:b"], "a:b: must not contain a colon, because fairseq splits paths at colons"),
        (["--work-dir", "a,b"], "a,b: must not contain a comma, because fairseq splits paths at commas"),
        (["--manifest", "no.tsv"], "--manifest no.tsv: must be a file that exists, or none"),
        (["--set", "layers=true"], "--set layers=true: must be of type int, like the recipe's own 2"),
        (["--stage", "8", "--stop-stage", "3"], "--stage 8 --stop-stage 3: must be 1 <= stage <= stop-stage <= 11"),
    ],
)
def test_wrong_flags_are_refused_by_name(tmp_path, capsys, flags, message):
    assert re.match(f"run.sh: error: .*{re.escape(message)}", usage_error(capsys, small, tmp_path, *flags))
    assert list(tmp_path.iterdir()) == []
