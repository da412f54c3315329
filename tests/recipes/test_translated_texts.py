"""Back-translation and distillation: the training set that they make, with a model of the corpus of conftest.py."""

import gzip

import pytest

from fairseq_rope.lines import read_lines
from fairseq_rope.serving.translator import Translator
from recipes.pipeline import __main__ as pipeline
from recipes.text import mix
from tests.recipes.small_demo import SMALL, run_here, setting_flags, small_corpus, usage_error
from tests.serving.exports import exported

MONOLINGUAL = ["the dog sees the red cat", "a big house", "", "old book over the house", "the cat takes a dog"] * 8


@pytest.fixture(scope="module")
def model(trained, data_bin, tmp_path_factory):
    """The folder of an exported model that translates en to de."""
    folder = tmp_path_factory.mktemp("exported") / "en-de"
    exported(trained, data_bin, folder)
    return folder


def words(work, *settings):
    """The command line of the stages before the training, for a small part of the demo's corpus."""
    folders = ["--data-dir", str(small_corpus()), "--work-dir", str(work)]
    return ["demo", *folders, "--gpus", "0", "--stop-stage", "6", *setting_flags(*SMALL, *settings)]


@pytest.fixture(scope="module")
def back_translation(model, tmp_path_factory):
    """The settings of a recipe from German to English, with monolingual English text."""
    text = tmp_path_factory.mktemp("monolingual") / "mono.en.gz"
    text.write_bytes(gzip.compress("".join(f"{line}\n" for line in MONOLINGUAL).encode()))
    names = [f"back_translation_files={text.with_name('mono.{lang}.gz')}", f"back_translation_model={model}"]
    return ["source_lang=de", "target_lang=en", *names]


def test_back_translations_are_added_with_a_tag_that_is_one_word_of_the_dictionary(back_translation, model, tmp_path):
    printed = run_here(words(tmp_path, *back_translation))
    assert "stage 2: translate texts for the training set" in printed
    with Translator(str(model)) as translator:
        expected = list(translator.translate_lines(MONOLINGUAL))
    assert read_lines(str(tmp_path / "raw" / "translated.en"), may_be_blank=True) == MONOLINGUAL
    assert read_lines(str(tmp_path / "raw" / "translated.de"), may_be_blank=True) == expected
    origins = read_lines(str(tmp_path / "bpe" / "train.origin"))
    train = {lang: read_lines(str(tmp_path / "bpe" / f"train.{lang}")) for lang in ("de", "en")}
    assert len(origins) == len(train["de"]) == len(train["en"])
    kept = [(source, target) for source, target in zip(expected, MONOLINGUAL) if source and target]
    assert origins == ["parallel"] * (len(origins) - len(kept)) + ["back-translated"] * len(kept) and kept
    for origin, source, target in zip(origins, train["de"], train["en"], strict=True):
        assert source.startswith("<bt> ") == (origin == "back-translated") and "<bt>" not in target
    plain = [source.removeprefix("<bt> ").replace("@@ ", "") for source in train["de"][-len(kept) :]]
    assert [line.split() for line in plain] == [source.split() for source, _ in kept]
    for lang in ("de", "en"):
        entries = [line.split()[0] for line in read_lines(str(tmp_path / "data-bin" / f"dict.{lang}.txt"))]
        assert entries.count("<bt>") == 1
    again = run_here(words(tmp_path, *back_translation))
    assert "stage 2: translate texts for the training set: done before, skipped" in again
    other = run_here(words(tmp_path, *back_translation, "back_translation_tag=", "back_translation_share=0.1"))
    assert "stage 2: translate texts for the training set: done before, skipped" in other
    origins = read_lines(str(tmp_path / "bpe" / "train.origin"))
    assert 0.08 < origins.count("back-translated") / len(origins) <= 0.1
    assert "<bt>" not in (tmp_path / "bpe" / "train.de").read_text()


def test_a_monolingual_text_with_lines_of_held_out_sets_is_refused_with_their_number(back_translation, tmp_path):
    for name, stage in (("valid", "translate texts for the training set"), ("test", "extract and check the test set")):
        lines = gzip.decompress((small_corpus() / f"{name}.en.gz").read_bytes()).decode().splitlines()
        text = tmp_path / "mono.en"
        text.write_text("".join(f"{line}\n" for line in [*MONOLINGUAL, *lines[:2], lines[1]]))
        settings = [*back_translation, f"back_translation_files={text}"]
        with pytest.raises(SystemExit) as stopped:
            run_here(words(tmp_path / name, *settings))
        error = str(stopped.value)
        assert stage in error and "has 3 lines that are also in" in error


def test_distillation_replaces_the_targets_of_the_training_set(model, tmp_path):
    run_here(words(tmp_path, f"distillation_model={model}"))
    sources = read_lines(str(tmp_path / "raw" / "train.en"))
    with Translator(str(model)) as translator:
        expected = list(translator.translate_lines(sources))
    assert read_lines(str(tmp_path / "raw" / "translated.de"), may_be_blank=True) == expected
    train = [read_lines(str(tmp_path / "bpe" / f"train.{lang}")) for lang in ("en", "de")]
    clean = [read_lines(str(tmp_path / "clean" / f"translated.{lang}")) for lang in ("en", "de")]
    assert [[line.replace("@@ ", "") for line in side] for side in train] == clean
    assert not (tmp_path / "bpe" / "train.origin").exists()
    dry = run_here([*words(tmp_path / "new", f"distillation_model={model}"), "--dry-run"])
    assert f"fairseq-rope translate --model {model} --input {tmp_path}/new/raw/translated.en" in dry


@pytest.mark.parametrize(
    "settings, problem",
    [
        (["back_translation_model=MODEL"], "both must be given, or neither"),
        (["back_translation_model=MODEL", "back_translation_files=x", "distillation_model=MODEL"], "give one of them"),
        (["distillation_model=MODEL", "segment_tokens=9"], "segment_tokens=9: must be 0 with distillation_model"),
        (["distillation_model=MODEL", "valid_files=", "holdout_every=9"], "holdout_every=9: must be 0 with"),
        (["distillation_model=missing"], "must be a folder that fairseq-rope export wrote"),
        (
            ["back_translation_model=MODEL", "back_translation_files=x"],
            "translates en to de, and must translate de to en",
        ),
        (
            ["source_lang=de", "target_lang=en", "back_translation_model=MODEL", "back_translation_files=missing"],
            "missing: must be a file that exists",
        ),
        (
            ["back_translation_model=MODEL", "back_translation_files=x", "start_checkpoint=x", "start_data=x"],
            "back_translation_tag=<bt>: must be empty with start_data",
        ),
        (["distillation_model=MODEL", "back_translation_tag=a b"], "back_translation_tag=a b: must have no blanks"),
    ],
)
def test_settings_that_do_not_fit_are_refused(model, settings, problem, tmp_path, capsys):
    settings = [setting.replace("MODEL", str(model)) for setting in settings]
    assert problem in usage_error(capsys, pipeline.main, *[words(tmp_path, *settings)])
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("share, expected", [(0.0, 0), (0.25, 2), (0.5, 6), (0.75, 7), (1.0, 7)])
def test_the_share_of_translated_pairs_is_at_most_the_stated_one(share, expected, tmp_path):
    for name, count in (("parallel", 6), ("translated", 7)):
        for lang in "ab":
            (tmp_path / f"{name}.{lang}").write_text("".join(f"{name} {lang}{n}\n" for n in range(count)))
    langs = ["--source-lang", "a", "--target-lang", "b", "--share", str(share), "--tag", "<t>"]
    prefixes = [word for name in ("parallel", "translated") for word in (f"--{name}", str(tmp_path / name))]
    mix.main([*langs, *prefixes, "--output", str(tmp_path / "train")])
    source, target, origin = (read_lines(str(tmp_path / f"train.{end}")) for end in ("a", "b", "origin"))
    assert origin == ["parallel"] * 6 + ["back-translated"] * expected
    assert source == [f"parallel a{n}" for n in range(6)] + [f"<t> translated a{n}" for n in range(expected)]
    assert target == [f"parallel b{n}" for n in range(6)] + [f"translated b{n}" for n in range(expected)]
