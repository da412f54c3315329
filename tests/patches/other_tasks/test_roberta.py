"""fairseq_rope/patches/other_tasks/roberta.py: a mask in plain text is filled, without a BPE and without a network."""

import math
from argparse import Namespace
from types import SimpleNamespace

import pytest
import torch
from fairseq.data import Dictionary
from fairseq.models.roberta import model as fairseq_model

from fairseq_rope.patches.other_tasks.roberta import RobertaHubInterface

PROBABILITIES = {"dog": 0.4, "</s>": 0.3, "cat": 0.2, "<unk>": 0.1}


class Model(torch.nn.Module):
    """Returns PROBABILITIES for <mask> in the words that it expects."""

    def __init__(self, dictionary, expected):
        super().__init__()
        self.dictionary, self.expected = dictionary, expected

    def forward(self, tokens, **options):
        words = [self.dictionary[token] for token in tokens[0].tolist()]
        assert words == self.expected and not self.training
        scores = torch.full((1, len(words), len(self.dictionary)), -math.inf)
        for word, probability in PROBABILITIES.items():
            scores[0, words.index("<mask>"), self.dictionary.index(word)] = math.log(probability)
        return scores, {}


@pytest.fixture
def hub():
    """hub(expected, bpe): the interface that from_pretrained returns, whose model expects these words."""
    dictionary = Dictionary()
    for word in ("the", "dog", "cat", "\u2581cat", "sees", "<mask>"):
        dictionary.add_symbol(word)
    task = SimpleNamespace(source_dictionary=dictionary, mask_idx=dictionary.index("<mask>"))

    def hub(expected, bpe=None):
        return fairseq_model.RobertaHubInterface(SimpleNamespace(bpe=bpe), task, Model(dictionary, expected))

    return hub


@pytest.mark.parametrize("text", ["the <mask> sees", "<mask> sees", "the cat sees <mask>", "the <mask> unheard"])
def test_a_mask_is_filled_with_words(hub, text):
    words = [word if word != "unheard" else "<unk>" for word in text.split()]
    filled = hub(["<s>", *words, "</s>"]).fill_mask(text, topk=2)
    expected = [(text.replace("<mask>", word), PROBABILITIES[word], word) for word in ("dog", "cat")]
    assert filled == [(line, pytest.approx(probability), word) for line, probability, word in expected]


def test_text_is_encoded_and_decoded(hub):
    interface = hub([])
    tokens = interface.encode("the dog sees", "the cat")
    words = [interface.task.source_dictionary[token] for token in tokens.tolist()]
    assert words == "<s> the dog sees </s> </s> the cat </s>".split()
    assert interface.decode(tokens) == ["the dog sees", "the cat"]


@pytest.mark.parametrize("kind", ["characters", "sentencepiece"])
def test_with_a_bpe_it_is_fairseqs(hub, byte_pieces, monkeypatch, kind):
    bpe = Namespace(bpe=kind, sentencepiece_model=str(byte_pieces))
    interface = hub(["<s>", *["<unk>"] * (1 if kind == "characters" else 2), "<mask>", "</s>"], bpe)
    alone = RobertaHubInterface(interface.cfg, interface.task, interface.model)
    for number, word in enumerate(("dog", "\u2581cat")):
        monkeypatch.setitem(PROBABILITIES, word, 1.0 + number)
        for text in ("z <mask>", "z<mask>"):
            assert interface.fill_mask(text, 1) == alone.fill_mask(text, 1)
    assert interface.encode("a b").tolist() == alone.encode("a b").tolist()
