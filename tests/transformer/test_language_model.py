"""transformer_lm_rope: beside a plain float64 reference and fairseq's transformer_lm, and with fairseq's commands."""

import math
import re
import shutil
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.models import build_model
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig
from omegaconf import OmegaConf

from fairseq_rope.checkpoints import load_checkpoint
from fairseq_rope.positions import ENCODINGS
from fairseq_rope.transformer.language_model import TransformerRopeLanguageModel
from tests.commands import PLUGIN, call, outputs, run_program, scores, valid_losses
from tests.models import PAD, batch, with_different_norms
from tests.references import CASES, C, H, layer_normalised, plain_layers
from tests.transformer.language_models import assert_resumes, averaged, fit

SIZES = {"decoder_layers": 2, "decoder_attention_heads": H, "decoder_ffn_embed_dim": 20, "max_target_positions": 30}
SIZES.update((f"decoder_{name}_dim", C) for name in ("embed", "input", "output"))
SIZES["quant_noise_pq_block_size"] = 4


@pytest.fixture
def language_model(build):
    def language_model(arch="transformer_lm_rope", **options):
        return with_different_norms(build(arch, **{**SIZES, **options}))

    return language_model


# -- beside the formula and fairseq --------------------------------------------------------------------


@pytest.mark.parametrize("name, side, options", [case for case in CASES if case.values[1] == "decoder"])
def test_the_model_is_its_formula(language_model, name, side, options):
    given = {key: value for key, value in options.items() if key in ENCODINGS[name].options_of(side)}
    model = language_model(position_encoding=name, decoder_normalize_before=True, **given).double()
    tokens, _ = batch([7, 4], left_pad=False)
    decoder = model.decoder
    x = decoder.embed_tokens.weight.double()[tokens].transpose(0, 1) * math.sqrt(C)
    x = plain_layers(decoder.layers, name, side, options, x, tokens.eq(PAD), torch.relu)
    expected = layer_normalised(x, decoder.layer_norm).transpose(0, 1) @ decoder.output_projection.weight.double().T
    words = tokens.ne(PAD)
    torch.testing.assert_close(model(tokens)[0][words], expected[words], rtol=1e-6, atol=1e-6)


FAIRSEQS = {
    "sinusoidal": {},
    "learned": {"decoder_learned_pos": True},
    "none": {"no_token_positional_embeddings": True},
}
OTHER_PARTS = {
    "usual": {},
    "normformer": {"scale_fc": True, "scale_attn": True, "scale_heads": True, "scale_resids": True},
    "shared": {"share_decoder_input_output_embed": True, "layernorm_embedding": True, "no_scale_embedding": True},
    "characters": {"character_embeddings": True, "character_filters": "[(1, 8), (2, 8)]"},
    "adaptive": {
        **{"adaptive_input": True, "adaptive_input_cutoff": "10,20", "adaptive_softmax_cutoff": "10,20"},
        **{"adaptive_input_factor": 2, "adaptive_softmax_factor": 2, "decoder_normalize_before": True},
        **{"tie_adaptive_weights": True, "tie_adaptive_proj": True},
    },
    "noise": {"quant_noise_pq": 0.1, "no_decoder_final_norm": True},
}


@pytest.mark.parametrize("name, parts", [(name, "usual") for name in FAIRSEQS] + [("none", p) for p in OTHER_PARTS])
def test_without_rope_it_is_fairseqs_model_from_the_same_seed(task, name, parts):
    given = {**SIZES, **OTHER_PARTS[parts]}
    torch.manual_seed(3)
    ours = by_hydra({"_name": "transformer_lm_rope", "position_encoding": name, **given}, task)
    torch.manual_seed(3)
    # fairseq builds its model from a configuration that lacks NormFormer's flags, and has them in a namespace
    defaults = {key: field.default for key, field in TransformerLanguageModelConfig.__dataclass_fields__.items()}
    args = Namespace(**{**defaults, **given, **FAIRSEQS[name]})
    stock = TransformerLanguageModel.build_model(args, task).eval()
    assert ours.state_dict().keys() == stock.state_dict().keys()
    if name != "learned":  # fairseq draws the vectors of positions before the layers
        for key, weight in stock.named_parameters():
            torch.testing.assert_close(ours.get_parameter(key), weight, rtol=0, atol=0, msg=key)
    ours.load_state_dict(stock.state_dict())
    tokens, _ = batch([7, 4], left_pad=False)
    torch.testing.assert_close(ours(tokens)[0], stock(tokens)[0], rtol=1e-6, atol=1e-6)


def by_hydra(args, task):
    """The model of *args*, as fairseq-hydra-train builds it."""
    return build_model(OmegaConf.create(args), task).eval()


# -- fairseq's commands ----------------------------------------------------------------------------


TINY = (
    "--task language_modeling --arch transformer_lm_rope_gpt2_tiny --share-decoder-input-output-embed "
    "--tokens-per-sample 32 --optimizer adam --lr 0.01 --max-tokens 512 --cpu --seed 3 --num-workers 0 "
    "--log-format json --save-interval-updates 2 --required-batch-size-multiple 1"
)


def perplexity(data, checkpoint, *more):
    words = ["--path", checkpoint, "--user-dir", PLUGIN, "--max-tokens", 512, "--tokens-per-sample", 32, *more]
    log = call("fairseq-eval-lm", data, *words, "--cpu", "--num-workers", 0)
    return float(re.search(r"Perplexity: ([\d.]+)", log).group(1))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--attention-type", "linear", "--ffn-type", "glu"]])
def test_a_language_model_trains_resumes_averages_evaluates_and_generates(text_bin, tmp_path, flags):
    last = assert_resumes(TINY, text_bin, tmp_path, *flags)
    plain, mean = (perplexity(text_bin, path) for path in (last, averaged(last.parent)))
    assert 1 < plain < 30 and 1 < mean < 30
    # each word reads at least 8 earlier ones; without a window, the first words of a block read fewer
    assert perplexity(text_bin, last, "--context-window", 8) != plain
    searched = ["--path", last, "--user-dir", PLUGIN, "--task", "language_modeling", "--sample-break-mode", "eos"]
    printed = call("fairseq-generate", text_bin, *searched, "--cpu", "--prefix-size", 1, "--beam", 2, "--max-len-b", 12)
    assert len(outputs(printed)) == 20
    hub = TransformerRopeLanguageModel.from_pretrained(str(last.parent), last.name, str(text_bin), tokenizer="space")
    assert len(hub.score("the dog sees")["positional_scores"]) == 3
    assert isinstance(hub.sample("the dog", max_len_b=8), str)


@pytest.mark.slow
def test_a_language_model_of_fairseq_continues_with_rope(text_bin, tmp_path):
    stock = TINY.replace("lm_rope", "lm")
    fit(stock, text_bin, tmp_path / "stock", "--max-update", 2, "--decoder-learned-pos")
    start = ["--finetune-from-model", tmp_path / "stock" / "checkpoint_last.pt", "--max-update", 2]
    log = fit(TINY, text_bin, tmp_path / "rope", *start)
    assert "dropped decoder.embed_positions.weight from the checkpoint: this model's decoder has the position" in log
    assert "with --decoder-position-encoding learned, not rope" in log and valid_losses(log)


@pytest.mark.slow
def test_a_translation_is_searched_with_a_language_model(data_bin, trained, tmp_path):
    with_dictionary, target = shutil.copytree(data_bin, tmp_path / "bin"), data_bin.parent / "text"
    shutil.copy(data_bin / "dict.de.txt", with_dictionary / "dict.txt")  # where a language model looks for it
    prefixes = [word for name in ("train", "valid") for word in (f"--{name}pref", target / f"{name}.de")]
    known = ["--srcdict", data_bin / "dict.de.txt"]
    call("fairseq-preprocess", "--only-source", *prefixes, "--destdir", tmp_path / "lm_bin", *known)
    fit(TINY, tmp_path / "lm_bin", tmp_path / "lm", "--max-update", 40)
    words = [with_dictionary, "--user-dir", PLUGIN, "--path", trained / "checkpoint_last.pt", "--cpu"]
    plain = call("fairseq-generate", *words)
    fused = {w: scores(call("fairseq-generate", *words, *with_lm(tmp_path / "lm", w))) for w in (0, 0.5)}
    assert fused[0] == scores(plain) and all(fused[0.5][row] < one for row, one in scores(plain).items())


def with_lm(folder, weight):
    return ["--lm-path", folder / "checkpoint_last.pt", "--lm-weight", weight]


MADE = ("yaml", "flags")


@pytest.mark.slow
def test_hydra_trains_the_same_language_model(text_bin, tmp_path):
    (tmp_path / "rope.yaml").write_text(
        f"""# @package _group_
common: {{user_dir: {PLUGIN}, cpu: true, seed: 3, log_format: json}}
task: {{_name: language_modeling, data: {text_bin}, tokens_per_sample: 32}}
model: {{_name: transformer_lm_rope_gpt2_tiny, share_decoder_input_output_embed: true, position_encoding: learned}}
criterion: {{_name: cross_entropy}}
optimizer: {{_name: adam}}
lr_scheduler: {{_name: fixed}}
dataset: {{max_tokens: 512, num_workers: 0, required_batch_size_multiple: 1}}
optimization: {{max_update: 2, lr: [0.01]}}
checkpoint: {{save_dir: {tmp_path / "yaml"}}}
"""
    )
    words = ["--config-dir", tmp_path, "--config-name", "rope", f"hydra.run.dir={tmp_path}"]
    run_program("fairseq-hydra-train", *words, cwd=tmp_path)
    fit(TINY, text_bin, tmp_path / "flags", "--max-update", 2, "--position-encoding", "learned")
    # The number of positions is that of the training, and not that of the evaluation.
    of_both = [perplexity(text_bin, tmp_path / n / "checkpoint_last.pt", "--tokens-per-sample", 20) for n in MADE]
    assert of_both[0] == of_both[1]
    by_yaml, by_flags = (load_checkpoint(str(tmp_path / n / "checkpoint_last.pt"))["model"] for n in MADE)
    assert by_yaml.keys() == by_flags.keys()
    assert all(torch.equal(by_yaml[name], weight) for name, weight in by_flags.items())


# -- adaptive softmax ----------------------------------------------------------------------------------


def test_the_adaptive_loss_has_every_word(language_model):
    """The probability of a word of a tail is that of the tail in the head, times that of the word in the tail."""
    model = language_model(**OTHER_PARTS["adaptive"], adaptive_softmax_dropout=0.0).double()
    softmax, words = model.decoder.adaptive_softmax, torch.arange(44).view(2, 22)  # 1 is padding
    tokens, _ = batch([22, 22], left_pad=False)
    features, expected = model(tokens)[0].contiguous(), []
    head = softmax.head(features).view(2, 22, -1).softmax(-1)
    for row, column in ((row, column) for row in range(2) for column in range(22)):
        word, probability = int(words[row, column]), head[row, column]
        for number, (begin, end) in enumerate(((10, 20), (20, 44))):
            if begin <= word < end:
                of_tail = softmax.tail[number](features[row, column][None])[0].softmax(-1)
                assert of_tail.shape == (end - begin,)
                expected.append(probability[10 + number] * of_tail[word - begin])
        if word < 10:
            expected.append(probability[word])
    expected = -torch.stack(expected).log()
    expected[PAD] = 0.0
    criterion = AdaptiveLoss(SimpleNamespace(target_dictionary=SimpleNamespace(pad=lambda: PAD)), sentence_avg=False)
    sample = {"net_input": {"src_tokens": tokens}, "target": words}
    loss, size, logged = criterion(model, sample)
    torch.testing.assert_close(loss, expected.sum()[None])
    assert size == logged["ntokens"] == 43
    torch.testing.assert_close(criterion(model, sample, reduce=False)[0], expected)


def test_validation_of_an_adaptive_softmax_has_the_loss_of_eval_lm(text_bin, tmp_path):
    cutoffs = "--adaptive-softmax-cutoff 6,10 --criterion adaptive_loss --ddp-backend legacy_ddp"
    flags = TINY.replace("--share-decoder-input-output-embed", cutoffs)
    fit(flags, text_bin, tmp_path, "--max-update", 2)
    path = tmp_path / "checkpoint_last.pt"
    words = ["--path", path, "--user-dir", PLUGIN, "--max-tokens", 512, "--tokens-per-sample", 32, "--cpu"]
    given = "--task language_modeling --valid-subset test --criterion adaptive_loss --ddp-backend legacy_ddp".split()
    log = call("fairseq-validate", text_bin, *words, *given)
    loss = float(re.findall(r"\| loss ([\d.]+)", log)[-1])
    by_eval_lm = call("fairseq-eval-lm", text_bin, *words, "--num-workers", 0)
    assert loss == pytest.approx(float(re.search(r"Loss \(base 2\): ([\d.]+)", by_eval_lm)[1]), abs=2e-3)
