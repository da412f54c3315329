"""fairseq_rope/tools/export.py: CTranslate2's model, compared with the checkpoint for every option."""

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import signal
from types import SimpleNamespace

import ctranslate2
import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.tasks.translation import TranslationTask

from fairseq_rope.positions import ENCODINGS as KNOWN_ENCODINGS
from fairseq_rope.positions.alibi import ALiBi
from fairseq_rope.positions.rotary import RotaryEmbedding
from fairseq_rope.serving import ctranslate2_model, export, export_checks
from fairseq_rope.serving.ctranslate2_model import position_limits, quantize, to_spec, words
from fairseq_rope.serving.ctranslate2_search import log_probs
from fairseq_rope.serving.ctranslate2_support import refuse_unsupported
from fairseq_rope.serving.exported_folder import INT8, QUANTIZATIONS, ExportError, TranslateError
from fairseq_rope.serving.replaced_folder import replacing
from fairseq_rope.serving.translator import Translator
from fairseq_rope.text.tokens import Tokeniser
from fairseq_rope.tools import average
from fairseq_rope.tools import export as command
from fairseq_rope.tools.export import main
from fairseq_rope.transformer.flags import encoding_options
from tests.models import FOUR_HEADS, LLAMA
from tests.serving.exports import exported


@pytest.fixture(autouse=True)
def _fewer_samples(monkeypatch):
    monkeypatch.setattr(export_checks, "SAMPLES", 20)


@pytest.fixture
def without_validation_set(monkeypatch):
    """Skip the slow comparison of translations in tests of something else."""
    monkeypatch.setattr(export_checks, "validation_pairs", lambda task: [])


def strong(model):
    """*model* with queries, keys and relative positions so large that they matter."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search(r"(q|k)_(proj|norm)\.weight|position\.relative", name):
                parameter.mul_(4.0)
            if re.search(r"norm\w*\.(weight|bias)", name):  # those of a new model are all 1 or 0
                parameter.add_(torch.rand_like(parameter) - 0.5)
    return model


def write(model, task, folder, quantization="float32", change=lambda spec: None):
    spec = to_spec(model, task.source_dictionary, task.target_dictionary)
    change(spec)
    spec.validate()
    quantize(spec, quantization)
    folder.mkdir()
    spec.save(str(folder))
    return str(folder)


def reference_of(model, task, **settings):
    search = {"beam": 4, "lenpen": 0.6, "max_len_b": 50, "segments": None, "quantization": "float32"}
    return export_checks.Reference(model, task, {**search, "positions": position_limits(model), **settings})


def check(folder, model, task, quantization="float32", force=False):
    return export_checks.check_model(str(folder), reference_of(model, task), quantization, force)


PRE_NORM = {"encoder_normalize_before": True, "decoder_normalize_before": True}
LEARNT = {"encoder_learned_pos": True, "decoder_learned_pos": True}
EXPORTED = {
    "the default": {},
    "half": {"rope_layout": "half"},
    "a fraction": {"rope_fraction": 0.25},
    "half, a fraction, another base": {"rope_layout": "half", "rope_fraction": 0.5, "rope_base": 500.0},
    "pre-norm": PRE_NORM,
    "the encoder pre-norm, the decoder not": {"encoder_normalize_before": True},
    "the decoder pre-norm, the encoder not": {"decoder_normalize_before": True},
    "pre-norm without the last norm": {**PRE_NORM, "no_decoder_final_norm": True},
    "shared embeddings": {"share_all_embeddings": True},
    "shared decoder embeddings": {"share_decoder_input_output_embed": True},
    "embeddings not scaled": {"no_scale_embedding": True},
    "embeddings normalised": {"layernorm_embedding": True},
    "other sizes": {
        "encoder_embed_dim": 32, "decoder_embed_dim": 64, "encoder_attention_heads": 1,
        "decoder_attention_heads": 4, "encoder_layers": 3, "decoder_layers": 1, "encoder_ffn_embed_dim": 48,
    },
    "projected in": {"decoder_input_dim": 48},
    "projected out": {"decoder_output_dim": 48},
    "gelu": {"activation_fn": "gelu"},
    "gelu_fast": {"activation_fn": "gelu_fast"},
    "gelu_accurate": {"activation_fn": "gelu_accurate"},
    "layers dropped": {"encoder_layerdrop": 0.2, "decoder_layerdrop": 0.2},
    "sinusoids": {"arch": "transformer_tiny"},
    "learnt positions": {"arch": "transformer_tiny", **LEARNT},
    "few learnt positions": {
        "arch": "transformer_tiny", **LEARNT, "max_source_positions": 30, "max_target_positions": 20,
    },
}  # fmt: skip
SMALL_VARIANCE = {"layernorm_embedding": True, "no_scale_embedding": True}  # so that a wrong epsilon matters
EXPORTED.update({
    "RMSNorm": {"norm_type": "rms", **SMALL_VARIANCE},
    "SwiGLU": {"ffn_type": "glu", "activation_fn": "swish"},
    "ReGLU": {"ffn_type": "glu", "encoder_ffn_embed_dim": 40},
    "no biases": {"no_projection_bias": True},
    "multi-query": {**FOUR_HEADS, "encoder_kv_heads": 1, "decoder_kv_heads": 1, "cross_kv_heads": 1},
    "two heads of keys in the encoder": {**FOUR_HEADS, "encoder_kv_heads": 2},
    "two heads of keys in the decoder": {**FOUR_HEADS, "decoder_kv_heads": 2},
    "two heads of keys in cross-attention": {**FOUR_HEADS, "cross_kv_heads": 2},
    "normalised queries and keys": {"qk_norm": True},
    "normalised queries and keys, half layout": {"qk_norm": True, "rope_layout": "half"},
    "the block of LLaMA": LLAMA,
    "all parts": {
        **LLAMA, **FOUR_HEADS, "encoder_kv_heads": 2, "decoder_kv_heads": 1, "cross_kv_heads": 2, "qk_norm": True,
    },
})  # fmt: skip
TRAINED = {"original_max_position_embeddings": 40}
SCALINGS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4},
    "ntk": {"rope_type": "ntk", "factor": 4},
    "yarn": {"rope_type": "yarn", "factor": 4, "beta_fast": 4, **TRAINED},
    "llama3": {"rope_type": "llama3", "factor": 4, "low_freq_factor": 1, "high_freq_factor": 4, **TRAINED},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
}
ENCODINGS = {
    **{name: {"position_encoding": name} for name in ("none", "sinusoidal", "shape", "learned")},
    **{name: {"position_encoding": name} for name in ("alibi", "t5", "shaw", "nezha", "kerple")},
    "asymmetric alibi": {"position_encoding": "alibi", "alibi_type": "asymmetric"},
    "few buckets": {
        "position_encoding": "t5", "relative_attention_num_buckets": 10, "relative_attention_max_distance": 70,
    },
    "near vectors": {"position_encoding": "shaw", "max_relative_positions": 1},
    "alibi and rope": {"encoder_position_encoding": "alibi", "decoder_position_encoding": "rope"},
    "rope and t5": {"encoder_position_encoding": "rope", "decoder_position_encoding": "t5"},
    **{f"rope, {name}": {"rope_scaling": scaling} for name, scaling in SCALINGS.items()},
    "yarn, half, a fraction": {"rope_scaling": SCALINGS["yarn"], "rope_layout": "half", "rope_fraction": 0.5},
    "yarn and llama3": {"encoder_rope_scaling": SCALINGS["yarn"], "decoder_rope_scaling": SCALINGS["llama3"]},
    "proportional and alibi": {"rope_scaling": SCALINGS["proportional"], "decoder_position_encoding": "alibi"},
    "yarn and normalised queries": {"rope_scaling": SCALINGS["yarn"], "qk_norm": True, "rope_fraction": 0.5},
    **{
        f"{name}, two heads of keys": {"position_encoding": name, **FOUR_HEADS, "decoder_kv_heads": 2}
        for name in ("alibi", "t5", "shaw", "nezha", "kerple", "none", "sinusoidal")
    },
    "shaw and none": {"encoder_position_encoding": "shaw", "decoder_position_encoding": "none"},
    "learned and shaw": {"encoder_position_encoding": "learned", "decoder_position_encoding": "shaw"},
    "none and sinusoidal": {"encoder_position_encoding": "none", "decoder_position_encoding": "sinusoidal"},
    "fairseq's without positions": {"arch": "transformer_tiny", "no_token_positional_embeddings": True},
}  # fmt: skip


@pytest.mark.parametrize("name", [*EXPORTED, *ENCODINGS])
def test_every_option_scores_as_in_the_checkpoint(build, task, tmp_path, monkeypatch, name):
    """With encodings also for sentences that are longer than all distances with biases or vectors of their own."""
    monkeypatch.setattr(export_checks, "LONGEST_SAMPLE", 300 if name in ENCODINGS else 128)
    options = {**EXPORTED, **ENCODINGS}[name]
    model = strong(build(**{"arch": "transformer_rope_tiny", **options}))
    refuse_unsupported(model, "model.pt", "float32")
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert "differ from the checkpoint's by" in check(write(model, task, tmp_path / "model"), model, task)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    if name == "few learnt positions":
        assert position_limits(model) == {"source": 30, "target": 20}


class Window(ALiBi):
    """A bias that is no encoding of ours: a step after 5 positions."""

    def by_distance(self, distance):
        return -3.0 * (distance.abs() > 5).expand(len(self.slope), -1)


def test_another_bias_of_the_distance_is_exported_if_layers_share_it(build, task, tmp_path):
    model, window = strong(build(position_encoding="alibi")), Window(2)
    for layer in (*model.encoder.layers, *model.decoder.layers):
        layer.self_attn.position = window
    assert "differ from the checkpoint's by" in check(write(model, task, tmp_path / "model"), model, task)
    window.shared = False
    with pytest.raises(ExportError, match="Window"):
        refuse_unsupported(model, "model.pt", "float32")


@pytest.mark.parametrize(
    "arch, encoding",
    [
        ("transformer_tiny", {}),
        ("transformer_rope_tiny", ENCODINGS["alibi"]),
        ("transformer_rope_tiny", {"rope_scaling": SCALINGS["yarn"]}),
        ("transformer_rope_tiny", {"rope_scaling": SCALINGS["ntk"]}),
    ],
)
def test_exported_positions_continue_beyond_those_of_training(build, task, tmp_path, arch, encoding):
    model = build(arch, max_source_positions=3000, max_target_positions=3000, **encoding)
    folder = write(model, task, tmp_path / "model")
    pairs = [([task.source_dictionary.nspecial] * 2100, [task.target_dictionary.nspecial] * 1400)]
    (actual,), computed_in = log_probs(folder, list(export_checks.words_of_pairs(task, pairs)))
    assert computed_in == "float32"
    (expected,) = export_checks.torch_scores(model, task, pairs)
    assert actual == pytest.approx(expected, abs=1e-4) and len(actual) == 1401


@pytest.mark.parametrize(
    "quantization, name", [*((each, "shared embeddings") for each in QUANTIZATIONS[1:]), ("int8", "all parts")]
)
def test_a_quantised_model_is_within_its_bound_and_the_checkpoint_stays_unchanged(
    build, task, tmp_path, quantization, name
):
    model = build("transformer_rope_tiny", **EXPORTED[name])
    before = {key: value.clone() for key, value in model.state_dict().items()}
    folder = write(model, task, tmp_path / "model", quantization)
    message = check(folder, model, task, quantization)
    assert "per word on average" in message
    supported = ctranslate2.get_supported_compute_types("cpu")
    assert ("(computed in " in message) == (quantization not in supported)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["shared embeddings", "all parts"])
@pytest.mark.parametrize("quantization", INT8)
def test_int8_weights_are_the_nearest_whole_numbers_of_7_bits(build, task, quantization, name):
    model = strong(build("transformer_rope_tiny", **EXPORTED[name]))
    first, second = model.encoder.layers[0].fc2, model.encoder.layers[1].fc2
    with torch.no_grad():
        first.weight[0] = 0.0
        second.weight.copy_(4 * first.weight)  # the same whole numbers, but another scale

    def variables(quantize):
        spec = to_spec(model, task.source_dictionary, task.target_dictionary)
        spec.validate()
        quantize(spec)
        return spec.variables()

    exact = variables(lambda spec: spec.optimize())  # CTranslate2's own
    expected = variables(lambda spec: spec.optimize(quantization=quantization))
    actual = variables(lambda spec: quantize(spec, quantization))
    assert actual.keys() == expected.keys()
    weights = 0
    for key, value in expected.items():
        if isinstance(value, str) or value.is_scalar():
            assert actual[key] == value if isinstance(value, str) else actual[key].equal(value)
            continue
        assert (actual[key].dtype, list(actual[key].shape)) == (value.dtype, list(value.shape)), key
        if value.dtype != "int8":
            continue
        weights += 1
        saved, scale, weight = actual[key].numpy(), actual[f"{key}_scale"].numpy(), exact[key].numpy()
        step = np.abs(weight).max(axis=1, keepdims=True) / 63
        assert (np.abs(saved / scale[:, None] - weight) <= step / 2 + 1e-6).all(), key
        assert np.isfinite(scale).all() and np.abs(saved).max() == 63, key
    assert weights > 20


def of_self_attention(spec, name, value=None):
    """Set an attribute of all self-attention in *spec*, or delete it."""
    for layer in (*spec.encoder.layer, *spec.decoder.layer):
        delattr(layer.self_attention, name) if value is None else setattr(layer.self_attention, name, value)


def of_biases(change):
    """Return a function that changes the table of biases of each side in a specification."""

    def change_spec(spec):
        for side in (spec.encoder, spec.decoder):
            table = change(side.layer[0].self_attention.relative_attention_bias)
            for layer in side.layer:
                layer.self_attention.relative_attention_bias = np.ascontiguousarray(table)

    return change_spec


def exchange(part, one, other):
    """Return a function that exchanges two attributes of a part of each layer in a specification."""

    def change_spec(spec):
        for layer in (*spec.encoder.layer, *spec.decoder.layer):
            values = vars(getattr(layer, part))
            values[one], values[other] = values[other], values[one]

    return change_spec


def exchange_heads_of_keys(spec):
    for layer in spec.decoder.layer:
        weight = layer.attention.linear[1].weight  # keys and values, two heads each
        layer.attention.linear[1].weight = weight.reshape(2, 2, -1, weight.shape[1])[:, ::-1].reshape(weight.shape)


# the position encoding or the options of the model, and the change
WRONG = {
    "no rotation": ("rope", lambda spec: of_self_attention(spec, "rotary_dim")),
    "the other layout": ("rope", lambda spec: of_self_attention(spec, "rotary_interleave", False)),
    "another base": ("rope", lambda spec: of_self_attention(spec, "rotary_base", np.float32(500.0))),
    "no scale of embeddings": ("rope", lambda spec: setattr(spec.decoder, "scale_embeddings", 1.0)),
    "another epsilon": ("rope", lambda spec: setattr(spec.config, "layer_norm_epsilon", 0.1)),
    "another start": ("rope", lambda spec: setattr(spec.config, "decoder_start_token", "<s>")),
    "a rotation": ("none", lambda spec: of_self_attention(spec, "rotary_scaling_factor", np.float32(1.0))),
    "sinusoids": ("none", lambda spec: of_self_attention(spec, "rotary_dim")),
    "biases of the next distance": ("alibi", of_biases(lambda table: np.roll(table, 1, axis=0))),
    "biases of the other direction": ("t5", of_biases(lambda table: np.roll(table, len(table) // 2, axis=0))),
    "biases of the other head": ("kerple", of_biases(lambda table: table[:, ::-1])),
    "biases in other buckets": ("kerple", of_biases(lambda table: table[: len(table) // 64])),
    "vectors exchanged": ("shaw", exchange("self_attention", "relative_position_keys", "relative_position_values")),
    "the epsilon of layer norms": (EXPORTED["RMSNorm"], lambda spec: setattr(spec.config, "layer_norm_epsilon", 1e-5)),
    "gate and up exchanged": (EXPORTED["SwiGLU"], exchange("ffn", "linear_0", "linear_0_noact")),
    "norms of heads exchanged": (
        {"qk_norm": True, "rope_fraction": 0.5},
        exchange("self_attention", "q_norm", "k_norm"),
    ),
    "heads of keys exchanged": (EXPORTED["two heads of keys in cross-attention"], exchange_heads_of_keys),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_a_wrong_model_specification_is_refused(build, task, tmp_path, name):
    options, change = WRONG[name]
    options = options if isinstance(options, dict) else {"position_encoding": options}
    model = strong(build("transformer_rope_tiny", **options))
    folder = write(model, task, tmp_path / "model", change=change)
    with pytest.raises(ExportError, match="per word at most, and 0.0001 "):
        check(folder, model, task)


def test_a_wrong_model_specification_is_refused_in_8_bits(build, task, tmp_path):
    options, change = WRONG["no rotation"]
    model = strong(build("transformer_rope_tiny", position_encoding=options))
    folder = write(model, task, tmp_path / "model", "int8", change)
    with pytest.raises(ExportError, match="per word on average, and 0.3 "):
        check(folder, model, task, "int8")


def test_models_with_rope_scaling_are_compared_on_longer_sentences(build, task, monkeypatch, without_validation_set):
    monkeypatch.setattr(export_checks, "SAMPLES", 64)
    lengths = []
    for options in ({}, {"decoder_rope_scaling": SCALINGS["linear"]}):
        pairs = reference_of(build("transformer_rope_tiny", **options), task).pairs
        lengths.append(max(len(source) for source, _ in pairs))
    assert 120 < lengths[0] <= 128 and 480 < lengths[1] <= 512


REFUSED = {
    "--adaptive-softmax-cutoff": {"adaptive_softmax_cutoff": "20"},
    "--no-cross-attention": {"no_cross_attention": True},
    "--activation-fn tanh": {"activation_fn": "tanh"},
    "--quant-noise-pq": {"quant_noise_pq": 0.1},
    "--cross-self-attention": {"arch": "transformer_tiny", "cross_self_attention": True},
    "no layers": {"encoder_layers": 0},
    "--scale-attn": {"scale_attn": True},
    "--scale-heads": {"scale_heads": True},
    "--scale-fc": {"scale_fc": True},
    "--scale-resids": {"scale_resids": True},
    "its encoder has the position encoding transformer-xl": {"position_encoding": "transformer-xl"},
    "its decoder has the position encoding transformer-xl": {"decoder_position_encoding": "transformer-xl"},
    "its encoder has the position encoding deberta": {"position_encoding": "deberta"},
    "its encoder has the position encoding tupe": {"position_encoding": "tupe"},
    "its decoder has the position encoding xpos": {"decoder_position_encoding": "xpos"},
    "its encoder has --rope-scaling of the type dynamic": {
        "rope_scaling": {"rope_type": "dynamic", "factor": 2, **TRAINED}
    },
    "its decoder has --rope-scaling of the type longrope": {
        "decoder_rope_scaling": {"rope_type": "longrope", "short_factor": [1] * 16, "long_factor": [2] * 16, **TRAINED}
    },
    "--attention-length-scaling": {"attention_length_scaling": 20.0},
    "its decoder has --attention-type linear": {"decoder_attention_type": "linear"},
}


@pytest.mark.parametrize("flag", list(REFUSED))
def test_unsupported_options_are_refused_by_name(build, flag):
    model = build(**{"arch": "transformer_rope_tiny", **REFUSED[flag]})
    with pytest.raises(ExportError, match=f"--path model.pt: .*{flag}, which CTranslate2 does not support"):
        refuse_unsupported(model, "model.pt", "float32")


@pytest.mark.parametrize("quantization", ["float16", "bfloat16"])
def test_factors_of_frequencies_in_16_bits_are_refused(build, quantization):
    message = f"its encoder has --rope-scaling of the type yarn with --quantization {quantization}, which CTranslate2"
    with pytest.raises(ExportError, match=message):
        refuse_unsupported(build(rope_scaling=SCALINGS["yarn"]), "model.pt", quantization)
    refuse_unsupported(build(rope_scaling=SCALINGS["linear"]), "model.pt", quantization)


def put(path, name, value):
    """Return a function that sets an attribute of a part of a model."""
    return lambda model: setattr(model.get_submodule(path), name, value)


EXTRA, ANOTHER = torch.nn.Parameter(torch.zeros(1, 1, 64)), type("Another", (RotaryEmbedding,), {})(32)


@pytest.mark.parametrize(
    "change, message",
    [
        (put("decoder.layers.1.self_attn", "position", ALiBi(2)), "layers of its decoder have different position"),
        (put("decoder.layers.0", "fc1", torch.nn.Sequential(torch.nn.Linear(64, 64))), "its decoder are quantised"),
        (lambda model: setattr(model.cfg, "base_layers", 1), "--base-layers"),  # building them needs several processes
        (put("encoder.layers.0.self_attn", "bias_k", EXTRA), "its attention has extra keys"),
        (put("decoder.layers.0.self_attn", "position", ANOTHER), "its decoder has the position encoding Another"),
        (lambda model: torch.nn.Linear(2, 2), "it is a Linear, not a transformer_rope or transformer"),
    ],
)
def test_layers_of_another_kind_are_refused(build, change, message):
    model = build()
    with pytest.raises(ExportError, match=message):
        refuse_unsupported(change(model) or model, "model.pt", "float32")


def dictionary_of(*symbols):
    dictionary = Dictionary()
    for symbol in symbols:
        dictionary.add_symbol(symbol, overwrite=True)
    return dictionary


@pytest.mark.parametrize("word", ["<blank>", "dog"])
def test_a_word_that_is_twice_in_the_dictionary_is_refused(word):
    with pytest.raises(ExportError, match=f"has the word {word} twice"):
        words(dictionary_of("dog", word))
    assert words(dictionary_of("dog")) == ["<s>", "<blank>", "</s>", "<unk>", "dog"]


# -- the command -----------------------------------------------------------------------------------


ROPE = {"rope_base": 10000.0, "rope_layout": "interleaved", "rope_fraction": 1.0}


def test_the_folder_is_complete(trained, data_bin, tmp_path, capsys):
    folder = exported(trained, data_bin, tmp_path / "model", "--quantization", "float32")
    report = capsys.readouterr().out
    same = re.search(
        r"\nfloat32: (\d+) of 20 sentences of the validation set are translated into the same words", report
    )
    assert same and int(same[1]) >= 19  # a model after 20 epochs has hypotheses whose scores differ by rounding
    assert "\n20 of 20 sources of the validation set" in report and f"\nwrote {folder}" in report
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    names = {path.name for path in folder.iterdir()}
    assert {"model.bin", "config.json", "shared_vocabulary.json", "fairseq_rope.json", "README.md"} == names
    settings = json.loads((folder / "fairseq_rope.json").read_text())
    assert (settings["source"], settings["target"], settings["quantization"]) == ("en", "de", "float32")
    assert settings["positions"] == {"source": None, "target": None}
    encodings = {"encoder_position_encoding": "rope", "decoder_position_encoding": "rope"}
    assert {**encodings, **ROPE, "attention_length_scaling": 0.0}.items() <= settings["model"].items()
    assert settings["segments"] is None
    assert ctranslate2.Translator(str(folder)).num_translators == 1
    assert "fairseq-rope translate --model ." in (folder / "README.md").read_text()
    assert settings["sha256"] == {
        name: hashlib.sha256((folder / name).read_bytes()).hexdigest()
        for name in ("model.bin", "config.json", "shared_vocabulary.json")
    }


OWN_ENCODING = """
from fairseq_rope.positions import ENCODINGS
from fairseq_rope.positions.interface import DistanceBias


class Near(DistanceBias):
    def by_distance(self, distance):
        return -0.1 * distance.abs().float().expand(2, -1)


ENCODINGS["near"] = Near
"""


def test_a_model_with_an_encoding_of_a_user_dir_needs_this_user_dir(trained, data_bin, tmp_path, monkeypatch):
    state = torch.load(trained / "checkpoint_last.pt", weights_only=False)
    state["cfg"]["model"].position_encoding = "near"
    state["cfg"]["model"].encoder_position_encoding = state["cfg"]["model"].decoder_position_encoding = None
    for name in encoding_options():
        setattr(state["cfg"]["model"], name, None)
    torch.save(state, tmp_path / "one.pt")
    state["model"] = {name: weight * 1.01 for name, weight in state["model"].items()}
    torch.save(state, tmp_path / "two.pt")
    user_dir = tmp_path / "positions_of_export_test"
    user_dir.mkdir()
    (user_dir / "__init__.py").write_text(OWN_ENCODING)
    commands = {
        average.main: ["--inputs", tmp_path / "one.pt", tmp_path / "two.pt", "--output", tmp_path / "averaged.pt"],
        main: ["--path", tmp_path / "one.pt", "--data", data_bin, "--output", tmp_path / "model", "--force"],
    }
    for tool, flags in commands.items():
        with pytest.raises(
            SystemExit, match="near: must be one of .*; if your own user dir adds it, give .*--user-dir"
        ):
            tool(list(map(str, flags)))
    monkeypatch.setitem(KNOWN_ENCODINGS, "near", None)  # so that it is removed after the test
    for tool, flags in commands.items():
        tool(list(map(str, [*flags, "--user-dir", user_dir])))
    assert (tmp_path / "averaged.pt").exists() and (tmp_path / "model" / "model.bin").exists()


def test_the_sinusoidal_model_is_exported_without_a_validation_set(sinusoidal, data_bin, tmp_path, capsys):
    (tmp_path / "data").mkdir()
    for dictionary in data_bin.glob("dict.*.txt"):
        shutil.copy(dictionary, tmp_path / "data")
    (tmp_path / "data" / "segments.json").write_text('{"tokens": 12, "separator": "cat"}')
    exported(sinusoidal, tmp_path / "data", tmp_path / "exported", "--quantization", "int8")
    report = capsys.readouterr().out
    assert "differ from the checkpoint's by" in report and "of the validation set" not in report
    settings = json.loads((tmp_path / "exported" / "fairseq_rope.json").read_text())
    assert settings["positions"] == {"source": 4096, "target": 4096}
    model = {"encoder_position_encoding": "sinusoidal", "decoder_attention_heads": 2, "activation_fn": "relu"}
    assert settings["model"].items() >= model.items()
    assert settings["segments"] == {"tokens": 12, "separator": "cat"}


@pytest.mark.usefixtures("without_validation_set")
def test_a_model_with_biases_refuses_longer_lines_with_the_limit(trained, data_bin, tmp_path, monkeypatch):
    monkeypatch.setattr(ctranslate2_model, "POSITIONS", 40)
    state = torch.load(trained / "checkpoint_last.pt", weights_only=False)
    state["cfg"]["model"].encoder_position_encoding = "alibi"
    state["cfg"]["model"].alibi_type = "asymmetric"
    torch.save(state, tmp_path / "checkpoint_last.pt")
    folder = exported(tmp_path, data_bin, tmp_path / "model")
    settings = json.loads((folder / "fairseq_rope.json").read_text())
    assert settings["positions"] == {"source": 40, "target": None}
    encodings = {"encoder_position_encoding": "alibi", "decoder_position_encoding": "rope"}
    assert {**encodings, "alibi_type": "asymmetric", **ROPE}.items() <= settings["model"].items()
    lines = Translator(str(folder)).translate_lines(["dog " * 39, "dog " * 40])
    assert next(lines)
    with pytest.raises(TranslateError, match="line 2 has 40 tokens, more than the limit of this model, 39: split"):
        next(lines)


@pytest.mark.usefixtures("without_validation_set")
@pytest.mark.parametrize("flag", ["--replace", "--force"])
def test_only_an_exported_model_is_replaced_and_only_with_a_flag(trained, data_bin, model, tmp_path, flag):
    folder = shutil.copytree(model, tmp_path / "model")
    before = (folder / "model.bin").stat().st_ino
    with pytest.raises(SystemExit, match="--replace"):
        exported(trained, data_bin, folder)
    (tmp_path / "link").symlink_to("model")
    exported(trained, data_bin, tmp_path / "link", flag, "--quantization", "int8")
    assert (folder / "model.bin").stat().st_ino != before and (tmp_path / "link").is_symlink()
    (folder / "thesis.tex").write_text("")
    with pytest.raises(SystemExit, match="thesis.tex"):
        exported(trained, data_bin, folder, flag)
    (tmp_path / "texts").mkdir()
    with pytest.raises(SystemExit, match="--output .*texts: "):
        exported(trained, data_bin, tmp_path / "texts", flag)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "model", "texts"]


def test_the_old_model_is_restored_if_replacing_fails(model, trained, data_bin, tmp_path, monkeypatch):
    folder = shutil.copytree(model, tmp_path / "model")
    before = (folder / "model.bin").read_bytes()
    rename, count = os.rename, iter(range(3))

    def full(old, new):
        if next(count) == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        rename(old, new)

    monkeypatch.setattr(os, "rename", full)
    monkeypatch.setattr(command, "convert", lambda args, folder: os.mkdir(folder))
    with pytest.raises(SystemExit, match="--output .*model: No space left on device"):
        exported(trained, data_bin, folder, "--replace")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (folder / "model.bin").read_bytes() == before


@pytest.mark.parametrize("renames", [0, 1, 2])
def test_a_killed_replacement_leaves_the_old_or_the_new_model(tmp_path, renames):
    """The process ends after a number of renames. Between the two, the hidden folder has both models."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "text").write_text("old")
    if (child := os.fork()) == 0:
        rename, left = os.rename, iter(range(renames))
        os.rename = lambda *paths: os._exit(1) if next(left, None) is None else rename(*paths)
        with replacing(str(tmp_path / "model")) as new:
            os.mkdir(new)
            shutil.copy(__file__, os.path.join(new, "text"))
        os._exit(0)
    os.waitpid(child, 0)
    found = {path.parent.name: path.read_text() == "old" for path in tmp_path.rglob("text")}
    assert found == [{"model": True, "new": False}, {"old": True, "new": False}, {"model": False}][renames]


@pytest.mark.usefixtures("without_validation_set")
@pytest.mark.parametrize("sent, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_export_leaves_no_files(trained, data_bin, tmp_path, monkeypatch, sent, status):
    def ending(folder, *args):
        assert os.path.exists(os.path.join(folder, "model.bin"))
        signal.raise_signal(sent)

    monkeypatch.setattr(export, "check_model", ending)
    with pytest.raises(SystemExit, match=f"^{status}$"):
        exported(trained, data_bin, tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("without_validation_set")
@pytest.mark.parametrize("quantization", ["float32", "int8"])
def test_a_model_that_fails_its_check_is_removed(trained, data_bin, model, tmp_path, monkeypatch, quantization):
    folder = shutil.copytree(model, tmp_path / "model")
    before = (folder / "model.bin").read_bytes()
    monkeypatch.setitem(export_checks.BOUNDS, quantization, 0.0)
    with pytest.raises(SystemExit, match="nothing was written"):
        exported(trained, data_bin, folder, "--replace", "--quantization", "int8")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert (folder / "model.bin").read_bytes() == before


@pytest.mark.parametrize(
    "quantization, allowed",
    [("float32", 1e-4), ("int16", 0.02), ("float16", 0.02), ("bfloat16", 0.1), ("int8", 0.3), ("int8_float32", 0.3)],
)
def test_larger_differences_of_scores_than_the_documented_ones_are_refused(quantization, allowed):
    """In float32, one sentence among many is enough."""
    expected = [[-1.0, -2.0]] * 10
    for share, is_refused in ((0.9, False), (1.1, True)):
        different = 1 if quantization == "float32" else 10
        scores = [[score - share * allowed for score in line] for line in expected[:different]] + expected[different:]
        with pytest.raises(ExportError, match="is allowed") if is_refused else contextlib.nullcontext():
            export_checks.check_scores(scores, quantization, expected, quantization)
    with pytest.raises(ExportError, match="nan"):
        export_checks.check_scores([[math.nan, -2.0], *expected[1:]], quantization, expected, quantization)


@pytest.mark.parametrize("most", [(150, 1024), (1024, 150)])
def test_a_model_with_learned_positions_scores_no_sentence_beyond_them(build, task, monkeypatch, most):
    limits = dict(zip(("max_source_positions", "max_target_positions"), most))
    model = build(position_encoding="learned", **limits).eval()
    lengths = ((10, 12), (149, 149), (150, 10), (10, 150))
    pairs = [([5] * source, [6] * target) for source, target in lengths]
    monkeypatch.setattr(export_checks, "validation_pairs", lambda task: pairs)
    reference = reference_of(model, task)
    fit = [pair for pair in pairs if len(pair[0]) < most[0] and len(pair[1]) < most[1]]
    assert reference.validation == fit and len(fit) == 3
    assert [len(scores) for scores in reference.scores[-3:]] == [len(target) + 1 for _, target in fit]


@pytest.mark.usefixtures("without_validation_set")
def test_a_checkpoint_in_half_precision_is_exported(trained, data_bin, tmp_path):
    state = torch.load(trained / "checkpoint_last.pt", weights_only=False)
    state["model"] = {key: value.half() for key, value in state["model"].items()}
    torch.save(state, tmp_path / "checkpoint_last.pt")
    exported(tmp_path, data_bin, tmp_path / "model")


@pytest.mark.usefixtures("without_validation_set")
def test_the_instructions_in_the_readme_of_the_folder_work(trained, data_bin, tmp_path, monkeypatch, capsys):
    folder = exported(trained, data_bin, tmp_path / "model", "--beam", 5, "--lenpen", 0.3, "--max-len-b", 7)
    capsys.readouterr()
    readme = (folder / "README.md").read_text()
    assert "fairseq-interactive --beam 5 --lenpen 0.3 --max-len-a 1 --max-len-b 7" in readme
    lines = [line.strip() for line in readme.split("or in Python:")[1].splitlines() if line.startswith("    ")]
    monkeypatch.chdir(folder)
    exec("\n".join(lines[:3]), {})
    expected = Translator(str(folder)).translate("A small dog runs.")
    assert capsys.readouterr().out == f"{expected}\n"
    assert "/" in re.search(r"pip install '(.*)\[ctranslate2\]'", readme)[1]  # PyPI has no package of that name


def test_subwords_without_their_codes_are_refused(tmp_path):
    words, subwords = dictionary_of("dog"), dictionary_of("do@@")
    for dictionaries in ((subwords, words), (words, subwords)):
        with pytest.raises(ExportError, match=f"--data {tmp_path}: .* bpecodes nor sentencepiece.bpe.model"):
            export.subwords_of(str(tmp_path), None, *dictionaries)
    assert export.subwords_of(str(tmp_path), None, words, words) is None
    (tmp_path / "bpecodes").write_text("#version: 0.2\n")
    assert export.subwords_of(str(tmp_path), None, subwords, subwords) == {"kind": "subword_nmt", "file": "bpecodes"}


@pytest.mark.parametrize("words", [("1212", "318", "257"), ("\u0120the", "\u0120dog", "s")])
def test_subwords_of_gpt2_are_refused(tmp_path, words):
    """Moses would take the numbers of a text for subwords, and all words for unknown ones."""
    with pytest.raises(ExportError, match=rf"--data {tmp_path}: .*\({words[0]}, {words[1]}"):
        export.subwords_of(str(tmp_path), None, dictionary_of(*words), dictionary_of("a"))
    assert export.subwords_of(str(tmp_path), "none", dictionary_of(*words), dictionary_of("a")) is None
    # a text with a few numbers, translated into units of speech
    assert export.subwords_of(str(tmp_path), None, dictionary_of("1984", *"abcdef"), dictionary_of(*words)) is None


@pytest.mark.parametrize(
    "words, expected",
    [
        (("the", "dog"), True),
        (("the", "Dog"), False),
        (("狗", "madeupword0000"), False),
        (("ძაღლი", "&quot;"), False),
        (("ძაღლი", "abc"), True),
        ((), False),
    ],
)
def test_dictionaries_without_capital_letters_are_recognised(words, expected):
    assert export.has_only_small_letters(dictionary_of(*words)) is expected


def test_the_data_need_not_be_of_the_kind_that_the_model_was_trained_on(trained, data_bin, tmp_path, capsys):
    """As after --raw-text of fairseq up to 0.9."""
    state = torch.load(trained / "checkpoint_last.pt", weights_only=False)
    state["cfg"]["task"]["dataset_impl"] = "raw"
    torch.save(state, tmp_path / "other.pt")
    exported(tmp_path / "other.pt", data_bin, tmp_path / "model", "--force")
    assert "20 of 20 sources of the validation set" in capsys.readouterr().out


@pytest.mark.parametrize(
    "change, message",
    [
        ({"--data": "none"}, "--data none: "),
        ({"--output": "none/model"}, "--output none/model: "),
        ({"--path": "none.pt"}, "none.pt"),
        ({"--beam": "0"}, "beam 0: "),
        ({"--max-len-b": "-1"}, "max_len_b -1: "),
        ({"--segment-tokens": "4097"}, "segment_tokens 4097: "),
        ({"--model-overrides": "rope_base=2"}, "--model-overrides rope_base=2: "),
    ],
)
def test_wrong_flags_end_in_one_sentence(trained, data_bin, tmp_path, change, message):
    paths = {"--path": trained / "checkpoint_last.pt", "--data": data_bin, "--output": tmp_path / "model"}
    flags = {flag: str(path) for flag, path in paths.items()}
    with pytest.raises(SystemExit, match=message):
        main([word for flag in {**flags, **change}.items() for word in flag])
    assert list(tmp_path.iterdir()) == []


def test_validation_translations_are_compared_and_fairseq_searches_only_once(model, loaded, monkeypatch):
    checkpoint, task = loaded
    with torch.no_grad():  # gives other translations
        checkpoint.decoder.layers[0].fc2.weight.neg_()
    reference = reference_of(checkpoint, task)
    monkeypatch.setitem(export_checks.BOUNDS, "float32", 1e9)
    with pytest.raises(ExportError, match=r"^float32: \d of 20 sentences .*, and 10 are needed"):
        export_checks.check_model(str(model), reference, "float32")
    monkeypatch.setattr("fairseq.sequence_generator.SequenceGenerator", None)
    report = export_checks.check_model(str(model), reference, "float32", force=True)
    same = int(re.search(r"(\d+) of 20 sentences of the validation set are translated", report)[1])
    assert same < 20


def test_each_sentence_of_a_segment_is_compared():
    translations = [line.split() for line in ("a | x | c", "a b", "a | b", "a | b | c", "a |")]
    # 2 of 3, 0 of 2, 2 of 2, 1 of 2 and 0 of 1 are the same
    expected = [line.split() for line in ("a | b | c", "a | b", "a | b", "a | b c", "a")]
    assert export_checks.agreeing(translations, expected, "|") == (5, 10)
    assert export_checks.agreeing(translations, expected, "") == (1, 5)


def test_subwords_other_than_those_of_the_data_need_force(trained, data_bin, tmp_path, capsys):
    data = shutil.copytree(data_bin, tmp_path / "data")
    (data / "bpecodes").write_text("#version: 0.2\nt h\n")
    with pytest.raises(SystemExit, match="0 of 20 sources .* the subwords are not .*, and 19 are needed"):
        exported(trained, data, tmp_path / "letters")
    assert not (tmp_path / "letters").exists()
    exported(trained, data, tmp_path / "letters", "--force")
    assert "\n0 of 20 sources" in capsys.readouterr().out and (tmp_path / "letters" / "bpecodes").exists()


def test_a_model_with_other_translations_needs_force(trained, data_bin, tmp_path, monkeypatch, capsys):
    arguments = (trained, data_bin, tmp_path / "model", "--quantization", "int8")
    counts = iter([(10, 20), (9, 20), (9, 20), (9, 20)])  # in float32, then in int8
    monkeypatch.setattr(export_checks, "agreeing", lambda *_: next(counts))
    with pytest.raises(SystemExit, match="int8.* 9 of 20 .* 10 "):
        exported(*arguments)
    assert list(tmp_path.iterdir()) == []
    exported(*arguments, "--force")
    assert len(re.findall(r"(?m)^(?:float32|int8).*: 9 of 20 ", capsys.readouterr().out)) == 2


@pytest.mark.parametrize(
    "name, change",
    [
        ("valid.en-de.de.bin", lambda content: content[:10]),
        ("valid.en-de.en.idx", lambda content: content[:30]),
        ("dict.de.txt", lambda content: content + b"dog 1\ndog 1\n"),
        ("dict.de.txt", lambda content: content + b"\xff 1\n"),
        ("bpecodes", lambda content: b"\xff\xfe"),
        ("sentencepiece.bpe.model", lambda content: b"words"),
    ],
)
def test_damaged_data_are_refused_in_one_sentence(trained, data_bin, tmp_path, name, change):
    data = shutil.copytree(data_bin, tmp_path / "data")
    (data / name).write_bytes(change((data / name).read_bytes() if (data / name).exists() else b""))
    with pytest.raises(SystemExit, match=f"{data}: |{name}: ") as stopped:
        exported(trained, data, tmp_path / "model")
    assert "\n" not in stopped.value.code and [path.name for path in tmp_path.iterdir()] == ["data"]


def test_a_checkpoint_without_languages_and_files_of_embeddings_is_exported(trained, data_bin, tmp_path):
    """fairseq saves no languages if it has read them from names of files, and would read the embeddings again."""
    state = torch.load(trained / "checkpoint_last.pt", weights_only=False)
    state["cfg"]["task"].update(source_lang=None, target_lang=None)
    vars(state["cfg"]["model"]).update(encoder_embed_path="none.vec", decoder_embed_path="none.vec")
    torch.save(state, tmp_path / "model.pt")
    (tmp_path / "dictionaries").mkdir()
    for lang in ("en", "de"):
        shutil.copy(data_bin / f"dict.{lang}.txt", tmp_path / "dictionaries")
    with pytest.raises(SystemExit, match="--data .*dictionaries: "):
        exported(tmp_path / "model.pt", tmp_path / "dictionaries", tmp_path / "served")
    languages = ["--source-lang", "en", "--target-lang", "de"]
    exported(tmp_path / "model.pt", tmp_path / "dictionaries", tmp_path / "served", *languages)
    expected = exported(trained, data_bin, tmp_path / "expected", *languages)
    assert (tmp_path / "served" / "model.bin").read_bytes() == (expected / "model.bin").read_bytes()
    with pytest.raises(SystemExit, match="was trained from en to de, and the data are from de to en"):
        exported(trained, data_bin, tmp_path / "other", "--source-lang", "de", "--target-lang", "en")


@pytest.fixture
def segment_settings(tmp_path):
    """The function export.segment_settings for --segment-tokens and a text in segments.json, or None for no file."""
    dictionaries = [dictionary_of("dog", "‖", "<s2>"), dictionary_of("DOG", "‖", "<s2>")]
    task = SimpleNamespace(source_dictionary=dictionaries[0], target_dictionary=dictionaries[1])

    def run(text, tokens=None):
        if text is not None:
            (tmp_path / "segments.json").write_text(text)
        return export.segment_settings(str(tmp_path), tokens, task)

    return run


PRESENT = '{"tokens": 128, "separator": "<s2>", "share": 0.5}'


@pytest.mark.parametrize(
    "text, tokens, expected",
    [
        (None, None, None),
        (None, 64, (64, "‖")),
        (PRESENT, None, (128, "<s2>")),
        (PRESENT, 64, (64, "<s2>")),
        ('{"tokens": 1, "separator": "<s9>"}', None, None),
        (PRESENT, 1, None),
    ],
)
def test_the_segments_are_those_of_the_data_or_the_flag(segment_settings, text, tokens, expected):
    assert segment_settings(text, tokens) == (expected and {"tokens": expected[0], "separator": expected[1]})


@pytest.mark.parametrize(
    "text, named",
    [
        *((json.dumps({"tokens": 64, "separator": mark}), mark) for mark in ("dog", "DOG", "<unk>", "<pad>", "</s>")),
        ('{"tokens": 0, "separator": "<s2>"}', "segments.json"),
        ('{"tokens": true, "separator": "<s2>"}', "segments.json"),
        ('{"tokens": 64, "separator": null}', "segments.json"),
        ('{"tokens": 64, "separator": "a b"}', "segments.json"),
        *((text, "segments.json") for text in ("{}", "[]", "{")),
    ],
)
def test_segments_that_cannot_be_translated_are_refused(segment_settings, text, named):
    with pytest.raises(ExportError, match=named):
        segment_settings(text)


def test_sources_of_up_to_200_tokens_are_compared_even_if_most_are_longer(task):
    lengths = [300] * 600 + [200] + [201] * 600 + [1]
    data = [torch.full((length + 1,), 5) for length in lengths]
    pairs = LanguagePairDataset(
        *(data, [length + 1 for length in lengths], task.source_dictionary),
        *(data, [length + 1 for length in lengths], task.target_dictionary),
    )
    of_documents = TranslationTask(SimpleNamespace(data="", left_pad_source=True), *[task.source_dictionary] * 2)
    of_documents.datasets["valid"] = pairs
    assert [len(source) for source, _ in export_checks.validation_pairs(of_documents)] == [200, 1]
    assert len(export_checks.validation_pairs(of_documents, math.inf, math.inf)) == len(lengths)


SEGMENT = "&quot; dog <sep> . <sep> dog &quot; ."  # Moses escapes < and would not give <sep>


@pytest.mark.parametrize(
    "sources, tokenizer, segments, report",
    [
        (["a dog , a man &apos;s hat ."], "moses", None, "1 of 1 sources"),
        (["a dog , a man &apos;s hat ."], "none", None, "0 of 1 sources"),
        ([SEGMENT], "moses", None, "0 of 1 sources"),
        ([SEGMENT], "moses", {"tokens": 9, "separator": "<sep>"}, "1 of 1 sources"),
        (["dog"] * 58 + ["dog's"] * 6, "moses", None, "58 of 64 sources"),  # Moses writes the second as two words
        (["dog"] * 57 + ["dog's"] * 7, "moses", None, "57 of 64 sources .*, and 58 are needed"),
        (["dog <unk>"], "moses", None, "0 of 1 sources .*, and 1 are needed"),
        (["dog"] * 2 + ["dog <unk>"] * 62, "moses", None, "2 of 64 sources .*, and 32 are needed"),
        (["dog"] * 19 + ["dog <unk>"] * 2, "moses", None, "19 of 21 sources .*, and 20 are needed"),
        (["dog"] * 19, "moses", None, "19 of 19 sources"),
    ],
)
def test_sources_must_be_tokenised_as_in_the_data(monkeypatch, sources, tokenizer, segments, report):
    dictionary = Dictionary()
    pairs = [([dictionary.add_symbol(word) for word in source.split()], [4]) for source in sources]
    monkeypatch.setattr(export_checks, "validation_pairs", lambda task: pairs)
    moses, task = export.tokenisation(tokenizer, None, dictionary, "en", "de"), SimpleNamespace()
    task.source_dictionary = dictionary
    settings = {"source": "en", "moses": moses, "subwords": None, "segments": segments}
    if not re.match(r"(1|19|58) of (1|19|64) sources$", report):
        with pytest.raises(ExportError, match=report):
            export_checks.check_text("", settings, task)
    (message,) = export_checks.check_text("", settings, task, force=True)
    assert int(report.split()[0]) == int(message.split()[0])


@pytest.mark.parametrize(
    "tokenizer, kind, symbol, divided",
    [
        (None, None, "dog", ["a-b", ","]),
        (None, None, "@-@", ["a", "@-@", "b", ","]),
        ("none", None, "@-@", ["a-b,"]),
        (None, "sentencepiece", "dog", ["a-b,"]),
        ("moses", "sentencepiece", "dog", ["a-b", ","]),
    ],
)
def test_plain_text_is_tokenised_as_the_data(tokenizer, kind, symbol, divided):
    dictionary = dictionary_of(symbol)
    moses = export.tokenisation(tokenizer, kind, dictionary, "en", "de")
    assert Tokeniser("", {"moses": moses, "subwords": None}).tokens("a-b,") == divided
