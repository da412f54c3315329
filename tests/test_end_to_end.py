"""The plugin with fairseq's own commands as a user types them, from text to translations."""

import pytest
import torch

from fairseq_rope.checkpoints import load_checkpoint
from tests.commands import PLUGIN, outputs, run_program, train, training, valid_losses

FLAGS = ["--rope-layout", "half", "--rope-fraction", 0.5, "--rope-base", 500]


@pytest.mark.slow
def test_programs_train_average_and_translate(data_bin, tmp_path):
    done = run_program(*training(data_bin, tmp_path, *FLAGS, "--max-epoch", 6))
    losses = valid_losses(done.stdout + done.stderr)
    assert len(losses) == 6 and float(losses[6]) < 0.8 * float(losses[1])
    path = tmp_path / "average.pt"
    run_program("fairseq-rope", "average", "--inputs", tmp_path, "--num-epoch-checkpoints", 3, "--output", path)
    average = load_checkpoint(str(path))
    last = [load_checkpoint(str(tmp_path / f"checkpoint{epoch}.pt"))["model"] for epoch in (4, 5, 6)]
    for name, weight in average["model"].items():
        expected = torch.stack([model[name].double() for model in last]).mean(0).to(weight.dtype)
        assert torch.equal(weight, expected), name
    assert "last_optimizer_state" not in average
    flags = ["--path", path, "--user-dir", PLUGIN, "--beam", 4, "--lenpen", 0.6, "--max-len-b", 20, "--cpu"]
    generated = outputs(run_program("fairseq-generate", data_bin, *flags).stdout)
    source = (data_bin.parent / "text" / "test.en").read_text()
    assert sorted(generated) == list(range(20))
    assert outputs(run_program("fairseq-interactive", data_bin, *flags, input=source).stdout) == generated


@pytest.mark.slow
def test_a_resumed_training_ends_at_the_same_epoch_by_its_patience(data_bin, tmp_path):
    """With this learning rate no loss is lower than the first one, so a patience of 2 ends the training at epoch 3."""
    flags = ["--patience", 2, "--lr", 1e-12, "--warmup-init-lr", 1e-12, "--keep-last-epochs", 1]
    for last_epoch, expected in ((2, 2), (9, 3), (9, 3)):
        train(data_bin, tmp_path, *flags, "--max-epoch", last_epoch)
        state = load_checkpoint(str(tmp_path / "checkpoint_last.pt"))
        assert state["extra_state"]["train_iterator"]["epoch"] == expected + 1
    again = train(data_bin, tmp_path, *flags, "--max-epoch", 9, "--reset-meters")
    assert sorted(valid_losses(again)) == [4, 5, 6], "--reset-meters counts from the beginning"


def test_a_training_that_is_started_again_makes_no_update_beyond_its_maximum(data_bin, tmp_path):
    for most in (1, 1, 2):
        train(data_bin, tmp_path, "--max-update", most)
        state = load_checkpoint(str(tmp_path / "checkpoint_last.pt"))
        assert state["optimizer_history"][-1]["num_updates"] == most


@pytest.mark.parametrize("is_old", [False, True])
def test_a_sinusoidal_checkpoint_is_finetuned_with_rotary_positions(data_bin, sinusoidal, tmp_path, is_old):
    path = sinusoidal
    if is_old:  # the format until 2022: a buffer for the positions, and args instead of cfg
        state, path = load_checkpoint(str(sinusoidal)), tmp_path / "old.pt"
        for side in ("encoder", "decoder"):
            state["model"][f"{side}.embed_positions._float_tensor"] = torch.zeros(1)
        state["args"], state["cfg"] = state["cfg"]["model"], None
        torch.save(state, path)
    log = train(data_bin, tmp_path / "rotary", "--finetune-from-model", path)
    assert f"loading pretrained model from {path}" in log and valid_losses(log)
    assert ("dropped encoder.embed_positions._float_tensor" in log) == is_old


@pytest.mark.slow
def test_hydra_trains_the_same_model(data_bin, tmp_path):
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
    train(data_bin, tmp_path / "by_flags", *FLAGS)
    by_flags = load_checkpoint(str(tmp_path / "by_flags" / "checkpoint_last.pt"))["model"]
    assert by_yaml.keys() == by_flags.keys()
    for name, weight in by_flags.items():
        assert torch.equal(by_yaml[name], weight), name
