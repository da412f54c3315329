"""recipes/documents_en_de/long_test_set.py: long documents of the training set are tested."""

import gzip

import pytest

from recipes.documents_en_de.long_test_set import main

LONG = {"train": (1, 3, 4, 7, 8), "test": (0, 2)}  # the documents of more than 6 words


def document(name, number):
    """Two lines in both languages; the second is blank in German in one document."""
    more = "a b c d e" if number in LONG.get(name, ()) else "a"
    german = " \u200b" if (name, number) == ("train", 3) else more.upper()
    return [(f"{name} {number}", f"{name.upper()} {number}"), (more, german)]


@pytest.fixture
def corpus(tmp_path):
    documents = {name: [document(name, n) for n in range(count)] for name, count in SIZES.items()}
    for name, of_name in documents.items():
        for side, lang in enumerate(("en", "de")):
            lines = [line for one in of_name for line in [*(pair[side] for pair in one), ""]]
            (tmp_path / f"{name}.{lang}.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    return tmp_path


SIZES = {"train": 9, "valid": 2, "test": 4}


def read(folder, name, lang):
    return gzip.decompress((folder / f"{name}.{lang}.gz").read_bytes()).decode()


def test_the_test_set_has_the_long_documents_and_the_training_set_the_others(corpus, tmp_path):
    main([str(corpus), str(tmp_path / "out"), "--words", "6", "--documents", "2"])
    moved = (1, 7)  # of 1, 4, 7, 8: the first of each half; 3 lacks a translation, which a test set must have
    expected = {
        "train": [document("train", n) for n in range(9) if n not in moved],
        "valid": [document("valid", n) for n in range(2)],
        "test": [document("test", n) for n in LONG["test"]] + [document("train", n) for n in moved],
    }
    for name, documents in expected.items():
        for side, lang in enumerate(("en", "de")):
            text = "\n\n".join("\n".join(pair[side] for pair in one) for one in documents) + "\n"
            assert read(tmp_path / "out", name, lang) == text


def test_too_few_long_documents_are_refused(corpus, tmp_path):
    message = "--documents 6: must be at most 4, the complete training documents of more than 6 words"
    with pytest.raises(SystemExit, match=message):
        main([str(corpus), str(tmp_path / "out"), "--words", "6", "--documents", "6"])
    assert not (tmp_path / "out").exists()


def test_the_input_is_not_overwritten(corpus):
    before = {path.name: path.read_bytes() for path in corpus.iterdir()}
    with pytest.raises(SystemExit, match="OUTPUT must be another folder than DIR"):
        main([str(corpus), f"{corpus}/../{corpus.name}", "--words", "6", "--documents", "2"])
    assert {path.name: path.read_bytes() for path in corpus.iterdir()} == before
