"""recipes/demo/corpus: its filters, and that no test paragraph is in the training set."""

import gzip

from tests.commands import ROOT

CORPUS = ROOT / "recipes" / "demo" / "corpus"


def lines(name):
    return gzip.decompress((CORPUS / f"{name}.gz").read_bytes()).decode("utf-8").removesuffix("\n").split("\n")


def test_paragraphs_are_short_unique_and_without_code():
    names = ("train", "valid", "test")
    corpus = {name: list(zip(lines(f"{name}.en"), lines(f"{name}.de"), strict=True)) for name in names}
    pairs = [pair for pairs in corpus.values() for pair in pairs]
    for text in (text for pair in pairs for text in pair):
        assert 2 <= len(text.split()) <= 25 and not set("=;{}\\<>") & set(text), text
    assert len(set(pairs)) == len(pairs)
    for side in (0, 1):  # no side of a held-out paragraph occurs elsewhere
        train, valid, test = ({pair[side] for pair in corpus[name]} for name in names)
        assert len(valid) == len(test) == 500
        assert not train & valid and not train & test and not valid & test
