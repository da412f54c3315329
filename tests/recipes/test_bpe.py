"""recipes/text/bpe.py, compared with subword-nmt's own functions and fairseq's encoders."""

import io
import tempfile
import unicodedata

import pytest
import sentencepiece
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig
from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE, SubwordNMTBPEConfig
from subword_nmt.apply_bpe import BPE
from subword_nmt.learn_bpe import learn_bpe

from recipes.text import bpe
from tests.recipes.texts import DIRTY_LINES, read_lines, write_lines
from tests.recipes.wmt14_lookalike import clean_pairs

ODD = ["", "  two  blanks ", "ein Wort@@ mit @@", "ünbekannt 漢字 x", "a", "no\u00a0break"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with sentences in two made-up languages: train.en, train.de, test.en, test.de."""
    folder, pairs = tmp_path_factory.mktemp("corpus"), clean_pairs(1500)
    for name, some in (("train", pairs[20:]), ("test", pairs[:20])):
        write_lines(folder / f"{name}.en", [f"the {en}" for en, _ in some])
        write_lines(folder / f"{name}.de", [f"das {de}" for _, de in some])
    return folder


def run(*words):
    bpe.main([str(word) for word in words])


def learn(corpus, output, vocab_size=600, tool="learn"):
    run(tool, "--vocab-size", vocab_size, "--output", output, corpus / "train.en", corpus / "train.de")
    return output


@pytest.fixture(scope="module")
def codes(corpus):
    return learn(corpus, corpus / "bpecodes")


@pytest.fixture(scope="module")
def model(corpus):
    return learn(corpus, corpus / "sentencepiece.bpe.model", tool="sentencepiece-train")


def apply(learnt, text, folder):
    """The lines of *text*, split by the codes or model *learnt*."""
    tool = ("sentencepiece-encode", "--model") if learnt.name.endswith("model") else ("apply", "--codes")
    source = write_lines(folder / "in", text)
    run(*tool, learnt, "--input", source, "--output", folder / "out")
    return read_lines(folder / "out")


def test_codes_and_subwords_equal_those_of_subword_nmt(corpus, codes, tmp_path):
    both = (corpus / "train.en").read_text() + (corpus / "train.de").read_text()
    learn_bpe(io.StringIO(both), expected := io.StringIO(), 600, total_symbols=True)
    assert codes.read_text() == expected.getvalue()
    lines = both.split("\n")[:-1] + ODD
    with open(codes, encoding="utf-8") as file:
        subword_nmt = BPE(file)
    assert apply(codes, lines, tmp_path) == [subword_nmt.process_line(line) for line in lines]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # fairseq does not close the codes
def test_fairseqs_encoders_split_the_same_and_decode_it(corpus, codes, model, tmp_path):
    text = read_lines(corpus / "test.de") + read_lines(corpus / "test.en") + ["ünbekannt 漢字 x"]
    odd, plain = ["", "„Ja“ – 5\u00a0% …"], ["", "„Ja“ – 5 % …"]
    for learnt, encoder, lines, decoded in (
        (codes, SubwordNMTBPE(SubwordNMTBPEConfig(bpe_codes=str(codes))), text, text),
        (model, SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(model))), text + odd, text + plain),
    ):
        split = apply(learnt, lines, tmp_path)
        assert split == [encoder.encode(line) for line in lines]
        assert [encoder.decode(line) for line in split] == decoded


def test_only_blanks_and_line_ends_separate_words(tmp_path):
    path = write_lines(tmp_path / "text", ["  a b\r", "b\u2028c b", "", "d\x85"])
    assert bpe.count_words([path, path]) == {"a": 2, "b": 4, "b\u2028c": 2, "d\x85": 2}


def test_sentencepiece_gives_the_requested_number_of_pieces_each_time(corpus, model, tmp_path, monkeypatch):
    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert len(processor) == 600
    assert {"▁the", "▁das"} <= {processor.id_to_piece(number) for number in range(len(processor))}
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # another folder for temporary files
    assert learn(corpus, tmp_path / "model", tool="sentencepiece-train").read_bytes() == model.read_bytes()


@pytest.mark.parametrize(
    "text, read",
    [
        ("你好，世界！（２）", "你好，世界！（２）"),  # SentencePiece's own rules make , ! (2) of these
        ("น้ำ ຳ ﬁ ½ …", "น้ำ ຳ ﬁ ½ …"),
        ("\u09df \u09af\u09bc \u095c", "\u09af\u09bc \u09af\u09bc \u0921\u093c"),  # NFC decomposes two
        (unicodedata.normalize("NFD", "für 한국 がっこう"), "für 한국 がっこう"),
        ("ê\u0301 e\u0302\u0301 ẹ\u0302 e\u0302\u0323 하\u11ab", "ế ế ệ ệ 한"),  # partly composed
        ("5\u00a0%\u3000a\u200bb\tc\ufeff\u2028 d", "5 % a b c d"),
    ],
)
def test_sentencepiece_changes_no_character_but_blanks_and_composes(model, text, read):
    """So that a model can write all characters of the references."""
    (pieces,) = bpe.sentencepiece_converter(str(model))([text])
    assert pieces.replace(" ", "").replace("▁", " ").strip() == read


@pytest.mark.slow
@pytest.mark.parametrize("name", ["codes", "model"])
def test_two_processes_write_the_same_subwords_as_one(corpus, tmp_path, request, capsys, monkeypatch, name):
    monkeypatch.setattr("recipes.text.lines.SHARE", 1)
    learnt = request.getfixturevalue(name)
    text = [line for line in DIRTY_LINES if "\r" not in line] + read_lines(corpus / "train.de") * 2
    written = []
    for workers in (1, 2):
        monkeypatch.setattr("recipes.text.lines.available_cores", lambda workers=workers: workers)
        written.append(apply(learnt, text, tmp_path))
    one, two = written
    assert one == two and len(one) == len(text)
    assert capsys.readouterr().out.count(f": {len(text)} lines\n") == 2


@pytest.fixture
def small(tmp_path):
    """Two files in which only "low" occurs twice, which allows 2 merges, and files that are not text."""
    write_lines(tmp_path / "text.en", ["low low"])
    write_lines(tmp_path / "text.de", ["er tut"])
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "latin").write_bytes(b"a\r\nb\n" + "Größe\n".encode("latin-1"))
    (tmp_path / "blank").write_bytes(b" \n\n")
    return tmp_path


LEARN, TRAIN = (["learn", "--vocab-size"], ["sentencepiece-train", "--vocab-size"])
APPLY, ENCODE = (["apply", "--input", "text.en", "--codes"], ["sentencepiece-encode", "--input", "text.en", "--model"])


@pytest.mark.parametrize(
    "words, values",
    [
        # Characters: l o e t u within words and w r t at their ends. Merges: "l o", "lo w".
        ([*LEARN, "11", "text.en", "text.de"], ["vocab_size 11", "10"]),
        ([*LEARN, "8", "text.en", "text.de"], ["vocab_size 8", "8 characters"]),
        # <unk>, <s>, </s>; ▁ l o w e r t u.
        ([*TRAIN, "10", "text.en", "text.de"], ["vocab_size 10", "11"]),
        ([*TRAIN, "500", "text.en", "text.de"], ["vocab_size 500", "500"]),
        *(([*tool, "9", "text.en", "empty"], ["FOLDER/empty"]) for tool in (LEARN, TRAIN)),
        *(([*tool, "9", "text.en", "latin"], ["FOLDER/latin, line 3", "0xf6"]) for tool in (LEARN, TRAIN)),
        *(([*tool, "9", "text.en", "none"], ["FOLDER/none"]) for tool in (LEARN, TRAIN)),
        *(([*tool, "9", "blank"], ["FOLDER/blank"]) for tool in (LEARN, TRAIN)),
        *(([*tool, name], [f"FOLDER/{name}"]) for tool in (APPLY, ENCODE) for name in ("latin", "empty", "none")),
    ],
)
def test_wrong_sizes_texts_and_models_are_refused(small, words, values):
    tool, *words = (str(small / word) if (small / word).exists() or word == "none" else word for word in words)
    with pytest.raises(SystemExit) as ended:
        run(tool, *words, "--output", small / "out")
    assert str(ended.value).startswith("recipes.text.bpe: ") and not (small / "out").exists()
    assert all(value.replace("FOLDER", str(small)) in ended.value.code for value in values)


def test_the_largest_possible_vocabulary_is_learnt(small):
    run(*LEARN, 10, "--output", small / "out", small / "text.en", small / "text.de")
    assert read_lines(small / "out")[1:] == ["o w</w>", "l ow</w>"]


@pytest.mark.slow
def test_a_wrong_model_is_refused_by_two_processes_too(small, monkeypatch):
    monkeypatch.setattr("recipes.text.lines.SHARE", 1)
    monkeypatch.setattr("recipes.text.lines.available_cores", lambda: 2)
    with pytest.raises(SystemExit, match=f"{small}/blank"):
        paths = ["--input", small / "text.en", "--output", small / "out"]
        run("sentencepiece-encode", *paths, "--model", small / "blank")
