"""recipes/text/bpe.py: against subword-nmt's own commands and fairseq's encoders."""

import subprocess

import pytest
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE, SentencepieceConfig
from fairseq.data.encoders.subword_nmt_bpe import SubwordNMTBPE, SubwordNMTBPEConfig

from recipes.text import bpe
from tests.commands import BIN
from tests.recipes.test_tokenise import DIRTY, read, tool, write
from tests.recipes.wmt14_lookalike import write_lookalike

ODD = ["", "  two  blanks ", "ein Wort@@ mit @@", "ünbekannt 漢字 x", "a", "no\u00a0break"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A folder with sentences in two made-up languages: train.en, train.de, test.en, test.de."""
    folder = tmp_path_factory.mktemp("corpus")
    lookalike = write_lookalike(folder / "tarballs", pairs=1500)
    dirty = {at for places in lookalike.dirty.values() for at in places}
    clean = [pair for at, pair in enumerate(lookalike.train) if at not in dirty]
    for name, pairs in (("train", clean), ("test", lookalike.test)):
        write(folder / f"{name}.en", [f"the {en}" for en, _ in pairs])
        write(folder / f"{name}.de", [f"das {de}" for _, de in pairs])
    return folder


def run(*words):
    bpe.main([str(word) for word in words])


def learn(corpus, output, vocab_size, tool="learn"):
    run(tool, "--vocab-size", vocab_size, "--output", output, corpus / "train.en", corpus / "train.de")
    return output


@pytest.fixture(scope="module")
def codes(corpus):
    return learn(corpus, corpus / "bpecodes", 600)


@pytest.fixture(scope="module")
def model(corpus):
    return learn(corpus, corpus / "sentencepiece.bpe.model", 600, "sentencepiece-train")


def refused(*words):
    with pytest.raises(SystemExit) as ended:
        run(*words)
    program, said = str(ended.value).split(": ", 1)
    assert program == "recipes.text.bpe" and "\n" not in said
    return said


# -- subword-nmt -----------------------------------------------------------------------------------


def test_codes_are_those_of_subword_nmts_own_command(corpus, codes):
    text = (corpus / "train.en").read_bytes() + (corpus / "train.de").read_bytes()
    command = [BIN / "subword-nmt", "learn-bpe", "--total-symbols", "--symbols", "600"]
    done = subprocess.run(command, input=text, capture_output=True, check=True)
    assert codes.read_bytes() == done.stdout


@pytest.mark.parametrize("lang", ["en", "de"])
def test_subwords_are_those_of_subword_nmts_own_command(corpus, codes, tmp_path, lang):
    text = (corpus / f"train.{lang}").read_bytes() + "".join(line + "\n" for line in ODD).encode()
    (tmp_path / "in").write_bytes(text)
    run("apply", "--codes", codes, "--input", tmp_path / "in", "--output", tmp_path / "out", "--workers", 1)
    command = [BIN / "subword-nmt", "apply-bpe", "--codes", codes]
    done = subprocess.run(command, input=text, capture_output=True, check=True)
    assert (tmp_path / "out").read_bytes() == done.stdout


@pytest.mark.parametrize("vocab_size", [300, 600])
def test_the_joint_vocabulary_is_about_the_size_asked_for(corpus, tmp_path, vocab_size):
    codes = learn(corpus, tmp_path / "codes", vocab_size)
    subwords = set()
    for lang in ("en", "de"):
        run("apply", "--codes", codes, "--input", corpus / f"train.{lang}", "--output", tmp_path / "out",
            "--workers", 1)  # fmt: skip
        subwords.update(subword for line in read(tmp_path / "out") for subword in line.split())
    assert 0.9 * vocab_size <= len(subwords) <= vocab_size


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # it does not close the codes
def test_fairseqs_bpe_does_the_same_and_undoes_it(corpus, codes, tmp_path):
    text = read(corpus / "test.de") + ["ünbekannt 漢字 x"]
    write(tmp_path / "in", text)
    run("apply", "--codes", codes, "--input", tmp_path / "in", "--output", tmp_path / "out", "--workers", 1)
    fairseqs = SubwordNMTBPE(SubwordNMTBPEConfig(bpe_codes=str(codes)))
    assert read(tmp_path / "out") == [fairseqs.encode(line) for line in text]
    assert [fairseqs.decode(line) for line in read(tmp_path / "out")] == text


def test_only_the_most_recent_words_are_remembered(codes, monkeypatch):
    text = ["the houses stand", "die Häuser stehen", "the houses stand"]
    whole = bpe.subword_nmt_converter(str(codes))(text)
    monkeypatch.setattr(bpe, "CACHED_WORDS", 2)
    convert = bpe.subword_nmt_converter(str(codes))
    assert [convert([line])[0] for line in text] == whole
    (cache,) = [cell.cell_contents.cache for cell in convert.__closure__]
    assert sorted(cache) == ["houses", "stand", "the"]


def test_words_are_what_stands_between_blanks_and_line_ends(tmp_path):
    path = write(tmp_path / "text", ["  a b\r", "b\u2028c b", "", "d\x85"])
    assert bpe.count_words([path, path]) == {"a": 2, "b": 4, "b\u2028c": 2, "d\x85": 2}


@pytest.fixture
def small(tmp_path):
    """Two files in which only "low" is there twice: 6 characters with their place, 2 merges."""
    write(tmp_path / "text.en", ["low low"])
    write(tmp_path / "text.de", ["er tut"])
    return tmp_path


def test_a_vocabulary_larger_than_the_corpus_can_give_is_refused_with_what_it_can_give(small):
    texts = small / "text.en", small / "text.de"
    # Characters: l o e t u within words and w r t at their ends. Merges: "l o", "lo w".
    assert refused("learn", "--vocab-size", 11, "--output", small / "codes", *texts) == (
        "vocab_size 11: must be at most 10, all that the corpus' words give"
    )
    assert not (small / "codes").exists()
    run("learn", "--vocab-size", 10, "--output", small / "codes", *texts)
    assert (small / "codes").read_text().split("\n")[1:] == ["o w</w>", "l ow</w>", ""]


def test_a_vocabulary_without_room_for_a_merge_is_refused(small):
    said = refused("learn", "--vocab-size", 8, "--output", small / "codes", small / "text.en", small / "text.de")
    assert said == "vocab_size 8: must be more than the corpus' 8 characters"


def test_a_corpus_of_single_letters_is_refused(tmp_path):
    text = write(tmp_path / "text", ["a b", "a c"])
    said = refused("learn", "--vocab-size", 30, "--output", tmp_path / "codes", text)
    assert said == "vocab_size 30: must be at most 3, all that the corpus' words give"


# -- sentencepiece ---------------------------------------------------------------------------------


def test_fairseqs_sentencepiece_does_the_same_and_undoes_it(corpus, model, tmp_path):
    text = read(corpus / "test.de") + read(corpus / "test.en")
    odd = ["", "ünbekannt 漢字 x", "„Ja“ – 5\u00a0% …"]
    write(tmp_path / "in", text + odd)
    words = ["--model", model, "--input", tmp_path / "in", "--output", tmp_path / "out", "--workers", 1]
    run("sentencepiece-encode", *words)
    fairseqs = SentencepieceBPE(SentencepieceConfig(sentencepiece_model=str(model)))
    out = read(tmp_path / "out")
    assert out == [fairseqs.encode(line) for line in text + odd]
    assert [fairseqs.decode(line) for line in out] == [*text, "", "ünbekannt 漢字 x", "„Ja“ – 5 % ..."]


def test_its_pieces_are_of_both_languages_and_as_many_as_asked_for(model):
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_file=str(model))
    assert len(processor) == 600
    pieces = {processor.id_to_piece(number) for number in range(len(processor))}
    assert {"▁the", "▁das"} <= pieces


def test_the_same_text_gives_the_same_model(corpus, model, tmp_path):
    again = learn(corpus, tmp_path / "model", 600, "sentencepiece-train")
    assert again.read_bytes() == model.read_bytes()


def test_no_character_and_no_long_line_is_left_out(tmp_path):
    import sentencepiece

    text = write(tmp_path / "text", ["abc abd"] * 1000 + ["abc " * 20000 + "漢"])
    run("sentencepiece-train", "--vocab-size", 15, "--output", tmp_path / "model", text)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "model"))
    assert processor.piece_to_id("漢") != processor.unk_id()


def test_sentencepiece_refuses_sizes_with_what_is_possible(small):
    texts = small / "text.en", small / "text.de"
    words = ["--output", small / "model", *texts]
    # <unk>, <s>, </s>; ▁ l o w e r t u.
    assert refused("sentencepiece-train", "--vocab-size", 10, *words) == (
        "vocab_size 10: must be at least 11, the corpus' characters and 3 marks"
    )
    said = refused("sentencepiece-train", "--vocab-size", 500, *words)
    assert said.startswith("vocab_size 500: must be at most ")
    assert not (small / "model").exists()
    most = said.removeprefix("vocab_size 500: must be at most ").split(",")[0]
    run("sentencepiece-train", "--vocab-size", most, *words)
    assert (small / "model").exists()


def test_it_says_no_more_than_progress_and_its_line(corpus, tmp_path):
    process = tool(
        "sentencepiece-train", "--vocab-size", 600, "--output", tmp_path / "model", corpus / "train.en",
        module="bpe",
    )  # fmt: skip
    out, err = process.communicate()
    assert process.returncode == 0
    assert out.startswith(f"{tmp_path}/model: 600 pieces in ") and out.count("\n") == 1
    assert all(line.startswith("  read: ") for line in err.splitlines() if line)


# -- both ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["apply", "sentencepiece-encode"])
def test_several_processes_write_what_one_writes_and_lines_stay_lines(corpus, codes, model, tmp_path, capsys, name):
    learnt = ["--codes", codes] if name == "apply" else ["--model", model]
    text = [line for line in DIRTY if "\r" not in line] + read(corpus / "train.de") * 2
    write(tmp_path / "in", text)
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        run(name, *learnt, "--input", tmp_path / "in", "--output", out, "--workers", workers)
        assert f"{len(text)} lines in " in capsys.readouterr().out
    assert len(read(tmp_path / "out1")) == len(text)
    assert (tmp_path / "out1").read_bytes() == (tmp_path / "out2").read_bytes()


@pytest.mark.parametrize("name", ["learn", "sentencepiece-train"])
def test_bad_text_to_learn_from_is_refused(small, name):
    (small / "empty").write_bytes(b"")
    (small / "latin").write_bytes(b"a\r\nb\n" + "Größe\n".encode("latin-1"))
    (small / "blank").write_bytes(b" \n\n")
    words = [name, "--vocab-size", 9, "--output", small / "out", small / "text.en"]
    assert refused(*words, small / "empty") == f"{small}/empty: is empty"
    assert refused(*words, small / "latin") == f"{small}/latin, line 3: the byte 0xf6 is not UTF-8"
    assert refused(*words, small / "none") == f"{small}/none: No such file or directory"
    assert refused(*words[:-1], small / "blank") == f"{small}/blank: no word is in it"
    assert not (small / "out").exists()


@pytest.mark.parametrize("name", ["apply", "sentencepiece-encode"])
@pytest.mark.parametrize("workers", [1, 2])
def test_what_was_not_learnt_is_refused(small, name, workers):
    flag = "--codes" if name == "apply" else "--model"
    words = ["--input", small / "text.en", "--output", small / "out", "--workers", workers]
    (small / "empty").write_bytes(b"")
    kind = "codes of subword-nmt" if name == "apply" else "a model of sentencepiece"
    for wrong in (write(small / "text", ["a line of text"]), small / "empty"):
        assert refused(name, flag, wrong, *words) == f"{flag} {wrong}: is not {kind}"
    assert refused(name, flag, small / "none", *words) == f"{small}/none: No such file or directory"
    assert not (small / "out").exists()
