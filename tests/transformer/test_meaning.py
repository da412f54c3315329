"""What makes two checkpoints the same model, and what happens when a training continues from another one."""

import json
from argparse import Namespace

import pytest
import torch

from fairseq_rope.checkpoints import flags_of_model
from fairseq_rope.errors import InputError
from fairseq_rope.transformer.flags import all_flags
from fairseq_rope.transformer.meaning import FUNCTION, OTHER_MODEL_OPTIONS, describe, meaning, option_differences
from tests.commands import train
from tests.models import FOUR_HEADS

# A value other than the default for every option of fairseq's models that builds a model of the same shapes
OTHER_VALUES = {
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout", "relu_dropout", "pooler_dropout"), 0.3),
    **dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop", "adaptive_softmax_dropout"), 0.3),
    **dict.fromkeys(("quant_noise_pq", "quant_noise_scalar", "mha_reg_scale_factor", "ffn_reg_scale_factor"), 0.1),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads", "quant_noise_pq_block_size"), 4),
    **dict.fromkeys(("min_params_to_wrap", "mha_heads_to_keep"), 1),
    **dict.fromkeys(("adaptive_softmax_factor", "adaptive_input_factor", "base_sublayers", "base_shuffle"), 2),
    **dict.fromkeys(("character_embedding_dim", "char_embedder_highway_layers", "ffn_blocks_to_remove"), 2),
    **dict.fromkeys(("encoder_normalize_before", "decoder_normalize_before", "no_decoder_final_norm"), True),
    **dict.fromkeys(("no_scale_embedding", "no_token_positional_embeddings", "no_cross_attention"), True),
    **dict.fromkeys(("checkpoint_activations", "offload_activations", "char_inputs", "export", "compile"), True),
    **dict.fromkeys(("load_checkpoint_heads", "spectral_norm_classification_head", "untie_weights_roberta"), True),
    "activation_fn": "gelu_accurate", "pooler_activation_fn": "relu", "character_filters": "[(1, 8)]",
    "adaptive_input_cutoff": "10,20",
}  # fmt: skip
# Other shapes, other forms of the output or other numbers of positions; options that share weights, are refused, or
# need files or several processes
NOT_BUILT = {
    *("encoder_embed_dim", "encoder_ffn_embed_dim", "encoder_layers", "encoder_layers_to_keep", "max_source_positions"),
    *("decoder_embed_dim", "decoder_ffn_embed_dim", "decoder_layers", "decoder_layers_to_keep", "max_target_positions"),
    *("decoder_input_dim", "decoder_output_dim", "max_positions", "layernorm_embedding", "character_embeddings"),
    *("encoder_learned_pos", "decoder_learned_pos", "encoder_embed_path", "decoder_embed_path", "adaptive_input"),
    *("encoder_xformers_att_config", "decoder_xformers_att_config", "cross_self_attention", "base_layers"),
    *("adaptive_softmax_cutoff", "scale_fc", "scale_attn", "scale_heads", "scale_resids"),
    *(name for name in (*FUNCTION, *OTHER_MODEL_OPTIONS) if name.startswith(("share_", "merge_", "tie_"))),
}
SIDES = ("encoder", "decoder")
SMALL = {
    **{f"{side}_{part}_dim": 64 for side in SIDES for part in ("embed", "ffn_embed", "input", "output")},
    **{f"{side}_{part}": 2 for side in SIDES for part in ("layers", "attention_heads")},
    **{"max_positions": 30, "max_target_positions": 30, "quant_noise_pq_block_size": 8},
}
# an architecture -> its sides that are ours, and the options with which the same weights have another output
HEADS = {"encoder_attention_heads", "decoder_attention_heads"}
CHANGING = {
    "transformer_rope_tiny": (SIDES, {"activation_fn", "no_scale_embedding", *HEADS}),
    "transformer_tiny": ((), {"activation_fn", "no_scale_embedding", "no_token_positional_embeddings", *HEADS}),
    "transformer_lm_rope": (("decoder",), {"activation_fn", "no_scale_embedding", "decoder_attention_heads"}),
    "roberta_rope": (("encoder",), {"activation_fn", "pooler_activation_fn", "encoder_attention_heads"}),
}


@pytest.mark.parametrize("arch", list(CHANGING))
def test_the_compared_options_are_those_that_change_the_output_of_the_same_weights(build, arch):
    sides, expected = CHANGING[arch]
    tokens, lengths = torch.randint(4, 40, (2, 7)), torch.tensor([7, 7])

    def built(**options):
        model = build(arch, **{**SMALL, **options})
        if hasattr(model, "register_classification_head"):
            model.register_classification_head("pairs", num_classes=2)
        return model.eval()

    def outputs(model):
        if hasattr(model, "register_classification_head"):
            return [model(tokens)[0], model(tokens, classification_head_name="pairs")[0]]
        return [model(tokens)[0] if sides == ("decoder",) else model(tokens, lengths, tokens)[0]]

    model, changing = built(), set()
    for name in flags_of_model(arch) - {"help"} - set(all_flags(sides)) - NOT_BUILT:
        other = built(**{name: OTHER_VALUES[name]})
        if model.state_dict().keys() == other.state_dict().keys():
            other.load_state_dict(model.state_dict())
            if not all(map(torch.equal, outputs(model), outputs(other))):
                changing.add(name)
    assert changing == expected
    assert expected - {"no_token_positional_embeddings"} <= {*FUNCTION, *OTHER_MODEL_OPTIONS}


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
