"""The precision of a training: what the CPU computes, what resumes, and what a comparison does about it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from recipes.compare.__main__ import main
from recipes.compare.same_precision import choose_precision
from recipes.pipeline import fairseq_train
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.model_folder import learnt_from
from recipes.pipeline.settings import read_settings
from recipes.pipeline.stages import TRAIN
from recipes.run import machine, precision
from recipes.run.run import ROOT, StageError
from recipes.run.stamps import Stamps
from tests.recipes.small_demo import AVX2, AVX512_BF16

ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n"
NOT_A_FLAG = "flags\t\t: fpu avx2 avx512_bf16x\nvmx flags\t: avx512_bf16\nbugs\t\t: amx_bf16\n"


def experiment(tmp=Path("/nowhere"), overrides=(), **more):
    settings = read_settings(ROOT / "recipes" / "demo" / "settings.yaml", overrides)
    return Experiment(settings, tmp, "transformer_rope", 1, **{"gpus": 0, **more})


@pytest.fixture
def on(monkeypatch):
    """on(text): let *text* be /proc/cpuinfo."""
    return lambda text: monkeypatch.setattr(machine, "cpu_info", lambda: text)


@pytest.fixture
def gpus(monkeypatch):
    """gpus(number, generation): let the machine have these GPUs."""

    def pretend(number, generation=(8, 0)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: number)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: generation)

    return pretend


# -- what the CPU computes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, best",
    [
        (AVX512_BF16, "bf16"),
        ("flags\t\t: avx512_bf16 amx_bf16 avx512_fp16 amx_tile amx_int8\n", "bf16"),
        ("flags: amx_bf16", "bf16"),
        (AVX2, "fp32"),
        (NOT_A_FLAG, "fp32"),
        (ARM, "fp32"),
        ("", "fp32"),  # not Linux
    ],
)
def test_the_instructions_of_the_cpu_decide_its_precision(on, gpus, text, best):
    on(text)
    gpus(0)
    for none in (0, None):
        assert fairseq_train.devices_and_precision(experiment(gpus=none)) == (0, best)
    for asked in ("fp32", "bf16"):
        run = experiment(overrides=[f"precision={asked}"])
        assert fairseq_train.devices_and_precision(run) == (0, asked)
        assert bool(fairseq_train.warning(run)) == (asked == "bf16" and best == "fp32")
    with pytest.raises(StageError, match="^--set precision=fp16: fairseq trains in fp16 on GPUs only$"):
        fairseq_train.check_devices(experiment(overrides=["precision=fp16"]))


def test_the_precision_of_a_gpu_does_not_depend_on_the_cpu(on, gpus):
    for text in (AVX2, AVX512_BF16):
        on(text)
        for generation, best in (((8, 0), "bf16"), ((7, 5), "fp16"), ((6, 1), "fp32")):
            gpus(1, generation)
            assert fairseq_train.devices_and_precision(experiment(gpus=None)) == (1, best)
    on(AVX2)
    gpus(1)
    assert not fairseq_train.warning(experiment(overrides=["precision=bf16"], gpus=None)), "it is for CPUs"


@pytest.mark.parametrize(
    "flag, given", [("--bf16", "bf16"), ("--memory-efficient-bf16", "bf16"), ("--fp16", "fp16"), ("--amp", "amp")]
)
def test_a_flag_for_fairseq_comes_before_the_setting(on, gpus, flag, given):
    """fairseq refuses two flags for different precisions."""
    on(AVX512_BF16)
    gpus(1)
    for setting in ("auto", "fp32", "bf16"):
        run = experiment(overrides=[f"precision={setting}", f"fairseq_train_flags={flag}"], gpus=1)
        chosen = fairseq_train.devices_and_precision(run)
        assert chosen == (1, given)
        command = fairseq_train.command(run, *chosen)
        assert [word for word in command.split() if word in precision.FLAGS] == [flag]
    if flag == "--fp16":
        with pytest.raises(StageError, match="^--fp16 among the flags for fairseq-train: fairseq trains in fp16 on GP"):
            fairseq_train.check_devices(replace(run, gpus=0))


# -- what a training has -----------------------------------------------------------------------------

IN_FP32, IN_BF16 = ({"batches": {"precision": one, "device": "the CPU"}} for one in ("fp32", "bf16"))


@pytest.mark.parametrize(
    "process, expected, words",
    [
        (IN_BF16, "bf16", "bf16 on the CPU"),
        # Stage 7 did not note flags that the user gave.
        ({"command": "fairseq-train data --cpu --bf16", **IN_FP32}, "bf16", "bf16 on the CPU"),
        ({"command": "fairseq-train data --cpu --seed 1"}, "fp32", "fp32 on the CPU"),
        ({"command": "fairseq-train --distributed-world-size 2 --memory-efficient-fp16"}, "fp16", "fp16 on 2 GPUs"),
        ({"command": "fairseq-train data --user-dir x"}, "fp32", "fp32"),
        ({"hardware": {"gpus": []}, "commit": "c"}, "fp32", "fp32"),
        ({"hardware": {"gpus": ["V100"]}}, "", ""),
        ({}, "", ""),
    ],
)
def test_the_precision_of_a_process_is_read_from_old_histories_too(process, expected, words):
    assert precision.of_process(process) == expected
    assert precision.described(process) == words


@pytest.mark.parametrize(
    "entries, expected",
    [
        ([IN_FP32, "epoch"], "fp32"),
        ([IN_FP32, "epoch", IN_BF16], "fp32"),  # fairseq refused to resume
        ([IN_BF16, IN_FP32, "epoch"], "fp32"),  # the first one ended before its first checkpoint
        ([IN_FP32, IN_BF16], "bf16"),
        ([], ""),
    ],
)
def test_the_last_process_that_trained_an_epoch_says_the_precision(tmp_path, entries, expected):
    lines = [{"valid_loss": "1"} if entry == "epoch" else {"process": entry} for entry in entries]
    path = tmp_path / "history.jsonl"
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"train_lo')
    assert precision.of_process(precision.last_process(path)) == expected
    assert precision.last_process(tmp_path / "none") == {}


def trained(run, process):
    """Write what stage 7 leaves in the folder of *run*. Returns the run."""
    run.checkpoints.mkdir(parents=True)
    (run.checkpoints / "begun.json").write_text(json.dumps(learnt_from(run, TRAIN, Stamps(run))))
    run.last_checkpoint.touch()
    run.history.write_text(json.dumps({"process": process}) + "\n")
    return run


def test_a_training_resumes_in_its_own_precision(tmp_path, on, gpus):
    run = trained(experiment(tmp_path), IN_FP32)
    on(AVX512_BF16)
    assert TRAIN.resumed(run) == "fp32"
    assert fairseq_train.devices_and_precision(run, "fp32") == (0, "fp32")
    gpus(1)
    assert fairseq_train.devices_and_precision(replace(run, gpus=1), "fp32") == (1, "fp32")
    on(AVX2)
    assert fairseq_train.devices_and_precision(run, "bf16") == (0, "bf16")
    assert fairseq_train.warning(run, "bf16").startswith(f"the training in {run.checkpoints} has the precision bf16: ")
    on(AVX512_BF16)
    assert not fairseq_train.warning(run, "bf16")
    in_fp16 = f"the training in {run.checkpoints} has the precision fp16: fairseq trains in fp16 on GPUs only"
    with pytest.raises(StageError, match=re.escape(in_fp16)):
        fairseq_train.devices_and_precision(run, "fp16")
    gpus(1, (7, 0))
    with pytest.raises(StageError, match="has the precision bf16: this GPU does not support it; the best is fp16"):
        fairseq_train.devices_and_precision(replace(run, gpus=1), "bf16")


@pytest.mark.parametrize("has, asked", [("fp32", "bf16"), ("bf16", "fp32"), ("fp16", "bf16"), ("bf16", "fp16")])
def test_another_precision_than_that_of_the_training_is_refused_in_one_sentence(tmp_path, gpus, has, asked):
    gpus(1)
    run = trained(experiment(tmp_path, [f"precision={asked}"], gpus=1), {"batches": {"precision": has}})
    assert TRAIN.resumed(run) == has
    with pytest.raises(StageError) as refused:
        fairseq_train.check_devices(run, has)
    assert str(refused.value) == (
        f"stage 7 (train): --set precision={asked}: the training in {run.checkpoints} has the precision {has}, and "
        f"cannot resume in {asked}: set precision={has}, or train another model with --name NAME or another --work-dir"
    )


def test_a_training_of_other_settings_or_without_a_checkpoint_decides_nothing(tmp_path):
    run = trained(experiment(tmp_path), IN_FP32)
    wider = replace(run, settings=replace(run.settings, width=64))
    assert TRAIN.resumed(wider) == "", "its folder is moved before the training"
    run.last_checkpoint.unlink()
    assert TRAIN.resumed(run) == ""


# -- comparisons -------------------------------------------------------------------------------------


def systems(tmp_path, *overrides, seed=1, **more):
    names = ("transformer", "transformer_rope")
    return [replace(experiment(tmp_path, overrides, **more), arch=name, system=name, seed=seed) for name in names]


def test_new_runs_have_the_precision_of_earlier_ones_and_the_comparison_says_so(tmp_path, on, capsys):
    on(AVX512_BF16)
    base, rope = systems(tmp_path)
    choose_precision([base, rope], [base, rope], True)
    assert fairseq_train.devices_and_precision(rope) == (0, "bf16") and not capsys.readouterr().out
    trained(replace(base, seed=7), IN_FP32)  # of a seed that the command does not name
    choose_precision([base, rope], [base, rope], True)
    assert capsys.readouterr().out == "precision: auto: earlier runs are in fp32, new ones in fp32\n"
    for run in (base, rope):
        assert fairseq_train.devices_and_precision(run) == (0, "fp32")


def test_new_runs_on_a_cpu_without_bf16_are_in_fp32_and_the_comparison_says_why(tmp_path, on, capsys):
    base, rope = systems(tmp_path)
    trained(base, IN_BF16)
    choose_precision([base, rope], [rope], True)
    why = "because this machine does not compute bf16 in hardware"
    assert capsys.readouterr().out == f"precision: auto: earlier runs are in bf16, new ones in fp32, {why}\n"
    assert fairseq_train.devices_and_precision(rope) == (0, "fp32")
    on(AVX512_BF16)
    assert fairseq_train.devices_and_precision(rope) == (0, "bf16")
    choose_precision([base, rope], [base], True)
    assert not capsys.readouterr().out, "no run is new"


def test_runs_on_a_gpu_have_the_precision_of_earlier_ones_on_the_cpu(tmp_path, gpus):
    base, rope = systems(tmp_path, gpus=None)
    trained(base, IN_FP32)
    gpus(1)
    choose_precision([base, rope], [base, rope], True)
    assert fairseq_train.devices_and_precision(rope) == (1, "fp32")


def test_new_runs_beside_earlier_ones_in_fp16_are_in_fp16_on_a_gpu_alone(tmp_path, gpus):
    base, rope = systems(tmp_path, gpus=None)
    trained(base, {"batches": {"precision": "fp16"}})
    choose_precision([base, rope], [rope], False)
    assert fairseq_train.devices_and_precision(rope)[1] == "fp32", "no GPU, and a CPU without bf16"
    gpus(1)
    assert fairseq_train.devices_and_precision(rope) == (1, "fp16"), "its best is bf16"


def test_a_comparison_in_another_precision_than_its_runs_is_refused_before_training(tmp_path):
    base, rope = systems(tmp_path, "precision=bf16")
    trained(rope, IN_FP32)
    with pytest.raises(StageError, match=f"--set precision=bf16: the training in {rope.checkpoints} has the precision"):
        choose_precision([base, rope], [base, rope], True)


def test_systems_whose_flags_choose_the_precision_do_not_decide_that_of_others(tmp_path, on):
    base, rope = systems(tmp_path)
    rope.settings.fairseq_train_flags = "--bf16"
    trained(rope, {"command": "fairseq-train --cpu --bf16"})
    choose_precision([base, rope], [base, rope], True)
    on(AVX512_BF16)
    rope.settings.fairseq_train_flags, base.settings.precision = "--fp16", "fp32"
    choose_precision([rope, base], [base], True)
    assert fairseq_train.devices_and_precision(base) == (0, "fp32")
    assert not base.precision_of_others


def test_a_comparison_warns_once_of_emulated_bf16(tmp_path, capsys):
    runs = systems(tmp_path, "precision=bf16") + systems(tmp_path, "precision=bf16", seed=2)
    choose_precision(runs[:2], runs, False)
    assert not capsys.readouterr().err, "other machines train"
    choose_precision(runs[:2], runs, True)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("recipes.compare: warning: --set precision=bf16: this CPU has no instructions for bf16 ")


def test_the_commands_of_a_comparison_have_the_precision_of_its_earlier_runs(tmp_path, on, capsys):
    on(AVX512_BF16)

    def commands():
        main(["demo", "--work-dir", str(tmp_path), "--gpus", "0", "--seeds", "2", "--dry-run"])
        return re.findall(r"\$ (fairseq-train .*)", capsys.readouterr().out)

    assert [("--bf16 " in command) for command in commands()] == [True] * 4
    trained(systems(tmp_path)[0], IN_FP32)
    assert [("--bf16 " in command) for command in commands()] == [False] * 4
