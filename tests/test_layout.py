"""fairseq_rope/layout.py: the other layout, the same model."""

import re

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_rope import layout
from fairseq_rope.patches.loading import load_checkpoint

from .commands import PLUGIN, call, outputs, scores, train


def logits(path):
    """What the model in *path* makes of a batch with padding: (B, T, words)."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    torch.manual_seed(1)
    words = torch.randint(4, len(task.source_dictionary), (3, 9))
    source = words.masked_fill(torch.arange(9) < torch.tensor([[0], [2], [4]]), task.source_dictionary.pad())
    lengths = torch.tensor([9, 7, 5])
    return model.eval()(source, lengths, words)[0].detach()


@pytest.mark.parametrize("fraction", [1, 0.5])
@pytest.mark.parametrize("there, back", [("half", "interleaved"), ("interleaved", "half")])
def test_the_other_layout_gives_the_same_output_and_the_way_back_the_same_weights(
    data_bin, tmp_path, fraction, there, back
):
    flags = ["--rope-layout", back, "--rope-fraction", fraction, "--decoder-attention-heads", 4]
    train(data_bin, tmp_path, *flags, "--no-epoch-checkpoints")
    path, turned, again = (tmp_path / name for name in ("checkpoint_last.pt", "turned.pt", "again.pt"))
    layout.main(["--path", str(path), "--rope-layout", there, "--output", str(turned)])
    layout.main(["--path", str(turned), "--rope-layout", back, "--output", str(again)])
    torch.testing.assert_close(logits(turned), logits(path), atol=1e-5, rtol=1e-5)
    weights = [load_checkpoint(str(file))["model"] for file in (path, turned, again)]
    assert all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    changed = {name for name, weight in weights[0].items() if not torch.equal(weight, weights[1][name])}
    assert {re.sub(r"^(encoder|decoder)\.layers\.\d+\.", "", name) for name in changed} <= {
        f"self_attn.{part}_proj.{kind}" for part in "qk" for kind in ("weight", "bias")
    }
    # Without the change of weights it would be another model, silently.
    state = load_checkpoint(str(path))
    state["cfg"]["model"].rope_layout = there
    torch.save(state, tmp_path / "wrong.pt")
    assert not torch.allclose(logits(tmp_path / "wrong.pt"), logits(path), atol=1e-2)


def test_a_turned_checkpoint_translates_the_same(data_bin, trained, tmp_path):
    turned = tmp_path / "half.pt"
    layout.main(
        ["--path", str(trained / "checkpoint_last.pt"), "--rope-layout", "half", "--output", str(turned)]
    )
    assert "last_optimizer_state" not in load_checkpoint(str(turned))
    printed = [
        call("fairseq-generate", data_bin, "--user-dir", PLUGIN, "--path", path, "--cpu", "--beam", 3)
        for path in (trained / "checkpoint_last.pt", turned)
    ]
    assert outputs(printed[0]) == outputs(printed[1])
    assert [pytest.approx(values, abs=1e-3) for values in scores(printed[0]).values()] == list(
        scores(printed[1]).values()
    )


def test_a_model_of_nested_yaml_and_averaged_weights_are_turned_too(data_bin, tmp_path):
    train(data_bin, tmp_path, "--no-epoch-checkpoints", "--store-ema")
    path, nested, turned = (tmp_path / name for name in ("checkpoint_last.pt", "nested.pt", "turned.pt"))
    state = load_checkpoint(str(path))
    flat = vars(state["cfg"]["model"])
    sides = {
        side: {"layers": 2, "embed_dim": 64, "ffn_embed_dim": 64, "attention_heads": 2}
        for side in ("encoder", "decoder")
    }
    given = {"_name": "transformer_rope", "share_all_embeddings": True, **sides}
    assert flat["encoder_ffn_embed_dim"] == 64, "the sizes of the tiny model"
    state["cfg"]["model"] = given
    torch.save(state, nested)
    layout.main(["--path", str(nested), "--rope-layout", "half", "--output", str(turned)])
    torch.testing.assert_close(logits(turned), logits(path), atol=1e-5, rtol=1e-5)
    after, name = load_checkpoint(str(turned)), "encoder.layers.0.self_attn.q_proj.weight"
    order = [row for head in (0, 1) for row in (head * 32 + n for n in layout.row_order(32, 32, "half"))]
    assert torch.equal(after["extra_state"]["ema"][name], state["extra_state"]["ema"][name][order])


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda state: state["cfg"].update(model=None), "does not say of which model it is"),
        (
            lambda state: setattr(state["cfg"]["model"], "rope_layout", "neox"),
            "its rope_layout is neox, and must",
        ),
        (
            lambda state: setattr(state["cfg"]["model"], "encoder_attention_heads", 5),
            "rows, which 5 heads do not",
        ),
        (lambda state: state["model"].clear(), "it has no self-attention"),
        (
            lambda state: state["model"].update(
                {"encoder.layers.0.self_attn.q_proj.centroids": torch.ones(2)}
            ),
            "centroids is neither weight nor bias, but of a quantised projection",
        ),
    ],
)
def test_what_cannot_be_turned_is_refused_by_name(trained, tmp_path, change, said):
    state = load_checkpoint(str(trained / "checkpoint_last.pt"))
    change(state)
    path = tmp_path / "changed.pt"
    torch.save(state, path)
    with pytest.raises(SystemExit, match=f"{path}: .*{said}"):
        layout.main(["--path", str(path), "--rope-layout", "half", "--output", str(tmp_path / "x.pt")])


def test_an_old_checkpoint_with_args_is_turned(trained, tmp_path):
    state = load_checkpoint(str(trained / "checkpoint_last.pt"))
    state["args"], state["cfg"] = state["cfg"]["model"], None
    turned = layout.convert_layout(state, "half")
    assert turned["args"].rope_layout == "half" and state["args"].rope_layout == "interleaved"


def test_a_checkpoint_already_in_the_layout_keeps_its_weights(trained, tmp_path):
    path, same = trained / "checkpoint_last.pt", tmp_path / "same.pt"
    layout.main(["--path", str(path), "--rope-layout", "interleaved", "--output", str(same)])
    before, after = (load_checkpoint(str(file))["model"] for file in (path, same))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_model_that_is_not_rotary_is_refused(data_bin, tmp_path):
    train(data_bin, tmp_path, "--arch", "transformer_tiny", "--no-epoch-checkpoints")
    path = tmp_path / "checkpoint_last.pt"
    with pytest.raises(SystemExit, match=f"--path {path}: it is of the architecture transformer_tiny, which"):
        layout.main(["--path", str(path), "--rope-layout", "half", "--output", str(tmp_path / "x.pt")])
    assert not (tmp_path / "x.pt").exists()


def test_the_rows_of_one_head_in_either_order():
    assert layout.row_order(8, 6, "half") == [0, 2, 4, 1, 3, 5, 6, 7]
    assert layout.row_order(8, 6, "interleaved") == [0, 3, 1, 4, 2, 5, 6, 7]
