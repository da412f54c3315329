"""fairseq_rope/tools/average.py against the mean, computed here."""

import argparse
import gc
import os
import resource
import shutil
from argparse import ArgumentParser, Namespace

import pytest
import torch
from fairseq.models import MODEL_REGISTRY

from fairseq_rope.patches import loading
from fairseq_rope.patches.loading import load_checkpoint
from fairseq_rope.tools.average import MEANING, main


def save(folder, name, weights, **more):
    torch.save({"model": weights, "cfg": None, "last_optimizer_state": {"big": torch.ones(9)}, **more}, folder / name)


def average(folder, *flags):
    main(["--inputs", str(folder), "--output", str(folder / "average.pt"), *flags])
    return torch.load(folder / "average.pt", weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_average_is_the_exact_mean_in_the_weights_own_type(tmp_path, dtype):
    weights = [torch.randn(50, 20).to(dtype) for _ in range(5)]
    for number, weight in enumerate(weights, 1):
        save(tmp_path, f"checkpoint{number}.pt", {"w": weight, "steps": torch.tensor(number)})
    state = average(tmp_path, "--num-epoch-checkpoints", "5")
    exact = torch.stack([w.double() for w in weights]).mean(0)
    assert torch.equal(state["model"]["w"], exact.to(dtype))
    assert state["model"]["steps"] == 3


def test_sums_do_not_saturate_in_16_bits(tmp_path):
    for number in (1, 2, 3):
        save(tmp_path, f"checkpoint{number}.pt", {"w": torch.tensor([40000.0, number]).half()})
    assert average(tmp_path, "--num-epoch-checkpoints", "3")["model"]["w"].tolist() == [40000.0, 2.0]


def test_only_the_optimiser_state_is_dropped_and_the_newest_gives_the_rest(tmp_path):
    for number in (1, 2):
        save(
            tmp_path, f"checkpoint{number}.pt", {"w": torch.tensor([float(number)])},
            optimizer_history=[{"num_updates": number}], extra_state={"epoch": number},
        )  # fmt: skip
    state = average(tmp_path, "--num-epoch-checkpoints", "2")
    assert set(state) == {"model", "cfg", "optimizer_history", "extra_state"}
    assert state["extra_state"] == {"epoch": 2}


def test_epoch_checkpoints_are_sorted_by_number_and_bounded(tmp_path, capsys):
    for number in (2, 9, 10, 11):
        save(tmp_path, f"checkpoint{number}.pt", {"w": torch.tensor([float(number)])})
    for other in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint_1_500.pt", "checkpoint12.pt.tmp"):
        save(tmp_path, other, {"w": torch.tensor([1e6])})
    assert average(tmp_path, "--num-epoch-checkpoints", "2")["model"]["w"] == 10.5
    assert average(tmp_path, "--num-epoch-checkpoints", "2", "--checkpoint-upper-bound", "10")["model"]["w"] == 9.5
    said = capsys.readouterr().out
    assert "checkpoint10.pt" in said and "checkpoint9.pt" in said and "checkpoint2.pt" not in said


def test_update_checkpoints_are_sorted_by_update(tmp_path):
    for epoch, update in ((1, 900), (1, 1000), (2, 1100)):
        save(tmp_path, f"checkpoint_{epoch}_{update}.pt", {"w": torch.tensor([float(update)])})
    save(tmp_path, "checkpoint1.pt", {"w": torch.tensor([1e6])})
    assert average(tmp_path, "--num-update-checkpoints", "2")["model"]["w"] == 1050
    bounded = average(tmp_path, "--num-update-checkpoints", "2", "--checkpoint-upper-bound", "1000")
    assert bounded["model"]["w"] == 950


@pytest.mark.parametrize("maximize, expected", [(False, 1.5), (True, 10.5)])
def test_best_checkpoints_are_the_best_by_the_metrics_own_sense(tmp_path, maximize, expected):
    for value in (1, 2, 10, 11):
        save(
            tmp_path, f"checkpoint.best_bleu_{value}.00{value % 3}.pt", {"w": torch.tensor([float(value)])},
            cfg={"checkpoint": {"maximize_best_checkpoint_metric": maximize}},
        )  # fmt: skip
    assert average(tmp_path, "--num-best-checkpoints", "2")["model"]["w"] == expected


def test_best_of_negative_scores_and_of_old_checkpoints(tmp_path):
    for value in (-9, -3, -1):
        args = argparse.Namespace(maximize_best_checkpoint_metric=True)
        save(tmp_path, f"checkpoint.best_score_{value}.000.pt", {"w": torch.tensor([float(value)])}, args=args)
    main(["--inputs", str(tmp_path), "--output", str(tmp_path / "o.pt"), "--num-best-checkpoints", "2"])
    assert load_checkpoint(str(tmp_path / "o.pt"))["model"]["w"] == -2


def test_named_files_with_nothing_but_weights_are_averaged_as_they_are(tmp_path):
    for name, value in {"a.pt": 1.0, "b.pt": 4.0, "c.pt": 7.0}.items():
        torch.save({"model": {"w": torch.tensor([value])}}, tmp_path / name)
    paths = [str(tmp_path / name) for name in ("a.pt", "b.pt", "c.pt")]
    main(["--inputs", *paths, "--output", str(tmp_path / "d.pt")])
    assert torch.load(tmp_path / "d.pt", weights_only=True) == {"model": {"w": torch.tensor([4.0])}}


def refuse(capsys, folder, *flags):
    """The one sentence with which main() refuses; the folder holds no output and no rest of one."""
    before = sorted(os.listdir(folder))
    with pytest.raises(SystemExit) as refused:
        average(folder, *flags)
    said = refused.value.code if isinstance(refused.value.code, str) else capsys.readouterr().err
    assert refused.value.code not in (0, None)
    assert sorted(os.listdir(folder)) == before
    return said


def test_fewer_checkpoints_than_asked_are_refused(tmp_path, capsys):
    save(tmp_path, "checkpoint1.pt", {"w": torch.ones(1)})
    said = refuse(capsys, tmp_path, "--num-epoch-checkpoints", "5")
    assert "--num-epoch-checkpoints 5: " in said and "has only 1 checkpoints (checkpoint1.pt)" in said
    said = refuse(capsys, tmp_path, "--num-update-checkpoints", "2")
    assert "--num-update-checkpoints 2: " in said and "has only 0 checkpoints (none)" in said
    assert "--num-best-checkpoints 2" in refuse(capsys, tmp_path, "--num-best-checkpoints", "2")


def test_differing_keys_and_shapes_are_refused_by_name(tmp_path, capsys):
    save(tmp_path, "checkpoint1.pt", {"same": torch.ones(1), "gone": torch.ones(1)})
    save(tmp_path, "checkpoint2.pt", {"same": torch.ones(1), "new": torch.ones(1)})
    said = refuse(capsys, tmp_path, "--num-epoch-checkpoints", "2")
    parts = ("the former lacks new; only the former has gone", "checkpoint1.pt", "checkpoint2.pt")
    assert all(part in said for part in parts)
    save(tmp_path, "checkpoint1.pt", {"same": torch.ones(2), "new": torch.ones(1)})
    said = refuse(capsys, tmp_path, "--num-epoch-checkpoints", "2")
    assert "same has shape (2,)" in said and "(1,)" in said


def options(**values):
    """The options of a small rotary model, as fairseq saves them; an option of None is left out."""
    given = {"arch": "transformer_rope_tiny", "lr": [0.1], "seed": 1, "dropout": 0.1, **values}
    return Namespace(**{name: value for name, value in given.items() if value is not None})


def save_two(folder, first, second):
    """checkpoint2.pt with the configuration *first*, checkpoint1.pt with *second*; the newest comes first."""
    save(folder, "checkpoint2.pt", {"w": torch.zeros(1)}, **first)
    save(folder, "checkpoint1.pt", {"w": torch.tensor([2.0])}, **second)


@pytest.mark.parametrize(
    "first, second, said",
    [
        ({}, {"rope_base": 500.0}, "--rope-base is 500.0 in the former and 10000.0 in the latter"),
        ({"rope_layout": "half"}, {}, "--rope-layout is interleaved in the former and half in the latter"),
        ({}, {"rope_fraction": 0.5}, "--rope-fraction is 0.5 in the former and 1.0 in the latter"),
        ({}, {"decoder_attention_heads": 4}, "--decoder-attention-heads is 4 in the former and 2 in"),
        ({"activation_fn": "gelu"}, {}, "--activation-fn is relu in the former and gelu in the latter"),
        ({}, {"encoder_normalize_before": True}, "--encoder-normalize-before is True in the former and False"),
        ({}, {"arch": "transformer_tiny"}, "the model is transformer in the former and transformer_rope in"),
        (
            {"arch": "transformer_tiny"},
            {"arch": "transformer_tiny", "no_token_positional_embeddings": True},
            "--no-token-positional-embeddings is True in the former and False in the latter",
        ),
    ],
)
@pytest.mark.parametrize("form", ["cfg", "YAML", "args"])
def test_checkpoints_whose_weights_have_another_meaning_are_refused(tmp_path, capsys, first, second, said, form):
    def state(values):
        given = options(**values)
        if form == "args":  # fairseq < 0.10
            return {"args": given, "cfg": None}
        given = {"_name": vars(given).pop("arch"), **vars(given)} if form == "YAML" else given
        return {"cfg": {"model": given, "task": {}}}

    save_two(tmp_path, state(first), state(second))
    sentence = refuse(capsys, tmp_path, "--num-epoch-checkpoints", "2")
    files = f"{tmp_path}/checkpoint1.pt and {tmp_path}/checkpoint2.pt are not of the same model: "
    assert files + said in sentence


def test_checkpoints_of_opposite_directions_are_refused(tmp_path, capsys):
    tasks = [{"source_lang": "en", "target_lang": "de"}, {"source_lang": "de", "target_lang": "en"}]
    save_two(tmp_path, *({"cfg": {"model": options(), "task": task}} for task in tasks))
    said = refuse(capsys, tmp_path, "--num-epoch-checkpoints", "2")
    assert "the direction is de-en in the former and en-de in the latter" in said


@pytest.mark.parametrize(
    "first, second",
    [
        ({"lr": [0.2], "seed": 2, "dropout": 0.3, "attention_dropout": 0.1}, {}),
        ({"rope_base": 10000.0, "rope_layout": "interleaved"}, {}),
        # an architecture of another name, with the same sizes
        (
            {"arch": "transformer_rope", "encoder_attention_heads": 2, "decoder_attention_heads": 2},
            {"arch": "transformer_rope_tiny"},
        ),
        # an architecture of somebody's, which is not registered here
        ({"arch": "of_somebody", "rope_base": 500.0}, {"arch": "of_somebody", "rope_base": 500.0}),
    ],
)
def test_other_settings_of_the_training_and_defaults_that_are_written_out_are_averaged(tmp_path, first, second):
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


# Another value for every option of the transformer and of its rotary model.
OTHER_VALUES = {
    "activation_fn": "gelu", "dropout": 0.3, "attention_dropout": 0.3, "activation_dropout": 0.3,
    "relu_dropout": 0.3, "encoder_embed_dim": 32, "encoder_ffn_embed_dim": 32, "encoder_layers": 1,
    "encoder_attention_heads": 4, "encoder_normalize_before": True, "encoder_layerdrop": 0.3,
    "encoder_layers_to_keep": "0", "max_source_positions": 99, "decoder_embed_dim": 32,
    "decoder_ffn_embed_dim": 32, "decoder_layers": 1, "decoder_attention_heads": 4,
    "decoder_normalize_before": True, "decoder_layerdrop": 0.3, "decoder_layers_to_keep": "0",
    "decoder_output_dim": 32, "max_target_positions": 99, "no_token_positional_embeddings": True,
    "adaptive_softmax_dropout": 0.3, "adaptive_softmax_factor": 2, "layernorm_embedding": True,
    "no_scale_embedding": True, "checkpoint_activations": True, "offload_activations": True,
    "no_cross_attention": True, "quant_noise_pq": 0.1, "quant_noise_pq_block_size": 4,
    "quant_noise_scalar": 0.1, "min_params_to_wrap": 1, "char_inputs": True, "base_sublayers": 2,
    "base_shuffle": 2, "export": True, "no_decoder_final_norm": True, "rope_base": 500.0,
    "rope_layout": "half", "rope_fraction": 0.5, "encoder_learned_pos": True, "decoder_learned_pos": True,
    "adaptive_softmax_cutoff": [10, 20],
}  # fmt: skip
# How weights are shared changes no output, but whose average the shared weight is. The rest is refused by the
# model, or needs files, several processes or an adaptive softmax.
SHARING = {name for name in MEANING if name.startswith(("share_", "merge_", "tie_"))}
NOT_BUILT = {
    *("encoder_embed_path", "decoder_embed_path", "encoder_xformers_att_config"),
    *("decoder_xformers_att_config", "cross_self_attention", "base_layers", "adaptive_input"),
}


def test_the_options_that_are_compared_are_those_that_change_what_the_same_weights_compute(build):
    flags = {}
    for model in ("transformer_rope", "transformer"):
        parser = ArgumentParser(add_help=False, conflict_handler="resolve")
        MODEL_REGISTRY[model].add_args(parser)
        flags[model] = {action.dest for action in parser._actions}
    assert set().union(*flags.values()) - SHARING - NOT_BUILT == set(OTHER_VALUES), "no option is forgotten"

    source, previous = torch.randint(4, 40, (2, 2, 7))

    def output(model):
        return model(source, torch.tensor([7, 7]), previous)[0]

    changing = set()
    for arch, model in (("transformer_rope_tiny", "transformer_rope"), ("transformer_tiny", "transformer")):
        for name in sorted(flags[model] & set(OTHER_VALUES)):
            if name == "adaptive_softmax_cutoff" or (name.endswith("learned_pos") and "rope" in arch):
                continue  # an output of another form; refused
            extra = {"decoder_embed_dim": 32} if name == "encoder_embed_dim" else {}
            one, other = build(arch), build(arch, **{name: OTHER_VALUES[name]}, **extra)
            weights = one.state_dict()
            if {n: w.shape for n, w in weights.items()} == {n: w.shape for n, w in other.state_dict().items()}:
                other.load_state_dict(weights)
                if not torch.equal(output(one), output(other)):
                    changing.add(name)
    # These change the names of weights too, or which heads --print-alignment shows.
    also = {"encoder_normalize_before", "decoder_normalize_before", "adaptive_softmax_cutoff"}
    assert changing == set(MEANING) - SHARING - also - {"alignment_heads", "alignment_layer"}


def test_one_checkpoint_given_twice_is_refused(tmp_path, capsys):
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


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--checkpoint-upper-bound", "3"], "--checkpoint-upper-bound needs"),
        (["--num-epoch-checkpoints", "0"], "--num-epoch-checkpoints 0: must be at least 1"),
        (["--num-epoch-checkpoints", "1", "--num-update-checkpoints", "1"], "not allowed with argument"),
    ],
)
def test_wrong_flags_are_refused_by_name(tmp_path, capsys, flags, said):
    save(tmp_path, "checkpoint1.pt", {"w": torch.ones(1)})
    assert said in refuse(capsys, tmp_path, *flags)


def test_a_broken_checkpoint_is_refused_and_the_old_average_stays(tmp_path, capsys):
    save(tmp_path, "checkpoint1.pt", {"w": torch.ones(1)})
    average(tmp_path, "--num-epoch-checkpoints", "1")
    (tmp_path / "checkpoint2.pt").write_bytes((tmp_path / "checkpoint1.pt").read_bytes()[:300])
    assert "checkpoint2.pt" in refuse(capsys, tmp_path, "--num-epoch-checkpoints", "2")
    assert torch.load(tmp_path / "average.pt", weights_only=True)["model"]["w"] == 1


def test_a_disk_that_refuses_the_write_is_one_sentence_and_leaves_nothing_behind(tmp_path):
    save(tmp_path, "a.pt", {"w": torch.ones(100, 1000)})
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, unlimited[1]))
    try:
        with pytest.raises(SystemExit) as stopped:
            main(["--inputs", str(tmp_path / "a.pt"), "--output", str(tmp_path / "b.pt")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    said = stopped.value.code
    assert "\n" not in said and f"{tmp_path}/b.pt: could not be written" in said
    assert os.listdir(tmp_path) == ["a.pt"]


def test_one_checkpoint_and_the_sum_are_in_memory_at_a_time(tmp_path, monkeypatch):
    for number in range(1, 5):
        save(tmp_path, f"checkpoint{number}.pt", {"w": torch.full((1000, 100), float(number))})
    loaded, real = [], loading.load_checkpoint

    def counting(path):
        gc.collect()
        held = sum(type(o) is torch.Tensor and o.shape == (1000, 100) for o in gc.get_objects())
        loaded.append(held)
        return real(path)

    monkeypatch.setattr(loading, "load_checkpoint", counting)
    average(tmp_path, "--num-epoch-checkpoints", "4")
    assert loaded == [0, 1, 1, 1]  # before each load: nothing, then the sum alone
