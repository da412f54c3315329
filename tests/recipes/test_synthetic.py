"""Back-translation and distillation: the training set that the script writes, with a stub and with a real model."""

import gzip
from pathlib import Path
from types import SimpleNamespace

import pytest

from fairseq_rope.serving.exported_folder import SETTINGS
from fairseq_rope.serving.translator import Translator
from recipes.synthetic import translate_texts as module
from tests.recipes.texts import read_lines, write_lines
from tests.serving.exports import exported

PARALLEL = [(f"quelle {n}", f"target {n}") for n in range(6)]
MONOLINGUAL = [f"new {n}" for n in range(11)]


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """A folder with texts and a stub of a model from en to de, and the command lines of its translations."""
    for lang, side in zip(("de", "en"), zip(*PARALLEL), strict=True):
        write_lines(tmp_path / f"train.{lang}", side)
        write_lines(tmp_path / f"test.{lang}", [f"{lang} held out {n}" for n in range(3)])
    write_lines(tmp_path / "mono.en", MONOLINGUAL)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / SETTINGS).write_text("first")
    commands = []

    def run(command):
        commands.append(words := command[command.index("translate") :])
        source, output = (Path(words[words.index(flag) + 1]) for flag in ("--input", "--output-dir"))
        lines = ["" if "untranslatable" in line else line.upper() for line in read_lines(source)]
        write_lines(output / source.name, lines)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=run))
    monkeypatch.setattr(module, "exported_settings", lambda folder: {"source": "en", "target": "de"})
    return SimpleNamespace(folder=tmp_path, commands=commands)


def back_translate(corpus, *flags, langs=("de", "en")):
    """The pairs and their origins that the script writes for a model from German to English."""
    words = ["--source-lang", langs[0], "--target-lang", langs[1], "--model", str(corpus.folder / "model")]
    words += ["--train", f"{corpus.folder}/train.{{lang}}", "--held-out", f"{corpus.folder}/test.{{lang}}"]
    words += ["--monolingual", str(corpus.folder / "mono.en"), "--output", str(corpus.folder / "more" / "train")]
    module.main(["back-translation", *words, *flags])
    sides = [read_lines(corpus.folder / "more" / f"train.{end}") for end in ("de", "en", "origin")]
    return list(zip(*sides, strict=True))


@pytest.mark.parametrize("share, expected", [("0.25", 2), ("0.6", 9), ("1", 11)])
def test_the_first_lines_are_added_up_to_the_share_and_no_others_are_translated(corpus, capsys, share, expected):
    new = [(f"⇐ {line.upper()}", line, "back-translated") for line in MONOLINGUAL[:expected]]
    assert back_translate(corpus, "--share", share) == [(*pair, "parallel") for pair in PARALLEL] + new
    (given,) = corpus.folder.glob("more/train.translations/*/text.en")
    assert read_lines(given) == MONOLINGUAL[:expected]
    printed = capsys.readouterr().out
    assert f"{6 + expected} pairs" in printed and f"({expected / (6 + expected):.1%})" in printed


def test_texts_are_read_in_order_without_blank_lines_and_characters_that_do_not_print(corpus):
    (corpus.folder / "b.gz").write_bytes(gzip.compress(b"third\n"))
    write_lines(corpus.folder / "mono.en", ["first\r", "", " \u200b", "untranslatable", "sec\u2028ond"])
    new = back_translate(corpus, "--monolingual", f"{corpus.folder}/mono.en", f"{corpus.folder}/b.gz", "--tag=")[6:]
    assert [target for _, target, _ in new] == ["first", "sec ond", "third"]
    assert [source for source, _, _ in new] == ["FIRST", "SEC OND", "THIRD"]


def test_flags_pass_through_and_a_finished_translation_is_not_repeated(corpus):
    first = back_translate(corpus, "--search", "top10", "--", "--jobs", "2")
    (command,) = corpus.commands
    assert command[:3] == ["translate", "--model", str(corpus.folder / "model")]
    assert command[7:] == ["--sampling-topk", "10", "--jobs", "2"]
    again = back_translate(corpus, "--search", "top10", "--tag", "BT", "--", "--jobs", "2")
    assert len(corpus.commands) == 1 and again[6:] == [(s.replace("⇐", "BT"), *more) for s, *more in first[6:]]
    back_translate(corpus, "--search", "sampling")
    assert corpus.commands[1][7:] == ["--sampling-topk", "0"]
    (corpus.folder / "model" / SETTINGS).write_text("another model")
    back_translate(corpus, "--search", "sampling")
    write_lines(corpus.folder / "mono.en", ["another text"])
    back_translate(corpus, "--search", "sampling")
    assert len(corpus.commands) == 4


def test_a_failed_translation_writes_no_training_set(corpus, monkeypatch):
    monkeypatch.setattr(module, "subprocess", SimpleNamespace(run=lambda command: SimpleNamespace(returncode=3)))
    with pytest.raises(SystemExit, match="--model .*status 3"):
        back_translate(corpus)
    assert [path.name for path in (corpus.folder / "more").iterdir()] == ["train.translations"]


def test_lines_of_held_out_sets_are_refused_with_their_number(corpus):
    same = [
        "en held out 0",
        "  en\theld out 1\r",
        "en held\u00a0 out 2",
        "en h\uff45ld out 0",
        "\ufeffen he\u00adld out 1",
    ]
    write_lines(corpus.folder / "mono.en", [*MONOLINGUAL, *same, "en held out 3", "En held out 0", ""])
    with pytest.raises(SystemExit, match=f"--monolingual: .*--held-out.*mono.en: {len(same)}, .*line 12$"):
        back_translate(corpus, "--share", "0.1")
    assert not corpus.commands and not [*corpus.folder.glob("more/*")]


@pytest.mark.parametrize(
    "flag, value", [("--share", value) for value in ("0", "1.5", "nan")]
    + [("--tag", value) for value in ("target", "NEW")],  # words of the texts
)  # fmt: skip
def test_wrong_values_are_refused(corpus, flag, value):
    with pytest.raises(SystemExit, match=f"^recipes.synthetic.translate_texts: {flag} {value}: "):
        back_translate(corpus, flag, value)
    with pytest.raises(SystemExit, match="--model .* en .* de"):  # of the other direction
        back_translate(corpus, langs=("en", "de"))
    assert not (corpus.folder / "more" / "train.de").exists()


@pytest.mark.slow
def test_distillation_has_the_translations_of_a_real_model_as_targets(trained, data_bin, tmp_path):
    model = exported(trained, data_bin, tmp_path / "model")
    sources = ["the dog sees the red cat", "a big\u2028house", "old book"]
    write_lines(tmp_path / "train.en", sources)
    write_lines(tmp_path / "train.de", ["x", "y", "z"])
    words = ["--source-lang", "en", "--target-lang", "de", "--model", str(model), "--output", str(tmp_path / "student")]
    module.main(["distillation", *words, "--train", f"{tmp_path}/train.{{lang}}", "--", "--beam", "2"])
    sources[1] = "a big house"
    with Translator(str(model), beam=2) as translator:
        expected = translator.translate(sources)
    assert read_lines(tmp_path / "student.en") == sources and read_lines(tmp_path / "student.de") == expected
    assert read_lines(tmp_path / "student.origin") == ["distilled"] * 3
