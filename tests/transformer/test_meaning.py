"""What makes two checkpoints the same model, and what happens when a training continues from another one."""

import json
from argparse import ArgumentParser, Namespace

import pytest
import torch
from fairseq.models import MODEL_REGISTRY

from fairseq_rope.errors import InputError
from fairseq_rope.transformer.flags import all_flags
from fairseq_rope.transformer.meaning import FUNCTION, OTHER_MODEL_OPTIONS, describe, meaning, option_differences
from tests.commands import train
from tests.models import FOUR_HEADS

# A value other than the default for every option of the transformer and of the rotary model.
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
    "base_shuffle": 2, "export": True, "no_decoder_final_norm": True, "encoder_learned_pos": True,
    "decoder_learned_pos": True,
    "adaptive_softmax_cutoff": [10, 20],
}  # fmt: skip
# SHARING changes which weights are the same, but no output. The model refuses the options in NOT_BUILT, or they need
# files, several processes or an adaptive softmax.
SHARING = {name for name in (*FUNCTION, *OTHER_MODEL_OPTIONS) if name.startswith(("share_", "merge_", "tie_"))}
NOT_BUILT = {
    *("encoder_embed_path", "decoder_embed_path", "encoder_xformers_att_config"),
    *("decoder_xformers_att_config", "cross_self_attention", "base_layers", "adaptive_input"),
}


def test_the_compared_options_are_those_that_change_the_output_of_the_same_weights(build):
    flags = {}
    for model in ("transformer_rope", "transformer"):
        parser = ArgumentParser(add_help=False, conflict_handler="resolve")
        MODEL_REGISTRY[model].add_args(parser)
        flags[model] = {action.dest for action in parser._actions}
    assert set().union(*flags.values()) - SHARING - NOT_BUILT - set(all_flags()) == set(OTHER_VALUES)

    source, previous = torch.randint(4, 40, (2, 2, 7))

    def output(model):
        return model(source, torch.tensor([7, 7]), previous)[0]

    changing = set()
    for arch, model in (("transformer_rope_tiny", "transformer_rope"), ("transformer_tiny", "transformer")):
        one = build(arch)
        weights = one.state_dict()
        for name in sorted(flags[model] & set(OTHER_VALUES)):
            if name == "adaptive_softmax_cutoff" or (name.endswith("learned_pos") and "rope" in arch):
                continue  # another form of output, or refused
            extra = {"decoder_embed_dim": 32} if name == "encoder_embed_dim" else {}
            other = build(arch, **{name: OTHER_VALUES[name]}, **extra)
            if {n: w.shape for n, w in weights.items()} == {n: w.shape for n, w in other.state_dict().items()}:
                other.load_state_dict(weights)
                if not torch.equal(output(one), output(other)):
                    changing.add(name)
    # These also change the names of weights, or are refused, or a task applies them after the model is built.
    also = {"encoder_normalize_before", "decoder_normalize_before", "adaptive_softmax_cutoff", "layernorm_embedding"}
    positions = {"no_token_positional_embeddings", "encoder_learned_pos", "decoder_learned_pos"}
    assert changing - positions == set(FUNCTION) - SHARING - NOT_BUILT - also - {"quant_noise_scalar"}


SCALING = {"rope_type": "linear", "factor": 2}
# The options of two models, and what differs.
PAIRS = [
    ({}, {"rope_base": 10000.0, "dropout": 0.3, "encoder_layerdrop": 0.1, "max_source_positions": 7}, ""),
    ({"position_encoding": "shape"}, {"position_encoding": "shape", "shape_max_shift": 7}, ""),
    ({**FOUR_HEADS, "encoder_kv_heads": 4}, {**FOUR_HEADS, "cross_kv_heads": 4}, ""),
    ({**FOUR_HEADS, "encoder_kv_heads": 2}, FOUR_HEADS, "with --encoder-kv-heads 2, not 0"),
    ({"encoder_kv_heads": 1}, {}, "with --encoder-kv-heads 1, not 0"),
    ({"share_all_embeddings": True}, {"share_all_embeddings": True, "share_decoder_input_output_embed": True}, ""),
    ({"adaptive_softmax_cutoff": "8, 16"}, {"adaptive_softmax_cutoff": [8, 16]}, ""),
    ({"adaptive_softmax_cutoff": "8"}, {}, "with --adaptive-softmax-cutoff 8, not without --adaptive-softmax-cutoff"),
    ({"qk_norm": True}, {}, "with --qk-norm, not without --qk-norm"),
    ({"norm_type": "rms"}, {}, "with --norm-type rms, not layer"),
    ({"rope_scaling": SCALING}, {"rope_scaling": json.dumps({**SCALING, "factor": 2.0})}, ""),
    ({"rope_scaling": SCALING}, {"encoder_rope_scaling": SCALING, "decoder_rope_scaling": SCALING}, ""),
    (
        {"position_encoding": "alibi", "activation_fn": "gelu"},
        {},
        "with --encoder-position-encoding alibi, not rope and with --decoder-position-encoding alibi, not rope and "
        "with --activation-fn gelu, not relu",
    ),
    (
        {"attention_type": "linear", "feature_map": "favor"},
        {"attention_type": "linear", "feature_map": "favor", "favor_features": 112},  # 32 * ln 32, in steps of 8
        "",
    ),
    ({"quant_noise_scalar": 0.1}, {"quant_noise_scalar": 0.2}, ""),
    ({"arch": "transformer_tiny", "qk_norm": True}, {"arch": "transformer_tiny"}, ""),  # not an option of fairseq's
    (
        {"arch": "transformer_tiny", "encoder_learned_pos": True},
        {"arch": "transformer_tiny"},
        "with --encoder-position-encoding learned, not sinusoidal",
    ),
]


@pytest.mark.parametrize("first, second, expected", PAIRS)
def test_two_models_differ_in_what_changes_their_function(first, second, expected):
    one, other = (meaning(Namespace(**{"arch": "transformer_rope_tiny", **given})) for given in (first, second))
    assert describe(option_differences(one, other)) == expected


RESUMED = [
    (["--activation-fn", "gelu"], "with --activation-fn relu, not gelu"),
    (["--encoder-attention-heads", 4], "with --encoder-attention-heads 2, not 4"),
    (["--no-scale-embedding"], "without --no-scale-embedding, not with --no-scale-embedding"),
    (["--rope-base", 500], "with --rope-base 10000.0, not 500.0"),
]


@pytest.mark.parametrize("flags, difference", RESUMED)
def test_a_training_does_not_resume_as_another_model(data_bin, trained, tmp_path, flags, difference):
    path = trained / "checkpoint_last.pt"
    with pytest.raises(InputError) as refused:
        train(data_bin, tmp_path, "--restore-file", path, "--max-epoch", 21, *flags)
    start = f"start another training from it, in another --save-dir, with --finetune-from-model {path}"
    assert str(refused.value) == f"{path} was trained {difference}; use the same value, or {start}"


@pytest.mark.parametrize("start", ["--finetune-from-model", "--reset-optimizer --restore-file"])
def test_a_new_training_from_another_model_gives_one_warning(data_bin, trained, tmp_path, start):
    path, flags = trained / "checkpoint_last.pt", [word for flags, _ in RESUMED for word in flags]
    log = train(data_bin, tmp_path, *flags, "--max-update", 1, *start.split(), path)
    (warning,) = [line for line in log.splitlines() if "was trained" in line]
    assert all(difference in warning for _, difference in RESUMED) and '"train_' not in log.partition(warning)[0]


def test_as_many_key_value_heads_as_heads_are_the_default_and_fairseqs_own_models_resume_as_always(
    data_bin, trained, tmp_path
):
    flags = ["--encoder-kv-heads", 2, "--cross-kv-heads", 2]
    log = train(data_bin, tmp_path, "--restore-file", trained / "checkpoint_last.pt", "--max-epoch", 20, *flags)
    assert "Loaded checkpoint" in log and "was trained" not in log
    sinusoidal = ["--arch", "transformer_tiny", "--max-update"]
    train(data_bin, tmp_path / "fairseqs", *sinusoidal, 1)
    train(data_bin, tmp_path / "fairseqs", *sinusoidal, 2, "--activation-fn", "gelu")
