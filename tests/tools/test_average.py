"""fairseq_rope/tools/average.py, compared with the mean."""

import gc
import os
import shutil
from argparse import Namespace

import pytest
import torch
from fairseq.logging import meters

from fairseq_rope import checkpoints
from fairseq_rope.checkpoints import load_checkpoint
from fairseq_rope.tools.average import main


def save(folder, name, weights, **more):
    torch.save({"model": weights, "cfg": None, "last_optimizer_state": {"big": torch.ones(9)}, **more}, folder / name)


def average(folder, *flags):
    main(["--inputs", str(folder), "--output", str(folder / "average.pt"), *flags])
    return load_checkpoint(str(folder / "average.pt"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_average_is_the_exact_mean_in_the_weights_dtype(tmp_path, dtype):
    weights = [torch.randn(50, 20).to(dtype) for _ in range(5)]
    for number, weight in enumerate(weights, 1):
        numbers = {"steps": torch.tensor(number), "rounded": torch.tensor(number + (number == 5) * 4)}  # a mean of 3.8
        save(tmp_path, f"checkpoint{number}.pt", {"w": weight, **numbers})
    state = average(tmp_path, "--num-epoch-checkpoints", "5")
    exact = torch.stack([w.double() for w in weights]).mean(0)
    assert torch.equal(state["model"]["w"], exact.to(dtype))
    assert (state["model"]["steps"], state["model"]["rounded"]) == (3, 3), "rounded down, as by fairseq's script"


def test_the_other_entries_come_from_the_newest_checkpoint_without_what_belongs_to_its_weights(tmp_path):
    for number in (1, 2):
        save(
            tmp_path, f"checkpoint{number}.pt", {"w": torch.tensor([float(number)])},
            optimizer_history=[{"num_updates": number}],
            extra_state={"epoch": number, "ema": {"w": torch.ones(1)}, "ema_fp32_params": {}},
        )  # fmt: skip
    state = average(tmp_path, "--num-epoch-checkpoints", "2")
    assert set(state) == {"model", "cfg", "optimizer_history", "extra_state"}
    assert state["extra_state"] == {"epoch": 2}


def test_the_average_of_checkpoints_with_meters_can_be_loaded(tmp_path):
    """fairseq up to 0.8 saved objects with the progress, which torch pickles under their present names."""
    for number in (1, 2):
        meters_ = {"loss": meters.AverageMeter(), "wps": meters.TimeMeter(), "wall": meters.StopwatchMeter()}
        meters_["loss"].update(number)
        weights = {"w": torch.tensor([float(number)])}
        save(tmp_path, f"checkpoint{number}.pt", weights, extra_state={"train_meters": meters_})
    state = average(tmp_path, "--num-epoch-checkpoints", "2")
    assert state["extra_state"]["train_meters"]["loss"].avg == 2 and state["model"]["w"].tolist() == [1.5]


def test_epoch_checkpoints_are_sorted_by_number(tmp_path, capsys):
    for number in (2, 9, 10, 11):
        save(tmp_path, f"checkpoint{number}.pt", {"w": torch.tensor([float(number)])})
    for other in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint_1_500.pt", "checkpoint12.pt.tmp"):
        save(tmp_path, other, {"w": torch.tensor([1e6])})
    assert average(tmp_path, "--num-epoch-checkpoints", "2")["model"]["w"] == 10.5
    message = capsys.readouterr().out
    assert "checkpoint11.pt" in message and "checkpoint10.pt" in message and "checkpoint9.pt" not in message


def test_update_checkpoints_are_sorted_by_update(tmp_path):
    for epoch, update in ((1, 900), (1, 1000), (2, 1100)):
        save(tmp_path, f"checkpoint_{epoch}_{update}.pt", {"w": torch.tensor([float(update)])})
    save(tmp_path, "checkpoint1.pt", {"w": torch.tensor([1e6])})
    assert average(tmp_path, "--num-update-checkpoints", "2")["model"]["w"] == 1050


def test_an_average_that_would_replace_one_of_its_checkpoints_is_refused(tmp_path):
    for name in ("a.pt", "b.pt"):
        save(tmp_path, name, {"w": torch.ones(1) * len(name)})
    os.symlink("a.pt", tmp_path / "link.pt")
    before = (tmp_path / "a.pt").read_bytes()
    for output in ("a.pt", "link.pt"):
        with pytest.raises(SystemExit, match=f"--output .*{output}: is one of the averaged checkpoints"):
            main(["--inputs", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"), "--output", str(tmp_path / output)])
    assert (tmp_path / "a.pt").read_bytes() == before


def test_named_files_with_only_weights_are_averaged(tmp_path):
    for name, value in {"a.pt": 1.0, "b.pt": 4.0, "c.pt": 7.0}.items():
        torch.save({"model": {"w": torch.tensor([value])}}, tmp_path / name)
    paths = [str(tmp_path / name) for name in ("a.pt", "b.pt", "c.pt")]
    main(["--inputs", *paths, "--output", str(tmp_path / "d.pt")])
    assert torch.load(tmp_path / "d.pt", weights_only=True) == {"model": {"w": torch.tensor([4.0])}}


def refuse(capsys, folder, *flags):
    """The one-sentence error of main(), which must not change the files in *folder*."""
    before = sorted(os.listdir(folder))
    with pytest.raises(SystemExit) as refused:
        average(folder, *flags)
    message = refused.value.code if isinstance(refused.value.code, str) else capsys.readouterr().err
    assert refused.value.code not in (0, None)
    assert sorted(os.listdir(folder)) == before
    return message


def test_fewer_checkpoints_than_requested_are_refused(tmp_path, capsys):
    save(tmp_path, "checkpoint1.pt", {"w": torch.ones(1)})
    message = refuse(capsys, tmp_path, "--num-epoch-checkpoints", "5")
    assert "--num-epoch-checkpoints 5: " in message and "has only 1 checkpoints (checkpoint1.pt)" in message
    assert "--num-update-checkpoints" not in message
    message = refuse(capsys, tmp_path, "--num-update-checkpoints", "2")
    assert "--num-update-checkpoints 2: " in message and "has only 0 checkpoints (none)" in message
    assert "--num-epoch-checkpoints" in message
    (tmp_path / "checkpoint1.pt").rename(tmp_path / "checkpoint_1_500.pt")
    assert "--num-update-checkpoints" in refuse(capsys, tmp_path, "--num-epoch-checkpoints", "1")


def test_differing_keys_and_shapes_are_refused_by_name(tmp_path, capsys):
    save(tmp_path, "checkpoint1.pt", {"same": torch.ones(1), "gone": torch.ones(1)})
    save(tmp_path, "checkpoint2.pt", {"same": torch.ones(1), "new": torch.ones(1)})
    message = refuse(capsys, tmp_path, "--num-epoch-checkpoints", "2")
    parts = ("the former lacks new; only the former has gone", "checkpoint1.pt", "checkpoint2.pt")
    assert all(part in message for part in parts)
    save(tmp_path, "checkpoint1.pt", {"same": torch.ones(2), "new": torch.ones(1)})
    message = refuse(capsys, tmp_path, "--num-epoch-checkpoints", "2")
    assert "same has shape (2,)" in message and "(1,)" in message


def options(**values):
    """The options of a small rotary model as fairseq saves them, without those whose value is None."""
    given = {"arch": "transformer_rope_tiny", "lr": [0.1], "seed": 1, "dropout": 0.1, **values}
    return Namespace(**{name: value for name, value in given.items() if value is not None})


def save_two(folder, first, second):
    """Save checkpoint2.pt, which is newer, with the entries *first*, and checkpoint1.pt with *second*."""
    save(folder, "checkpoint2.pt", {"w": torch.zeros(1)}, **first)
    save(folder, "checkpoint1.pt", {"w": torch.tensor([2.0])}, **second)


@pytest.mark.parametrize(
    "first, second, message",
    [
        ({}, {"rope_base": 500.0}, "--rope-base is 500.0 in the former and 10000.0 in the latter"),
        ({"rope_layout": "half"}, {}, "--rope-layout is interleaved in the former and half in the latter"),
        ({}, {"position_encoding": "none"}, "--encoder-position-encoding is none in the former and rope in the latter"),
        (
            {"encoder_position_encoding": "alibi", "alibi_type": "symmetric"},
            {"encoder_position_encoding": "alibi", "alibi_type": "asymmetric"},
            "--alibi-type is asymmetric in the former and symmetric in the latter",
        ),
        ({}, {"decoder_attention_heads": 4}, "--decoder-attention-heads is 4 in the former and 2 in"),
        ({}, {"encoder_normalize_before": True}, "--encoder-normalize-before is True in the former and not given"),
        ({}, {"arch": "transformer_tiny"}, "the model is transformer in the former and transformer_rope in"),
        (
            {"arch": "transformer_tiny"},
            {"arch": "transformer_tiny", "no_token_positional_embeddings": True},
            "--encoder-position-encoding is none in the former and sinusoidal in the latter",
        ),
    ],
)
def test_checkpoints_of_different_models_are_refused(tmp_path, capsys, first, second, message):
    save_two(tmp_path, *({"cfg": {"model": options(**values), "task": {}}} for values in (first, second)))
    sentence = refuse(capsys, tmp_path, "--num-epoch-checkpoints", "2")
    assert f"{tmp_path}/checkpoint1.pt and {tmp_path}/checkpoint2.pt are not of the same model: {message}" in sentence


@pytest.mark.parametrize("form", ["YAML", "args"])
def test_the_options_of_other_forms_of_checkpoints_are_compared(tmp_path, capsys, form):
    def state(base):
        given = options(rope_base=base)
        if form == "args":  # fairseq < 0.10
            return {"args": given, "cfg": None}
        return {"cfg": {"model": {"_name": vars(given).pop("arch"), **vars(given)}, "task": {}}}

    save_two(tmp_path, state(10000.0), state(500.0))
    assert "--rope-base is 500.0 " in refuse(capsys, tmp_path, "--num-epoch-checkpoints", "2")


def test_checkpoints_of_opposite_directions_are_refused(tmp_path, capsys):
    tasks = [{"source_lang": "en", "target_lang": "de"}, {"source_lang": "de", "target_lang": "en"}]
    save_two(tmp_path, *({"cfg": {"model": options(), "task": task}} for task in tasks))
    message = refuse(capsys, tmp_path, "--num-epoch-checkpoints", "2")
    assert "the direction is de-en in the former and en-de in the latter" in message


@pytest.mark.parametrize(
    "first, second",
    [
        ({"lr": [0.2], "seed": 2, "dropout": 0.3, "attention_dropout": 0.1}, {}),
        ({"rope_base": 10000.0, "rope_layout": "interleaved"}, {}),
        # an architecture of another name, with the same sizes
        ({"arch": "transformer_rope", "encoder_attention_heads": 2, "decoder_attention_heads": 2}, {}),
        # a user's architecture, which is not registered
        ({"arch": "of_somebody", "rope_base": 500.0}, {"arch": "of_somebody", "rope_base": 500.0}),
    ],
)
def test_checkpoints_with_other_training_settings_or_explicit_defaults_are_averaged(tmp_path, first, second):
    save_two(tmp_path, *({"cfg": {"model": options(**values), "task": {}}} for values in (first, second)))
    assert average(tmp_path, "--num-epoch-checkpoints", "2")["model"]["w"] == 1


def test_a_checkpoint_without_options_and_an_average_are_averaged(tmp_path):
    cfg = {"cfg": {"model": options(), "task": {}}}
    save_two(tmp_path, cfg, {})
    assert average(tmp_path, "--num-epoch-checkpoints", "2")["model"]["w"] == 1
    save_two(tmp_path, cfg, cfg)
    average(tmp_path, "--num-epoch-checkpoints", "2")
    save(tmp_path, "checkpoint3.pt", {"w": torch.tensor([4.0])}, **cfg)
    again = ["--inputs", *(str(tmp_path / name) for name in ("average.pt", "checkpoint3.pt"))]
    main([*again, "--output", str(tmp_path / "again.pt")])
    state = load_checkpoint(str(tmp_path / "again.pt"))
    assert state["model"]["w"] == 2.5 and state["cfg"]["model"] == options()


def test_a_checkpoint_given_twice_is_refused(tmp_path, capsys):
    save(tmp_path, "checkpoint1.pt", {"w": torch.ones(1)})
    save(tmp_path, "checkpoint2.pt", {"w": torch.zeros(1)})
    save(tmp_path, "saved_again.pt", {"w": torch.ones(1)}, extra_state={"epoch": 2})
    (tmp_path / "link.pt").symlink_to(tmp_path / "checkpoint1.pt")
    shutil.copy(tmp_path / "checkpoint1.pt", tmp_path / "checkpoint_best.pt")  # as fairseq makes it
    output = ["--output", str(tmp_path / "average.pt")]
    for other in ("checkpoint1.pt", "link.pt", "checkpoint_best.pt", "saved_again.pt"):
        paths = [str(tmp_path / name) for name in ("checkpoint1.pt", "checkpoint2.pt", other)]
        with pytest.raises(SystemExit, match=f"{paths[2]} has the same weights as {paths[0]}"):
            main(["--inputs", *paths, *output])
        assert not (tmp_path / "average.pt").exists()


def test_a_broken_checkpoint_is_refused_and_the_old_average_stays(tmp_path, capsys):
    save(tmp_path, "checkpoint1.pt", {"w": torch.ones(1)})
    average(tmp_path, "--num-epoch-checkpoints", "1")
    (tmp_path / "checkpoint2.pt").write_bytes((tmp_path / "checkpoint1.pt").read_bytes()[:300])
    assert "checkpoint2.pt" in refuse(capsys, tmp_path, "--num-epoch-checkpoints", "2")
    assert torch.load(tmp_path / "average.pt", weights_only=True)["model"]["w"] == 1


def test_only_one_checkpoint_and_the_sum_are_in_memory(tmp_path, monkeypatch):
    for number in range(1, 5):
        save(tmp_path, f"checkpoint{number}.pt", {"w": torch.full((1000, 100), float(number))})
    counts, real = [], checkpoints.load_checkpoint

    def counting(path):
        gc.collect()
        counts.append(sum(type(o) is torch.Tensor and o.shape == (1000, 100) for o in gc.get_objects()))
        return real(path)

    monkeypatch.setattr(checkpoints, "load_checkpoint", counting)
    average(tmp_path, "--num-epoch-checkpoints", "4")
    assert counts == [0, 1, 1, 1]  # tensors before each load: none, then only the sum


def test_numbered_checkpoints_of_two_folders_are_refused(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        save(tmp_path / name, "checkpoint1.pt", {"w": torch.ones(1)})
    flags = ["--inputs", str(tmp_path / "a"), str(tmp_path / "b"), "--output", str(tmp_path / "out.pt")]
    with pytest.raises(SystemExit, match=f"--num-epoch-checkpoints .*{tmp_path}/a {tmp_path}/b"):
        main([*flags, "--num-epoch-checkpoints", "1"])
    assert not (tmp_path / "out.pt").exists()
