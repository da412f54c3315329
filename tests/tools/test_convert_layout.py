"""fairseq_rope/tools/convert_layout.py: the same model in the other layout."""

import re

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from omegaconf import OmegaConf

from fairseq_rope.checkpoints import load_checkpoint
from fairseq_rope.patches import precision
from fairseq_rope.positions import ENCODINGS
from fairseq_rope.positions.rotary import LAYOUTS
from fairseq_rope.tools import convert_layout as layout
from fairseq_rope.transformer.models import TransformerRopeModel
from tests.commands import PLUGIN, call, outputs, scores, train, valid_losses


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


SMALL = [f"--{side}-{size}" for side in ("encoder", "decoder") for size in ("embed-dim=32", "layers=1")]


def update_losses(log):
    """The training loss of each update in a log with --log-interval 1."""
    entries = re.findall(r'"loss": "([\d.]+)".*?"num_updates": "(\d+)"', log)
    return {int(update): float(loss) for loss, update in entries}


@pytest.mark.parametrize(
    "flags, flat",
    [
        (["--rope-fraction", 0.5, "--encoder-attention-heads", 4, "--encoder-kv-heads", 2, "--qk-norm"], False),
        pytest.param(["--store-ema", "--ema-fp32"], False, marks=pytest.mark.slow),
        pytest.param(["--optimizer", "nag", "--lr", 0.1, "--momentum", 0.9], False, marks=pytest.mark.slow),
        pytest.param(["--optimizer", "sgd", "--lr", 0.1, "--momentum", 0.9], False, marks=pytest.mark.slow),
        pytest.param(["--optimizer", "adamax"], False, marks=pytest.mark.slow),
        pytest.param(["--optimizer", "adagrad"], False, marks=pytest.mark.slow),
        pytest.param(["--optimizer", "adadelta", "--lr", 1], False, marks=pytest.mark.slow),
        pytest.param(["--arch", "transformer_rope_align", *SMALL], False, marks=pytest.mark.slow),
        pytest.param(["--memory-efficient-fp16"], False, marks=pytest.mark.slow),
        (["--fp16"], True),
        pytest.param(["--bf16"], False, marks=pytest.mark.slow),
    ],
)
def test_training_resumes_from_a_converted_checkpoint_with_the_same_losses(
    data_bin, tmp_path, flags, flat, monkeypatch
):
    few = ["--train-subset", "test", "--max-tokens", 50, "--max-epoch", 2]
    flags = [*few, "--log-interval", 1, "--fp16-init-scale", 4, *flags]
    # The only function for which --fp16 needs a GPU and --memory-efficient-fp16 does not. So the plugin refuses --fp16.
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(precision, "refuse_precision", lambda *_: None)
    undisturbed, converted = tmp_path / "undisturbed", tmp_path / "converted"
    converted.mkdir()
    expected = train(data_bin, undisturbed, *flags)
    first = undisturbed / "checkpoint1.pt"
    convert(first, "half", converted / "checkpoint_last.pt")
    count = len(load_checkpoint(str(first))["last_optimizer_state"]["param_groups"][0]["params"])
    resumed = train(data_bin, converted, *flags, "--rope-layout", "half")

    assert (count == 1) == flat, "the form of the optimiser's state that is tested"
    losses = update_losses(expected)
    second_half = {update: loss for update, loss in losses.items() if update > len(losses) // 2}
    assert update_losses(resumed) == pytest.approx(second_half, abs=1.1e-3)  # three decimals are printed
    ((epoch, valid_loss),) = valid_losses(resumed).items()
    assert (epoch, float(valid_loss)) == (2, pytest.approx(float(valid_losses(expected)[2]), abs=1.1e-3))
    # Compare the weights in one layout. Moments in the wrong rows would change them by 0.001 or more.
    close = 5e-4 if {"--fp16", "--bf16", "--memory-efficient-fp16"} & set(flags) else 1e-4
    end = [load_checkpoint(str(folder / "checkpoint2.pt")) for folder in (undisturbed, converted)]
    end[1] = layout.convert_layout(end[1], "interleaved")
    for name, weight in end[0]["model"].items():
        if ".self_attn.q_proj." in name or ".self_attn.k_proj.weight" in name or ".self_attn.q_norm." in name:
            difference = (end[1]["model"][name].float() - weight.float()).abs()
            # With instructions for bf16, the other layout adds in another order: a few weights have another last bit.
            rounded = 0.01 if "--bf16" in flags else 0.0
            assert float((difference > close).float().mean()) <= rounded and float(difference.max()) < 2e-3
    if "--store-ema" in flags:
        for average in ("ema", "ema_fp32_params"):
            name = "encoder.layers.0.self_attn.q_proj.weight"
            averages = [state["extra_state"][average][name] for state in end]
            torch.testing.assert_close(averages[1], averages[0], atol=1e-5, rtol=0)


ONE_OPTIMISER = "it is not the state of one optimiser with one group of parameters"


def as_multilingual(state):
    """Turn *state* into one of multilingual_transformer_rope for the pair en-de."""
    state["model"] = {f"models.en-de.{name}": weight for name, weight in state["model"].items()}
    state["cfg"]["model"].arch = "multilingual_transformer_rope"


@pytest.mark.parametrize(
    "change, reason",
    [
        # of --optimizer composite
        (lambda state: {"default": state["last_optimizer_state"]}, ONE_OPTIMISER),
        (lambda state: [1, 2], ONE_OPTIMISER),
        (
            lambda state: with_state(state, {**state["last_optimizer_state"]["state"], 999: {}}),
            "it has entries for parameters that its group does not list",
        ),
        (lambda state: with_moments(state, exp_avg=[torch.ones(64)]), "its exp_avg is a list, not a tensor or number"),
        # of --optimizer adafactor
        (
            lambda state: with_moments(state, exp_avg_sq_row=torch.ones(64)),
            "the order of the rows of its exp_avg_sq_row is not known",
        ),
        (
            lambda state: with_moments(state, exp_avg=torch.ones(3, 2)),
            "its exp_avg of encoder.embed_tokens.weight has the shape (3, 2)",
        ),
        (as_multilingual, "the order of parameters is not known for a model without encoder.embed_tokens"),
        # of a model with a frozen parameter
        (lambda state: with_numbers(state, range(84)), "it has 84 parameters, and the model has 85"),
        (
            lambda state: state["cfg"]["distributed_training"].update(ddp_backend="fully_sharded"),
            "--ddp-backend fully_sharded numbers the parameters in another order",
        ),
        (
            lambda state: setattr(state["cfg"]["model"], "decoder_normalize_before", True),
            "its parameter decoder.layer_norm.weight does not fit the model that its options describe",
        ),
        (
            lambda state: setattr(state["cfg"]["model"], "activation_fn", "sine"),
            "the model cannot be built to find the order of its parameters: ",
        ),
    ],
)
def test_an_unknown_optimiser_state_is_dropped_with_a_warning(trained, tmp_path, capsys, change, reason):
    state = load_checkpoint(str(trained / "checkpoint_last.pt"))
    changed = change(state)
    if changed is not None:
        state["last_optimizer_state"] = changed
    path, output = tmp_path / "odd.pt", tmp_path / "half.pt"
    torch.save(state, path)
    convert(path, "half", output)
    printed, warned = capsys.readouterr()
    assert f"fairseq-rope convert-layout: warning: the optimiser's state is dropped: {reason}" in warned
    assert "starts with a new optimiser" in warned
    assert printed == f"wrote {output}, without the state of the optimiser\n"
    after = load_checkpoint(str(output))
    assert set(state) - set(after) == {"last_optimizer_state"}


def with_state(state, entries):
    """The optimiser's state of *state*, with other *entries*."""
    return {**state["last_optimizer_state"], "state": entries}


def with_moments(state, **moments):
    """The optimiser's state of *state*, with other entries for its first parameter."""
    entries = state["last_optimizer_state"]["state"]
    return with_state(state, {**entries, 0: {**entries[0], **moments}})


def with_numbers(state, numbers):
    """The optimiser's state of *state*, with only the parameters of these *numbers*."""
    optimiser = state["last_optimizer_state"]
    groups = [{**optimiser["param_groups"][0], "params": list(numbers)}]
    return {"state": {n: optimiser["state"][n] for n in numbers}, "param_groups": groups}


def test_a_checkpoint_without_optimiser_state_is_converted_without_a_warning(trained, tmp_path, capsys):
    state = load_checkpoint(str(trained / "checkpoint_last.pt"))
    del state["last_optimizer_state"]  # as fairseq_rope.tools.average writes it
    path, output = tmp_path / "average.pt", tmp_path / "half.pt"
    torch.save(state, path)
    convert(path, "half", output)
    assert capsys.readouterr() == (f"wrote {output}\n", "")


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


def test_the_rows_of_a_model_whose_heads_were_pruned_move_within_their_heads(trained):
    """fairseq's --mha-heads-to-keep leaves out rows, and the options keep the number of heads."""
    state = load_checkpoint(str(trained / "checkpoint_last.pt"))
    names = [f"encoder.layers.0.self_attn.{part}_proj.weight" for part in "qk"]
    state["model"].update({name: state["model"][name][:32] for name in names})
    converted = layout.convert_layout(state, "half")["model"]
    for name in names:
        assert torch.equal(converted[name], state["model"][name][layout.row_order(32, 32, "half")])


def test_options_that_fairseq_reads_as_a_configuration_are_kept(trained):
    state = load_checkpoint(str(trained / "checkpoint_last.pt"))
    options = dict(vars(state["cfg"]["model"]))
    state["cfg"]["model"] = OmegaConf.create(options)
    converted = layout.convert_layout(state, "half")["cfg"]["model"]
    assert converted == {**options, "rope_layout": "half"} and state["cfg"]["model"] == options
    with pytest.raises(layout.LayoutError, match="^the layout interleave must be one of interleaved, half$"):
        layout.convert_layout(state, "interleave")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state["cfg"].update(model=None), "it has no options of its model"),
        (lambda state: setattr(state["cfg"]["model"], "rope_layout", "neox"), "its rope_layout is neox, and must"),
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


def test_a_rotation_of_the_user_without_layouts_is_refused(trained, monkeypatch):
    own = type("Own", (ENCODINGS["rope"],), {"options": {}})
    monkeypatch.setitem(ENCODINGS, "own", own)
    state = load_checkpoint(str(trained / "checkpoint_last.pt"))
    options = vars(state["cfg"]["model"])
    for name in [name for name in options if name.startswith("rope_") or "_rope_" in name]:
        del options[name]
    options["position_encoding"] = "own"
    with pytest.raises(layout.LayoutError, match="^its position encoding is own, which has no --rope-layout$"):
        layout.convert_layout(state, "half")


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


def test_the_command_line_has_the_layouts_of_the_rotation():
    assert layout.CHOICES == LAYOUTS


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
