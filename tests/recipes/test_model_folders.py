"""The models' folders: every setting has its own folder, and no run removes or overwrites a checkpoint.

A function replaces the commands. It writes files of the same names with unique contents, so that a test can
distinguish a model that was trained again from the earlier one.
"""

import dataclasses
import json
import os
import random
import re
import uuid
from types import SimpleNamespace

import pytest
import yaml

from recipes.pipeline import __main__ as pipeline
from recipes.pipeline import stage07_train
from recipes.pipeline.__main__ import main
from recipes.pipeline.checkpoints import check_checkpoints
from recipes.pipeline.experiment import SETS, TEST
from recipes.pipeline.fairseq_train import check_devices
from recipes.pipeline.session import announce
from recipes.pipeline.stages import AVERAGE, SCORE, STAGES, TO_SCORE, TRAIN, TRANSLATE, needed
from recipes.run import machine, stamps
from recipes.run.run import StageError
from recipes.run.runner import Runner
from recipes.run.stamps import Stamps
from tests.recipes.small_demo import AVX2, AVX512_BF16, describe, setting_flags

FROM_TRAINING = (TRAIN, AVERAGE, TRANSLATE, SCORE)
MODEL_STAGES = [stage for stage in STAGES if stage.per_model]


def fake_run(experiment, stage, command):
    """Write the files that *command* would write into the model's folder."""
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
    """A work folder with binary data. Its commands are :func:`fake_run`."""
    fake = lambda stage, command, *_: fake_run(RUNNING[-1], stage, command)  # noqa: E731
    monkeypatch.setattr("recipes.run.shell.run_logged", fake)
    monkeypatch.setattr(stage07_train, "describe", dict)
    monkeypatch.setattr("recipes.run.runner.describe", dict)
    (tmp_path / "raw").mkdir()
    for lang in ("en", "de"):
        (tmp_path / "raw" / f"test.{lang}").write_text("a line\n")
    (tmp_path / "data-bin").mkdir()
    for experiment in (described(tmp_path), described(tmp_path, "--bpe sentencepiece")):
        for path in (*experiment.binary_data, *experiment.binary_sets(SETS)):
            path.write_text("data A")
    return tmp_path


RUNNING = []  # the experiments of this test; the last one is running


def described(work, *flags):
    """The experiment that these flags of the demo describe, with one epoch. KEY=VALUE is a setting."""
    words = [word for flag in flags for word in (["--set", flag] if "=" in flag else flag.split())]
    few = setting_flags("average_checkpoints=1", "max_epochs=1")
    return describe("demo", "--work-dir", work, "--gpus", "0", *few, *words)


def ensure(experiment, *stages):
    """Run *stages* of *experiment*. Returns the numbers of the stages that were not skipped."""
    RUNNING.append(experiment)
    runner = Runner(experiment, STAGES, program="command")
    return [stage.number for stage in stages if runner.ensure(stage)]


def run(work, *flags):
    """Run the stages from training to score. Returns the numbers of the stages that ran, and the experiment."""
    experiment = described(work, *flags)
    return SimpleNamespace(ran=ensure(experiment, *needed(FROM_TRAINING, experiment)), experiment=experiment)


def change_data(work, contents):
    (work / "data-bin" / "train.en-de.en.bin").write_text(contents)


def checkpoints(work):
    """The folder of every checkpoint in *work*, by the checkpoint's contents."""
    return {path.read_text(): path.relative_to(work).parts[0] for path in sorted(work.rglob("*.pt"))}


def tree(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


SWEEP = [
    *(["learning_rate=1e-3"], ["learning_rate=2e-3"], ["dropout=0.3"], ["vocab_size=500"], ["max_words=249"]),
    *(["--bpe sentencepiece"], ["-- --clip-norm 1"], ["--seed 2"], ["--seed 2", "learning_rate=1e-3"]),
    *(["--arch transformer"], ["--name baseline"], ["--name other", "learning_rate=3e-3"]),
]


def test_every_setting_has_its_own_folder_and_an_earlier_setting_is_not_trained_again(work):
    run(work)
    first = (work / "transformer_rope.seed1" / "averaged.pt").read_text()
    folders = {run(work, *flags).experiment.model.name for flags in SWEEP}
    assert len(folders) == len(SWEEP) and "transformer_rope.seed1" not in folders
    assert {"transformer.seed1", "transformer_rope.seed2", "transformer_rope.seed1.baseline"} <= folders
    trained = checkpoints(work)
    for flags in ([], *SWEEP):
        assert run(work, *flags).ran == []
    assert checkpoints(work) == trained
    assert (work / "transformer_rope.seed1" / "averaged.pt").read_text() == first


def test_the_folder_name_depends_on_values_and_not_on_their_notation_or_order(work):
    equal = (
        ["learning_rate=1e-3", "dropout=0"],
        ["dropout=0.0", "learning_rate=0.001"],
        ["learning_rate=1e-3", "dropout=0", "max_epochs=9", "beam=2"],
    )
    (name,) = {described(work, *settings).model.name for settings in equal}
    assert re.fullmatch(r"transformer_rope\.seed1\.[0-9a-f]{8}", name)
    assert described(work, "learning_rate=4e-3").model.name == "transformer_rope.seed1"


def test_other_data_rename_the_model_folder_and_the_first_data_restore_it(work, capsys):
    run(work)
    first = tree(work / "transformer_rope.seed1")
    change_data(work, "data B")
    assert run(work).ran == [7, 8, 9, 10]
    second = (work / "transformer_rope.seed1" / "averaged.pt").read_text()
    (aside,) = work.glob("transformer_rope.seed1.old-*")
    assert {path.relative_to(aside): contents for path, contents in tree(aside).items()} == {
        path.relative_to(work / "transformer_rope.seed1"): contents for path, contents in first.items()
    }
    assert f"has another architecture, other settings or data: moved to {aside}\n" in capsys.readouterr().out
    scripts = [script.read_text().split() for script in work.glob("transformer*/commands/*.sh")]
    assert len(scripts) == 2 * 4
    for words in scripts:  # they move only the temporary files that they write, and remove nothing
        assert not {"rm", "cp", "-delete"} & {*words}
        assert all(words[n + 1].endswith(".tmp") for n, word in enumerate(words) if word == "mv")
    change_data(work, "data A")
    assert run(work).ran == []
    assert tree(work / "transformer_rope.seed1") == first
    change_data(work, "data B")
    assert run(work).ran == []
    assert (work / "transformer_rope.seed1" / "averaged.pt").read_text() == second


def test_another_architecture_under_the_name_of_a_system_is_trained(work):
    def ran(arch):
        of_system = dataclasses.replace(described(work), system="mine", arch=arch)
        return ensure(of_system, *needed(FROM_TRAINING, of_system))

    assert ran("transformer_rope") == [7, 8, 9, 10]
    trained = checkpoints(work)
    for stage in FROM_TRAINING:
        is_done = [
            Stamps(dataclasses.replace(described(work), system="mine", arch=arch)).is_done(stage)
            for arch in ("transformer_rope", "transformer_alibi")
        ]
        assert is_done == [True, stage is not TRAIN]
    assert ran("transformer_alibi") == [7, 8, 9, 10]
    assert trained.keys() < checkpoints(work).keys()
    assert ran("transformer_rope") == [] and trained.items() <= checkpoints(work).items()
    begun = work / "mine.seed1" / "checkpoints" / "begun.json"
    identity = json.loads(begun.read_text())
    assert identity.pop("--arch") == "transformer_rope"
    begun.write_text(json.dumps(identity))  # as earlier versions wrote it
    assert ran("transformer_rope") == [] and ran("transformer_alibi") == []


def test_another_architecture_after_a_training_without_checkpoints_is_done_when_it_is_trained(work):
    def of_system(arch):
        return dataclasses.replace(described(work), system="mine", arch=arch)

    first, second = of_system("transformer_rope"), of_system("transformer_alibi")
    ensure(first, *needed(FROM_TRAINING, first))
    for path in first.checkpoints.glob("*.pt"):
        path.unlink()
    assert ensure(second, *needed(FROM_TRAINING, second)) == [7, 8, 9, 10]
    assert Stamps(second).is_done(TRAIN) and ensure(second, *needed(FROM_TRAINING, second)) == []


def test_an_input_that_is_another_model_of_the_same_name_has_one_name_in_stamps(work):
    """As a checkpoint of the recipe's own settings, from which a training with other settings starts."""
    (work / "transformer_rope.seed1").mkdir()
    start = work / "transformer_rope.seed1" / "averaged.pt"
    start.write_text("weights")
    run_stamps = Stamps(described(work, "learning_rate=1e-3"))
    stage = SimpleNamespace(depends_on=lambda run: {"lr": 1}, inputs=lambda run: [start])
    of = run_stamps.of(stage)
    (work / "stamp.json").write_text(json.dumps({"of": of, "made": {}}))
    assert run_stamps.read(work / "stamp.json")["of"] == of == run_stamps.of(stage) and len(of) == 2


def test_reusing_a_name_for_another_setting_keeps_the_first_model(work):
    run(work, "--name mine")
    trained = checkpoints(work)
    run(work, "--name mine", "learning_rate=1e-3")
    assert trained.keys() < checkpoints(work).keys()
    assert run(work, "--name mine").ran == []
    assert trained.items() <= checkpoints(work).items()


def test_a_dry_run_shows_what_would_be_moved_and_moves_nothing(work, capsys):
    run(work)
    change_data(work, "data B")
    before = tree(work)
    capsys.readouterr()
    run(work, "--dry-run")
    printed = capsys.readouterr().out
    (aside,) = re.findall(
        r"transformer_rope.seed1 has another architecture, other .*: would be moved to (\S+)", printed
    )
    assert tree(work) == before
    run(work)
    assert (work / aside).exists()
    capsys.readouterr()
    run(work, "--dry-run", "beam=1")
    moves = re.findall(r"/(\S+) is from another run: would be moved to (\S+)", capsys.readouterr().out)
    assert [name.rpartition("/")[2] for name, _ in moves] == ["generate.txt", "hypotheses.de", "score.json"]
    run(work, "beam=1")
    assert all((work / new).exists() for _, new in moves)


def test_no_sequence_of_runs_loses_a_checkpoint(work):
    draw = random.Random(5)
    trained = {}
    for _ in range(40):
        change_data(work, draw.choice(["data A", "data B", "data C"]))
        flags = draw.choice([[], *SWEEP[:2], SWEEP[-1], ["--name other"]])
        more = [f"max_epochs={draw.choice([1, 2, 3])}", f"beam={draw.choice([1, 2])}"]
        try:
            run(work, *more, *flags)
        except StageError as error:
            assert "beyond max_epochs=" in str(error)
        earlier, trained = trained, checkpoints(work)
        assert earlier.keys() <= trained.keys()
    assert len(trained) > 25


def test_another_test_set_trains_no_model_and_keeps_the_results_of_the_first(work):
    model = run(work).experiment.model
    before = checkpoints(work)
    for path in described(work).binary_sets(TEST):
        path.write_text("another test set")
    assert run(work).ran == [9, 10]
    assert checkpoints(work) == before
    assert (model / "earlier" / "1" / "score.json").exists()
    assert run(work, "test_files=").ran == []
    assert run(work, "--seed 2", "test_files=").ran == [7, 8]


# Names in the stamps of finished stages. With other names, a stage would run again in every work folder; stage 7 would
# train again.
STAMPED = """\
train_files valid_files source_lang target_lang
test_files source_lang target_lang
train_files valid_files source_lang target_lang
test_files source_lang target_lang
normalise_punctuation source_lang target_lang --bpe
normalise_punctuation source_lang target_lang --bpe
max_words max_length_ratio holdout_every valid_files source_lang target_lang --bpe
vocab_size --bpe
--bpe
source_lang target_lang segment_tokens segment_share
source_lang target_lang segment_tokens
layers width ffn_width heads dropout adam_betas adam_eps warmup_init_lr learning_rate label_smoothing warmup_updates \
tokens_per_update fairseq_train_flags tokens_per_device precision max_epochs max_updates save_every_updates \
average_checkpoints
average_checkpoints save_every_updates
beam length_penalty max_len_b source_lang target_lang fairseq_generate_flags
source_lang target_lang --tokenize
"""


def test_stamps_have_the_names_that_finished_work_folders_have(work):
    of_stages = [Stamps(described(work)).of(stage) for stage in needed(TO_SCORE, described(work))]
    names = [[name for name in of if "/" not in name and "." not in name] for of in of_stages]
    assert [sorted(one) for one in names] == [sorted(line.split()) for line in STAMPED.splitlines()]
    documents = described(work, "segment_tokens=9")
    assert [stage.number for stage in STAGES if Stamps(documents).of(stage).get("documents")] == [2, 2, 4]


# -- precision ---------------------------------------------------------------------------------------


def trained_with(experiment):
    """The precision and the device in run.yaml, and whether the command of stage 7 has --bf16."""
    noted = yaml.safe_load((experiment.model / "run.yaml").read_text())["training"]
    command = (experiment.model / "commands" / "stage07_train.sh").read_text()
    return noted["precision"], noted["device"], "--bf16 " in command


def test_a_training_keeps_its_precision_on_another_cpu_and_is_not_trained_again(work, monkeypatch, capsys):
    first = run(work).experiment
    assert trained_with(first) == ("fp32", "the CPU", False)
    monkeypatch.setattr(machine, "cpu_info", lambda: AVX512_BF16)
    assert run(work).ran == []
    second = run(work, "--seed 2").experiment
    assert trained_with(second) == ("bf16", "the CPU", True)
    assert "auto keeps" not in capsys.readouterr().out
    assert run(work, "max_epochs=2").ran == [7, 8, 9, 10]
    assert trained_with(first) == ("fp32", "the CPU", False), "in the run.yaml of stage 10"
    assert "  precision: auto keeps fp32, in which this training has begun\n" in capsys.readouterr().out
    monkeypatch.setattr(machine, "cpu_info", lambda: AVX2)
    assert run(work, "--seed 2").ran == []
    run(work, "--seed 2", "max_epochs=2")
    assert trained_with(second) == ("bf16", "the CPU", True)


def test_a_run_warns_once_of_emulated_bf16(work, monkeypatch, capsys):
    monkeypatch.setattr(Runner, "refuse_stale_inputs", lambda *_: None)
    monkeypatch.setattr(pipeline, "check_flags", lambda *_, **__: None)

    def warnings(*flags):
        RUNNING.append(described(work, *flags))
        given = [word for flag in flags for word in (["--set", flag] if "=" in flag else flag.split())]
        few = setting_flags("average_checkpoints=1", "max_epochs=1")
        main(["demo", "--work-dir", str(work), "--gpus", "0", "--stage", "7", "--stop-stage", "9", *few, *given])
        return [line for line in capsys.readouterr().err.splitlines() if "warning" in line]

    (line,) = warnings("precision=bf16")
    assert line.startswith("recipes/demo: warning: --set precision=bf16: this CPU has no instructions for bf16 ")
    assert not warnings("precision=bf16"), "it is trained"
    assert not warnings("--seed 2")
    monkeypatch.setattr(machine, "cpu_info", lambda: AVX512_BF16)
    assert not warnings("precision=bf16", "--seed 3")


def test_a_finished_model_is_not_taken_for_one_of_another_precision(work):
    run(work)
    before = tree(work)
    with pytest.raises(StageError) as refused:
        run(work, "precision=bf16")
    folder = work / "transformer_rope.seed1" / "checkpoints"
    assert str(refused.value) == (
        f"stage 7 (train): --set precision=bf16: the training in {folder} has the precision fp32, and cannot resume in "
        "bf16: set precision=fp32, or train another model with --name NAME or another --work-dir"
    )
    with pytest.raises(StageError, match="cannot resume in bf16"):  # not "run with --stage 7"
        Runner(described(work, "precision=bf16"), MODEL_STAGES).refuse_stale_inputs(STAGES[-1])
    assert tree(work) == before
    other = run(work, "precision=bf16", "--name other").experiment
    assert trained_with(other) == ("bf16", "the CPU", True)
    trained = checkpoints(work)
    assert run(work, "precision=fp32").ran == []
    assert trained.items() <= checkpoints(work).items()


# -- results -----------------------------------------------------------------------------------------


def beams(folder):
    """The beam of each result in *folder*, and of its settings.yaml."""
    names = [name for name in ("hypotheses.de", "score.json") if (folder / name).exists()]
    results = {name: int((folder / name).read_text().split()[1]) for name in names}
    return {**results, "settings": yaml.safe_load((folder / "settings.yaml").read_text())["beam"]}


def test_results_of_other_settings_move_to_earlier(work, capsys):
    model = run(work).experiment.model
    averaged = (model / "averaged.pt").read_text()
    (model / "hypotheses.de").unlink()
    assert run(work).ran == [9]
    assert not (model / "earlier").exists(), "results with the same settings are overwritten"
    fail = ["fairseq_generate_flags=--fail"]
    capsys.readouterr()
    with pytest.raises(StageError, match="no memory"):
        run(work, "beam=1", *fail)
    printed = capsys.readouterr().out
    assert "stage 8: average the last checkpoints: done before, skipped" in printed
    assert "stage 9: translate the test set (again, since beam, fairseq_generate_flags changed)" in printed
    assert beams(model) == {"settings": 1}
    assert beams(model / "earlier" / "1") == {"hypotheses.de": 4, "score.json": 4, "settings": 4}
    assert (model / "averaged.pt").read_text() == averaged, "it does not depend on the beam"
    assert run(work, "beam=1").ran == [9, 10]
    assert beams(model) == {"hypotheses.de": 1, "score.json": 1, "settings": 1}
    run(work)
    assert beams(model) == {"hypotheses.de": 4, "score.json": 4, "settings": 4}
    assert beams(model / "earlier" / "2") == {"hypotheses.de": 1, "score.json": 1, "settings": 1}


def test_results_of_later_stages_with_other_settings_move_too_with_the_record_of_their_run(work):
    model = run(work).experiment.model
    joined, record = model / "joined" / "2.de", (model / "run.yaml").read_bytes()
    joined.parent.mkdir()
    joined.write_text("of beam 4")
    of_stage_14 = {"of": {"beam": 4}, "made": {f"{model.name}/joined/2.de": "sha256:x"}}
    (model / "stamps" / "14.json").write_text(json.dumps(of_stage_14))
    run(work, "beam=1")
    assert (model / "earlier" / "1" / "joined" / "2.de").read_text() == "of beam 4" and not joined.parent.exists()
    assert (model / "earlier" / "1" / "run.yaml").read_bytes() == record


def test_a_stage_that_ends_without_its_outputs_is_not_done(work):
    class Idle(type(AVERAGE)):
        def run(self, experiment, shell):
            pass

    experiment = run(work).experiment
    experiment.averaged.unlink()
    with pytest.raises(StageError, match=r"stage 8: .* ended without writing .*/averaged\.pt$"):
        ensure(experiment, Idle())
    assert not Stamps(experiment).path(AVERAGE).exists()


def test_a_longer_training_keeps_the_average_of_the_shorter_one(work):
    model = run(work).experiment.model
    short = (model / "averaged.pt").read_text()
    ensure(described(work, "max_epochs=2"), TRAIN)
    assert not (model / "averaged.pt").exists()
    assert (model / "earlier" / "1" / "averaged.pt").read_text() == short
    assert yaml.safe_load((model / "earlier" / "1" / "settings.yaml").read_text())["max_epochs"] == 1
    way_out = rf"set max_epochs=2, or train another .*; results of shorter trainings are in {model}/earlier$"
    with pytest.raises(StageError, match=f"beyond max_epochs=1: {way_out}"):
        run(work)
    with pytest.raises(StageError, match=f"beyond max_epochs=1: {way_out}"):  # not "run with --stage 7"
        Runner(described(work), MODEL_STAGES).refuse_stale_inputs(STAGES[-1])
    assert yaml.safe_load((model / "settings.yaml").read_text())["max_epochs"] == 2


def test_a_device_that_cannot_continue_the_training_changes_nothing(work):
    """A GPU without bf16 trained in fp16 (precision: auto), and the folder is now on a machine without a GPU."""
    experiment = run(work).experiment
    experiment.history.write_text(json.dumps({"process": {"batches": {"precision": "fp16"}}}) + "\n")
    before = tree(work)
    longer = described(work, "max_epochs=2")
    with pytest.raises(StageError, match="has the precision fp16: fairseq trains in fp16 on GPUs only"):
        ensure(longer, TRAIN)
    with pytest.raises(StageError, match="has the precision fp16: fairseq trains in fp16 on GPUs only"):
        check_devices(longer, TRAIN.resumed(longer))
    assert tree(work) == before and run(work).ran == []


def test_averaging_fewer_checkpoints_keeps_the_checkpoints(work, capsys):
    run(work, "max_epochs=3", "average_checkpoints=3")
    before = {path: text for path, text in tree(work).items() if path.match("checkpoints/*.pt")}
    assert run(work, "max_epochs=3", "average_checkpoints=2").ran == [7, 8, 9, 10]
    assert "stage 7: train (again, since average_checkpoints changed)" in capsys.readouterr().out
    assert before.items() <= tree(work).items()


def test_a_missing_checkpoint_is_reported_with_a_remedy(work, capsys, monkeypatch):
    flags = ["max_epochs=3", "average_checkpoints=3"]
    experiment = run(work, *flags).experiment
    (experiment.checkpoints / "checkpoint2.pt").unlink()
    monkeypatch.setattr("recipes.run.shell.run_logged", lambda *_: None)  # as fairseq-train after its last epoch
    with pytest.raises(StageError) as refused:
        run(work, *flags)
    missing = "transformer_rope.seed1/checkpoints/checkpoint2.pt is missing"
    assert f"stage 7: train (again, since {missing})" in capsys.readouterr().out
    assert "the last 3 epochs, to average them, and has those of 1, 3" in str(refused.value)
    remedies = "train longer (max_epochs, max_updates), average fewer (average_checkpoints=1), or train again with"
    assert remedies in str(refused.value)


def test_a_training_that_patience_ends_early_can_average_the_checkpoints_that_it_has(work, monkeypatch):
    flags = ["max_epochs=3", "average_checkpoints=3"]
    experiment = run(work, *flags).experiment
    (experiment.checkpoints / "checkpoint3.pt").unlink()
    monkeypatch.setattr("recipes.run.shell.run_logged", lambda *_: None)  # as fairseq-train, which does not go on
    with pytest.raises(StageError, match=r"average fewer \(average_checkpoints=2\), "):
        run(work, *flags)
    check_checkpoints(described(work, "max_epochs=3", "average_checkpoints=2"))


def test_settings_of_the_device_change_no_finished_training(work):
    run(work)
    before = tree(work)
    assert run(work, "tokens_per_device=512").ran == [] and tree(work) == before
    longer = ["max_epochs=2", "tokens_per_device=512"]
    experiment = run(work, *longer)
    assert experiment.ran == [7, 8, 9, 10]
    assert Stamps(experiment.experiment).last(TRAIN)["of"]["tokens_per_device"] == 512
    assert run(work, *longer).ran == [] and run(work, "max_epochs=2").ran == []


def test_an_average_of_more_checkpoints_than_there_are_moves_no_results(work):
    experiment = run(work, "max_epochs=3").experiment
    for number in (1, 2):  # fairseq-train keeps as many as are averaged
        (experiment.checkpoints / f"checkpoint{number}.pt").unlink()
    before = tree(work)
    with pytest.raises(StageError, match=r"average fewer \(average_checkpoints=1\), "):
        run(work, "max_epochs=3", "average_checkpoints=2")
    assert tree(work) == before
    assert run(work, "max_epochs=3").ran == []


def test_large_files_are_compared_by_contents_and_hashed_once(work, monkeypatch):
    """A file that is written again with the same contents has another date, but the same hash."""
    monkeypatch.setattr(stamps, "LARGE", 3)
    hashed = []

    def checksum(path):
        hashed.extend([str(path)] * (path.stat().st_size > 3))
        return path.read_text()

    monkeypatch.setattr(stamps, "checksum", checksum)
    run(work)
    trained = checkpoints(work)
    files = [*described(work).binary_data, *described(work).binary_sets(TEST), *(work / "raw").iterdir()]
    assert {str(path) for path in files} <= {*hashed}
    change_data(work, "data B")  # of the same size
    assert run(work).ran == [7, 8, 9, 10]
    change_data(work, "data A")
    os.utime(work / "data-bin" / "train.en-de.en.bin", (1, 1))
    assert run(work).ran == []
    assert trained.items() <= checkpoints(work).items()
    hashed.clear()
    assert run(work).ran == [] and not hashed, "the hash of a file is computed once"
    hashes = work / "stamps" / "hashes.json"
    hashes.unlink()
    hashes.with_name("hashes.json.tmp").mkdir()  # each process has its own temporary file
    assert run(work).ran == [] and hashes.exists()


def test_changed_settings_are_printed_with_their_values(work, capsys):
    for flags, suffix in (([], r"\w{8}"), (["--name mine"], "mine")):
        announce(described(work, "learning_rate=1e-3", "dropout=0", *flags))
        line = rf"model folder: transformer_rope\.seed1\.{suffix}; changed settings: dropout=0.0, learning_rate=0.001\n"
        assert re.search(line, capsys.readouterr().out)
    announce(described(work))
    assert "model folder" not in capsys.readouterr().out


def test_the_list_has_each_model_folder_with_its_scores_and_changed_settings(work, capsys):
    def listed():
        capsys.readouterr()
        main(["demo", "--work-dir", str(work), "--list"])
        return [re.split(r"  +", line) for line in capsys.readouterr().out.splitlines()]

    assert listed() == [[f"{work}: has no model yet"]]
    few = "max_epochs=1, average_checkpoints=1"  # of :func:`described`
    scores = {"sacreBLEU": 23.456, "TER": 70, "chrF2++": 45.1}
    experiment = run(work).experiment
    metrics = [{"name": name, "score": score} for name, score in scores.items()]
    experiment.score.write_text(json.dumps({"systems": [{"metrics": metrics}]}))
    changed = run(work, "learning_rate=1e-3", "dropout=0", "--name b").experiment
    changed.score.unlink()
    assert listed() == [
        [f"models in {work}:"],
        ["model folder", "sacreBLEU", "chrF", "changed settings"],
        ["transformer_rope.seed1", "23.46", "45.10", few],
        ["transformer_rope.seed1.b", "-", "-", f"dropout=0.0, learning_rate=0.001, {few}"],
    ]
    metrics = [{"name": "chrF2", "score": 31.25}]  # of Chinese, for example
    experiment.score.write_text(json.dumps({"systems": [{"metrics": metrics}]}))
    assert listed()[2][:3] == ["transformer_rope.seed1", "-", "31.25"]


def test_the_history_of_another_training_without_checkpoints_is_removed(work):
    experiment = described(work)
    experiment.checkpoints.mkdir(parents=True)
    (experiment.checkpoints / "begun.json").write_text(json.dumps({"width": 1}))
    experiment.history.write_text('{"valid_loss": "1"}\n')
    run(work)
    assert "valid_loss" not in experiment.history.read_text()
