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


XPOS = {"encoder_position_encoding": "rope", "decoder_position_encoding": "xpos"}
BUCKETS = "relative_attention_num_buckets"
YARN = {"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 64}
# options of a model, and the flag and the value that the message begins with
REFUSED = [
    # fairseq's own options
    ({"cross_self_attention": True}, "--cross-self-attention"),
    ({"encoder_learned_pos": True}, "--encoder-learned-pos"),
    (of("sinusoidal", decoder_learned_pos=True), "--decoder-learned-pos"),
    ({"encoder_xformers_att_config": "{'name': 'linformer'}"}, "--encoder-xformers-att-config {'name': 'linformer'}"),
    ({"decoder_xformers_att_config": "{}"}, "--decoder-xformers-att-config {}"),
    ({"decoder_position_encoding": "xpos", "full_context_alignment": True}, "--full-context-alignment"),
    (of("sinusoidal", no_token_positional_embeddings=True), "--no-token-positional-embeddings"),
    ({"decoder_position_encoding": "learned", "no_token_positional_embeddings": True},
     "--no-token-positional-embeddings"),
    # types and choices
    (of("t5", **{BUCKETS: "eight"}), "--relative-attention-num-buckets eight"),
    (of("shaw", max_relative_positions=2.5), "--max-relative-positions 2.5"),
    ({"qk_norm": "yes"}, "--qk-norm yes"),
    ({"encoder_kv_heads": 0.5}, "--encoder-kv-heads 0.5"),
    ({"cross_kv_heads": -1}, "--cross-kv-heads -1"),
    ({"norm_type": "batch"}, "--norm-type batch"),
    ({"rope_layout": "neox"}, "--rope-layout neox"),
    (of("alibi", alibi_type="left"), "--alibi-type left"),
    ({"decoder_attention_type": "sparse"}, "--decoder-attention-type sparse"),
    (favor(favor_features=7), "--favor-features 7"),
    (favor(favor_features=2**40), "--favor-features 1099511627776"),
    ({"attention_length_scaling": 1}, "--attention-length-scaling 1"),
    ({"attention_length_scaling": math.nan}, "--attention-length-scaling nan"),
    # values of position encodings
    (of("rotary"), "--position-encoding rotary"),
    ({"decoder_position_encoding": "T5"}, "--decoder-position-encoding T5"),
    (of(""), "--position-encoding "),
    (of("xpos"), "--position-encoding xpos"),
    ({"encoder_position_encoding": "xpos"}, "--encoder-position-encoding xpos"),
    *(({"rope_fraction": value}, f"--rope-fraction {value}") for value in (0.0, 0.3, 1.5, math.nan)),
    *(({"rope_base": value}, f"--rope-base {value}") for value in (-1.0, 1.0, math.inf)),
    (of("t5", **{BUCKETS: 7}), "--relative-attention-num-buckets 7"),
    (of("t5", **{BUCKETS: 2}), "--relative-attention-num-buckets 2"),
    (of("t5", relative_attention_max_distance=16), "--relative-attention-max-distance 16"),
    (of("shaw", max_relative_positions=0), "--max-relative-positions 0"),
    (of("deberta", deberta_max_distance=0), "--deberta-max-distance 0"),
    ({**XPOS, "xpos_scale_base": 0.0}, "--xpos-scale-base 0.0"),
    ({**XPOS, "xpos_scale_base": math.nan}, "--xpos-scale-base nan"),
    ({"encoder_rope_scaling": "linear"}, "--encoder-rope-scaling linear"),
    (scaling("longrope", short_factor=[1], long_factor=[2], original_max_position_embeddings=64), "--rope-scaling "),
    ({"decoder_rope_scaling": {"rope_type": "proportional", "partial_rotary_factor": 0.5}, "rope_fraction": 0.5},
     "--rope-scaling "),
    (scaling("proportional", partial_rotary_factor=0.001), "--rope-scaling "),
    ({**scaling("ntk", factor=2), "rope_fraction": 2 / 32}, "--rope-scaling "),
    (favor(favor_features=6, rope_fraction=0.5), "--feature-map favor, with 6 features: --rope-fraction 0.5"),
    # options without an effect
    ({"decoder_position_encoding": "alibi", "alibi_type": "asymmetric"}, "--alibi-type asymmetric"),
    ({"xpos_scale_base": 64.0}, "--xpos-scale-base 64.0"),
    (of("alibi", rope_base=500.0), "--rope-base 500.0"),
    (of("alibi", rope_scaling="{}"), "--rope-scaling {}"),
    ({"decoder_position_encoding": "alibi", "decoder_rope_scaling": {"rope_type": "linear", "factor": 2}},
     "--decoder-rope-scaling {'rope_type': 'linear', 'factor': 2}"),
    (of("tupe", tupe_absolute_only=True, **{BUCKETS: 64}), "--relative-attention-num-buckets 64"),
    ({"no_cross_attention": True, "cross_kv_heads": 1}, "--cross-kv-heads 1"),
    ({"feature_map": "favor"}, "--feature-map favor"),
    (linear(favor_seed=1), "--favor-seed 1"),
    (linear(attention_length_scaling=9.0), "--attention-length-scaling 9.0"),
    # heads that share keys and values
    ({**FOUR_HEADS, "encoder_kv_heads": 3}, "--encoder-kv-heads 3"),
    ({"decoder_kv_heads": 8}, "--decoder-kv-heads 8"),
    ({"cross_kv_heads": 3}, "--cross-kv-heads 3"),
    # linear attention
    *((linear(position_encoding=name), "--attention-type linear")
      for name in ("alibi", "t5", "kerple", "shaw", "nezha", "transformer-xl", "deberta", "tupe")),
    ({"decoder_attention_type": "linear", "decoder_position_encoding": "shaw"}, "--decoder-attention-type linear"),
    (linear(rope_scaling=YARN), '--rope-scaling {"attention_factor": null, '),
    (linear(decoder_rope_scaling=YARN), '--decoder-rope-scaling {"attention_factor": null, '),
]  # fmt: skip


LM, ROBERTA = {"arch": "transformer_lm_rope"}, {"arch": "roberta_rope"}
ADAPTIVE = {"adaptive_softmax_cutoff": "10,20", "adaptive_input": True, "tie_adaptive_weights": True}
REFUSED += [
    ({**LM, "decoder_learned_pos": True}, "--decoder-learned-pos"),
    ({**LM, **scaling("dynamic", factor=2, original_max_position_embeddings=4)}, "--rope-scaling "),
    ({**LM, "decoder_kv_heads": 3}, "--decoder-kv-heads 3"),
    ({**LM, **ADAPTIVE, "adaptive_input_cutoff": "5,20"}, "--tie-adaptive-weights"),
    ({**ROBERTA, "position_encoding": "xpos"}, "--position-encoding xpos"),
    ({**ROBERTA, "alibi_type": "asymmetric"}, "--alibi-type asymmetric"),
    ({**ROBERTA, "encoder_learned_pos": True}, "--encoder-learned-pos"),
]


@pytest.mark.parametrize("options, flag", REFUSED)
def test_options_that_cannot_work_are_refused_in_one_sentence(build, options, flag):
    with pytest.raises(ValueError, match=f"^{re.escape(flag)}") as refused:
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
