"""Options that cannot work together: the model refuses them in one sentence, which names the flag."""

import math
import re

import pytest
import torch

from tests.models import FOUR_HEADS


def of(position_encoding, **options):
    return {"position_encoding": position_encoding, **options}


def linear(**options):
    return {"attention_type": "linear", **options}


def favor(**options):
    return linear(feature_map="favor", **options)


def scaling(rope_type, **keys):
    return {"rope_scaling": {"rope_type": rope_type, **keys}}


LEFT_OUT = "is not used by the position encodings"
XPOS = {"encoder_position_encoding": "rope", "decoder_position_encoding": "xpos"}
USE_XPOS = "use --encoder-position-encoding rope --decoder-position-encoding xpos"
BUCKETS = "relative_attention_num_buckets"
EVEN = "must be an even number of at least 4"
SEVERAL = {"checkpoint_activations": True, "distributed_world_size": 2, "ddp_backend": "pytorch_ddp"}
PAIRS = "computes no scores of pairs, which the encoder's position encoding"
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
NO_SCORES = re.escape('multiplies scores by 1.13863², and linear attention has no scores; add "attention_factor": 1')
REFUSED = [
    # fairseq's own options
    ({"cross_self_attention": True}, "--cross-self-attention has no meaning"),
    ({"encoder_learned_pos": True}, "--encoder-learned-pos asks for learned absolute positions"),
    ({"decoder_learned_pos": True}, "--decoder-learned-pos asks for learned absolute positions"),
    ({"encoder_xformers_att_config": "{'name': 'linformer'}"}, "--encoder-xformers-att-config .*linformer"),
    ({"decoder_xformers_att_config": "{'name': 'linformer'}"}, "--decoder-xformers-att-config .*linformer"),
    ({"decoder_attention_heads": 5}, "--decoder-attention-heads 5: must divide --decoder-embed-dim 64"),
    # the rotation
    ({"rope_fraction": 0.3}, "--rope-fraction 0.3 of a head of 32 dimensions leaves 9.6"),
    ({"rope_fraction": 1.5}, r"--rope-fraction 1.5: .* must be in \(0, 1\]"),
    ({"rope_base": -1.0}, "--rope-base -1.0: must be a finite number above 1"),
    ({"encoder_embed_dim": 36, "encoder_attention_heads": 4}, ".*a head of 9 dimensions leaves 9"),
    # position encodings
    (of("rotary"), "--position-encoding rotary: must be one of none, sinusoidal"),
    ({"decoder_position_encoding": "T5"}, "--decoder-position-encoding T5: must be one of none"),
    (of(""), "--position-encoding : must be one of none, sinusoidal"),
    (of("xpos"), f"--position-encoding xpos: .*{USE_XPOS}"),
    ({"encoder_position_encoding": "xpos"}, f"--encoder-position-encoding xpos: .*{USE_XPOS}"),
    ({"decoder_position_encoding": "alibi", "alibi_type": "asymmetric"},
     rf"--alibi-type asymmetric: {LEFT_OUT} rope \(encoder\) and alibi \(decoder\), but by alibi in the encoder"),
    ({"decoder_position_encoding": "xpos", "full_context_alignment": True},
     "--full-context-alignment: lets the decoder see later words, and the position encoding xpos is"),
    (of("t5", **{BUCKETS: "eight"}), "--relative-attention-num-buckets eight: must be an integer"),
    (of("t5", **{BUCKETS: 7}), f"--relative-attention-num-buckets 7: {EVEN}"),
    (of("t5", **{BUCKETS: 2}), f"--relative-attention-num-buckets 2: {EVEN}"),
    (of("t5", relative_attention_max_distance=16),
     "--relative-attention-max-distance 16: must be larger than 16, half of --relative-attention-num-buckets"),
    (of("shaw", max_relative_positions=2.5), ".* 2.5: must be an integer"),
    (of("shaw", max_relative_positions=0), "--max-relative-positions 0: must be at least 1"),
    (of("deberta", deberta_max_distance=0), "--deberta-max-distance 0: must be at least 1"),
    (of("shape", shape_max_shift=-1), "--shape-max-shift -1: must be an integer from 0 to 100000"),
    (of("shape", shape_max_shift=2.5), "--shape-max-shift 2.5: must be an integer from 0"),
    (of("sinusoidal", shape_max_shift=7), "--shape-max-shift 7: is not used by .* but by shape"),
    *((of("tupe", tupe_absolute_only=True, **{name: 64}),
       f"--{name.replace('_', '-')} 64: has no use with --tupe-absolute-only; drop one of the two")
      for name in (BUCKETS, "relative_attention_max_distance")),
    (of("alibi", alibi_type="left"), "--alibi-type left: must be one of symmetric, as"),
    ({**XPOS, "xpos_scale_base": 0.0}, "--xpos-scale-base 0.0: must be a finite number above 0"),
    ({**XPOS, "xpos_scale_base": math.nan}, "--xpos-scale-base nan: must be a finite number"),
    ({**XPOS, "rope_base": 1.0}, "--rope-base 1.0: must be a finite number above 1"),
    (of("alibi", rope_base=500.0),
     rf"--rope-base 500.0: {LEFT_OUT} alibi \(encoder\) and alibi \(decoder\), but by rope and xpos"),
    ({"xpos_scale_base": 64.0}, "--xpos-scale-base 64.0: is not used by .* but by xpos"),
    (of("shaw", **{BUCKETS: 32}), "--relative-attention-num-buckets 32: is not used by .* but by t5"),
    (of("sinusoidal", no_token_positional_embeddings=True),
     "--no-token-positional-embeddings contradicts the position encoding sinusoidal of the encoder"),
    ({"decoder_position_encoding": "learned", "no_token_positional_embeddings": True},
     "--no-token-positional-embeddings contradicts the position encoding learned of the decoder"),
    (of("sinusoidal", encoder_learned_pos=True),
     "--encoder-learned-pos .*use --encoder-position-encoding learned"),
    (of("t5", **SEVERAL), "--checkpoint-activations: .*legacy_ddp .* t5, whose"),
    (of("kerple", **SEVERAL), "--checkpoint-activations: .*legacy_ddp .* kerple, whose"),
    (of("deberta", **SEVERAL), "--checkpoint-activations: .*legacy_ddp .* deberta, whose"),
    # RoPE for longer inputs
    (scaling("longrope", short_factor=[1], long_factor=[2], original_max_position_embeddings=64),
     "--rope-scaling .*: short_factor has 1 numbers, and must have 16, one for each pair"),
    ({"decoder_rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}, "rope_fraction": 0.5},
     "--decoder-rope-scaling .*: needs --rope-fraction 1, not 0.5"),
    ({"encoder_rope_scaling": "linear"}, "--encoder-rope-scaling linear: must be a JSON object"),
    (scaling("proportional", partial_rotary_factor=0.001), ".*leaves no pair that rotates"),
    ({**scaling("ntk", factor=2), "rope_fraction": 2 / 32},
     "--rope-scaling .*: needs at least 4 rotating dimensions"),
    (of("alibi", rope_scaling="{}"), f"--rope-scaling {{}}: {LEFT_OUT}"),
    ({"decoder_position_encoding": "alibi", "decoder_rope_scaling": {"rope_type": "linear", "factor": 2}},
     f"--decoder-rope-scaling .*: {LEFT_OUT} rope .*, but by rope in the decoder"),
    ({"attention_length_scaling": 1}, "--attention-length-scaling 1: must be a number above 1, or 0"),
    ({"attention_length_scaling": math.nan}, "--attention-length-scaling nan: must be a number above 1, or 0"),
    # parts of the block
    ({"norm_type": "batch"}, "--norm-type batch: must be one of layer, rms"),
    ({"ffn_type": "moe"}, "--ffn-type moe: must be one of mlp, glu"),
    ({**FOUR_HEADS, "encoder_kv_heads": 3}, "--encoder-kv-heads 3: must divide --encoder-attention-heads 4 without"),
    ({"decoder_kv_heads": 8}, "--decoder-kv-heads 8: must divide --decoder-attention-heads 2 without remainder"),
    ({"cross_kv_heads": 3}, "--cross-kv-heads 3: must divide --decoder-attention-heads 2 without remainder"),
    ({"cross_kv_heads": -1}, "--cross-kv-heads -1: must be an integer from 0 to 2147483647"),
    ({"encoder_kv_heads": 0.5}, "--encoder-kv-heads 0.5: must be an integer from 0 to 2147483647"),
    ({"no_cross_attention": True, "cross_kv_heads": 1},
     "--cross-kv-heads 1: has no use with --no-cross-attention; drop one of the two"),
    ({"qk_norm": "yes"}, "--qk-norm yes: must be true or false"),
    ({"scale_glu_width": True}, "--scale-glu-width: is for gated feed-forward layers; add --ffn-type glu"),
    # weights of the output that are those of the input
    *(({name: True, "decoder_output_dim": 32},
       f"--{name.replace('_', '-')}: --decoder-output-dim 32 must be equal to --decoder-embed-dim 64$")
      for name in ("share_decoder_input_output_embed", "share_all_embeddings", "tie_adaptive_weights")),
    ({"tie_adaptive_weights": True, "adaptive_softmax_cutoff": [10, 20]},
     "--tie-adaptive-weights: needs --adaptive-input, which translation models lack; drop the flag$"),
    # linear attention
    *((linear(position_encoding=name), f"--attention-type linear: {PAIRS} {name} changes; use one of none, sinusoidal")
      for name in ("alibi", "t5", "kerple", "shaw", "nezha", "transformer-xl", "deberta", "tupe")),
    ({"decoder_attention_type": "linear", "decoder_position_encoding": "shaw"},
     "--decoder-attention-type linear: computes no scores of pairs, which the decoder's position encoding shaw"),
    (linear(attention_length_scaling=9.0), "--attention-length-scaling 9.0: is for softmax; drop it"),
    ({"attention_type": "lineal"}, "--attention-type lineal: must be one of softmax, linear"),
    ({"decoder_attention_type": "sparse"}, "--decoder-attention-type sparse: must be one of softmax, linear"),
    (favor(favor_features=7), "--favor-features 7: must be an even integer from 0 to 65536"),
    (favor(favor_features=2**40), "--favor-features 1099511627776: must be an even integer"),
    (favor(favor_seed=-1), "--favor-seed -1: must be an integer from 0 to 2147483647"),
    (linear(rope_scaling=YARN), f'--rope-scaling {{"attention_factor": null, .*"factor": 4, .*{NO_SCORES}$'),
    (linear(decoder_rope_scaling=YARN), f'--decoder-rope-scaling {{"attention_factor": null, .*{NO_SCORES}$'),
    (favor(favor_features=6, rope_fraction=0.5),
     "--feature-map favor, with 6 features: --rope-fraction 0.5 of a head of 6 dimensions leaves 3 to rotate; "),
    ({"feature_map": "favor"}, "--feature-map favor: is used with linear attention only"),
    (linear(favor_seed=1), "--favor-seed 1: is used with --feature-map favor only; drop the"),
]  # fmt: skip


@pytest.mark.parametrize("options, message", REFUSED)
def test_options_that_cannot_work_are_refused_in_one_sentence(build, options, message):
    with pytest.raises(ValueError, match=f"^{message}") as refused:
        build(**options)
    assert "\n" not in str(refused.value)


def test_buckets_are_those_of_the_side_that_has_them(build):
    tupe_a = {"encoder_position_encoding": "t5", "decoder_position_encoding": "tupe", "tupe_absolute_only": True}
    build(**tupe_a, **{BUCKETS: 64})


@pytest.mark.parametrize(
    "options", [{}, {"adaptive_softmax_cutoff": [10, 20], "share_decoder_input_output_embed": True}]
)
def test_an_output_of_another_width_works_with_weights_of_its_own(build, options):
    model = build(decoder_output_dim=32, **options)
    tokens = torch.full((1, 3), 5)
    assert model(tokens, torch.tensor([3]), tokens)[0].shape == (1, 3, 32 if options else 44)


@pytest.mark.parametrize("other", [{"ddp_backend": "legacy_ddp"}, {"distributed_world_size": 1}])
def test_activation_checkpointing_of_shared_parameters_is_allowed_where_it_works(build, other):
    build(**of("t5", **{**SEVERAL, **other}))
    build(**of("shaw", **SEVERAL))
