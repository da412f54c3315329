"""Segments of documents as ordinary text, and the way back from translated segments to sentences and documents."""

import random
import re
from itertools import count, islice

import pytest
import sacrebleu
from sacremoses import MosesDetokenizer

from fairseq_rope.text.subwords import read_sentencepiece
from recipes.documents import join_and_score, segments
from recipes.text.bpe import sentencepiece_converter, train_sentencepiece
from recipes.text.tokenise import line_converter
from tests.recipes.texts import read_lines, write_lines

SENTENCES = {
    "en": ['He said: "It is over."', "No.", "In 1999, Mr. Smith's co-op didn't work...", "(end)", "Why? ‘Yes’"],
    "de": ["Er sagte: „Es ist vorbei.“", "Am 3.", "Der Nord-Süd-Vertrag z.B. war …", "(Ende)", 'Warum? "Ja"'],
    "zh": ["他说：“结束了。”", "好的", "1999年，史密斯先生的合作社", "（完）", "为什么？"],
}  # fmt: skip
HEADER = "line\tsentences\tdocument"
NAMES = {"table": "out.segments.tsv", "translations": "out.de", "sentences": "out.sentences.de"}


def texts(seed, documents, longest=12):
    """Documents of pairs of numbered sentences, of random lengths."""
    draw, numbers = random.Random(seed), count()

    def sentence(lang, number):
        return " ".join([f"{lang}{number}"] * draw.randint(1, longest))

    counted = (islice(numbers, draw.randint(1, 9)) for _ in range(documents))
    return [[(sentence("s", n), sentence("t", n)) for n in document] for document in counted]


def write_documents(folder, documents):
    for side, lang in enumerate(("en", "de")):
        blocks = ("".join(f"{pair[side]}\n" for pair in document) for document in documents)
        (folder / f"in.{lang}").write_text("\n".join([*blocks, ""]))


def make(folder, *flags, langs=("en", "de")):
    """The lines that the script writes as pairs, and its map."""
    words = ["--source-lang", langs[0], "--target-lang", langs[1], "--output", folder / "out", *flags]
    segments.main([*map(str, words), f"{folder}/in.{{lang}}"])
    sides = [read_lines(folder / f"out.{lang}") for lang in langs]
    return list(zip(*sides, strict=True)), segments.read_map(str(folder / "out.segments.tsv"))


def joined(pairs):
    return tuple(" ‖ ".join(side) for side in zip(*pairs, strict=True))


def divided(lines):
    return [pair for line in lines for pair in zip(*(side.split(" ‖ ") for side in line), strict=True)]


@pytest.mark.parametrize("seed, words", [(1, 12), (3, 1)])
def test_each_line_has_as_many_sentences_of_a_document_as_fit(tmp_path, seed, words):
    write_documents(tmp_path, documents := texts(seed, 20))
    groups = []
    for number, document in enumerate(documents, 1):
        groups.append((number, []))
        for pair in document:
            in_line = [*groups[-1][1], pair]
            if len(in_line) > 1 and sum(max(len(side.split()) for side in pair) + 1 for pair in in_line) > words + 1:
                groups.append((number, in_line := [pair]))
            groups[-1] = (number, in_line)
    lines, table = make(tmp_path, "--words", words)
    assert lines == [joined(group) for _, group in groups]
    assert table == [(n, len(group), number) for n, (number, group) in enumerate(groups, 1)]
    plain = [read_lines(tmp_path / f"out.sentences.{lang}") for lang in ("en", "de")]
    assert plain == [[*side] for side in zip(*sum(documents, []), strict=True)]


@pytest.mark.parametrize("share", [0, 0.3, 1])
def test_training_text_has_each_sentence_once_and_the_share_in_segments_of_all_lengths(tmp_path, capsys, share):
    write_documents(tmp_path, documents := texts(5, 300, longest=6))
    lines, table = make(tmp_path, "--words", 20, "--share", share)
    assert divided(lines) == sum(documents, []) and sum(row.sentences for row in table) == len(sum(documents, []))
    joined = [line for line in lines if "‖" in line[0]]
    assert all(len(side.split()) <= 20 for line in joined for side in line)
    assert not share or {len(line[0].split("‖")) for line in joined} >= {2, 3, 4}
    printed = float(re.search(r"([\d.]+)% of the sentences in segments", capsys.readouterr().out)[1])
    assert printed / 100 == pytest.approx(share, abs=0.01)
    assert not [*tmp_path.glob("out.sentences.*")] and make(tmp_path, "--words", 20, "--share", share)[0] == lines
    assert (make(tmp_path, "--words", 20, "--share", share, "--seed", 2)[0] == lines) == (share == 0)


@pytest.mark.parametrize("size", [1, 4])
def test_exactly_n_sentences_of_a_document_are_joined(tmp_path, size):
    write_documents(tmp_path, documents := texts(7, 20))
    groups = [document[n : n + size] for document in documents for n in range(0, len(document), size)]
    complete = [group for group in groups if len(group) == size]
    lines, table = make(tmp_path, "--sentences", size)
    assert lines == [joined(group) for group in complete] and {row.sentences for row in table} == {size}
    assert read_lines(tmp_path / "out.sentences.de") == [target for _, target in sum(complete, [])]
    lines, _ = make(tmp_path, "--sentences", size, "--no-separator", "--one-document")
    sentences = sum(documents, [])
    groups = [sentences[n : n + size] for n in range(0, len(sentences) - size + 1, size)]
    assert lines == [tuple(" ".join(side) for side in zip(*group, strict=True)) for group in groups]


def test_characters_are_counted_in_languages_without_blanks(tmp_path):
    write_lines(tmp_path / "in.en", ["a", "b", "c", "", "d"])
    write_lines(tmp_path / "in.zh_CN", ["一二三", "四 五", "六", "", "七"])
    lines, _ = make(tmp_path, "--words", 6, langs=("en", "zh_CN"))
    assert [target for _, target in lines] == ["一二三 ‖ 四 五", "六", "七"]
    write_lines(tmp_path / "in.zh_CN", ["", "四 五", "六", "", "七"])  # training leaves out pairs with a blank side
    lines, _ = make(tmp_path, "--words", 6, "--share", 1, langs=("en", "zh_CN"))
    assert divided(lines) == [("b", "四 五"), ("c", "六"), ("d", "七")]


@pytest.mark.parametrize(
    "source, target, flags, values",
    [
        (["a", "", "b"], ["A", "", "B‖"], ["--words", 9], r"in.{lang} \(de\), line 3: .*‖"),
        (["a", "", "b"], ["A", "", ""], ["--words", 9], r"in.{lang} \(de\), line 3: "),
        (["", "", "b"], ["A", "", "B"], ["--sentences", 1], r"in.{lang} \(en\), line 1: "),
        (["a", "", "b"], ["A", "", "B"], ["--sentences", 2], "out: .* 2 "),
        (["a", "", "b"], ["A", "", "B"], ["--words", 3, "--share", "nan"], "--share nan"),
        (["a", "", "b"], ["A", "", "B"], ["--sentences", 3, "--share", 1], "--share 1.0: .*--words"),
    ],
)  # fmt: skip
def test_what_cannot_be_joined_is_refused(tmp_path, source, target, flags, values):
    write_lines(tmp_path / "in.en", source)
    write_lines(tmp_path / "in.de", target)
    with pytest.raises(SystemExit, match=f"^recipes.documents.segments: .*{values}"):
        make(tmp_path, *flags)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.de", "in.en"]


@pytest.mark.parametrize("lang", ["en", "de", pytest.param("zh", marks=pytest.mark.slow)])  # jieba starts in seconds
def test_the_separator_is_one_token_of_each_tool_and_comes_back(tmp_path, lang):
    line = " ‖ ".join(SENTENCES[lang])
    for normalise in (True, False):
        (tokens,) = line_converter(lang, normalise, tokenise=True)([line])
        assert tokens.split().count("‖") == 4
        assert MosesDetokenizer(lang).detokenize(tokens.split()).count(" ‖ ") == 4
    text = write_lines(tmp_path / "text", [line] * 9)
    (tmp_path / "model").write_bytes(train_sentencepiece([text], len({*line}) + 20))
    (pieces,) = sentencepiece_converter(str(tmp_path / "model"))([line])
    assert pieces.split().count("▁‖") == 4
    assert read_sentencepiece(str(tmp_path / "model")).decode(pieces.split()) == line


def score(folder, *flags, references=("out.sentences.de",), **files):
    for name, lines in files.items():
        write_lines(folder / NAMES[name], lines)
    words = ["--map", folder / NAMES["table"], "--translations", folder / NAMES["translations"]]
    words += ["--references", *(folder / name for name in references), "--output", folder / "hyp", *flags]
    join_and_score.main(["--target-lang", "de", *map(str, words)])


def test_sentences_and_documents_are_scored_as_by_sacrebleu(tmp_path, capsys):
    references = ["Das ist das Haus.", "Ja, das ist es!", "Der Hund sieht die Katze.", "Ein altes Buch.", "Ende."]
    write_lines(tmp_path / "others", others := ["Dies ist ein Haus.", "Ja.", "Ein Hund.", "Ein Buch.", "Ende"])
    translations = ["Das ist ein Haus. ‖ Ja, das ist es.", "Der Hund ‖ sieht eine Katze.", "Ein Buch."]
    both = {"references": ("out.sentences.de", "others"), "sentences": references}
    score(tmp_path, table=[HEADER, "1\t2\t1", "2\t1\t1", "3\t2\t4"], translations=translations, **both)
    sentences = ["Das ist ein Haus.", "Ja, das ist es.", "Der Hund sieht eine Katze.", "Ein Buch.", ""]
    documents = ["Das ist ein Haus. Ja, das ist es. Der Hund sieht eine Katze.", "Ein Buch."]
    assert read_lines(tmp_path / "hyp.sentences") == sentences and read_lines(tmp_path / "hyp.documents") == documents
    of_documents = [[" ".join(side[:3]), " ".join(side[3:])] for side in (references, others)]
    printed = capsys.readouterr().out
    assert printed.startswith("2 of 3 ") and "nrefs:2" in printed and "tok:13a" in printed
    assert f"2 documents: {sacrebleu.corpus_bleu(documents, of_documents).score:.2f}\n" in printed
    assert f"5 sentences: {sacrebleu.corpus_bleu(sentences, [references, others]).score:.2f}\n" in printed


def test_files_that_do_not_fit_are_refused(tmp_path):
    fitting = {"table": [HEADER, "1\t2\t1", "2\t1\t1"], "translations": ["a ‖ b", "c"], "sentences": ["a", "b", "c"]}
    for files, values in (
        ({"translations": ["a"]}, "out.de: .* 1 .* 2 "),
        ({"sentences": ["a", "b"]}, "out.sentences.de: .* 2 .* 3 "),
        ({"table": ["1\t2\t1"]}, "out.segments.tsv, line 1: "),
    ):
        with pytest.raises(SystemExit, match=f"^recipes.documents.join_and_score: .*{values}"):
            score(tmp_path, **fitting | files)
    assert not (tmp_path / "hyp.sentences").exists()
