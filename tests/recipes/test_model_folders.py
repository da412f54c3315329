"""Where models lie: every setting has its own folder, and no run removes or overwrites a checkpoint.

The commands are stood in for by functions that write files of the same names, each with contents that no
other file has. So a test can tell a model that was trained again from the earlier one.
"""

import json
import os
import random
import re
import shutil
import uuid
from types import SimpleNamespace

import pytest
import yaml

from recipes.pipeline import commands, session, stage07_train, stamps
from recipes.pipeline.experiment import StageError
from recipes.pipeline.runner import Runner
from recipes.pipeline.session import announce, write_down
from recipes.pipeline.stages import STAGES, TRAIN
from tests.recipes.small_demo import describe, setting_flags

FROM_TRAINING = STAGES[6:10]


def fake_run(experiment, stage, command):
    """Write what *command* would write beside the model."""
    if stage.number == 7:
        folder = experiment.checkpoints
        for epoch in range(1, experiment.settings.max_epochs + 1):
            if not (folder / f"checkpoint{epoch}.pt").exists():
                (folder / f"checkpoint{epoch}.pt").write_text(uuid.uuid4().hex)
        last = (folder / f"checkpoint{experiment.settings.max_epochs}.pt").read_text()
        (folder / "checkpoint_last.pt").write_text(last)
    if stage.number == 8:
        (experiment.model / "averaged.pt").write_text(uuid.uuid4().hex)
    if stage.number == 9 and "--fail" in command:
        raise StageError("stage 9 (translate the test set) failed with status 1: no memory")
    if stage.number == 9:
        (experiment.model / "generate.txt").write_text("")
        (experiment.model / "hypotheses.de").write_text(f"beam {experiment.settings.beam}\n")
    if stage.number == 10:
        (experiment.model / "score.json").write_text((experiment.model / "hypotheses.de").read_text())


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A work folder with binary data, in which commands are :func:`fake_run`."""
    monkeypatch.setattr(commands, "run_logged", lambda stage, command, *_: fake_run(RUNNING[-1], stage, command))
    monkeypatch.setattr(stage07_train, "describe", dict)
    monkeypatch.setattr(session, "describe", dict)
    (tmp_path / "raw").mkdir()
    for lang in ("en", "de"):
        (tmp_path / "raw" / f"test.{lang}").write_text("a line\n")
    (tmp_path / "data-bin").mkdir()
    for experiment in (described(tmp_path), described(tmp_path, "--bpe sentencepiece")):
        for path in experiment.binary_data:
            path.write_text("data A")
    return tmp_path


RUNNING = []  # the experiments of this test, the one that runs last


def described(work, *flags):
    """The experiment that these flags of the demo describe, with as few epochs as can be; KEY=VALUE is a setting."""
    words = [word for flag in flags for word in (["--set", flag] if "=" in flag else flag.split())]
    few = setting_flags("average_checkpoints=1", "max_epochs=1")
    return describe("demo", "--work-dir", work, "--gpus", "0", *few, *words)


def ensure(experiment, *stages):
    """Run *stages* of *experiment*; returns the numbers of those that were not skipped."""
    RUNNING.append(experiment)
    runner = Runner(experiment, STAGES, record=lambda folder: write_down(experiment, "command", folder))
    return [stage.number for stage in stages if runner.ensure(stage)]


def run(work, *flags):
    """Run the stages from training to score; returns the numbers of those that ran, and the experiment."""
    experiment = described(work, *flags)
    return SimpleNamespace(ran=ensure(experiment, *FROM_TRAINING), experiment=experiment)


def of_other_data(work, contents):
    (work / "data-bin" / "train.en-de.en.bin").write_text(contents)


def checkpoints(work):
    """The contents of every checkpoint below *work*, and in which folder of it the checkpoint is."""
    return {path.read_text(): path.relative_to(work).parts[0] for path in sorted(work.rglob("*.pt"))}


def tree(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


SWEEP = [
    *(["learning_rate=1e-3"], ["learning_rate=2e-3"], ["dropout=0.3"], ["vocab_size=500"], ["max_words=249"]),
    *(["--bpe sentencepiece"], ["-- --clip-norm 1"], ["--seed 2"], ["--seed 2", "learning_rate=1e-3"]),
    *(["--arch transformer"], ["--name baseline"], ["--name other", "learning_rate=3e-3"]),
]


def test_every_setting_has_a_folder_and_going_back_finds_the_first_model(work):
    run(work)
    first = (work / "transformer_rope.seed1" / "averaged.pt").read_text()
    folders = {run(work, *flags).experiment.model.name for flags in SWEEP}
    assert len(folders) == len(SWEEP) and "transformer_rope.seed1" not in folders
    assert {"transformer.seed1", "transformer_rope.seed2", "transformer_rope.seed1.baseline"} <= folders
    kept = checkpoints(work)
    for flags in ([], *SWEEP):
        assert run(work, *flags).ran == []
    assert checkpoints(work) == kept
    assert (work / "transformer_rope.seed1" / "averaged.pt").read_text() == first


def test_a_folders_name_stands_for_the_values_and_not_for_how_they_were_written(work):
    written = (
        ["learning_rate=1e-3", "dropout=0"],
        ["dropout=0.0", "learning_rate=0.001"],
        ["learning_rate=1e-3", "dropout=0", "max_epochs=9", "beam=2"],
    )
    (name,) = {described(work, *settings).model.name for settings in written}
    assert re.fullmatch(r"transformer_rope\.seed1\.[0-9a-f]{8}", name)
    assert described(work, "learning_rate=5e-3").model.name == "transformer_rope.seed1"


def test_other_data_leave_the_model_under_another_name_and_take_it_back(work, capsys):
    run(work)
    first = tree(work / "transformer_rope.seed1")
    of_other_data(work, "data B")
    assert run(work).ran == [7, 8, 9, 10]
    second = (work / "transformer_rope.seed1" / "averaged.pt").read_text()
    (aside,) = work.glob("transformer_rope.seed1.old-*")
    assert {path.relative_to(aside): contents for path, contents in tree(aside).items()} == {
        path.relative_to(work / "transformer_rope.seed1"): contents for path, contents in first.items()
    }
    assert f"is of other settings or data: moved to {aside}\n" in capsys.readouterr().out
    scripts = [script.read_text().split() for script in work.glob("transformer*/commands/*.sh")]
    assert len(scripts) == 2 * 4
    for words in scripts:  # none moves or removes anything but files that it writes
        assert not {"rm", "cp", "-delete"} & {*words}
        # What is moved was written by the command before it, under a temporary name.
        assert all(words[n + 1].endswith(".tmp") for n, word in enumerate(words) if word == "mv")
    of_other_data(work, "data A")
    assert run(work).ran == []
    assert tree(work / "transformer_rope.seed1") == first
    of_other_data(work, "data B")
    assert run(work).ran == []
    assert (work / "transformer_rope.seed1" / "averaged.pt").read_text() == second


def test_a_name_that_was_given_to_another_setting_does_not_cost_its_model(work):
    run(work, "--name mine")
    kept = checkpoints(work)
    run(work, "--name mine", "learning_rate=1e-3")
    assert kept.keys() < checkpoints(work).keys()
    assert run(work, "--name mine").ran == []
    assert {text: checkpoints(work)[text] for text in kept} == kept


def test_a_dry_run_shows_what_would_be_moved_and_moves_nothing(work, capsys):
    run(work)
    of_other_data(work, "data B")
    before = tree(work)
    capsys.readouterr()
    run(work, "--dry-run")
    said = capsys.readouterr().out
    (aside,) = re.findall(r"transformer_rope.seed1 is of other .*: would be moved to (\S+)", said)
    assert tree(work) == before
    run(work)
    assert (work / aside).exists()
    capsys.readouterr()
    run(work, "--dry-run", "beam=1")
    would = re.findall(r"/(\S+) is of another run: would be moved to (\S+)", capsys.readouterr().out)
    assert [name.rpartition("/")[2] for name, _ in would] == ["generate.txt", "hypotheses.de", "score.json"]
    run(work, "beam=1")
    assert all((work / new).exists() for _, new in would)


def test_what_earlier_versions_left_is_found_and_nothing_of_it_is_lost(work):
    """There ``checkpoints`` were those of the last settings, and ``checkpoints.old`` those before."""
    rates = [[f"learning_rate={rate}"] for rate in ("1e-3", "2e-3")]
    plain = work / "transformer_rope.seed1"
    of_1, of_2 = (run(work, *rate).experiment.model for rate in rates)
    of_2.rename(plain)
    (of_1 / "checkpoints").rename(plain / "checkpoints.old")
    shutil.rmtree(of_1)
    before = checkpoints(work)
    assert run(work).ran == [7, 8, 9, 10], "a model of the recipe's own settings was not there"
    assert before.keys() < checkpoints(work).keys() and not list(work.rglob("checkpoints.old"))
    assert run(work, *rates[1]).ran == []
    run(work, *rates[0])
    assert (of_1 / "checkpoints" / "checkpoint1.pt").read_text() in before
    assert before.keys() < checkpoints(work).keys()


def test_no_sequence_of_runs_loses_a_checkpoint(work):
    draw = random.Random(5)
    ever = {}
    for _ in range(40):
        of_other_data(work, draw.choice(["data A", "data B", "data C"]))
        flags = draw.choice([[], *SWEEP[:2], SWEEP[-1], ["--name other"]])
        more = [f"max_epochs={draw.choice([1, 2, 3])}", f"beam={draw.choice([1, 2])}"]
        try:
            run(work, *more, *flags)
        except StageError as error:
            assert "beyond max_epochs=" in str(error)
        found = checkpoints(work)
        assert ever.keys() <= found.keys()
        ever = found
    assert len(ever) > 25


# -- results -----------------------------------------------------------------------------------------


def beside(folder):
    """The beam that each result in *folder* is of, and the one that its settings.yaml names."""
    names = [name for name in ("hypotheses.de", "score.json") if (folder / name).exists()]
    found = {name: int((folder / name).read_text().split()[1]) for name in names}
    return {**found, "settings": yaml.safe_load((folder / "settings.yaml").read_text())["beam"]}


def test_results_of_other_settings_are_not_left_beside_new_settings(work, capsys):
    model = run(work).experiment.model
    averaged = (model / "averaged.pt").read_text()
    (model / "hypotheses.de").unlink()
    assert run(work).ran == [9]
    assert not (model / "earlier").exists(), "what is made again with the same settings is not kept twice"
    fail = ["fairseq_generate_flags=--fail"]
    capsys.readouterr()
    with pytest.raises(StageError, match="no memory"):
        run(work, "beam=1", *fail)
    printed = capsys.readouterr().out
    assert "stage 8: average the last checkpoints: done before, skipped" in printed
    assert "stage 9: translate the test set (again, since beam, fairseq_generate_flags changed)" in printed
    assert beside(model) == {"settings": 1}
    assert beside(model / "earlier" / "1") == {"hypotheses.de": 4, "score.json": 4, "settings": 4}
    assert (model / "averaged.pt").read_text() == averaged, "it is not of a beam"
    assert run(work, "beam=1").ran == [9, 10]
    assert beside(model) == {"hypotheses.de": 1, "score.json": 1, "settings": 1}
    run(work)
    assert beside(model) == {"hypotheses.de": 4, "score.json": 4, "settings": 4}
    assert beside(model / "earlier" / "2") == {"hypotheses.de": 1, "score.json": 1, "settings": 1}


def test_a_longer_training_keeps_the_average_of_the_shorter_one(work):
    model = run(work).experiment.model
    short = (model / "averaged.pt").read_text()
    ensure(described(work, "max_epochs=2"), TRAIN)
    assert not (model / "averaged.pt").exists(), "until the longer training has one"
    assert (model / "earlier" / "1" / "averaged.pt").read_text() == short
    assert yaml.safe_load((model / "earlier" / "1" / "settings.yaml").read_text())["max_epochs"] == 1
    with pytest.raises(StageError, match="beyond max_epochs=1: set max_epochs=2, or train another model"):
        run(work)
    assert yaml.safe_load((model / "settings.yaml").read_text())["max_epochs"] == 2


def test_fewer_checkpoints_to_average_do_not_train_anew(work, capsys):
    run(work, "max_epochs=3", "average_checkpoints=3")
    kept = {path: text for path, text in tree(work).items() if path.parent.name == "checkpoints"}
    assert run(work, "max_epochs=3", "average_checkpoints=2").ran == [7, 8, 9, 10]
    assert "stage 7: train (again, since average_checkpoints changed)" in capsys.readouterr().out
    now = tree(work)
    assert all(now[path] == text for path, text in kept.items() if path.suffix == ".pt")


def test_a_checkpoint_that_is_gone_is_told_with_what_to_do(work, capsys, monkeypatch):
    flags = ["max_epochs=3", "average_checkpoints=3"]
    experiment = run(work, *flags).experiment
    (experiment.checkpoints / "checkpoint2.pt").unlink()
    monkeypatch.setattr(commands, "run_logged", lambda *_: None)  # as fairseq-train, which has no epoch left
    with pytest.raises(StageError) as refused:
        run(work, *flags)
    gone = "transformer_rope.seed1/checkpoints/checkpoint2.pt changed"
    assert f"stage 7: train (again, since {gone}" in capsys.readouterr().out
    assert "has [1, 3] of the epochs to average" in str(refused.value)
    assert "train longer, or anew with --name NAME" in str(refused.value)


def test_large_data_are_known_by_their_contents(work, monkeypatch):
    """As the large files of WMT14: written anew with the same contents, they have another date."""
    monkeypatch.setattr(stamps, "LARGE", 3)
    hashed = []
    monkeypatch.setattr(stamps, "_sha256", lambda file: hashed.append(file.name) or file.read().decode())
    run(work)
    trained = checkpoints(work)
    files = [*described(work).binary_data, *(work / "raw").iterdir()]
    assert {str(path) for path in files} <= {*hashed}
    of_other_data(work, "data B")
    run(work)
    of_other_data(work, "data A")
    os.utime(work / "data-bin" / "train.en-de.en.bin", (1, 1))
    assert run(work).ran == []
    assert trained.items() <= checkpoints(work).items()
    hashed.clear()
    assert run(work).ran == [] and not hashed, "the hash of a file is computed once"


def test_digests_of_large_files_of_earlier_versions_are_understood(work, monkeypatch):
    """They had the size and the date in place of the hash."""
    experiment = run(work).experiment
    path = work / "data-bin" / "train.en-de.en.bin"
    status = path.stat()
    size_and_date = f"{status.st_size} bytes of {status.st_mtime_ns}"
    written_by = [experiment.checkpoints / "begun.json", *(experiment.model / "stamps").glob("*.json")]
    for file in written_by:
        of = json.loads(file.read_text())
        for names in (of, of.get("of", {})):
            if "data-bin/train.en-de.en.bin" in names:
                names["data-bin/train.en-de.en.bin"] = size_and_date
        file.write_text(json.dumps(of))
    assert run(work).ran == []


def test_the_reason_of_a_folders_name_is_not_told_of_a_name_that_was_given(work, capsys):
    announce(described(work, "learning_rate=1e-3"))
    said = r"model folder: transformer_rope\.seed1\.\w+, since learning_rate differs from the recipe's own"
    assert re.search(said, capsys.readouterr().out)
    announce(described(work, "learning_rate=1e-3", "--name mine"))
    assert "model folder" not in capsys.readouterr().out


def test_a_training_that_ended_before_its_first_checkpoint_leaves_no_curve_to_another(work):
    experiment = described(work)
    experiment.checkpoints.mkdir(parents=True)
    (experiment.checkpoints / "begun.json").write_text(json.dumps({"width": 1}))
    experiment.history.write_text('{"valid_loss": "1"}\n')
    run(work)
    assert "valid_loss" not in experiment.history.read_text()
