"""fairseq_rope/serving/shortlist.py, and the shortlist in exports and translations."""

import functools
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from fairseq.data import Dictionary

from fairseq_rope.errors import InputError
from fairseq_rope.serving import export_checks, shortlist
from fairseq_rope.serving.export import build_shortlist
from fairseq_rope.serving.exported_folder import ExportError
from fairseq_rope.serving.shortlist import ALIGNER, Shortlist, align, build, of_whole_words, words_of
from fairseq_rope.serving.translator import Translator
from fairseq_rope.tools import export
from fairseq_rope.tools.translate import main
from tests.serving.exports import exported

# Stands for eflomal: links word i of the source with word J of the target, which has n words. One direction gets the
# even words, the other one the odd ones.
PROGRAM = """#!/bin/sh
[ "$1 $3 $5 $7" = "-s -t -f -r" ] && paste -d '|' "$2" "$4" | awk -F '|' -v f="$6" -v r="$8" '{{
    m = split($1, source, " "); n = split($2, target, " ")
    if (m * n == 0) exit 1
    for (i = 0; i < m; i++) printf "%d-%d ", i, {J} >(i % 2 ? r : f)
    print "" >f; print "" >r
}}'
"""


@pytest.fixture
def aligner(tmp_path_factory, monkeypatch):
    """aligner(J): let PROGRAM stand for eflomal; by default it links words in reverse order, which is right."""

    def put(J="n - 1 - i", text=PROGRAM):
        program = tmp_path_factory.mktemp("bin") / ALIGNER
        program.write_text(text.format(J=J))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", str(program.parent), prepend=":")
        monkeypatch.setattr(sys, "executable", "/nowhere/python")
        return str(program)

    return put


# -- building ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens, words",
    [
        ("a b@@ c@@ d e", [range(0, 1), range(1, 4), range(4, 5)]),
        ("▁a ▁b c d ▁e", [range(0, 1), range(1, 4), range(4, 5)]),
        ("b ▁a", [range(0, 1), range(1, 2)]),
        ("▁a b <sep> c ▁d", [range(0, 2), range(2, 3), range(3, 4), range(4, 5)]),
        ("▁a b c d e f g h", [range(0, 8)]),
        ("▁a b c d e f g h i", [range(n, n + 1) for n in range(9)]),  # Japanese has no spaces
        ("a b@@", [range(0, 1), range(1, 2)]),
        ("", []),
    ],
)
def test_subwords_are_grouped_into_words(tokens, words):
    assert words_of(tokens.split(), "<sep>") == words
    assert words_of(tokens.replace("<sep>", "[SEP]").split(), "[SEP]") == words


def test_links_spread_to_all_subwords_of_their_words_and_to_words_without_links():
    source, target = "the g@@ ate .".split(), "zu das T@@ o@@ r .".split()
    links = {(1, 3), (3, 5)}  # g@@ – o@@, and the dots
    expected = {(i, j) for i in (1, 2) for j in (2, 3, 4)} | {(3, 5)}
    expected |= {(i, j) for i in (1, 2) for j in (0, 1)}  # the nearest word of "zu" and "das" with a link is "Tor"
    assert of_whole_words(source, target, links) == expected
    assert of_whole_words(source, target, set()) == set()


def test_candidates_are_the_most_frequent_ones_of_each_subword(aligner, tmp_path):
    aligner("i")
    pairs = [("a b", "x y"), ("a", "x"), ("a", "z"), ("b", "y"), ("", "x"), ("c", "")]
    pairs = [(source.split(), target.split()) for source, target in pairs]
    built = build(pairs, candidates=1, frequent=1)
    # "x" is always possible: so "a" has the next best candidate
    assert built == Shortlist(["x"], {"a": ["z"], "b": ["y"], "y": ["y"], "z": ["z"]})
    assert build(pairs, candidates=9, frequent=3) == Shortlist(["x", "y", "z"], {})
    assert build([(["a"], ["x"]), (["a"], ["z"]), (["a"], ["z"])], 2, 0).candidates["a"] == ["z", "x"]
    # A subword of both sides, such as a part of a name, is a candidate of itself beside the others.
    names = [([one], [other]) for one, other in (("a", "b"), ("a", "b"), ("b", "a"), ("a", "a"), ("c", "d"))]
    assert build(names, 1, 0).candidates == {"a": ["b", "a"], "b": ["a", "b"], "c": ["d"], "d": ["d"]}
    assert build(names, 9, 1, "e") == Shortlist(["b", "e"], {"a": ["a"], "b": ["a"], "c": ["d"], "d": ["d"]})
    built.write(str(tmp_path / "vmap.txt"))
    assert (tmp_path / "vmap.txt").read_text() == "\tx\na\tz\nb\ty\ny\ty\nz\tz\n"


def test_a_missing_or_failing_program_is_named(aligner, monkeypatch):
    program = aligner(text="#!/bin/sh\necho one\necho no memory\nexit 3\n")
    with pytest.raises(InputError, match=f"{program} ended with status 3: no memory"):
        build([(["a"], ["x"])])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InputError, match="needs the program eflomal-align; install it .* pip install 'eflomal>=2,<3'"):
        build([(["a"], ["x"])])


def test_an_export_that_ends_early_ends_the_program_and_its_children(aligner, tmp_path):
    program = aligner(text=f"#!/bin/sh\n(sleep 300; true) & echo $! > {tmp_path}/child; wait\n")

    def interrupt():
        while not (tmp_path / "child").exists() or not (tmp_path / "child").read_text():
            time.sleep(0.01)
        time.sleep(0.5)  # on a busy machine, the main thread may still be starting the program
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        list(align([(["a"], ["x"])], program))
    child = int((tmp_path / "child").read_text())
    for _ in range(1000):
        if not Path(f"/proc/{child}").exists() or "\tZ" in Path(f"/proc/{child}/status").read_text():
            return
        time.sleep(0.01)
    raise AssertionError("it still runs")


def test_eflomal_finds_the_translations():
    try:
        shortlist.find_aligner()
    except InputError as missing:  # it is optional: it needs a C compiler, and its licence is the GPL
        pytest.skip(str(missing))
    words = {"dog": "Hund", "cat": "Katze", "red": "rot", "big": "groß", "house": "Haus"}
    names = list(words)
    pairs = [[names[(n * k + k) % 5] for k in range(1, 4)] for n in range(400)]
    built = build([(source, [words[word] for word in source]) for source in pairs], candidates=1, frequent=0)
    of_itself = {target: [target] for target in words.values()}
    assert built.candidates == {**{source: [target] for source, target in words.items()}, **of_itself}


# -- in exports and translations ---------------------------------------------------------------------


def test_an_export_has_the_shortlist_of_its_training_set_and_reports_how_it_translates(
    aligner, trained, data_bin, tmp_path, capsys, monkeypatch
):
    aligner()
    monkeypatch.setattr(shortlist, "build", functools.partial(build, frequent=1))
    # The small model may learn nothing, which depends on the CPU: so --force.
    folder = exported(trained, data_bin, tmp_path / "model", "--shortlist", "--force")
    report = capsys.readouterr().out
    lines = (data_bin.parent / "text" / "valid.en").read_text().splitlines()
    with_it, without = Translator(str(folder)), Translator(str(folder), shortlist=False)
    same = sum(map(str.__eq__, with_it.translate(lines), without.translate(lines)))
    assert f"on 20 sentences of the validation set; {same} of the translations are the same" in report
    lines = dict(line.split("\t") for line in (folder / "vmap.txt").read_text().splitlines())
    assert len(lines.pop("").split()) == 1
    assert {source: [source.upper()] for source in lines} == {k: v.split() for k, v in lines.items()}
    assert {"dog", "DOG"} < lines.keys()
    assert "vmap.txt" in json.loads((folder / "fairseq_rope.json").read_text())["sha256"]

    # The texts of the corpus give the same shortlist; a folder with one may be replaced.
    text = [str(data_bin.parent / "text" / f"train.{language}") for language in ("en", "de")]
    first = (folder / "vmap.txt").read_bytes()
    exported(trained, data_bin, folder, "--replace", "--force", "--shortlist", *text)
    assert (folder / "vmap.txt").read_bytes() == first


def record(folder):
    """Write the checksum of the shortlist into the settings, as export does."""
    settings = json.loads((folder / "fairseq_rope.json").read_text())
    settings["sha256"]["vmap.txt"] = hashlib.sha256((folder / "vmap.txt").read_bytes()).hexdigest()
    (folder / "fairseq_rope.json").write_text(json.dumps(settings))


@pytest.fixture
def with_few_words(model, tmp_path):
    """An exported folder whose shortlist has no translation of "cat"."""
    folder = tmp_path / "few"
    shutil.copytree(model, folder)
    words = [word.upper() for word in "the a dog sees takes red blue big old house".split()]
    Shortlist([], {word.lower(): [word] for word in words}).write(str(folder / "vmap.txt"))
    record(folder)
    return folder


def test_only_words_of_the_shortlist_are_found_unless_it_is_off(with_few_words, tmp_path, capsys):
    (tmp_path / "in").write_text("the red cat sees a dog\n")

    def translated(*flags):
        main(["--model", str(with_few_words), "--input", str(tmp_path / "in"), *flags])
        return capsys.readouterr().out

    assert "CAT" not in translated() and "CAT" in translated("--no-shortlist")
    # An unknown word has the candidates of <unk>, as in the training data.
    Shortlist(["THE"], {"<unk>": ["RED", "HOUSE"]}).write(str(with_few_words / "vmap.txt"))
    record(with_few_words)
    (tmp_path / "in").write_text("xyz xyz\n")
    found = {word for line in translated("--nbest", "4").splitlines() for word in line.split("\t")[2].split()}
    assert found & {"RED", "HOUSE"} and found <= {"THE", "RED", "HOUSE", "<unk>"}


def test_a_shortlist_that_costs_bleu_or_cannot_be_checked_needs_force(
    aligner, trained, data_bin, tmp_path, monkeypatch, loaded
):
    aligner()
    monkeypatch.setattr(shortlist, "build", lambda *_, **__: Shortlist(["THE"], {}))
    wrong = ("--shortlist",)
    # no score is high enough, also if the small model has learnt nothing
    monkeypatch.setattr(export_checks, "SHORTLIST_LOSS", -200)
    with pytest.raises(SystemExit, match=r"sacreBLEU may be -200 lower: nothing was written"):
        exported(trained, data_bin, tmp_path / "model", *wrong)
    assert not (tmp_path / "model").exists()
    exported(trained, data_bin, tmp_path / "model", *wrong, "--force")
    assert (tmp_path / "model" / "vmap.txt").exists()
    monkeypatch.setattr(export_checks, "validation_pairs", lambda *_: [])
    settings = {"positions": {"source": None, "target": None}}
    with pytest.raises(ExportError, match="cannot be checked without a validation set"):
        export_checks.shortlist_samples(settings, loaded[1], force=False)
    assert "was not checked" in export_checks.check_shortlist("", settings, [], force=True)
    monkeypatch.setattr(export_checks, "validation_pairs", lambda *_: [([4] * 5, [4]), ([4], [4] * 9), ([4], [4])])
    settings = {"positions": {"source": 5, "target": 9}}  # with the end of the sentence
    assert [(len(a), len(b)) for a, b in export_checks.shortlist_samples(settings, loaded[1], force=False)] == [(1, 1)]


def test_the_report_and_the_bound_are_of_the_right_side(model, monkeypatch):
    """The translations are given: those without a shortlist are the references, unless *swapped*."""
    settings = json.loads((model / "fairseq_rope.json").read_text())
    lines = "the red cat sees a dog today|a big house has a red door|the old dog takes the book|no cat is blue"
    pairs = [(line.split(), line.upper().split()) for line in lines.split("|")]
    swapped = False

    class Given:
        def __init__(self, folder, settings, shortlist):
            self.begin = [["CAT"], []][shortlist == swapped]

        def __call__(self, sources):
            return [[([*(self.begin if n else []), *pairs[n][1]], -1.0)] for n in range(len(sources))]

        def close(self):
            pass

    monkeypatch.setattr(export_checks, "Search", Given)
    with pytest.raises(ExportError, match="may be 0.2 lower: nothing was written") as refused:
        export_checks.check_shortlist(str(model), settings, pairs, force=False)
    report = str(refused.value)
    lower, higher = map(float, re.search(r"sacreBLEU (\S+), and (\S+) without it, on 4", report).groups())
    assert 0 < lower < 99 and higher == pytest.approx(100.0) and "; 1 of the translations are the same" in report
    swapped = True
    report = export_checks.check_shortlist(str(model), settings, pairs, force=False)
    assert f"sacreBLEU 100.00, and {lower:.2f} without it" in report


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--shortlist", "one"], "--shortlist one: "),
        (["--shortlist", "{folder}/two", "{folder}/three"], "2 and 3 lines"),
        (["--shortlist", "{folder}/absent", "{folder}/two"], "absent"),
        (["--shortlist"], "--shortlist: --data"),
    ],
)
def test_wrong_flags_and_corpora_end_in_one_sentence(aligner, trained, data_bin, tmp_path, capsys, flags, message):
    aligner()
    data = shutil.copytree(data_bin, tmp_path / "bin", ignore=shutil.ignore_patterns("train.*"))
    for name, count in (("two", 2), ("three", 3)):
        (tmp_path / name).write_text("a dog\n" * count)
    with pytest.raises(SystemExit) as ended:
        exported(trained, data, tmp_path / "model", *(flag.format(folder=tmp_path) for flag in flags))
    assert message in f"{ended.value}{capsys.readouterr().err}" and not (tmp_path / "model").exists()


def shortlist_of_texts(folder, words, texts, settings):
    """The shortlist of a line or lines of text for each side; the dictionaries have *words*."""
    dictionaries = [Dictionary(), Dictionary()]
    for dictionary, of_side, text, name in zip(dictionaries, words, texts, "st", strict=True):
        (folder / name).write_text(text)
        for word in of_side:
            dictionary.add_symbol(word)
    task = SimpleNamespace(source_dictionary=dictionaries[0], target_dictionary=dictionaries[1])
    flags = f"--path p --data d --output o --shortlist {folder}/s {folder}/t"
    return build_shortlist(export.build_parser().parse_args(flags.split()), "", {"subwords": None, **settings}, task)


def test_texts_have_unknown_words_and_the_separator_is_always_possible(aligner, tmp_path, monkeypatch):
    aligner("i")
    monkeypatch.setattr(shortlist, "build", functools.partial(build, frequent=1))
    texts = [f"{word} {word} unknown-{word} <sep>\n{word} <sep>\n" + f"{word} b\n" * 3 for word in "ax"]
    settings = {"moses": None, "target": "de", "segments": {"tokens": 9, "separator": "<sep>"}}
    built = shortlist_of_texts(tmp_path, ["a", "x"], texts, settings)
    assert built.frequent == ["x", "<sep>"]
    assert built.candidates == {"<unk>": ["<unk>"]}, "the search looks unknown words up as <unk>"


def test_the_target_of_a_text_is_tokenised_by_the_rules_of_its_language(aligner, tmp_path):
    aligner("i")
    words, texts = [["the", "friend"], ["l&apos;", "ami"]], ["the friend\n", "l'ami\n"]
    settings = {"moses": {"source": "en", "target": "fr", "dash_splits": False}, "target": "fr", "segments": None}
    assert set(shortlist_of_texts(tmp_path, words, texts, settings).frequent) == {"l&apos;", "ami"}
