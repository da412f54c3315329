"""The training stage: batches, precision and checkpoints; machine.py: checks before the first stage."""

import contextlib
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from recipes.compare.curves import read_history
from recipes.pipeline import fairseq_train
from recipes.pipeline.check_machine import check_machine
from recipes.pipeline.checkpoints import check_checkpoints, check_limit, check_long_enough
from recipes.pipeline.experiment import SETS, Experiment
from recipes.pipeline.lengths import check_lengths
from recipes.pipeline.settings import FIELDS, check_values, read_settings
from recipes.pipeline.stage03_tokenise import Tokenise
from recipes.pipeline.stages import TRAIN, TRANSLATE
from recipes.run import history
from recipes.run.run import ROOT, StageError
from recipes.run.runner import Runner
from recipes.run.shell import Shell

RECIPES = sorted((ROOT / "recipes").glob("*/settings.yaml"))


def experiment(recipe="wmt14_en_de", tmp=Path("/nowhere"), overrides=(), **more):
    settings = read_settings(ROOT / "recipes" / recipe / "settings.yaml", overrides)
    return Experiment(settings, tmp, "transformer_rope", 1, **more)


def flag(command, name):
    return re.search(rf"--{name} (\S+)", command).group(1)


@given(tokens=st.integers(1000, 10**6), device=st.integers(500, 40000), gpus=st.integers(1, 64))
def test_tokens_per_update_do_not_depend_on_the_number_of_devices(tokens, device, gpus):
    if tokens < gpus:
        return
    max_tokens, frequency = fairseq_train.batches(tokens, device, gpus)
    assert max_tokens <= device
    assert tokens - gpus * frequency < max_tokens * gpus * frequency <= tokens


@pytest.mark.parametrize("gpus, max_tokens, update_freq", [(1, 3571, 7), (2, 3125, 4), (4, 3125, 2), (8, 3125, 1)])
def test_wmt14_trains_on_25k_tokens_an_update(gpus, max_tokens, update_freq):
    command = fairseq_train.command(experiment(), gpus, "bf16")
    assert int(flag(command, "max-tokens")) == max_tokens
    assert int(flag(command, "update-freq")) == update_freq
    assert int(flag(command, "distributed-world-size")) == gpus
    assert "--bf16" in command and "--cpu" not in command
    assert 24_900 <= gpus * max_tokens * update_freq <= 25_000


@pytest.mark.parametrize(
    "flags, batches",
    [
        ("", {"max_tokens": 3571, "update_freq": 7}),
        ("--update-freq 2 --max-tokens 99", {"max_tokens": 99, "update_freq": 2}),
        ("--update-freq=4,2 --max-sentences 8", {"max_tokens": 3571, "update_freq": "4,2", "batch_size": 8}),
    ],
)
def test_the_batches_of_flags_are_noted_in_place_of_the_settings(flags, batches):
    command = fairseq_train.command(experiment(overrides=[f"fairseq_train_flags={flags}"]), 1, "fp32")
    assert fairseq_train.batches_of(command) == batches


def test_wmt14_has_the_settings_of_the_papers():
    command, settings = fairseq_train.command(experiment(), 1, "bf16"), experiment().settings
    assert "--adam-betas '(0.9, 0.98)'" in command and "--lr-scheduler inverse_sqrt" in command
    assert "--share-all-embeddings" in command
    roformer = {"lr": 5e-4, "warmup-init-lr": 1e-7, "label-smoothing": 0.1, "max-update": 100_000}
    vaswani = {"dropout": 0.1, "adam-eps": 1e-9, "warmup-updates": 4000}
    expected = roformer | vaswani
    for side in ("encoder", "decoder"):
        expected |= {f"{side}-layers": 6, f"{side}-embed-dim": 512, f"{side}-ffn-embed-dim": 2048}
        expected[f"{side}-attention-heads"] = 8
    assert {name: float(flag(command, name)) for name in expected} == expected
    expected = {"beam": 4, "length_penalty": 0.6, "average_checkpoints": 5, "vocab_size": 37000, "max_len_b": 50}
    assert {name: getattr(settings, name) for name in expected} == expected
    assert settings.max_updates % settings.save_every_updates == 0


def test_each_setting_is_the_value_of_its_own_flag():
    values = {
        **{"dropout": 0.31, "adam_eps": 3e-9, "warmup_init_lr": 3e-8, "learning_rate": 3e-4, "label_smoothing": 0.13},
        **{
            "warmup_updates": 31,
            "max_epochs": 32,
            "max_updates": 33,
            "average_checkpoints": 7,
            "save_every_updates": 3,
        },
    }
    command = fairseq_train.command(experiment(overrides=[f"{k}={v}" for k, v in values.items()]), 1, "fp32")
    flags = {name: name.replace("_", "-") for name in values}
    flags |= {"learning_rate": "lr", "max_epochs": "max-epoch", "max_updates": "max-update"}
    flags |= {"average_checkpoints": "keep-interval-updates", "save_every_updates": "save-interval-updates"}
    assert {name: float(flag(command, flags[name])) for name in values} == values


def test_the_gpu_decides_the_precision(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for generation, best in (((9, 0), "bf16"), ((8, 6), "bf16"), ((7, 0), "fp16"), ((6, 1), "fp32")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda generation=generation: generation)
        assert fairseq_train.devices_and_precision(experiment()) == (2, best)
    assert fairseq_train.devices_and_precision(experiment(gpus=1)) == (1, "fp32")
    assert fairseq_train.devices_and_precision(experiment(gpus=0)) == (0, "fp32")
    assert fairseq_train.devices_and_precision(experiment(overrides=["precision=fp16"])) == (2, "fp16")
    for options, message in (
        ({"gpus": 3}, "--gpus 3: this machine has 2"),
        ({"overrides": ["precision=bf16"]}, "--set precision=bf16: this GPU does not support it; the best is fp32"),
        ({"overrides": ["precision=fp16"], "gpus": 0}, "--set precision=fp16: fairseq trains in fp16 on GPUs only"),
    ):
        with pytest.raises(StageError, match=message):
            fairseq_train.devices_and_precision(experiment(**options))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_every_recipe_has_the_settings_and_only_those(path):
    check_values(read_settings(path))
    with_comments = re.findall(r"^(\w+):.* # \S", path.read_text(), re.MULTILINE)
    assert with_comments == list(FIELDS), "in the order of settings.py"


@pytest.mark.parametrize(
    "sides, expected", [("none", []), ("source", ["en"]), ("target", ["de"]), ("both", ["en", "de"])]
)
def test_punctuation_is_normalised_on_the_chosen_sides(sides, expected, capsys):
    Runner(experiment(overrides=[f"normalise_punctuation={sides}"], dry_run=True)).ensure(Tokenise())
    commands = [line for line in capsys.readouterr().out.splitlines() if "raw/train" in line]
    assert [lang for lang, line in zip(("en", "de"), commands, strict=True) if "--normalise-p" in line] == expected


def test_the_translation_command_has_the_search_settings(capsys):
    Runner(experiment(dry_run=True)).ensure(TRANSLATE)
    printed = capsys.readouterr().out
    assert "--beam 4 --lenpen 0.6 --max-len-a 1 --max-len-b 50 --tokenizer moses --moses-no-dash-splits" in printed


def test_a_sentence_too_long_for_fairseq_is_refused_before_training(tmp_path):
    (tmp_path / "bpe").mkdir()
    for path in experiment(tmp=tmp_path).texts("bpe", SETS):
        path.write_text("a b\n" + "a " * (1024 if path.name in ("train.en", "test.en") else 1023) + "\n")
    train, generate = (
        f"fairseq_{program}_flags=--max-source-positions 2000 --max-target-positions 2000"
        for program in ("train", "generate")
    )
    for overrides in ([], [train], [generate]):  # both the model and the search must allow it
        with pytest.raises(StageError, match=r"bpe/test.en, line 2, has 1025 tokens, more than the 1024"):
            check_lengths(experiment(tmp=tmp_path, overrides=overrides), 4096)
    positions = ["fairseq_train_flags=--cross-attention-positions rope", generate]  # not a limit
    with pytest.raises(StageError, match=r"bpe/test.en, line 2"):
        check_lengths(experiment(tmp=tmp_path, overrides=positions), 4096)
    check_lengths(experiment(tmp=tmp_path, overrides=[train, generate]), 4096)
    check_lengths(
        experiment(tmp=tmp_path, overrides=[flags.partition(" --max-t")[0] for flags in (train, generate)]), 4096
    )
    with pytest.raises(StageError, match=r"bpe/valid.de, line 2, has 1024 tokens, more than the 512 that"):
        check_lengths(experiment(tmp=tmp_path, overrides=["fairseq_train_flags=--max-target-positions=512"]), 4096)
    with pytest.raises(StageError, match=r"bpe/train.de, line 2, has 1024 tokens, more than the 900 of a batch"):
        check_lengths(experiment(tmp=tmp_path), 900)
    (tmp_path / "bpe" / "test.en").write_text("a b\na\n")
    check_lengths(experiment(tmp=tmp_path), 4096)
    # A batch of the search has 8000 tokens, and all positions are allowed.
    many = [flags.replace("2000", "9000") for flags in (train, generate)]
    (tmp_path / "bpe" / "test.en").write_text("a b\n" + "a " * 8000 + "\n")
    with pytest.raises(
        StageError, match=r"test.en, line 2, has 8001 tokens, more than the 8000 of a batch: .* in fairseq_g"
    ):
        check_lengths(experiment(tmp=tmp_path, overrides=many), 4096)
    check_lengths(experiment(tmp=tmp_path, overrides=[many[0], f"{many[1]} --max-tokens 8001"]), 4096)


@pytest.mark.parametrize(
    "settings, enough",
    [
        # 80 tokens on the longer side: with 10 an update, 8 updates an epoch; twice as many because of padding
        (["save_every_updates=0", "max_epochs=50", "average_checkpoints=4", "max_updates=25"], True),
        (["save_every_updates=0", "max_epochs=50", "average_checkpoints=4", "max_updates=24"], False),
        (["save_every_updates=17", "max_epochs=2", "average_checkpoints=2", "max_updates=900"], True),
        (["save_every_updates=18", "max_epochs=2", "average_checkpoints=2", "max_updates=900"], False),
        (["save_every_updates=100", "max_epochs=0", "average_checkpoints=2", "max_updates=900"], True),
        (["save_every_updates=0", "max_epochs=4", "average_checkpoints=4", "max_updates=0"], True),
    ],
)
def test_a_training_too_short_for_its_average_is_refused_before_it_starts(tmp_path, settings, enough):
    """Four checkpoints of epochs need an update more than three epochs; two of updates, two intervals."""
    short = experiment(tmp=tmp_path, overrides=settings)
    (tmp_path / "bpe").mkdir()
    for path, line in zip(short.texts("bpe", ["train"]), ("a a a\n", "a a\n"), strict=True):
        path.write_text(20 * line)
    wanted = short.settings.average_checkpoints
    message = f"stage 7 (train): average_checkpoints={wanted}: max_"
    with refusal(None if enough else message):
        check_long_enough(short, 10)
    for path in short.texts("bpe", ["train"]):  # fairseq skips a pair that is too long
        path.write_text(path.read_text() + "a " * 1024 + "\n")
    with refusal(None if enough else message):
        check_long_enough(short, 10)
    truncated = experiment(tmp=tmp_path, overrides=[*settings, "fairseq_train_flags=--truncate-source"])
    check_long_enough(truncated, 10)


def refusal(message):
    """A context that expects a StageError with *message*, or no error if *message* is None."""
    return contextlib.nullcontext() if message is None else pytest.raises(StageError, match=re.escape(message))


def with_checkpoints(tmp_path, overrides, *names):
    """An experiment whose folder has checkpoints of these names."""
    described = experiment(tmp=tmp_path, overrides=overrides)
    described.checkpoints.mkdir(parents=True)
    for name in names:
        (described.checkpoints / f"checkpoint{name}.pt").touch()
    return described


@pytest.mark.parametrize(
    "interval, names, message",
    [
        (0, "2 3 4", None),
        (0, "1 3 4", "the checkpoints of the last 3 epochs, to average them, and has those of 1, 3, 4:"),
        (
            0,
            "_1_5 _1_10 _2_15",
            "of the last 3 epochs, to average them, and has none: train longer (max_epochs, max_updates), or",
        ),
        (5, "_1_5 _1_10 _2_15", None),
        (5, "_1_5 _1_6 _2_15", "the last 3 updates (multiples of 5), to average them, and has those of 5, 6, 15:"),
        (10, "_1_5 _1_10 _2_15", "multiples of 10)"),
    ],
)
def test_the_averaged_checkpoints_are_the_last_ones_without_gaps(tmp_path, interval, names, message):
    settings = ["average_checkpoints=3", f"save_every_updates={interval}"]
    trained = with_checkpoints(tmp_path, settings, *names.split(), "_last", "_best")
    with refusal(message):
        check_checkpoints(trained)
        files = [f"checkpoint{name}.pt" for name in ("_last", *names.split())]
        assert [path.name for path in TRAIN.outputs(trained)] == files


@pytest.mark.parametrize(
    "every, limit, last, message",
    [
        (0, "max_epochs=3", "4", "is already trained for 4 epochs, beyond max_epochs=3"),
        (0, "max_epochs=4", "4", None),
        (5, "max_updates=12", "_2_15", "set max_updates=15, or train another"),
        (5, "max_updates=15", "_2_15", None),
    ],
)
def test_checkpoints_beyond_the_limit_are_refused(tmp_path, every, limit, last, message):
    trained = with_checkpoints(tmp_path, ["average_checkpoints=1", f"save_every_updates={every}", limit], last)
    with refusal(message):
        check_limit(trained)


def test_the_limit_of_the_other_kind_counts_too(tmp_path):
    trained = with_checkpoints(
        tmp_path / "epochs", ["average_checkpoints=1", "save_every_updates=0", "max_updates=39"], "4"
    )
    entries = [{"epoch": epoch, "valid_num_updates": f"{10 * epoch}"} for epoch in (3, 4)]
    trained.history.write_text("\n".join(map(json.dumps, entries)))
    with refusal("is already trained for 40 updates, beyond max_updates=39: set max_updates=40, or"):
        check_limit(trained)
    settings = ["average_checkpoints=1", "save_every_updates=0", "max_updates=1234567"]
    long = with_checkpoints(tmp_path / "long", settings, "4")
    long.history.write_text(json.dumps({"epoch": 4, "valid_num_updates": f"{1234567:g}"}))
    check_limit(long)
    settings = ["average_checkpoints=1", "save_every_updates=5", "max_updates=15", "max_epochs=1"]
    with refusal("is already trained for 2 epochs, beyond max_epochs=1"):
        check_limit(with_checkpoints(tmp_path / "updates", settings, "_2_15"))


def test_a_line_must_fit_a_batch_of_the_flag_that_counts(tmp_path, monkeypatch):
    own = experiment("demo", tmp_path, ["tokens_per_update=512", "fairseq_train_flags=--max-tokens 2048"], gpus=0)
    limits = []
    monkeypatch.setattr("recipes.pipeline.stage07_train.check_lengths", lambda _, limit: limits.append(limit))
    monkeypatch.setattr("recipes.run.shell.run_logged", lambda *_: None)
    own.checkpoints.mkdir(parents=True)
    with pytest.raises(StageError, match="and has none"):  # since nothing was trained
        TRAIN.run(own, Shell(TRAIN, tmp_path / "script.sh"))
    assert limits == [2048]


def test_the_bar_and_the_curve_follow_a_training_beyond_a_million_updates(tmp_path):
    """fairseq's log has the updates with six digits: {:g}."""
    lines = [json.dumps({"epoch": 3, "num_updates": f"{n:g}", "loss": "3.1"}) for n in (999_990, 1_000_000, 1_234_570)]
    with history.training_bar(2_000_000, 0, disable=False) as bar:
        for line in lines:
            history.follow(bar, f"2026-01-01 | INFO | train_inner | {line}")
        assert bar.n == 1_234_570
    entries = [
        {
            "epoch": n,
            f"{part}_loss": "3.1",
            f"{part}_num_updates": f"{500_000 * n:g}",
            f"{part}_wall": f"{n}.0",
            "train_wps": "9",
        }
        for n in (1, 2, 3)
        for part in ("valid", "train")
    ]
    (tmp_path / "history.jsonl").write_text("\n".join(map(json.dumps, entries)))
    curve = read_history(tmp_path / "history.jsonl")
    assert [*curve.updates] == [500_000, 1_000_000, 1_500_000]


def test_files_of_the_text_and_of_the_same_model_count_as_free_disk(tmp_path, monkeypatch):
    own = experiment(tmp=tmp_path, overrides=["disk_gb=1", "memory_gb=0"])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=997_000_000))
    for folder in (own.work / "raw", own.model / "checkpoints", own.work / "transformer.seed9"):
        folder.mkdir(parents=True)
    (own.work / "transformer.seed9" / "of another model").write_bytes(bytes(4_000_000))
    with pytest.raises(StageError, match="^1.0 GB are free on the disk of .*, and 1.0 are needed; .* disk_gb=0$"):
        check_machine(own)
    (own.work / "raw" / "train.en").write_bytes(bytes(2_000_000))
    with pytest.raises(StageError, match="GB are free on the disk of"):
        check_machine(own)
    (own.model / "checkpoints" / "checkpoint1.pt").write_bytes(bytes(1_000_000))
    check_machine(own)


def test_a_machine_that_is_too_small_is_refused(tmp_path, monkeypatch):
    def check(*overrides, **more):
        check_machine(experiment(tmp=tmp_path / "new", overrides=overrides, **more))

    with pytest.raises(StageError, match=r"GB are free on the disk of .*, and 1000000.0 are needed; "):
        check("disk_gb=1000000")
    memory = r"GB of memory, and 1e\+06 are needed; to try anyway, run with --set memory_gb="
    with pytest.raises(StageError, match=memory):
        check("memory_gb=1000000")
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 8_000_000_000 // 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    check("memory_gb=7.9", "disk_gb=0")
    with pytest.raises(StageError, match="this machine has 8.0 GB of memory, and 8.1 are needed; .* memory_gb=8$"):
        check("memory_gb=8.1", "disk_gb=0")
    which = shutil.which
    monkeypatch.setattr(shutil, "which", lambda name, **kw: None if name == "subword-nmt" else which(name, **kw))
    with pytest.raises(StageError, match="subword-nmt is neither in "):
        check("disk_gb=0", "memory_gb=0")
    check("disk_gb=0", "memory_gb=0", bpe="sentencepiece")
