"""Where models lie: every setting has its own folder, and no run removes or overwrites a checkpoint.

The commands are stood in for by functions that write files of the same names, each with contents that no
other file has, so that a model which was trained again is told from the one that was there.
"""

import json
import random
import re
import shutil
import uuid
from types import SimpleNamespace

import pytest
import yaml

from recipes.pipeline import stage06_binarise, stage07_train
from recipes.pipeline.__main__ import STAGES, _keep, build_parser, experiment, parse
from recipes.pipeline.experiment import Experiment, StageError

FROM_TRAINING = STAGES[6:10]


def fake_run(x, stage, command, on_line):
    """Write what *command* would write beside the model."""
    if stage.NUMBER == 7:
        folder = x.model / "checkpoints"
        for epoch in range(1, x.settings["max_epochs"] + 1):
            if not (folder / f"checkpoint{epoch}.pt").exists():
                (folder / f"checkpoint{epoch}.pt").write_text(uuid.uuid4().hex)
        last = (folder / f"checkpoint{x.settings['max_epochs']}.pt").read_text()
        (folder / "checkpoint_last.pt").write_text(last)
    if stage.NUMBER == 8:
        (x.model / "averaged.pt").write_text(uuid.uuid4().hex)
    if stage.NUMBER == 9 and "--fail" in command:
        raise StageError("stage 9 (translate the test set) failed with status 1: no memory")
    if stage.NUMBER == 9:
        (x.model / "generate.txt").write_text("")
        (x.model / "hypotheses.de").write_text(f"beam {x.settings['beam']}\n")
    if stage.NUMBER == 10:
        (x.model / "score.json").write_text((x.model / "hypotheses.de").read_text())


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A work folder with binary data, in which commands are :func:`fake_run`."""
    monkeypatch.setattr(Experiment, "_run", fake_run)
    monkeypatch.setattr(stage07_train, "describe", dict)
    (tmp_path / "raw").mkdir()
    for lang in ("en", "de"):
        (tmp_path / "raw" / f"test.{lang}").write_text("a line\n")
    (tmp_path / "data-bin").mkdir()
    for x in (described(tmp_path), described(tmp_path, "--bpe", "sentencepiece")):
        for path in stage06_binarise.outputs(x):
            path.write_text("data A")
    return tmp_path


def described(work, *flags):
    """The experiment that these flags of the demo describe, with as few epochs as can be."""
    words = ["demo", "--work-dir", str(work), "--gpus", "0", "--set", "average_checkpoints=1"]
    parser = build_parser()
    args, train_flags = parse(parser, [*words, "--set", "max_epochs=1", *flags])
    x = experiment(parser, args, args.arch, args.seed, train_flags)
    x.record = lambda folder: _keep(x, "command", folder)
    return x


def run(work, *flags):
    """Run the stages from training to score; returns the numbers of those that were not skipped, and x."""
    x = described(work, *flags)
    return SimpleNamespace(ran=[stage.NUMBER for stage in FROM_TRAINING if x.ensure(stage)], x=x)


def of_other_data(work, contents):
    (work / "data-bin" / "train.en-de.en.bin").write_text(contents)


def checkpoints(work):
    """The contents of every checkpoint below *work*, and in which folder of it the checkpoint is."""
    return {path.read_text(): path.relative_to(work).parts[0] for path in sorted(work.rglob("*.pt"))}


def tree(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


SWEEP = [
    ["--set", "learning_rate=1e-3"],
    ["--set", "learning_rate=2e-3"],
    ["--set", "dropout=0.3"],
    ["--set", "vocab_size=500"],
    ["--set", "max_words=249"],
    ["--bpe", "sentencepiece"],
    ["--", "--clip-norm", "1"],
    ["--seed", "2"],
    ["--seed", "2", "--set", "learning_rate=1e-3"],
    ["--arch", "transformer"],
    ["--name", "baseline"],
    ["--name", "other", "--set", "learning_rate=3e-3"],
]


def test_every_setting_has_a_folder_and_going_back_finds_the_first_model(work):
    run(work)
    first = (work / "transformer_rope.seed1" / "averaged.pt").read_text()
    folders = {run(work, *flags).x.model.name for flags in SWEEP}
    assert len(folders) == len(SWEEP) and "transformer_rope.seed1" not in folders
    assert {"transformer.seed1", "transformer_rope.seed2", "transformer_rope.seed1.baseline"} <= folders
    kept = checkpoints(work)
    for flags in ([], *SWEEP):
        assert run(work, *flags).ran == []
    assert checkpoints(work) == kept
    assert (work / "transformer_rope.seed1" / "averaged.pt").read_text() == first


def test_a_folders_name_stands_for_the_values_and_not_for_how_they_were_written(work):
    names = [
        described(work, *flags).model.name
        for flags in (
            ["--set", "learning_rate=1e-3", "--set", "dropout=0"],
            ["--set", "dropout=0.0", "--set", "learning_rate=0.001"],
            ["--set", "learning_rate=1e-3", "--set", "dropout=0", "--set", "max_epochs=9", "--set", "beam=2"],
        )
    ]
    assert len(set(names)) == 1 and re.fullmatch(r"transformer_rope\.seed1\.[0-9a-f]{8}", names[0])
    assert described(work, "--set", "learning_rate=5e-3").model.name == "transformer_rope.seed1"


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
    of_other_data(work, "data A")
    assert run(work).ran == []
    assert tree(work / "transformer_rope.seed1") == first
    of_other_data(work, "data B")
    assert run(work).ran == []
    assert (work / "transformer_rope.seed1" / "averaged.pt").read_text() == second


def test_a_name_that_was_given_to_another_setting_does_not_cost_its_model(work):
    run(work, "--name", "mine")
    kept = checkpoints(work)
    run(work, "--name", "mine", "--set", "learning_rate=1e-3")
    assert kept.keys() < checkpoints(work).keys()
    assert run(work, "--name", "mine").ran == []
    assert {text: checkpoints(work)[text] for text in kept} == kept


def test_a_dry_run_shows_what_would_be_moved_and_moves_nothing(work, capsys):
    run(work)
    of_other_data(work, "data B")
    before = tree(work)
    capsys.readouterr()
    x = described(work, "--dry-run")
    for stage in FROM_TRAINING:
        x.ensure(stage)
    said = capsys.readouterr().out
    (aside,) = re.findall(r"transformer_rope.seed1 is of other .*: would be moved to (\S+)", said)
    assert tree(work) == before
    run(work)
    assert (work / aside).exists()
    capsys.readouterr()
    x = described(work, "--dry-run", "--set", "beam=1")
    for stage in FROM_TRAINING:
        x.ensure(stage)
    would = re.findall(r"/(\S+) is of another run: would be moved to (\S+)", capsys.readouterr().out)
    assert [name.rpartition("/")[2] for name, _ in would] == ["generate.txt", "hypotheses.de", "score.json"]
    run(work, "--set", "beam=1")
    assert all((work / new).exists() for _, new in would)


def test_no_kept_script_of_a_model_moves_or_removes_anything_but_files_it_writes(work):
    x = run(work).x
    of_other_data(work, "data B")
    run(work)
    for script in (x.model / "commands").glob("*.sh"):
        words = script.read_text().split()
        assert not {"rm", "cp", "-delete"} & {*words}
        # What is moved was written by the command before it, under a temporary name.
        assert all(words[n + 1].endswith(".tmp") for n, word in enumerate(words) if word == "mv")


def test_what_earlier_versions_left_is_found_and_nothing_of_it_is_lost(work):
    """There ``checkpoints`` were those of the last settings, and ``checkpoints.old`` those before."""
    rates = [["--set", f"learning_rate={rate}"] for rate in ("1e-3", "2e-3")]
    plain = work / "transformer_rope.seed1"
    of_1, of_2 = (run(work, *rate).x.model for rate in rates)
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
    for _ in range(60):
        of_other_data(work, draw.choice(["data A", "data B", "data C"]))
        flags = draw.choice([[], *SWEEP[:2], SWEEP[-1], ["--name", "other"]])
        more = ["--set", f"max_epochs={draw.choice([1, 2, 3])}", "--set", f"beam={draw.choice([1, 2])}"]
        try:
            run(work, *more, *flags)
        except StageError as error:
            assert "beyond max_epochs=" in str(error)
        found = checkpoints(work)
        assert ever.keys() <= found.keys()
        ever = found
    assert len(ever) > 40


# -- results -----------------------------------------------------------------------------------------


def beside(folder):
    """The beam that each result in *folder* is of, and the one that its settings.yaml names."""
    names = [name for name in ("hypotheses.de", "score.json") if (folder / name).exists()]
    found = {name: int((folder / name).read_text().split()[1]) for name in names}
    return {**found, "settings": yaml.safe_load((folder / "settings.yaml").read_text())["beam"]}


def test_results_of_other_settings_are_not_left_beside_new_settings(work):
    model = run(work).x.model
    averaged = (model / "averaged.pt").read_text()
    fail = ["--set", "fairseq_generate_flags=--fail"]
    with pytest.raises(StageError, match="no memory"):
        run(work, "--set", "beam=1", *fail)
    assert beside(model) == {"settings": 1}
    assert beside(model / "earlier" / "1") == {"hypotheses.de": 4, "score.json": 4, "settings": 4}
    assert (model / "averaged.pt").read_text() == averaged, "it is not of a beam"
    assert run(work, "--set", "beam=1").ran == [9, 10]
    assert beside(model) == {"hypotheses.de": 1, "score.json": 1, "settings": 1}
    run(work)
    assert beside(model) == {"hypotheses.de": 4, "score.json": 4, "settings": 4}
    assert beside(model / "earlier" / "2") == {"hypotheses.de": 1, "score.json": 1, "settings": 1}


def test_a_longer_training_keeps_the_average_of_the_shorter_one(work):
    model = run(work).x.model
    short = (model / "averaged.pt").read_text()
    x = described(work, "--set", "max_epochs=2")
    x.ensure(stage07_train)
    assert not (model / "averaged.pt").exists(), "until the longer training has one"
    assert (model / "earlier" / "1" / "averaged.pt").read_text() == short
    assert yaml.safe_load((model / "earlier" / "1" / "settings.yaml").read_text())["max_epochs"] == 1
    with pytest.raises(StageError, match="beyond max_epochs=1: set max_epochs=2, or train another model"):
        run(work)
    assert yaml.safe_load((model / "settings.yaml").read_text())["max_epochs"] == 2


def test_what_is_made_again_with_the_same_settings_is_not_kept_twice(work):
    model = run(work).x.model
    (model / "hypotheses.de").unlink()
    assert run(work).ran == [9]
    assert not (model / "earlier").exists()


def test_a_training_that_ended_before_its_first_checkpoint_leaves_no_curve_to_another(work):
    x = described(work)
    (x.model / "checkpoints").mkdir(parents=True)
    (x.model / "checkpoints" / "begun.json").write_text(json.dumps({"width": 1}))
    stage07_train.history(x).write_text('{"valid_loss": "1"}\n')
    run(work)
    assert "valid_loss" not in stage07_train.history(x).read_text()
