"""recipes.paper: each script runs once with tiny sizes and prints its result; the texts that prepare.py writes."""

import gzip
import json
import re
import subprocess

import pytest

from recipes.paper import prepare, sequences
from tests.commands import BIN, ENVIRONMENT, LIMIT, ROOT

SIZES = {
    **{"LAYERS": "1", "WIDTH": "16", "HEADS": "2", "EMBED": "16", "TOKENS": "64", "UPDATES": "3", "INTERVAL": "3"},
    "PASSAGE": "20",
}
WORDS = "the old dog sees a red house under the big tree".split()
PARTS = ("train", "valid", "test")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with small files for all scripts; the texts have three documents of five paragraphs."""
    folder = tmp_path_factory.mktemp("data")
    paragraphs = [f"{number} {' '.join(WORDS[number % 5 :])}" for number in range(15)]
    text = "\n".join(line + "\n" * (number % 5 == 4) for number, line in enumerate(paragraphs)) + "\n"
    triples = [{"A": a, "B": b, "C": c, "label": "BC"[len(a) % 2]} for a, b, c in zip(*[iter(paragraphs)] * 3)]
    for part in PARTS:
        (folder / f"{part}.txt").write_text(text)
        (folder / f"{part}.json.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, triples)).encode()))
    for part in ("train", "dev"):
        rows = [f"{line}\t{number % 2}\n" for number, line in enumerate(paragraphs)]
        (folder / f"{part}.tsv").write_text("sentence\tlabel\n" + "".join(rows))
    return folder


def run(name, *words, **variables):
    """Run a script with SIZES, and return its output."""
    variables["PATH"] = f"{BIN}:{ENVIRONMENT['PATH']}"
    command = ["bash", ROOT / "recipes" / "paper" / f"{name}.sh", *words]
    done = subprocess.run(
        command, env={**ENVIRONMENT, **SIZES, **variables},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def last_number(pattern, output):
    """The number after *pattern* in the last line of *output*."""
    return float(re.search(rf"{pattern} ([\d.]+)", output.splitlines()[-1])[1])


@pytest.fixture(scope="module")
def work(data, tmp_path_factory):
    """The work folder of masked_lm.sh, which has printed its validation loss."""
    folder = tmp_path_factory.mktemp("work")
    assert 3 < last_number("loss", run("masked_lm", data, folder)) < 12
    return folder


@pytest.mark.slow
def test_language_models_print_their_losses_and_continue(data, tmp_path):
    for updates in ("3", "4"):
        output = run("language_model", data, tmp_path, UPDATES=updates)
        assert 5 < last_number(r"Loss \(base 2\):", output) < 12
        assert bool(re.search("Loaded checkpoint .* @ 3 updates", output)) == (updates == "4")


@pytest.mark.slow
@pytest.mark.parametrize("task, pretrained", [("documents", "yes"), ("SST-2", "no")])
def test_fine_tuning_prints_the_accuracy(data, work, task, pretrained):
    output = run("fine_tuning", data, work, TASK=task, PRETRAINED=pretrained)
    assert 0 <= last_number(r"\| accuracy", output) <= 100
    assert ("loading pretrained model from" in output) == (pretrained == "yes")


@pytest.mark.slow
def test_long_documents_print_the_test_accuracy(data, tmp_path):
    output = run("long_documents", data, tmp_path, LIMITS="32", EPOCHS="1")
    assert 0 <= last_number(r"\| accuracy", output) <= 100


@pytest.mark.slow
def test_sequences_print_perplexity_and_exact_sequences_of_both_lengths(tmp_path):
    output = run("sequences", tmp_path, "--max-update", "3", TASK="reverse", LENGTH="3", DEVIATION="1")
    for part, line in zip(("test", "test1"), output.splitlines()[-2:], strict=True):
        perplexity, exact = re.fullmatch(rf"{part} \| ppl ([\d.]+) \| exact ([\d.]+)", line).groups()
        assert float(perplexity) > 5 and 0 <= float(exact) < 50


@pytest.mark.parametrize("task, target", [("copy", "a b c"), ("repeat", "a b c a b c"), ("reverse", "c b a")])
def test_sequences_are_copied_repeated_or_reversed(tmp_path, task, target):
    assert " ".join(sequences.TARGETS[task](["a", "b", "c"])) == target
    sequences.write_sets(task, tmp_path, 20, 2)
    lengths = {}
    for part in sequences.SETS:
        sources, targets = (
            [line.split() for line in (tmp_path / f"{part}.{side}").read_text().splitlines()]
            for side in ("source", "target")
        )
        assert [*map(sequences.TARGETS[task], sources)] == targets
        lengths[part] = sum(map(len, sources)) / len(sources)
    assert [round(length) for length in lengths.values()] == [20, 20, 20, 40]


def test_one_file_of_a_language_model_is_split(tmp_path):
    (tmp_path / "enwik8").write_bytes(bytes(range(200)))
    prepare.prepare_bytes(tmp_path / "enwik8", tmp_path)
    lines = [bytes.fromhex((tmp_path / f"{part}.txt").read_text()) for part in PARTS]
    assert b"".join(lines) == bytes(range(200)) and [*map(len, lines)] == [180, 10, 10]


def test_text_is_split_into_characters_or_subwords(data, tmp_path):
    for subwords, tokens in (("0", "0 ▁ t h e ▁ o l d"), ("40", "▁ 0 ▁the ▁ o l d")):
        prepare.prepare_text(data, tmp_path, str(tmp_path / "subwords.model"), subwords)
        assert (tmp_path / "train.txt").read_text().startswith(tokens)


def test_pairs_of_passages_follow_each_other_or_come_from_two_documents():
    documents = [prepare.passages_of(["one", "two", "three", "four"], 6), ["seven", "eight"]]
    assert documents[0] == ["one tw", "three "]
    assert sorted(prepare.following_pairs(documents))[0][1] in documents[1]
    assert [pair[:2] for pair in prepare.following_pairs(documents) if pair[2] == "1"] == documents
