"""fairseq_rope/tools/convert_layout.py: the same model in the other layout."""

import re

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY

from fairseq_rope.checkpoints import load_checkpoint
from fairseq_rope.positions import ENCODINGS
from fairseq_rope.tools import convert_layout as layout
from fairseq_rope.transformer.models import TransformerRopeModel
from tests.commands import PLUGIN, call, outputs, scores, train


def logits(path):
    """The output (B, T, words) of the model in *path* for a batch with padding."""
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    torch.manual_seed(1)
    words = torch.randint(4, len(task.source_dictionary), (3, 9))
    source = words.masked_fill(torch.arange(9) < torch.tensor([[0], [2], [4]]), task.source_dictionary.pad())
    lengths = torch.tensor([9, 7, 5])
    return model.eval()(source, lengths, words)[0].detach()


def convert(path, new_layout, output, *flags):
    layout.main([str(word) for word in ("--path", path, "--rope-layout", new_layout, "--output", output, *flags)])


@pytest.mark.parametrize("fraction", [1, 0.5])
def test_the_other_layout_gives_the_same_output_and_converting_back_the_same_weights(
    data_bin, trained, tmp_path, fraction
):
    path, turned, again = (tmp_path / name for name in ("checkpoint_last.pt", "turned.pt", "again.pt"))
    if fraction == 1:
        path = trained / "checkpoint_last.pt"
    else:
        flags = ["--rope-fraction", fraction, "--decoder-attention-heads", 4]
        train(data_bin, tmp_path, *flags, "--no-epoch-checkpoints")
    convert(path, "half", turned)
    convert(turned, "interleaved", again)
    torch.testing.assert_close(logits(turned), logits(path), atol=1e-5, rtol=1e-5)
    weights = [load_checkpoint(str(file))["model"] for file in (path, turned, again)]
    assert all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0])
    changed = {name for name, weight in weights[0].items() if not torch.equal(weight, weights[1][name])}
    assert {re.sub(r"^(encoder|decoder)\.layers\.\d+\.", "", name) for name in changed} <= {
        f"self_attn.{part}_proj.{kind}" for part in "qk" for kind in ("weight", "bias")
    }
    # Changing only the option, and not the weights, gives a different model without an error.
    state = load_checkpoint(str(path))
    state["cfg"]["model"].rope_layout = "half"
    torch.save(state, tmp_path / "wrong.pt")
    assert not torch.allclose(logits(tmp_path / "wrong.pt"), logits(path), atol=1e-2)


@pytest.mark.slow
def test_a_converted_checkpoint_translates_the_same(data_bin, trained, tmp_path):
    path, turned = trained / "checkpoint_last.pt", tmp_path / "half.pt"
    convert(path, "half", turned)
    flags = ["--user-dir", PLUGIN, "--cpu"]
    search = ["fairseq-generate", data_bin, *flags, "--max-len-b", 20]
    one, other = (call(*search, "--path", each) for each in (path, turned))
    assert outputs(one) == outputs(other) and scores(one).keys() == scores(other).keys()
    assert sum(scores(one).values(), []) == pytest.approx(sum(scores(other).values(), []), abs=1e-3)
    validate = ["fairseq-validate", data_bin, *flags, *"--task translation --log-format json --max-tokens 500".split()]
    losses = [re.findall(r'"valid_[a-z_]*loss": "[\d.]+"', call(*validate, "--path", each)) for each in (path, turned)]
    assert losses[0] and losses[0] == losses[1]


def test_a_training_resumes_from_a_converted_checkpoint_with_a_new_optimiser(data_bin, trained, tmp_path, capsys):
    path, turned = trained / "checkpoint_last.pt", tmp_path / "checkpoint_last.pt"
    convert(path, "half", turned)
    anew = ": in a training that resumes from it, the optimiser and its learning-rate schedule start anew"
    assert capsys.readouterr() == (f"wrote {turned}{anew}\n", "")
    before, after = (load_checkpoint(str(file)) for file in (path, turned))
    assert before.keys() - after.keys() == {"last_optimizer_state"} and before["extra_state"] == after["extra_state"]
    epoch = before["extra_state"]["train_iterator"]["epoch"]
    log = train(data_bin, tmp_path, "--rope-layout", "half", "--max-epoch", epoch, "--log-interval", 1)
    assert f"{turned} has no state of the optimiser: it, the learning rate and the updates start anew" in log
    first_update = re.search(r'"epoch": (\d+).*?"num_updates": "(\d+)"', log)
    assert first_update.groups() == (str(epoch), "1")


def test_the_input_is_replaced_only_with_force(trained, tmp_path):
    path, link, hard_link = (tmp_path / name for name in ("a.pt", "link.pt", "hard.pt"))
    path.write_bytes((trained / "checkpoint_last.pt").read_bytes())
    link.symlink_to(path)
    hard_link.hardlink_to(path)
    before = path.read_bytes()
    for given, output in ((path, path), (path, link), (link, path), (path, hard_link)):
        with pytest.raises(SystemExit, match=f"--output {output}: is the file of --path {given}"):
            convert(given, "half", output)
        assert path.read_bytes() == before
    convert(path, "half", path, "--force")
    assert load_checkpoint(str(path))["cfg"]["model"].rope_layout == "half"


def test_a_model_of_nested_yaml_and_averaged_weights_are_converted_too(trained, tmp_path):
    path, nested, turned = trained / "checkpoint_last.pt", tmp_path / "nested.pt", tmp_path / "turned.pt"
    state = load_checkpoint(str(path))
    state["extra_state"]["ema"] = {name: 0.5 * weight for name, weight in state["model"].items()}
    assert state["cfg"]["model"].encoder_ffn_embed_dim == 64, "the sizes of the tiny model"
    sizes = {"layers": 2, "embed_dim": 64, "ffn_embed_dim": 64, "attention_heads": 2}
    given = {"_name": "transformer_rope", "share_all_embeddings": True, "encoder": sizes, "decoder": dict(sizes)}
    state["cfg"]["model"] = given
    torch.save(state, nested)
    convert(nested, "half", turned)
    torch.testing.assert_close(logits(turned), logits(path), atol=1e-5, rtol=1e-5)
    after, name = load_checkpoint(str(turned)), "encoder.layers.0.self_attn.q_proj.weight"
    order = [row for head in (0, 1) for row in (head * 32 + n for n in layout.row_order(32, 32, "half"))]
    assert torch.equal(after["extra_state"]["ema"][name], state["extra_state"]["ema"][name][order])


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state["cfg"].update(model=None), "it has no options of its model"),
        (lambda state: setattr(state["cfg"]["model"], "rope_layout", "neox"), "--rope-layout neox: "),
        (
            lambda state: setattr(state["cfg"]["model"], "encoder_attention_heads", 5),
            "has 64 rows, which is not a multiple of the 12 of a head",
        ),
        (lambda state: state["model"].clear(), "it has no self-attention"),
        (
            lambda state: state["model"].update({"encoder.layers.0.self_attn.q_proj.centroids": torch.ones(2)}),
            "centroids is not a weight or bias, but part of a quantised projection",
        ),
    ],
)
def test_a_checkpoint_that_cannot_be_converted_is_refused_by_name(trained, tmp_path, change, message):
    state = load_checkpoint(str(trained / "checkpoint_last.pt"))
    change(state)
    path = tmp_path / "changed.pt"
    torch.save(state, path)
    with pytest.raises(SystemExit, match=f"{path}: .*{message}"):
        convert(path, "half", tmp_path / "x.pt")


def test_a_rotation_with_parameters_is_refused(trained, monkeypatch):
    """Only its author knows how its dimensions are ordered."""
    own = type("Own", (ENCODINGS["rope"],), {})
    monkeypatch.setitem(ENCODINGS, "own", own)
    state = load_checkpoint(str(trained / "checkpoint_last.pt"))
    state["cfg"]["model"].position_encoding = "own"
    state["model"]["encoder.layers.0.self_attn.position.gain"] = torch.ones(4)
    with pytest.raises(layout.LayoutError, match="self_attn.position.gain is part of the rotation, which can only"):
        layout.convert_layout(state, "half")


def test_an_old_checkpoint_with_args_is_converted(trained, tmp_path):
    state = load_checkpoint(str(trained / "checkpoint_last.pt"))
    state["args"], state["cfg"] = state["cfg"]["model"], None
    turned = layout.convert_layout(state, "half")
    assert turned["args"].rope_layout == "half" and state["args"].rope_layout == "interleaved"


def test_a_checkpoint_already_in_the_layout_is_copied_with_a_message(trained, tmp_path, capsys):
    path, same = trained / "checkpoint_last.pt", tmp_path / "same.pt"
    convert(path, "interleaved", same)
    message = f"{path} already has the layout interleaved: nothing was changed\nwrote {same}\n"
    assert capsys.readouterr() == (message, "")
    before, after = (load_checkpoint(str(file)) for file in (path, same))
    assert all(torch.equal(before["model"][name], after["model"][name]) for name in before["model"])
    moments = [state["last_optimizer_state"]["state"] for state in (before, after)]
    assert all(torch.equal(moments[0][n]["exp_avg"], moments[1][n]["exp_avg"]) for n in moments[0])


def test_a_model_that_is_not_rotary_is_refused(sinusoidal, tmp_path):
    with pytest.raises(SystemExit, match=f"--path {sinusoidal}: its model is transformer, which is not rotary"):
        convert(sinusoidal, "half", tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


def test_row_order_of_one_head_in_both_layouts():
    assert layout.row_order(8, 6, "half") == [0, 2, 4, 1, 3, 5, 6, 7]
    assert layout.row_order(8, 6, "interleaved") == [0, 3, 1, 4, 2, 5, 6, 7]


def test_a_rotary_model_of_a_user_dir_is_converted(trained, monkeypatch):
    own = type("Own", (TransformerRopeModel,), {})
    monkeypatch.setitem(MODEL_REGISTRY, "own", own)
    monkeypatch.setitem(ARCH_MODEL_NAME_REGISTRY, "own", "own")
    monkeypatch.setitem(ARCH_MODEL_REGISTRY, "own", own)
    path = str(trained / "checkpoint_last.pt")
    expected, state = layout.convert_layout(load_checkpoint(path), "half"), load_checkpoint(path)
    state["cfg"]["model"].arch = state["cfg"]["model"]._name = "own"
    converted = layout.convert_layout(state, "half")
    assert all(torch.equal(converted["model"][name], expected["model"][name]) for name in expected["model"])
    assert converted["cfg"]["model"].rope_layout == "half"
