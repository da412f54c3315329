"""recipes/demo/corpus: sizes, what is filtered out, and that no test paragraph is in the training set."""

import gzip

import pytest

from tests.commands import ROOT

CORPUS = ROOT / "recipes" / "demo" / "corpus"


def lines(name):
    return gzip.decompress((CORPUS / f"{name}.gz").read_bytes()).decode("utf-8").removesuffix("\n").split("\n")


@pytest.fixture(scope="module")
def corpus():
    """Set to its pairs, (English, German)."""
    return {
        name: list(zip(lines(f"{name}.en"), lines(f"{name}.de"), strict=True)) for name in ("train", "valid", "test")
    }


def test_sizes_are_those_that_the_readme_names(corpus):
    assert {name: len(pairs) for name, pairs in corpus.items()} == {"train": 21664, "valid": 500, "test": 500}
    assert sum(path.stat().st_size for path in CORPUS.glob("*.gz")) < 1_000_000
    readme = (CORPUS.parent / "README.md").read_text()
    assert "21,664" in readme and "LibreOffice" in readme and "(corpus/NOTICE)" in readme


def test_paragraphs_have_2_to_25_words_and_no_characters_of_code(corpus):
    for english, german in (pair for pairs in corpus.values() for pair in pairs):
        for text in (english, german):
            assert 2 <= len(text.split()) <= 25 and not set("=;{}\\<>") & set(text), text


def test_no_side_of_a_held_out_paragraph_occurs_elsewhere(corpus):
    pairs = [pair for pairs in corpus.values() for pair in pairs]
    assert len(set(pairs)) == len(pairs)
    for side in (0, 1):
        train, valid, test = ({pair[side] for pair in corpus[name]} for name in ("train", "valid", "test"))
        assert len(valid) == len(test) == 500
        assert not train & valid and not train & test and not valid & test
