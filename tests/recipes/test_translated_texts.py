"""Back-translation and distillation: the training set that they make, with a model of the corpus of conftest.py."""

import gzip
import hashlib
import json
import os
import re
import shutil

import pytest
import yaml

from fairseq_rope.lines import read_lines
from fairseq_rope.serving.exported_folder import SETTINGS
from fairseq_rope.serving.translator import Translator
from fairseq_rope.tools import translate
from recipes.pipeline import __main__ as pipeline
from recipes.run import shell
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


def words(work, *settings, last=6):
    """The command line of the stages up to *last*, by default all before the training, for a small corpus."""
    folders = ["--data-dir", str(small_corpus()), "--work-dir", str(work)]
    return ["demo", *folders, "--gpus", "0", "--stop-stage", str(last), *setting_flags(*SMALL, *settings)]


@pytest.fixture(scope="module")
def back_translation(model, tmp_path_factory):
    """The settings of a recipe from German to English, with monolingual English text."""
    text = tmp_path_factory.mktemp("monolingual") / "mono.en.gz"
    text.write_bytes(gzip.compress("".join(f"{line}\n" for line in MONOLINGUAL).encode()))
    names = [f"back_translation_files={text.with_name('mono.{lang}.gz')}", f"back_translation_model={model}"]
    return ["source_lang=de", "target_lang=en", *names]


def test_back_translations_are_added_with_a_tag_that_is_one_word_of_the_dictionary(back_translation, model, tmp_path):
    printed = run_here(words(tmp_path, *back_translation))
    assert "can be used" not in printed
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
    for name, stage in (("valid", "join and check monolingual texts"), ("test", "extract and check the test set")):
        lines = gzip.decompress((small_corpus() / f"{name}.en.gz").read_bytes()).decode().splitlines()
        changed = [f"  {lines[0]}\t\r", lines[1].replace(" ", "\u00a0 "), lines[2].replace("e", "\uff45")]
        changed += [f"\ufeff{lines[3]}", lines[4].replace("e", "e\u00ad")]  # a byte order mark, and soft hyphens
        assert {*changed}.isdisjoint(lines)
        text = tmp_path / "mono.en"
        text.write_bytes("".join(f"{line}\n" for line in [*MONOLINGUAL, lines[1], *changed]).encode())
        settings = [*back_translation, f"back_translation_files={text}"]
        with pytest.raises(SystemExit) as stopped:
            run_here(words(tmp_path / name, *settings))
        error = str(stopped.value)
        assert stage in error and f"raw/{name}.en: 6, the first is line {len(MONOLINGUAL) + 1}: remove them" in error
        assert not (tmp_path / name / "raw" / "translated.en").exists(), "it was refused after the translation"


def test_the_lines_of_each_test_set_and_reference_are_refused(back_translation, tmp_path):
    corpora = []
    for n, (source, *references) in enumerate([(["eins"], ["one"], ["one or two"]), (["zwei"], ["two"], ["2"])]):
        for name, lines in (("de", source), ("en", references[0]), ("2.en", references[1])):
            (tmp_path / f"test{n}.{name}").write_text("".join(f"{line}\n" for line in lines))
        corpora.append(f"{tmp_path}/test{n}.{{lang}},{tmp_path}/test{n}.2.{{lang}}")
    for refused in ("one", "2"):
        (tmp_path / "mono.en").write_text("".join(f"{line}\n" for line in [*MONOLINGUAL, refused]))
        settings = [f"test_files={' '.join(corpora)}", f"back_translation_files={tmp_path / 'mono.en'}"]
        with pytest.raises(SystemExit, match="lines that are also in .*: 1, the first is line 41"):
            run_here(words(tmp_path / "work", *back_translation, *settings))


def test_monolingual_texts_are_joined_line_by_line_and_each_is_watched(back_translation, tmp_path):
    for name in "abc":
        (tmp_path / name).mkdir()
    files = [tmp_path / name for name in ("a/mono.en", "b/mono.en", "c/mono.en.gz")]
    files[0].write_bytes(b"the dog\r\na cat")
    files[1].write_bytes(b"\xef\xbb\xbfa house\n\nred\xe2\x80\xa8blue")
    files[2].write_bytes(gzip.compress(b"old book"))
    settings = [*back_translation, f"back_translation_files={' '.join(map(str, files))}", "max_length_ratio=999"]
    printed = run_here(words(tmp_path / "work", *settings, last=5))
    assert all(f"{file}: {count} lines" in printed for file, count in zip(files, (2, 3, 1)))
    train = {lang: read_lines(str(tmp_path / "work" / "bpe" / f"train.{lang}")) for lang in ("de", "en")}
    origins = read_lines(str(tmp_path / "work" / "bpe" / "train.origin"))
    added = [line.replace("@@ ", "") for line, origin in zip(train["en"], origins) if origin == "back-translated"]
    assert added == ["the dog", "a cat", "a house", "red blue", "old book"]
    # A character that does not print is not in the training data of a recipe's model, which would not know the word.
    given = read_lines(str(tmp_path / "work" / "raw" / "translated.en"), may_be_blank=True)
    assert [line.strip() for line in given] == ["the dog", "a cat", "a house", "", "red blue", "old book"]
    assert len(read_lines(str(tmp_path / "work" / "raw" / "translated.de"), may_be_blank=True)) == 6
    files[0].write_text("the dogs\na cat\n")
    again = run_here(words(tmp_path / "work", *settings, last=5))
    assert "join and check monolingual texts (again, since" in again
    assert read_lines(str(tmp_path / "work" / "raw" / "translated.en"), may_be_blank=True)[0] == "the dogs"
    files[1].write_bytes(b"a house\n\xff\n")
    with pytest.raises(SystemExit, match="b/mono.en, line 2: the byte 0xff is not UTF-8"):
        run_here(words(tmp_path / "work", *settings))


def test_a_line_that_cannot_be_translated_is_left_out_and_counted(back_translation, tmp_path):
    (tmp_path / "mono.en").write_text("the dog\n" + "x" * 40_000 + "\na cat\n")
    settings = [f"back_translation_files={tmp_path / 'mono.en'}", "max_words=99999", "max_length_ratio=9999"]
    printed = run_here(words(tmp_path / "work", *back_translation, *settings, last=5))
    assert "lines that were not translated and are empty: 1, listed in" in printed
    assert read_lines(str(tmp_path / "work" / "bpe" / "train.origin")).count("back-translated") == 2


@pytest.mark.parametrize("search", ["sampling", "top10"])
def test_sources_are_drawn_with_the_search_of_the_settings(back_translation, model, tmp_path, search):
    def translated(*settings):
        printed = run_here(words(tmp_path / "work", *back_translation, *settings, last=2))
        return printed, read_lines(str(tmp_path / "work" / "raw" / "translated.de"), may_be_blank=True)

    text = tmp_path / "mono.en"
    text.write_text("".join(f"{line}\n" for line in MONOLINGUAL))
    flags = ["--sampling"] if search == "sampling" else ["--sampling", "--sampling-topk", "10"]
    translate.main(["--model", str(model), "--input", str(text), "--output-dir", str(tmp_path / "out"), *flags])
    _, drawn = translated(f"back_translation_search={search}")
    assert drawn == read_lines(str(tmp_path / "out" / "mono.en"), may_be_blank=True)
    printed, searched = translated("back_translation_search=beam")
    assert "translate texts for the training set (again, since back_translation_search changed)" in printed
    assert "join and check monolingual texts: done before, skipped" in printed and searched != drawn


def test_runs_with_other_translated_texts_leave_no_origins(back_translation, model, tmp_path):
    reverse = tmp_path / "de-en"
    shutil.copytree(model, reverse)
    settings = json.loads((reverse / SETTINGS).read_text())
    (reverse / SETTINGS).write_text(json.dumps({**settings, "source": "de", "target": "en"}))
    directions = ["source_lang=de", "target_lang=en"]
    runs = {"both": back_translation, "none": directions, "distilled": [*directions, f"distillation_model={reverse}"]}
    run_here(words(tmp_path / "work", *runs["both"], last=5))
    for name in ("none", "both", "distilled"):
        run_here(words(tmp_path / "work", *runs[name], last=5))
        run_here(words(tmp_path / name, *runs[name], last=5))
        for file in ("train.de", "train.en", "train.origin"):
            here, fresh = (tmp_path / folder / "bpe" / file for folder in ("work", name))
            assert here.exists() == fresh.exists() == (file != "train.origin" or name == "both")
            assert not here.exists() or here.read_bytes() == fresh.read_bytes()


@pytest.mark.parametrize("bpe, tag", [("sentencepiece", "<bt>"), ("subword-nmt", "-x"), ("sentencepiece", "▁$'\"")])
def test_a_tag_is_one_entry_of_the_dictionary_and_in_sources_of_translated_pairs_alone(
    back_translation, tmp_path, bpe, tag
):
    command = words(tmp_path, *back_translation, f"back_translation_tag={tag}", "vocab_size=200")
    printed = run_here([*command, "--set", "back_translation_share=0.1", "--bpe", bpe])
    assert f"{len(MONOLINGUAL)} lines are translated, and at most 22 of them can be used" in printed
    (tag_lines, *others) = (
        [line.split(" ").count(tag) for line in read_lines(str(tmp_path / "bpe" / name))]
        for name in ("train.de", "train.en", "valid.de", "valid.en", "test.de", "test.en")
    )
    origins = read_lines(str(tmp_path / "bpe" / "train.origin"))
    assert tag_lines == [int(origin == "back-translated") for origin in origins] and any(tag_lines)
    assert not any(map(any, others))
    for lang in ("de", "en"):
        entries = [line.rsplit(" ", 1)[0] for line in read_lines(str(tmp_path / "data-bin" / f"dict.{lang}.txt"))]
        assert entries.count(tag) == 1


def test_a_tag_that_is_a_word_of_the_text_is_refused(back_translation, tmp_path):
    for tag, side in ((".", "de"), ("the", "en")):
        with pytest.raises(SystemExit, match=rf"--tag {tag}: is a word of .*parallel.{side}, line \d+; choose another"):
            run_here(words(tmp_path, *back_translation, f"back_translation_tag={tag}"))


@pytest.mark.parametrize("after", ["python -m fairseq_rope translate", "rm -rf [^ ]*/raw/translations$"])
def test_an_interrupted_translation_continues_and_records_say_which_model_it_was(
    back_translation, model, tmp_path, monkeypatch, after
):
    run_logged = shell.run_logged

    def interrupted(stage, command, *more):
        peak = run_logged(stage, command, *more)
        if re.match(after, command):
            raise KeyboardInterrupt
        return peak

    with monkeypatch.context() as patch:
        patch.setattr(shell, "run_logged", interrupted)
        with pytest.raises(SystemExit, match="130"):
            run_here(words(tmp_path, *back_translation, last=2))
    printed = run_here(words(tmp_path, *back_translation, last=2))
    assert ("translated.de" in "".join(re.findall("made before the interruption: (.*)", printed))) is ("rm" in after)
    assert ("translated.en: done before" in printed) is ("rm" not in after)
    assert not (tmp_path / "raw" / "translations").exists()
    assert len(read_lines(str(tmp_path / "raw" / "translated.de"), may_be_blank=True)) == len(MONOLINGUAL)
    record = yaml.safe_load((tmp_path / "run.yaml").read_text())
    sha256 = hashlib.sha256((model / SETTINGS).read_bytes()).hexdigest()
    assert record["translator"] == {"model": str(model), f"sha256 of {SETTINGS}": sha256}
    kept = yaml.safe_load((tmp_path / "settings.yaml").read_text())
    assert kept["back_translation_model"] == str(model) and kept["back_translation_search"] == "beam"
    again = run_here(words(tmp_path, *back_translation, "translate_flags=--jobs 3", last=2))
    assert "translate texts for the training set: done before, skipped" in again, "the flags change no translation"
    dry = run_here([*words(tmp_path / "new", *back_translation), "--dry-run"])
    assert f"python -m fairseq_rope translate --model {model} --input {tmp_path}/new/raw/translated.en" in dry
    assert "python -m recipes.text.mix" in dry and "--tag=<bt>" in dry and not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "flags, shown",
    [
        ("", "--jobs 2"),
        ("--threads 1", "--threads 1 --jobs 2"),
        ("--jobs 5", "--jobs 5"),
        ("--device cpu", "--device cpu --jobs 2"),
        ("--device cuda", "--device cuda"),
        ("--device=cuda", "--device=cuda"),
    ],
)
def test_the_translation_has_the_cores_that_the_recipe_may_use_or_those_of_the_flags(
    back_translation, tmp_path, monkeypatch, flags, shown
):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    printed = run_here([*words(tmp_path, *back_translation, f"translate_flags={flags}"), "--dry-run"], cores=(3, 4))
    assert f"--output-dir {tmp_path}/raw/translations {shown} && cat " in printed
    assert "--workers 2 " in printed and "--workers 64" not in printed


def test_distillation_replaces_the_targets_of_the_training_set(model, tmp_path):
    run_here(words(tmp_path, f"distillation_model={model}", last=5))
    sources = read_lines(str(tmp_path / "raw" / "train.en"))
    with Translator(str(model)) as translator:
        expected = list(translator.translate_lines(sources))
    assert read_lines(str(tmp_path / "raw" / "translated.de"), may_be_blank=True) == expected
    train = [read_lines(str(tmp_path / "bpe" / f"train.{lang}")) for lang in ("en", "de")]
    clean = [read_lines(str(tmp_path / "clean" / f"translated.{lang}")) for lang in ("en", "de")]
    assert [[line.replace("@@ ", "") for line in side] for side in train] == clean
    assert not (tmp_path / "bpe" / "train.origin").exists()
    dry = run_here([*words(tmp_path / "new", f"distillation_model={model}"), "--dry-run"])
    assert f"python -m fairseq_rope translate --model {model} --input {tmp_path}/new/raw/translated.en" in dry


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
        (["back_translation_tag=</s>"], "back_translation_tag=</s>: must not be a symbol of fairseq's dictionaries"),
        (["back_translation_search=top5"], "back_translation_search=top5: must be one of beam, sampling, top10"),
        (
            ["translate_flags=--beam 2"],
            "'translate_flags=--beam 2': unrecognized arguments: --beam 2; it may contain --jobs",
        ),
        (["translate_flags=--launcher slurm"], "needs --slurm time=MINUTES; submitit would ask for 5 minutes; it may"),
        (["translate_flags=--jobs 0"], "'translate_flags=--jobs 0': --jobs and --threads must be 1 or more; it may"),
        (["translate_flags='"], "translate_flags=': no closing quotation"),
        (
            ["back_translation_files=x", "back_translation_model=MODEL", "back_translation_share=0"],
            "back_translation_share=0.0: must be above 0 with back_translation_model",
        ),
        (["back_translation_share=1.5"], "back_translation_share=1.5: must be 0 to 1"),
        (["back_translation_share=-0.1"], "back_translation_share=-0.1: must be 0 to 1"),
        (["back_translation_share=nan"], "back_translation_share"),
    ],
)
def test_settings_that_do_not_fit_are_refused(model, settings, problem, tmp_path, capsys):
    settings = [setting.replace("MODEL", str(model)) for setting in settings]
    assert problem in usage_error(capsys, pipeline.main, *[words(tmp_path, *settings)])
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("share, expected", [(0.0, 0), (0.25, 2), (0.5, 6), (0.6, 9), (0.75, 11), (1.0, 11)])
def test_the_share_of_translated_pairs_is_at_most_the_stated_one(share, expected, tmp_path):
    for name, count in (("parallel", 6), ("translated", 11)):
        for lang in "ab":
            (tmp_path / f"{name}.{lang}").write_text("".join(f"{name} {lang}{n}\n" for n in range(count)))
    langs = ["--source-lang", "a", "--target-lang", "b", "--share", str(share), "--tag", "<t>"]
    prefixes = [word for name in ("parallel", "translated") for word in (f"--{name}", str(tmp_path / name))]
    mix.main([*langs, *prefixes, "--output", str(tmp_path / "train")])
    source, target, origin = (read_lines(str(tmp_path / f"train.{end}")) for end in ("a", "b", "origin"))
    assert origin == ["parallel"] * 6 + ["back-translated"] * expected
    assert source == [f"parallel a{n}" for n in range(6)] + [f"<t> translated a{n}" for n in range(expected)]
    assert target == [f"parallel b{n}" for n in range(6)] + [f"translated b{n}" for n in range(expected)]
