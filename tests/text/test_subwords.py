"""fairseq_rope/text/subwords.py: pieces of SentencePiece become the text that they were made of."""

import pytest
import sentencepiece

from fairseq_rope.text import tokens
from fairseq_rope.text.subwords import text_of_pieces, undo_subwords
from fairseq_rope.text.tokens import Tokeniser

# Only the first line consists of learned pieces.
TEXTS = ["the dog sees 5 houses", "5 €", "€5, 日本 and 🙂!", "the<x>dog <x>", "<0x41> <2de>", "naïve"]


@pytest.fixture(scope="module")
def processor(byte_pieces):
    return sentencepiece.SentencePieceProcessor(model_file=str(byte_pieces))


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_its_pieces_with_and_without_their_model(byte_pieces, processor, text):
    pieces = processor.encode(text, out_type=str)
    assert text_of_pieces(pieces, processor) == text_of_pieces(pieces) == text
    settings = {"moses": None, "subwords": {"kind": "sentencepiece", "file": byte_pieces.name}}
    tokeniser = Tokeniser(str(byte_pieces.parent), settings)
    assert tokeniser.plain(tokeniser.tokens(text)) == text
    assert undo_subwords([" ".join(pieces)]) == ([text], "SentencePiece")


def test_the_subwords_of_words_do_not_fill_the_memory(tmp_path, monkeypatch):
    (tmp_path / "codes").write_text("#version: 0.2\na b\nab c</w>\n")
    tokeniser = Tokeniser(str(tmp_path), {"moses": None, "subwords": {"kind": "subword_nmt", "file": "codes"}})
    assert tokeniser.tokens("abc bca") == ["abc", "b@@", "c@@", "a"]
    kept = tokeniser._bpe.cache
    assert set(kept) == {"abc", "bca"}
    monkeypatch.setattr(tokens, "MOST_CHARACTERS", 16)
    for line, words in (("abc bca xy", 0), ("abc xy", 2), ("bca", 3), ("abc bca", 3), ("x", 0)):
        assert tokeniser.tokens(line)[:1] == (["b@@"] if line == "bca" else [line.split()[0]])
        assert len(tokeniser._bpe.cache) == words
    assert set(kept) >= {"abc", "bca"}, "another thread can be reading it"


@pytest.mark.parametrize(
    "pieces", ["▁a <0xE2> <0x82> ▁b", "<0xAC> a <0xED> <0xA0> <0x80> <0xF0> <0x9F>", "▁the <0xC3> <0xA9> <0xA9> dog"]
)
def test_bytes_that_are_no_character_become_what_sentencepiece_makes_of_them(processor, pieces):
    expected = processor.decode(pieces.split())
    assert "\ufffd" in expected
    assert text_of_pieces(pieces.split(), processor) == text_of_pieces(pieces.split()) == expected


def test_control_symbols_are_removed_and_unknown_words_remain(processor):
    assert text_of_pieces("<2de> ▁the <unk> ▁dog <unk>".split(), processor) == "the<unk> dog<unk>"
    assert text_of_pieces("▁the <unk> ▁dog".split()) == "the<unk> dog"
    assert text_of_pieces(["▁unheard", "▁of"], processor) == "unheard of"  # pieces of another model
    assert text_of_pieces([], processor) == text_of_pieces([]) == ""


def test_a_text_stays_in_one_line(processor):
    pieces = ["▁the", "<0x0A>", "▁dog", "<0x0D>", "<0x0A>"]
    assert text_of_pieces(pieces, processor) == text_of_pieces(pieces) == "the  dog"


@pytest.fixture
def with_blanks(tmp_path):
    """A tokeniser and the processor of a model that does not remove blanks."""
    options = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, "add_dummy_prefix": False}
    options |= {"vocab_size": 16, "model_type": "char", "minloglevel": 2}
    prefix, lines = str(tmp_path / "m"), iter(["a cat  sees a dog"] * 9)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_prefix=prefix, **options)
    tokeniser = Tokeniser(str(tmp_path), {"moses": None, "subwords": {"kind": "sentencepiece", "file": "m.model"}})
    return tokeniser, sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


def test_only_the_blanks_between_words_are_tokens_as_in_fairseq_interactive(with_blanks):
    """fairseq_cli/interactive.py strips each line."""
    tokeniser, processor = with_blanks
    pieces = processor.encode("a  cat sees", out_type=str)
    assert [tokeniser.tokens(line) for line in ("a  cat sees", " a  cat sees\t", "a  cat sees\r\n")] == [pieces] * 3
    assert text_of_pieces(pieces, processor) == text_of_pieces(pieces) == "a  cat sees"


@pytest.mark.parametrize(
    "line, hypothesis, plain, undone",
    [
        ("5 <0xE2><0x82><0xAC>", "▁5 ▁ <0xE2> <0x82> <0xAC>", "5 €", "bytes of SentencePiece"),
        ("5 <0xE2><0x82><0xAC>", "5 <0xE2><0x82><0xAC>", "5 €", "bytes of SentencePiece"),  # --remove-bpe
        ("Byte <0x41>", "Byte &lt;0x41&gt;", "Byte <0x41>", None),  # Moses escapes what is text
        ("Byte <0x41>", "▁Byte ▁< 0 x 4 1 >", "Byte <0x41>", None),
    ],
)
def test_bytes_that_fairseq_joined_become_text_if_they_were_pieces(line, hypothesis, plain, undone):
    assert undo_subwords([line], [hypothesis]) == ([plain], undone)


def test_moses_tokens_of_pieces_are_detokenised(byte_pieces):
    moses = {"source": "en", "target": "en", "dash_splits": False}
    settings = {"moses": moses, "subwords": {"kind": "sentencepiece", "file": byte_pieces.name}}
    tokeniser = Tokeniser(str(byte_pieces.parent), settings)
    assert tokeniser.plain(tokeniser.tokens("the dog's house, (5 €).")) == "the dog's house, (5 €)."
