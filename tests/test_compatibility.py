"""fairseq's features with transformer_rope, through fairseq's own commands: the rows of docs/compatibility.md."""

import math
import random
import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.models.ema.ema import EMA
from fairseq.models.transformer_align import TransformerAlignModel
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from fairseq_rope.checkpoints import load_checkpoint
from fairseq_rope.errors import InputError
from fairseq_rope.modules.attention import SelfAttention
from fairseq_rope.modules.norms import RMSNorm
from fairseq_rope.transformer import TransformerRopeModel
from tests.commands import PLUGIN, call, outputs, scores, train, training, valid_losses


@pytest.fixture(scope="module")
def model_path(trained):
    return trained / "checkpoint_last.pt"


PAIR = ["--source-lang", "en", "--target-lang", "de"]
# Parts of TINY that some flags exclude.
SHARED, SMOOTHED = ["--share-all-embeddings"], ["--criterion label_smoothed_cross_entropy --label-smoothing 0.1"]
# The corpus has no longer sentences. A model with little training does not end its translations.
SHORT = ["--max-len-a", 0, "--max-len-b", 20]


def generate(data, path, *flags):
    words = ["--path", path, "--user-dir", PLUGIN, "--cpu", "--num-workers", 0, *SHORT, *flags]
    return call("fairseq-generate", data, *words)


def interactive(data, path, *flags, stdin=""):
    return call("fairseq-interactive", data, "--path", path, "--user-dir", PLUGIN, "--cpu", *SHORT, *flags, stdin=stdin)


@pytest.fixture(scope="module")
def translations(data_bin, model_path):
    """The translations of the test set with a beam of 4, by sentence number."""
    return outputs(generate(data_bin, model_path, "--beam", 4))


@pytest.fixture(scope="module")
def scores_of_references(data_bin, model_path):
    """The scores of the test set that --score-reference prints."""
    return scores(generate(data_bin, model_path, "--score-reference"))


def text(data, name):
    return (data.parent / "text" / name).read_text().splitlines()


def preprocess(destination, train_prefix, valid_prefix, *more):
    prefixes = ["--trainpref", train_prefix, "--validpref", valid_prefix]
    call("fairseq-preprocess", *PAIR, *prefixes, "--joined-dictionary", "--destdir", destination, *more)


def layers(model):
    return [*model.encoder.layers, *model.decoder.layers]


def assert_scores_equal_those_of(actual, models, task):
    """Each score must be the mean log2 probability of the reference, averaged over *models* in one pass each."""
    task.load_dataset("test")
    dataset = task.dataset("test")
    for number in range(len(dataset)):
        sample = dataset.collater([dataset[number]])
        with torch.no_grad():
            probabilities = torch.stack([model.eval()(**sample["net_input"])[0].softmax(-1) for model in models])
        of_words = probabilities.mean(0).gather(-1, sample["target"].unsqueeze(-1)).log2()
        assert actual[number] == [pytest.approx(float(of_words.mean()), abs=1e-3)]


def assert_translates(data, path, *flags):
    """fairseq-generate must translate all 20 sentences of the test set."""
    assert sorted(outputs(generate(data, path, *flags))) == list(range(20))


# -- search ------------------------------------------------------------------------------------------


def test_beam_search_lists_distinct_hypotheses_best_first(data_bin, model_path, translations):
    printed = generate(data_bin, model_path, "--beam", 4, "--nbest", 3)
    hypotheses, actual = outputs(printed), scores(printed)
    assert sorted(hypotheses) == list(range(20))
    for number in hypotheses:
        assert len(set(hypotheses[number])) == 3
        assert actual[number] == sorted(actual[number], reverse=True)
    assert translations == {number: texts[:1] for number, texts in hypotheses.items()}


def test_batches_and_buffers_do_not_change_translations(data_bin, model_path, translations):
    assert outputs(generate(data_bin, model_path, "--beam", 4, "--batch-size", 1)) == translations
    buffers = ["--buffer-size", 8, "--batch-size", 8, "--input", data_bin.parent / "text" / "test.en"]
    assert outputs(interactive(data_bin, model_path, "--beam", 4, *buffers)) == translations


@pytest.mark.slow
def test_diverse_beam_search_finds_more_different_hypotheses(data_bin, model_path):
    def distinct(strength):
        groups = ["--diverse-beam-groups", 2, "--diverse-beam-strength", strength]
        flags = ["--beam", 4, "--nbest", 4, *groups]
        hypotheses = outputs(generate(data_bin, model_path, *flags, "--batch-size", 20))
        assert outputs(generate(data_bin, model_path, *flags, "--batch-size", 3)) == hypotheses
        return sum(len(set(texts)) for texts in hypotheses.values())

    assert distinct(2.0) > distinct(0.0)


def test_prefix_size_keeps_the_references_first_words(data_bin, model_path):
    hypotheses = outputs(generate(data_bin, model_path, "--beam", 3, "--prefix-size", 2))
    for number, reference in enumerate(text(data_bin, "test.de")):
        assert hypotheses[number][0].split()[:2] == reference.split()[:2]


@pytest.mark.parametrize("kind", ["ordered", "unordered"])
def test_lexical_constraints_appear_in_the_output(data_bin, model_path, kind):
    lines = "the dog sees a cat\tHOUSE\tBIG\nthe old book\tUNDER\n"
    printed = interactive(data_bin, model_path, "--beam", 8, "--constraints", kind, stdin=lines)
    hypotheses = outputs(printed)
    for number, constraints in ((0, ["HOUSE", "BIG"]), (1, ["UNDER"])):
        words = hypotheses[number][0].split()
        assert all(word in words for word in constraints)
        if kind == "ordered":
            places = [words.index(word) for word in constraints]
            assert places == sorted(places)


UNKNOWN = ("the dog zyzzyva", "flub takes the big qux red", "house")


@pytest.fixture(scope="module")
def raw_text(data_bin, tmp_path_factory):
    """A data folder for --dataset-impl raw; some words of the text are not in the dictionary."""
    folder = tmp_path_factory.mktemp("raw")
    for lang in ("en", "de"):
        (folder / f"dict.{lang}.txt").write_bytes((data_bin / f"dict.{lang}.txt").read_bytes())
        (folder / f"test.en-de.{lang}").write_text("".join(f"{line}\n" for line in UNKNOWN))
    (folder / "lexicon").write_text("dog HUND\nqux QUX\n")
    return folder


@pytest.mark.slow
def test_unknown_words_are_replaced_with_the_aligned_source_words(raw_text, model_path):
    """The reference takes the alignments that --print-alignment prints."""
    search = ["--dataset-impl", "raw", *PAIR, "--unkpen", -1000, "--max-len-b", 6, "--beam", 3, "--nbest", 2]
    aligned = generate(raw_text, model_path, *search, "--print-alignment", "hard")
    texts, alignments = outputs(aligned), outputs(aligned, "A")
    assert 0 < sum(line.split().count("<unk>") for lines in texts.values() for line in lines)
    for file, lexicon in (([raw_text / "lexicon"], {"dog": "HUND", "qux": "QUX"}), ([], {})):
        expected = {}
        for number, source in enumerate(UNKNOWN):
            for text, pairs in zip(texts[number], alignments[number], strict=True):
                of_target = {int(target): int(one) for one, target in (pair.split("-") for pair in pairs.split())}
                copied = [source.split()[of_target[n]] for n in range(len(text.split()))]
                words = [lexicon.get(c, c) if word == "<unk>" else word for word, c in zip(text.split(), copied)]
                expected.setdefault(number, []).append(" ".join(words))
        replaced = generate(raw_text, model_path, *search, "--replace-unk", *file)
        assert outputs(replaced) == outputs(replaced, "D") == expected


def test_unknown_subwords_are_replaced_before_subwords_are_joined(raw_text, sinusoidal):
    search = [*PAIR, "--unkpen", -1000, "--max-len-b", 4, "--beam", 1, "--post-process", "subword_nmt"]
    printed = interactive(raw_text, sinusoidal, *search, "--replace-unk", stdin="zyz@@\n")
    assert re.fullmatch("(zyz){2,}", outputs(printed)[0][0])  # not zyz@@ zyz@@


def test_score_reference_prints_the_models_probability(model_path, scores_of_references):
    models, _, task = checkpoint_utils.load_model_ensemble_and_task([str(model_path)])
    assert_scores_equal_those_of(scores_of_references, models, task)


@pytest.mark.parametrize("other", ["rotary", "sinusoidal"])
def test_ensembles_average_probabilities(data_bin, model_path, sinusoidal, other, tmp_path):
    second = sinusoidal
    if other == "rotary":  # the same weights in the other layout give another model
        state, second = load_checkpoint(str(model_path)), tmp_path / "half.pt"
        state["cfg"]["model"].rope_layout = "half"
        torch.save(state, second)
    pair = f"{second}:{model_path}"
    models, _, task = checkpoint_utils.load_model_ensemble_and_task(pair.split(":"))
    assert_scores_equal_those_of(scores(generate(data_bin, pair, "--score-reference")), models, task)
    assert_translates(data_bin, pair, "--beam", 3)


@pytest.mark.slow
def test_retained_dropout_makes_translations_vary(data_bin, model_path, scores_of_references):
    def retained(seed, *modules):
        flags = ["--retain-dropout-modules", *modules] if modules else []
        return scores(generate(data_bin, model_path, "--score-reference", "--retain-dropout", *flags, "--seed", seed))

    assert retained(1) != retained(2)
    assert retained(1, "TransformerEncoder") != scores_of_references
    assert retained(1, "NoSuchModule") == scores_of_references


# -- evaluation --------------------------------------------------------------------------------------


def test_validate_gives_the_loss_that_training_logged(data_bin, model_path):
    flags = ["--cpu", "--max-tokens", 500, "--num-workers", 0, "--log-format", "simple", "--task", "translation"]
    printed = call("fairseq-validate", data_bin, "--path", model_path, "--user-dir", PLUGIN, *flags)
    logged = load_checkpoint(str(model_path))["extra_state"]["val_loss"]
    assert f"loss {logged:.3f}".rstrip("0") in printed


def test_bleu_in_training_is_logged_and_picks_the_best(data_bin, tmp_path):
    bleu = ["--eval-bleu", "--eval-bleu-remove-bpe", "--eval-bleu-args", '{"beam": 2, "max_len_a": 1, "max_len_b": 10}']
    best = ["--best-checkpoint-metric", "bleu", "--maximize-best-checkpoint-metric"]
    log = train(data_bin, tmp_path, "--max-epoch", 3, *bleu, *best)
    logged = [float(score) for score in re.findall(r'"valid_bleu": "([\d.]+)"', log)]
    assert len(logged) == 3
    state = load_checkpoint(str(tmp_path / "checkpoint_best.pt"))
    assert state["extra_state"]["best"] == pytest.approx(max(logged), abs=0.01)


@pytest.mark.slow
def test_from_pretrained_translates_raw_text_as_fairseq_interactive(tmp_path):
    draw = random.Random(2)
    words = "the dog's old cat-like friend sees a well-known house".split()
    for name, count in (("train", 60), ("valid", 5)):
        lines = [" ".join(draw.choice(words) for _ in range(6)) for _ in range(count)]
        for lang in ("en", "de"):
            (tmp_path / f"{name}.{lang}").write_text("".join(f"{line}\n" for line in lines))
    with open(tmp_path / "train.en") as lines, open(tmp_path / "bpecodes", "w") as codes:
        learn_bpe(lines, codes, 40)
    with open(tmp_path / "bpecodes") as codes:
        bpe = BPE(codes)
    for name in ("train.en", "train.de", "valid.en", "valid.de"):
        divided = bpe.process_line((tmp_path / name).read_text().replace("'s", " &apos;s"))
        (tmp_path / name.replace(".", ".bpe.")).write_text(divided)
    data, path = tmp_path / "bin", tmp_path / "model" / "checkpoint_last.pt"
    preprocess(data, tmp_path / "train.bpe", tmp_path / "valid.bpe")
    train(data, tmp_path / "model", "--max-epoch", 2, "--no-epoch-checkpoints")

    options = {"tokenizer": "moses", "moses_no_dash_splits": True, "bpe": "subword_nmt"}
    options["bpe_codes"] = str(tmp_path / "bpecodes")
    hub = TransformerRopeModel.from_pretrained(str(path.parent), path.name, str(data), **options)
    sentences = ["the dog's well-known friend sees", "a cat-like house"]
    moses = ["--tokenizer", "moses", "--moses-no-dash-splits"]
    flags = ["--beam", 5, *PAIR, *moses, "--bpe", "subword_nmt", "--bpe-codes", tmp_path / "bpecodes"]
    detokenised = outputs(interactive(data, path, *flags, stdin="".join(f"{line}\n" for line in sentences)), "D")
    short = {"beam": 5, "max_len_a": 0, "max_len_b": 20}
    assert hub.translate(sentences, **short) == [detokenised[0][0], detokenised[1][0]]
    assert hub.translate(sentences[0], **short) == detokenised[0][0]
    assert hub.decode(hub.encode("cat-like")) == "cat-like"


SENTENCES = ["the dog sees a cat", "house", "a big old book under the red house"]


@pytest.fixture(scope="module")
def hub(data_bin, model_path):
    return TransformerRopeModel.from_pretrained(str(model_path.parent), model_path.name, str(data_bin))


def hypotheses_of(hub, sentences, **options):
    return hub.generate([hub.encode(line) for line in sentences], **{"beam": 3, "max_len_b": 12, **options})


@pytest.mark.parametrize("options", [{}, {"diverse_beam_groups": 3}])
def test_hypotheses_of_the_hub_have_the_attention_of_one_full_pass_if_it_is_on(hub, options, monkeypatch):
    monkeypatch.setattr(hub.models[0].decoder.layers[-1], "need_attn", True)
    for source, of_sentence in zip(map(hub.encode, SENTENCES), hypotheses_of(hub, SENTENCES, **options), strict=True):
        for hypothesis in of_sentence:
            tokens = hypothesis["tokens"]
            previous = torch.cat([tokens[-1:], tokens[:-1]])[None]
            with torch.no_grad():
                extra = hub.models[0](source[None], torch.tensor([len(source)]), previous)[1]
            longest = max(len(hub.encode(line)) for line in SENTENCES)  # padded on the left
            assert hypothesis["attention"].shape == (longest, len(tokens))
            torch.testing.assert_close(hypothesis["attention"][longest - len(source) :], extra["attn"][0][0].T)
            assert not hypothesis["attention"][: longest - len(source)].any()


def test_alignments_of_the_hub_are_those_of_fairseq_generate(data_bin, model_path, hub):
    flags = ["--beam", 3, "--nbest", 3, "--print-alignment", "soft"]
    printed = outputs(generate(data_bin, model_path, *flags), "A")
    sentences = text(data_bin, "test.en")
    hypotheses = hypotheses_of(hub, sentences, print_alignment="soft", max_len_a=0, max_len_b=20)
    for number, of_sentence in enumerate(hypotheses):
        for line, hypothesis in zip(printed[number], of_sentence, strict=True):
            expected = torch.tensor([list(map(float, row.split(","))) for row in line.split()])
            actual = torch.tensor([list(map(float, row)) for row in hypothesis["alignment"]])
            torch.testing.assert_close(actual, expected, atol=2e-6, rtol=0)  # printed with 6 digits


@pytest.mark.parametrize("options", [{}, {"diverse_beam_groups": 3}])
def test_each_sentence_of_the_hub_has_its_own_prefix(hub, options):
    words = ["CAT", "BOOK", "UNDER"]
    prefix = torch.tensor([[hub.tgt_dict.index(word)] for word in words])
    given = {"inference_step_args": {"prefix_tokens": prefix}}
    for of_sentence, word in zip(hypotheses_of(hub, SENTENCES, **given, **options), words, strict=True):
        assert [hub.decode(each["tokens"]).split()[0] for each in of_sentence] == [word] * 3
    first = {"inference_step_args": {"prefix_tokens": prefix[:1]}}
    (_, *others) = hub.generate(hub.encode(SENTENCES[0]), beam=3, max_len_b=12, **first, **options)
    assert {hub.decode(each["tokens"]).split()[0] for each in others} == {"CAT"}


def test_groups_of_the_hub_are_those_of_each_sentence_alone(hub):
    groups = {"diverse_beam_groups": 3, "diverse_beam_strength": 2.0, "max_len_b": 20, "max_len_a": 0}
    for line, of_sentence in zip(SENTENCES, hypotheses_of(hub, SENTENCES, **groups), strict=True):
        (alone,) = hypotheses_of(hub, [line], **groups)
        assert [each["tokens"].tolist() for each in of_sentence] == [each["tokens"].tolist() for each in alone]


# -- training ----------------------------------------------------------------------------------------


def test_an_average_that_fairseq_alone_has_saved_gets_its_norms_back(build):
    """fairseq alone saves averages of pre-norm models with the version of 2017 and without the last norms."""
    model = build(encoder_normalize_before=True, decoder_normalize_before=True)
    saved = {name: weight for name, weight in model.state_dict().items() if not re.match(r"\w+\.layer_norm", name)}
    saved |= {name: torch.ones(1) for name in saved if name.endswith("version")}
    average = EMA(model, SimpleNamespace(ema_decay=0.5, ema_seed_model=None, ema_fp32=False, ema_update_freq=1))
    average.restore(saved)
    average.step(model)
    assert average.get_model().state_dict().keys() == model.state_dict().keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        "--encoder-normalize-before --decoder-normalize-before --activation-fn gelu --activation-dropout 0.1 "
        "--attention-dropout 0.2 --encoder-layerdrop 0.3 --decoder-layerdrop 0.2 --quant-noise-pq 0.1 "
        "--quant-noise-pq-block-size 8 --store-ema --ema-decay 0.9",
        "--encoder-normalize-before --layernorm-embedding --no-scale-embedding --left-pad-source "
        "--rope-fraction 0.5 --rope-layout half --rope-base 500 "
        "--encoder-embed-dim 32 --decoder-embed-dim 64 --decoder-output-dim 32",
        "--arch transformer_rope_llama --encoder-layers 1 --decoder-layers 2 --encoder-embed-dim 64 "
        "--encoder-ffn-embed-dim 64 --encoder-attention-heads 2 --decoder-attention-heads 2 --quant-noise-pq 0.1 "
        "--checkpoint-activations --store-ema --optimizer adafactor --share-decoder-input-output-embed",
        "--memory-efficient-fp16 --share-all-embeddings",
    ],
)
def test_options_train_and_translate(data_bin, tmp_path, flags):
    """tests/test_flags.py shows that each of these flags of models changes the model."""
    words = training(data_bin, tmp_path, "--max-epoch", 1, "--no-epoch-checkpoints", without=SHARED)
    log = call(*words, *flags.split())
    assert math.isfinite(float(valid_losses(log)[1]))
    path = tmp_path / "checkpoint_last.pt"
    if "--store-ema" in flags:
        state = load_checkpoint(str(path))
        assert state["extra_state"]["ema"].keys() == state["model"].keys(), "also the norms after the layers"
    assert_translates(data_bin, path, "--beam", 2)


ADAPTIVE = ["--criterion", "adaptive_loss", "--adaptive-softmax-cutoff", "8,16"]


def test_embeddings_are_read_from_a_file(build, task, tmp_path):
    lines = [f"w7 {' '.join(['0.25'] * 64)}", f"w9 {' '.join(['-0.5'] * 64)}"]
    path = tmp_path / "vectors"
    path.write_text("2 64\n" + "\n".join(lines) + "\n")
    model = build(encoder_embed_path=str(path), decoder_embed_path=str(path))
    for side in (model.encoder, model.decoder):
        for word, value in (("w7", 0.25), ("w9", -0.5)):
            assert bool(side.embed_tokens.weight[task.source_dictionary.index(word)].eq(value).all())


def test_layers_to_keep_builds_the_model_of_those_layers(data_bin, model_path):
    override = "{'encoder_layers_to_keep': '1', 'decoder_layers_to_keep': '0'}"
    actual = scores(generate(data_bin, model_path, "--score-reference", "--model-overrides", override))
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(model_path)])
    model.encoder.layers, model.decoder.layers = model.encoder.layers[1:], model.decoder.layers[:1]
    model.decoder.num_layers = 1
    assert_scores_equal_those_of(actual, [model], task)


@pytest.mark.parametrize("kept", [["--encoder-layers-to-keep", "1"], ["--decoder-layers-to-keep", "0"]])
def test_a_training_starts_from_some_layers_of_a_checkpoint(data_bin, model_path, tmp_path, kept):
    """fairseq's own transformer fails with these flags. With a learning rate of 0, the weights stay the same."""
    start = ["--finetune-from-model", model_path, *kept, "--lr", 0, "--warmup-init-lr", 0]
    train(data_bin, tmp_path, *start)
    (whole,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(model_path)])
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(tmp_path / "checkpoint_last.pt")])
    assert (len(model.encoder.layers), len(model.decoder.layers)) == ((1, 2) if "1" in kept else (2, 1))
    expected = whole.encoder.layers[1:] if "1" in kept else whole.decoder.layers[:1]
    actual = model.encoder.layers if "1" in kept else model.decoder.layers
    for one, other in zip(expected.parameters(), actual.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_adaptive_softmax_trains_and_translates(data_bin, tmp_path):
    words = training(data_bin, tmp_path, "--max-epoch", 1, without=(*SHARED, *SMOOTHED))
    log = call(*words, *ADAPTIVE, "--ddp-backend", "legacy_ddp")
    assert math.isfinite(float(valid_losses(log)[1]))
    assert_translates(data_bin, tmp_path / "checkpoint_last.pt", "--max-len-b", 8)


def test_the_adaptive_loss_of_a_model_without_adaptive_softmax_is_refused(data_bin, tmp_path):
    words = training(data_bin, tmp_path, "--max-epoch", 1, without=(*SHARED, *SMOOTHED))
    with pytest.raises(InputError, match="^--criterion adaptive_loss: .*--adaptive-softmax-cutoff"):
        call(*words, "--criterion", "adaptive_loss", "--ddp-backend", "legacy_ddp")


@pytest.mark.slow
def test_activation_checkpointing_and_offloading_train_to_the_same_loss(data_bin, tmp_path):
    losses = [
        valid_losses(train(data_bin, tmp_path / str(number), "--no-epoch-checkpoints", *option))
        for number, option in enumerate(([], ["--checkpoint-activations"], ["--offload-activations"]))
    ]
    assert losses[0] and losses[0] == losses[1] == losses[2]


# -- other models and tasks --------------------------------------------------------------------------


SIZES = {"layers": 1, "embed-dim": 32, "ffn-embed-dim": 64, "attention-heads": 2}
SMALL = [f"--{side}-{name}={size}" for side in ("encoder", "decoder") for name, size in SIZES.items()]


@pytest.mark.slow
def test_supervised_alignment_trains_and_prints_alignments(data_bin, tmp_path):
    folder = tmp_path / "text"
    shutil.copytree(data_bin.parent / "text", folder)
    for name in ("train", "valid"):
        lengths = [len(line.split()) for line in text(data_bin, f"{name}.en")]
        mirrored = [" ".join(f"{i}-{n - 1 - i}" for i in range(n)) for n in lengths]
        (folder / f"{name}.align").write_text("".join(f"{line}\n" for line in mirrored))
    data, path = tmp_path / "bin", tmp_path / "model" / "checkpoint_last.pt"
    preprocess(data, folder / "train", folder / "valid", "--align-suffix", "align")
    supervised = ["--load-alignments", "--criterion", "label_smoothed_cross_entropy_with_alignment"]
    of_layer = ["--alignment-layer", 0, "--full-context-alignment"]
    of_block = "--norm-type rms --cross-kv-heads 1 --ffn-type glu --qk-norm --encoder-attention-type linear".split()
    log = train(data, path.parent, "--arch", "transformer_rope_align", *SMALL, *supervised, *of_layer, *of_block)
    assert '"valid_alignment_loss"' in log
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    assert isinstance(model, TransformerAlignModel)
    assert isinstance(model.decoder.layers[0].self_attn, SelfAttention)
    assert model.encoder.embed_positions is None
    assert type(model.decoder.layers[0].final_layer_norm) is RMSNorm
    assert model.decoder.layers[0].encoder_attn.k_proj.out_features == 16
    printed = generate(data, path, "--gen-subset", "valid", "--print-alignment", "--max-len-b", 8)
    assert sorted(outputs(printed, "A")) == list(range(20))


def test_multilingual_transformer_trains_and_translates(data_bin, tmp_path):
    path, task = tmp_path / "checkpoint_last.pt", ["--task", "multilingual_translation", "--lang-pairs", "en-de,de-en"]
    shared = ["--share-encoders", "--rope-layout", "half", "--norm-type", "rms", "--encoder-kv-heads", 1]
    shared += "--ffn-type glu --qk-norm --no-projection-bias --decoder-attention-type linear".split()
    log = train(data_bin, tmp_path, "--arch", "multilingual_transformer_rope", *task, *SMALL, *shared)
    assert math.isfinite(float(valid_losses(log)[1]))
    (model,), _, _ = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    for name in ("en-de", "de-en"):
        assert {layer.self_attn.position.layout for layer in layers(model.models[name])} == {"half"}
        assert {type(layer.final_layer_norm) for layer in model.models[name].decoder.layers} == {RMSNorm}
        assert {layer.self_attn.v_proj.out_features for layer in model.models[name].encoder.layers} == {16}
    assert_translates(data_bin, path, *task, *PAIR, "--max-len-b", 8)


@pytest.mark.slow
def test_translation_multi_simple_epoch_trains_and_translates(data_bin, tmp_path):
    task = "--task translation_multi_simple_epoch --lang-pairs en-de,de-en --encoder-langtok src".split()
    sampling = "--sampling-method temperature --sampling-temperature 1.5 --virtual-epoch-size 200".split()
    assert math.isfinite(float(valid_losses(train(data_bin, tmp_path, *task, *sampling))[1]))
    assert_translates(data_bin, tmp_path / "checkpoint_last.pt", *task, *PAIR, "--max-len-b", 8)


# -- 16 bits, torch.jit.script, pruning -------------------------------------------------------------------


def test_generation_in_fp16_translates(data_bin, model_path):
    assert_translates(data_bin, model_path, "--fp16", "--beam", 2)


@pytest.mark.parametrize("options", [{}, {"position_encoding": "shaw"}, {"norm_type": "rms", "qk_norm": True}])
def test_pruned_feed_forward_layers_and_heads_run(build, options):
    model = build(**options)
    layer = model.encoder.layers[0]
    layer._prune_fc_layer(layer._get_fc_rank(16))
    layer.self_attn._set_skip_embed_dim_check()
    layer.self_attn._adaptive_prune_heads(layer.self_attn._get_reserve_head_index(1))
    source = torch.randint(4, 44, (2, 5))
    out = model(source, torch.tensor([5, 5]), source)[0]
    assert layer.fc1.out_features == 48 and layer.self_attn.num_heads == 1
    assert bool(out.isfinite().all())


@pytest.mark.parametrize("options", [{"no_projection_bias": True}, {"encoder_kv_heads": 1}])
def test_heads_without_biases_and_shared_heads_are_not_pruned(build, options):
    layer = build(**options).encoder.layers[0]
    with pytest.raises(ValueError, match="pruned"):
        layer.self_attn._get_reserve_head_index(1)  # the first step of fairseq's trainer


# -- lengths -----------------------------------------------------------------------------------------


def test_sentences_longer_than_any_in_training_translate(data_bin, model_path):
    longest = max(len(line.split()) for line in text(data_bin, "train.en"))
    long = " ".join(["dog", "cat"] * 300)
    assert len(long.split()) > 60 * longest  # and longer than the first rotary table
    assert outputs(interactive(data_bin, model_path, "--beam", 2, stdin=f"{long}\n"))[0][0]
