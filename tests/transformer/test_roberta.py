"""roberta_rope: beside a plain float64 reference and fairseq's roberta, and with fairseq's commands."""

from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY
from fairseq.models.roberta import RobertaModel

from fairseq_rope.positions import ENCODINGS
from fairseq_rope.transformer.language_model import TransformerRopeLanguageModel
from fairseq_rope.transformer.options import model_sides
from fairseq_rope.transformer.roberta import RobertaRopeModel
from tests.commands import valid_losses
from tests.models import PAD, batch, with_different_norms
from tests.references import CASES, C, H, gelu, layer_normalised, linear, plain_layers
from tests.transformer.language_models import assert_resumes, averaged, converted, fit

SIZES = {"encoder_layers": 2, "encoder_attention_heads": H, "encoder_embed_dim": C, "encoder_ffn_embed_dim": 20}
SIZES.update(max_positions=30, quant_noise_pq_block_size=4)


@pytest.fixture
def roberta(build):
    def roberta(arch="roberta_rope", **options):
        return with_different_norms(build(arch, **{**SIZES, **options}))

    return roberta


@pytest.mark.parametrize("name, side, options", [case for case in CASES if case.values[1] == "encoder"])
def test_the_model_is_its_formula(roberta, name, side, options):
    model = roberta(position_encoding=name, **options).double()
    tokens, _ = batch([7, 4], left_pad=False)
    encoder, head, words = model.encoder.sentence_encoder, model.encoder.lm_head, tokens.ne(PAD)
    x = layer_normalised(encoder.embed_tokens.weight.double()[tokens], encoder.layernorm_embedding).transpose(0, 1)
    x = plain_layers(encoder.layers, name, side, options, x, ~words, gelu).transpose(0, 1)
    torch.testing.assert_close(model(tokens, features_only=True)[0][words], x[words], rtol=1e-6, atol=1e-6)
    scores = layer_normalised(gelu(linear(x, head.dense)), head.layer_norm) @ encoder.embed_tokens.weight.T + head.bias
    torch.testing.assert_close(model(tokens)[0][words], scores[words], rtol=1e-6, atol=1e-6)
    model.register_classification_head("pairs", num_classes=2)
    pairs = model.classification_heads["pairs"].double()
    expected = linear(torch.tanh(linear(x[:, 0], pairs.dense)), pairs.out_proj)
    torch.testing.assert_close(model(tokens, classification_head_name="pairs")[0], expected, rtol=1e-6, atol=1e-6)


def test_a_subclass_with_a_name_of_its_own_is_one_sided_too(task, monkeypatch):
    """A user dir registers the subclass, with an architecture that sets nothing: fairseq's defaults remain."""
    for name, parent in (("my_roberta", RobertaRopeModel), ("my_lm", TransformerRopeLanguageModel)):
        monkeypatch.setitem(MODEL_REGISTRY, name, type(name, (parent,), {}))
        monkeypatch.setitem(ARCH_MODEL_NAME_REGISTRY, name, name)
    assert model_sides(Namespace(arch="my_lm")) == ("decoder",)

    def shapes(model, arch):
        built = model.build_model(Namespace(arch=arch, max_positions=30, encoder_layers=1), task)
        return {name: tuple(weight.shape) for name, weight in built.state_dict().items()}

    fairseqs = shapes(RobertaModel, "roberta")
    ours = shapes(MODEL_REGISTRY["my_roberta"], "my_roberta")
    assert ours == {name: shape for name, shape in fairseqs.items() if "embed_positions" not in name}


FAIRSEQS = {
    "learned": {},
    "sinusoidal": {"encoder_learned_pos": False},
    "none": {"no_token_positional_embeddings": True},
}
PARTS = {
    "usual": {},
    "before": {"encoder_normalize_before": True, "layernorm_embedding": False, "untie_weights_roberta": True},
    "noise": {"quant_noise_pq": 0.1, "encoder_layerdrop": 0.1},
}


@pytest.mark.parametrize("name", ["transformer-xl", "own"])
def test_an_encoding_chooses_its_own_initial_values(build, name, monkeypatch):
    """RoBERTa draws all linear layers and embeddings from N(0, 0.02)."""

    class Own(ENCODINGS["none"]):
        def __init__(self):
            super().__init__()
            self.table, self.linear = torch.nn.Embedding(3, 4), torch.nn.Linear(2, 2)
            self.reset_parameters()

        def reset_parameters(self):
            for number, parameter in enumerate(self.parameters(), 1):
                torch.nn.init.constant_(parameter, float(number))

    monkeypatch.setitem(ENCODINGS, "own", Own)
    model = build("roberta_rope", position_encoding=name, encoder_layerdrop=0.5, **SIZES)
    for layer in model.encoder.sentence_encoder.layers.children():
        position = layer.self_attn.position
        values = [parameter.detach().clone() for parameter in position.parameters()]
        assert values
        if name == "own":
            assert [set(value.flatten().tolist()) for value in values] == [{1.0}, {2.0}, {3.0}]
        else:  # of the same spread as those of the class
            position.reset_parameters()
            value, again = (max(of, key=torch.numel) for of in (values, position.parameters()))
            assert float(value.std()) == pytest.approx(float(again.detach().std()), rel=0.3)


@pytest.mark.parametrize(
    "name, parts", [*((name, "usual") for name in FAIRSEQS), ("none", "before"), ("none", "noise")]
)
def test_without_rope_it_is_fairseqs_model(build, name, parts):
    torch.manual_seed(3)
    ours = build("roberta_rope", position_encoding=name, **SIZES, **PARTS[parts])
    torch.manual_seed(3)
    stock = build("roberta", **SIZES, **PARTS[parts], **FAIRSEQS[name])
    assert ours.state_dict().keys() == stock.state_dict().keys()
    if name != "learned":  # fairseq draws the vectors of positions before the layers
        for key, weight in stock.named_parameters():
            torch.testing.assert_close(ours.get_parameter(key), weight, rtol=0, atol=0, msg=key)
    ours.load_state_dict(stock.state_dict())
    tokens, _ = batch([7, 4], left_pad=False)
    masked = torch.rand(tokens.shape) < 0.5
    for options in ({}, {"features_only": True}, {"masked_tokens": masked}):
        torch.testing.assert_close(ours(tokens, **options)[0], stock(tokens, **options)[0], rtol=1e-6, atol=1e-6)


def test_the_small_model_has_less_than_a_million_weights_without_embeddings(build):
    model = build("roberta_rope_small", max_positions=30)
    layers = sum(weight.numel() for weight in model.encoder.sentence_encoder.layers.parameters())
    assert 5e5 < layers < 1e6


# -- fairseq's commands ----------------------------------------------------------------------------

SHORT = (
    "--arch roberta_rope_small --encoder-layers 2 --max-positions 40 --optimizer adam --lr 0.001 --max-tokens 512 "
    "--cpu --seed 3 --num-workers 0 --log-format json --save-interval-updates 2 --required-batch-size-multiple 1 "
)
MASKED = f"{SHORT} --task masked_lm --criterion masked_lm --tokens-per-sample 32"
HEADS = {
    "prediction": "--task sentence_prediction --criterion sentence_prediction --init-token 0 --separator-token 2",
    "ranking": "--task sentence_ranking --criterion sentence_ranking --init-token 0 --separator-token 2",
}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--attention-type", "linear", "--norm-type", "rms"]])
def test_a_masked_language_model_trains_resumes_averages_and_fills_masks(text_bin, tmp_path, flags):
    last = assert_resumes(MASKED, text_bin, tmp_path, *flags)
    features = []
    for path in (last, converted(last), averaged(last.parent)):
        hub = RobertaRopeModel.from_pretrained(str(path.parent), path.name, str(text_bin), bpe=None).eval()
        tokens = hub.encode("the dog sees")
        features.append(hub.extract_features(tokens))
        assert features[-1].shape == (1, 5, 128) and len(hub.extract_features(tokens, return_all_hiddens=True)) == 3
        (filled, score, word), *_ = hub.fill_mask("the <mask> sees", topk=3)
        tokens[2] = hub.task.mask_idx
        probabilities = hub.model(tokens[None])[0][0, 2].softmax(0)
        best = probabilities[3:].max(0)  # without <s>, <pad> and </s>
        assert (filled, word) == (f"the {word} sees", hub.task.source_dictionary[3 + best.indices])
        assert score == pytest.approx(float(best.values.detach()), rel=1e-4)
    torch.testing.assert_close(features[1], features[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(features[2], features[0], atol=1e-4)


@pytest.mark.slow
def test_a_roberta_of_fairseq_continues_with_rope_and_a_head(text_bin, pairs_bin, tmp_path):
    stock = MASKED.replace("roberta_rope_small", "roberta --encoder-embed-dim 128 --encoder-ffn-embed-dim 512") + (
        " --encoder-attention-heads 4"
    )
    fit(stock, text_bin, tmp_path / "stock", "--max-update", 2)
    start = ["--finetune-from-model", tmp_path / "stock" / "checkpoint_last.pt", "--max-update", 4, "--num-classes", 2]
    for name, task in HEADS.items():
        log = fit(f"{SHORT} {task}", pairs_bin, tmp_path / name, *start)
        assert "dropped encoder.sentence_encoder.embed_positions.weight from the checkpoint" in log
        assert valid_losses(log)
    path = converted(tmp_path / "prediction" / "checkpoint_last.pt")
    places = (str(path.parent), path.name, str(pairs_bin))
    hub = RobertaRopeModel.from_pretrained(*places, bpe="characters").eval()
    tokens = torch.tensor([0, 5, 6, 2])
    expected = hub.model(tokens[None], classification_head_name="sentence_classification_head")[0].log_softmax(1)
    torch.testing.assert_close(hub.predict("sentence_classification_head", tokens), expected)
    hub.register_classification_head("new", num_classes=3)
    assert hub.predict("new", tokens).shape == (1, 3)
