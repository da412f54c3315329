"""Work folders: steps are named by what they read, nothing is lost or made twice, whatever is changed or killed.

The programs that a recipe calls are stood in for by ``fake_programs``, whose outputs are checksums of their inputs.
"""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from fairseq_rope.errors import InputError
from recipes import compared, jobs, machine, models, script
from recipes.__main__ import Command, main, parse
from tests.commands import LIMIT
from tests.recipes import fake_programs
from tests.recipes.fake_programs import FEW, RECIPES, change_data


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with data and fake programs; the recipe works in its folder ``work``."""
    monkeypatch.setattr(script, "PROGRAMS", str(fake_programs.install(tmp_path / "bin")))
    monkeypatch.setattr(compared.page, "write", lambda folder, contents: (folder / "report.html").touch())
    monkeypatch.setattr(compared.page, "verdict", lambda folder: [])
    monkeypatch.setenv("LEDGER", str(tmp_path / "ledger"))
    # Most of the time of a run with fake programs would be these.
    monkeypatch.setattr(os, "fsync", lambda file: None)
    monkeypatch.setattr(script, "time", SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: time.sleep(0.01)))
    (tmp_path / "ledger").touch()
    change_data(tmp_path, "data A")
    return tmp_path


def words(place, *more, work="work"):
    return ["demo", f"data={place / 'data'}", f"work={place / work}", *FEW, *more]


def run(place, *more, work="work"):
    """Run the demo's recipe with fake programs; returns the score in the plain name ``score``."""
    main(words(place, *more, work=work))
    return (place / work / "score" / "score.json").read_text()


def command(place, *more, work="work"):
    return Command(*parse(words(place, *more, work=work)))


def epochs(place):
    """The folder and number of each finished epoch, in order."""
    return (place / "ledger").read_text().splitlines()


def forked(function, *arguments):
    """Call *function* in a process of its own, in its own group. Returns its id."""
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        status = 1
        try:
            function(*arguments)
            status = 0
        except BaseException:
            pass
        finally:
            os._exit(status)
    return pid


def averages(place):
    return {path.parent.name: path.read_text() for path in (place / "work").glob("average-*/averaged.pt")}


@pytest.mark.slow
def test_no_sequence_of_runs_changes_and_kills_loses_a_model_or_trains_an_epoch_twice(place, monkeypatch):
    monkeypatch.setenv("SECONDS_AN_EPOCH", "0.05")
    draw, known = random.Random(5), {}
    choices = [
        *(["learning_rate=1e-3"], ["learning_rate=2e-3"], ["arch=transformer"], ["vocab_size=40"], ["beam=1"]),
        *(["test_files.news=news.{lang}.gz"], ["seeds=2"], ["dropout=0.2", "max_epochs=4"], []),
    ]
    for _ in range(40):
        change_data(place, draw.choice(["data A", "data A", "data B"]))
        more = draw.choice(choices) + [f"max_epochs={draw.choice([2, 3, 4])}"]
        processes = [forked(main, words(place, *more)) for _ in range(draw.choice([1, 1, 2]))]
        if draw.random() < 0.5:
            time.sleep(draw.uniform(0.05, 0.6))
            victim = draw.choice(processes)
            os.kill(victim, draw.choice([signal.SIGKILL, signal.SIGTERM]))
        for process in processes:
            os.waitpid(process, 0)
        found = averages(place)
        assert known.items() <= found.items()
        known = found
    deadline = time.time() + 20
    while any(models.state(command(place).work, path.name) == "running" for path in (place / "work").glob("train-*")):
        assert time.time() < deadline  # commands that outlive their recipe end by themselves
        time.sleep(0.1)
    trained = epochs(place)
    assert len(trained) > 25 and len({*trained}) == len(trained)
    for more in choices:
        for content in ("data A", "data B"):
            change_data(place, content)
            work = f"fresh {choices.index(more)} {content[-1]}".replace(" ", "-")
            limit = [] if "max_epochs=4" in more else ["max_epochs=4"]
            assert run(place, *more, *limit) == run(place, *more, *limit, work=work)


def test_another_setting_makes_a_folder_beside_the_old_one_and_the_screen_says_which_value_differs(place, capsys):
    run(place)
    assert len(epochs(place)) == 2
    capsys.readouterr()
    of_the_machine = ["tokens_per_device=512", "disk_gb=0.001"]
    run(place, *of_the_machine)
    assert "== " not in capsys.readouterr().out, "all steps are finished"
    run(place, "learning_rate=0.002")
    printed = capsys.readouterr().out
    assert "learning_rate 0.002, not 0.004" in printed
    assert [line.split("-")[0] for line in printed.splitlines() if line.startswith("== ")] == [
        "== train", "== average", "== translate", "== score"
    ]  # fmt: skip
    run(place)
    assert len(epochs(place)) == 4


def test_a_longer_training_continues_the_shorter_one_in_a_moved_folder_too_and_without_the_data(place):
    run(place)
    shorter = averages(place)
    run(place, "max_epochs=4")
    assert [line.split()[1] for line in epochs(place)] == ["1", "2", "3", "4"]
    assert shorter.items() < averages(place).items()
    score = run(place)
    assert score == run(place, work="other")
    with pytest.raises(SystemExit):
        main(words(place, "max_epochs=3"))  # its checkpoints are deleted
    with pytest.raises(SystemExit):
        run(place, "average_checkpoints=1")  # of epoch 2
    shutil.move(place / "work", place / "elsewhere")
    shutil.rmtree(place / "data")
    (place / "data").mkdir()
    run(place, "max_epochs=5", work="elsewhere")
    assert [line.split()[1] for line in epochs(place)] == ["1", "2", "3", "4", "1", "2", "5"]


def test_one_more_test_set_trains_nothing_and_has_a_score_of_its_own(place):
    run(place)
    run(place, "test_files.news=news.{lang}.gz")
    assert len(epochs(place)) == 2
    (model,) = models.scores_of(command(place).work).values()
    assert list(model) == ["test", "news"] and model["test"] != model["news"]
    table = (place / "work" / "models.md").read_text()
    assert "sacreBLEU test" in table and "sacreBLEU news" in table


def test_the_score_of_the_reference_after_moses_is_beside_a_score_if_it_is_low(place, capsys, monkeypatch):
    """A model that is trained on Moses' tokens cannot have a higher score."""
    for number, (more, ceiling, is_shown) in enumerate(
        [([], "14.46", True), ([], "99", False), (["bpe=sentencepiece"], "14.46", False)]
    ):
        monkeypatch.setenv("CEILING", ceiling)
        run(place, *more, work=f"work{number}")
        assert ("14.46" in capsys.readouterr().out.splitlines()[-1]) == is_shown


def test_systems_share_the_preparation_and_a_training_of_the_same_settings(place):
    (place / "systems.yaml").write_text("a: {arch: transformer}\nb: {}\nc: {beam: 2}\n")
    main(words(place, f"systems={place / 'systems.yaml'}", "--until", "translate"))
    kinds = [path.name.split("-")[0] for path in (place / "work").glob("[a-z]*-*") if path.is_dir()]
    assert {kind: kinds.count(kind) for kind in ("clean", "learn", "train", "translate")} == {
        "clean": 1, "learn": 1, "train": 2, "translate": 3
    }  # fmt: skip


def test_auto_is_resolved_when_a_training_begins_and_another_machine_is_told_what_to_set(place, monkeypatch):
    monkeypatch.setattr(machine, "cpu_info", lambda: "flags : avx2\n")
    run(place, "precision=auto")
    (record,) = command(place).work.records("train").values()
    assert record["settings"]["precision"] == "fp32"
    monkeypatch.setattr(machine, "cpu_info", lambda: "flags : avx2 avx512_bf16\n")
    with pytest.raises(InputError, match="precision=fp32.*precision=bf16"):
        command(place, "precision=auto").main()
    run(place, "precision=fp32")
    assert len(epochs(place)) == 2
    run(place, "precision=bf16")
    assert len(epochs(place)) == 4


@pytest.mark.parametrize("tokens, largest, devices", [(25000, 25000, 1), (25000, 4096, 1), (1000, 300, 2), (10, 99, 8)])
def test_batches_fill_an_update_and_are_not_larger_than_allowed(place, tokens, largest, devices):
    plan = command(place, f"tokens_per_update={tokens}").plan
    batch, frequency = plan.pipeline(plan.runs[0]).train.batches(devices, largest)
    assert batch <= largest and tokens - devices * frequency < batch * devices * frequency <= tokens


def test_a_batch_that_does_not_fit_into_the_memory_of_a_gpu_is_halved(place, monkeypatch, capsys):
    monkeypatch.setattr(machine, "devices", lambda gpus, precision: 2)
    monkeypatch.setenv("MEMORY", "300")
    run(place, "tokens_per_update=1000")
    assert re.findall("2 × .* tokens", capsys.readouterr().out) == [
        *("2 × 1 batches of 500 tokens", "2 × 2 batches of 250 tokens")
    ]
    assert len(epochs(place)) == 2
    run(place, "tokens_per_update=1000", "max_epochs=3")  # continues with the smaller batches
    assert re.findall("2 × .* tokens", capsys.readouterr().out) == ["2 × 2 batches of 250 tokens"]
    with pytest.raises(SystemExit, match="tokens_per_device"):
        run(place, "tokens_per_update=2000", "tokens_per_device=500")


def test_a_failed_model_says_why_and_the_others_go_on(place, capsys):
    (place / "systems.yaml").write_text("a: {}\nb: {train_flags: --fail}\nc: {dropout: 0.3}\n")
    with pytest.raises(SystemExit):
        main(words(place, f"systems={place / 'systems.yaml'}", "--until", "average"))
    assert "no memory" in capsys.readouterr().err
    states = [row.split(" | ")[-2] for row in (place / "work" / "models.md").read_text().splitlines()[2:]]
    assert sum("no memory" in state for state in states) == 1 and states.count("finished") == 2


def test_the_lowest_loss_of_a_sweep_chooses_for_the_other_seeds(place):
    """The loss of the fake training is its learning rate."""
    (place / "systems.yaml").write_text("a: {}\nb: {learning_rate: [3e-3, 1e-3, 2e-3]}\n")
    flags = [f"systems={place / 'systems.yaml'}", "seeds=2"]
    main(words(place, *flags, "--run", "7", "--until", "average"))  # system b, seed 2: with all it needs
    plan = command(place, *flags).plan
    assert [run.title for run in plan.runs][-1] == "b, seed 2" and plan.chosen("b") == "1e-3"
    records = [record["settings"] for record in plan.corpus.work.records("train").values()]
    trained = sorted((one["seed"], one["learning_rate"]) for one in records)
    assert trained == [(1, 1e-3), (1, 2e-3), (1, 3e-3), (2, 1e-3)]


def test_runs_are_numbered_and_a_cluster_does_one_each(place, capsys):
    flags = [f"systems={place / 'systems.yaml'}", "seeds=2"]
    (place / "systems.yaml").write_text("a: {}\nb: {arch: transformer}\n")
    for number in ("4", "2", "1", "3"):
        main(words(place, *flags, "--run", number))
    assert len(epochs(place)) == 8
    capsys.readouterr()
    main(words(place, *flags, "--list"))
    listed = [line.split() for line in capsys.readouterr().out.splitlines()[:4]]
    assert [line[0] for line in listed] == ["1", "2", "3", "4"] and {line[-1] for line in listed} == {"finished"}


@pytest.mark.parametrize(
    "word, values",
    [
        ("layer=3", ["layer=3", "layers"]),
        ("layers=x", ["layers=x", "int"]),
        ("layers=0", ["layers=0", "1"]),
        ("precision=fp8", ["precision=fp8", "bf16"]),
        ("target_lang=en", ["target_lang=en"]),
        ("holdout_every=9", ["valid_files", "holdout_every"]),
        ("train_flags=--fp16", ["train_flags", "--fp16", "precision"]),
        ("train_flags=--arch=x", ["train_flags", "--arch", "arch=ARCH"]),
        ("train_flags='", ["train_flags"]),
        ("average_checkpoints=9", ["average_checkpoints=9", "max_epochs=2"]),
        ("adam_betas=0.9", ["adam_betas=0.9"]),
        ("source_lang=en$(date)", ["source_lang=en$(date)"]),
        ("test_files.train=x", ["test_files.train"]),
        ("test_files=missing.{lang}", ["missing.en"]),
        ("seeds=0", ["seeds=0"]),
        ("beam", ["beam"]),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(place, word, values):
    with pytest.raises(InputError) as refused:
        command(place, word).main()
    assert all(value in str(refused.value) for value in values)
    assert not (place / "work").exists() or not [*(place / "work").glob("[a-z]*")]


def test_a_folder_says_what_its_step_read_and_ran_and_no_shell_runs_a_setting(place):
    run(place, "train_flags=--user-flag '$(touch broken)' `touch broken`", "generate_flags=; touch broken")
    assert not [*place.rglob("broken")]
    (folder,) = (place / "work").glob("train-*")
    record = yaml.safe_load((folder / "settings.yaml").read_text())
    assert record["settings"]["learning_rate"] == 4e-3 and record["inputs"]["data"].startswith("binarise-")
    assert "--lr 0.004" in (folder / "script.sh").read_text() and '"epoch": 2' in (folder / "log").read_text()
    assert Path(os.readlink(place / "work" / "data-bin")) == Path(record["inputs"]["data"])
    environment = {**os.environ, "FAIRSEQ_ROPE": str(script.ROOT), "PATH": f"{script.PROGRAMS}:{os.environ['PATH']}"}
    subprocess.run(["bash", folder / "script.sh"], env=environment, check=True, timeout=LIMIT)


@pytest.mark.slow
def test_a_killed_recipe_leaves_its_training_which_holds_the_lock(place, monkeypatch):
    monkeypatch.setenv("SECONDS_AN_EPOCH", "0.3")
    process = forked(main, words(place))
    while not [*(place / "work").glob("train-*/checkpoints/checkpoint1.pt")]:
        time.sleep(0.02)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    (folder,) = (place / "work").glob("train-*")
    assert models.state(command(place).work, folder.name) == "running"
    run(place)
    assert [line.split()[1] for line in epochs(place)] == ["1", "2"]


@pytest.mark.slow
def test_jobs_run_side_by_side(place, capsys, monkeypatch):
    """Each job is a process, which gets the fake programs here."""
    (place / "python").write_text(RECIPES.format(python=sys.executable, programs=script.PROGRAMS))
    (place / "python").chmod(0o755)
    monkeypatch.setattr(jobs.sys, "executable", str(place / "python"))
    (place / "systems.yaml").write_text("a: {}\nb: {arch: transformer}\nc: {train_flags: --fail}\n")
    with pytest.raises(SystemExit):
        main(words(place, f"systems={place / 'systems.yaml'}", "--jobs", "2", "--until", "average"))
    assert "c, seed 1" in (printed := capsys.readouterr().err) and "no memory" in printed
    assert len(epochs(place)) == 4
