"""The plugin with fairseq's own commands as a user types them, from text to translations."""

import pytest
import torch

import fairseq_rope.__main__
from fairseq_rope.checkpoints import load_checkpoint
from tests import forked_programs
from tests.commands import PLUGIN, ROOT, outputs, run_program, train, training, valid_losses

FLAGS = ["--rope-layout", "half", "--rope-fraction", 0.5, "--rope-base", 500, "--max-epoch", 6]


@pytest.fixture(scope="module")
def trained_checkpoints(data_bin, tmp_path_factory):
    """A folder with the checkpoints of 6 epochs and the average of the last 3; and the log."""
    folder = tmp_path_factory.mktemp("checkpoints")
    done = run_program(*training(data_bin, folder, *FLAGS))
    average = ["average", "--inputs", folder, "--num-epoch-checkpoints", 3, "--output", folder / "average.pt"]
    fairseq_rope.__main__.main([*map(str, average)])
    return folder, done.stdout + done.stderr


def test_training_learns_and_the_average_is_the_mean_of_the_last_three(trained_checkpoints):
    folder, log = trained_checkpoints
    losses = valid_losses(log)
    assert len(losses) == 6
    assert float(losses[6]) < 0.8 * float(losses[1])
    average = load_checkpoint(str(folder / "average.pt"))
    last = [load_checkpoint(str(folder / f"checkpoint{n}.pt"))["model"] for n in (4, 5, 6)]
    for name, weight in average["model"].items():
        expected = torch.stack([model[name].double() for model in last]).mean(0).to(weight.dtype)
        assert torch.equal(weight, expected), name
    assert "last_optimizer_state" not in average


def test_average_generate_and_interactive_agree(trained_checkpoints, data_bin):
    folder, _ = trained_checkpoints
    flags = [
        "--path",
        folder / "average.pt",
        "--user-dir",
        PLUGIN,
        "--beam",
        4,
        "--lenpen",
        0.6,
        "--max-len-b",
        20,
        "--cpu",
    ]
    generated = outputs(run_program("fairseq-generate", data_bin, *flags).stdout)
    source = (data_bin.parent / "text" / "test.en").read_text()
    assert sorted(generated) == list(range(20))
    assert outputs(run_program("fairseq-interactive", data_bin, *flags, input=source).stdout) == generated


@pytest.mark.slow
def test_a_resumed_training_ends_at_the_same_epoch_by_its_patience(data_bin, tmp_path):
    """With this learning rate no loss is lower than the first one, so a patience of 2 ends the training at epoch 3."""
    programs = forked_programs.folder()
    flags = ["--patience", 2, "--lr", 1e-12, "--warmup-init-lr", 1e-12, "--keep-last-epochs", 1]
    for last_epoch, expected in ((2, 2), (9, 3), (9, 3)):
        run_program(*training(data_bin, tmp_path, *flags, "--max-epoch", last_epoch), programs=programs)
        assert (
            load_checkpoint(str(tmp_path / "checkpoint_last.pt"))["extra_state"]["train_iterator"]["epoch"]
            == expected + 1
        )
    again = run_program(*training(data_bin, tmp_path, *flags, "--max-epoch", 9, "--reset-meters"), programs=programs)
    assert sorted(valid_losses(again.stdout + again.stderr)) == [4, 5, 6], "--reset-meters counts from the beginning"


def test_a_training_that_is_started_again_makes_no_update_beyond_its_maximum(data_bin, tmp_path):
    for most in (1, 1, 2):
        train(data_bin, tmp_path, "--max-update", most)
        state = load_checkpoint(str(tmp_path / "checkpoint_last.pt"))
        assert state["optimizer_history"][-1]["num_updates"] == most


def test_a_sinusoidal_checkpoint_is_finetuned_with_rotary_positions(data_bin, tmp_path):
    train(data_bin, tmp_path / "sinusoidal", "--arch", "transformer_tiny")
    path = tmp_path / "sinusoidal" / "checkpoint_last.pt"
    for old in (False, True):
        if old:  # the format until 2022: a buffer for the positions, and args instead of cfg
            state = load_checkpoint(str(path))
            for side in ("encoder", "decoder"):
                state["model"][f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
            state["args"], state["cfg"] = state["cfg"]["model"], None
            torch.save(state, path)
        output = train(data_bin, tmp_path / f"rotary{old}", "--max-epoch", 2, "--finetune-from-model", path)
        assert f"loading pretrained model from {path}" in output
        assert ("dropped encoder.embed_positions._float_tensor" in output) == old
        assert set(valid_losses(output)) == {1, 2}


@pytest.mark.slow
def test_hydra_trains_the_same_model(trained_checkpoints, data_bin, tmp_path):
    (tmp_path / "rope.yaml").write_text(
        f"""# @package _group_
common: {{user_dir: {PLUGIN}, cpu: true, seed: 3, log_format: json}}
task: {{_name: translation, data: {data_bin}, source_lang: en, target_lang: de}}
model: {{_name: transformer_rope_tiny, rope_layout: half, rope_fraction: 0.5, share_all_embeddings: true}}
criterion: {{_name: label_smoothed_cross_entropy, label_smoothing: 0.1}}
optimizer: {{_name: adam}}
lr_scheduler: {{_name: inverse_sqrt, warmup_updates: 20}}
dataset: {{max_tokens: 500, num_workers: 0}}
optimization: {{max_epoch: 1, lr: [0.01]}}
checkpoint: {{save_dir: {tmp_path / "checkpoints"}}}
"""
    )
    run_program(
        "fairseq-hydra-train", "--config-dir", tmp_path, "--config-name", "rope",
        "+model.rope_base=500", f"hydra.run.dir={tmp_path}", cwd=tmp_path,
    )  # fmt: skip
    by_yaml = load_checkpoint(str(tmp_path / "checkpoints" / "checkpoint_last.pt"))["model"]
    by_flags = load_checkpoint(str(trained_checkpoints[0] / "checkpoint1.pt"))["model"]
    assert by_yaml.keys() == by_flags.keys()
    for name, weight in by_flags.items():
        assert torch.equal(by_yaml[name], weight), name


def test_without_user_dir_fairseq_prints_the_documented_message(trained_checkpoints, data_bin):
    done = run_program(
        "fairseq-generate", data_bin, "--path", trained_checkpoints[0] / "average.pt", "--cpu", check=False
    )
    assert done.returncode != 0
    # torch < 2.6 and fairseq's git main read the checkpoint. They do not know the model, and fail to report that.
    quoted = ("Weights only load failed", "Replacement index 1 out of range for positional args tuple")
    assert any(text in done.stderr for text in quoted), done.stderr
    page = " ".join((ROOT / "docs" / "training.md").read_text().split())
    assert all(text in page for text in quoted)


def test_an_unknown_layout_is_refused(data_bin, tmp_path):
    with pytest.raises(ValueError, match=r"\A--rope-layout neox: must be one of interleaved, half\Z"):
        train(data_bin, tmp_path, "--rope-layout", "neox")
