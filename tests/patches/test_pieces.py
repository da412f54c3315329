"""fairseq_rope/patches/pieces.py: what fairseq's programs print for a model with SentencePiece is the original text.

With ``--score-reference``, the hypotheses are the references, so the text of the test set is the expected output.
"""

import json

import pytest
import sentencepiece
from fairseq.data import data_utils
from fairseq.data.encoders.sentencepiece_bpe import SentencepieceBPE

from fairseq_rope.serving import export_checks
from fairseq_rope.tools import score
from tests.commands import call, outputs, train

TEXT = ["5 € in the house", "the dog", "日本 sees a <x>cat", "naïve 🙂"]


@pytest.fixture(scope="module")
def translating(byte_pieces, tmp_path_factory):
    """The words of fairseq-generate for a tiny model of these pieces, and its test set with the control symbol."""
    folder = tmp_path_factory.mktemp("bytes")
    encode = sentencepiece.SentencePieceProcessor(model_file=str(byte_pieces)).encode
    for name in ("train", "valid", "test"):
        for side, tag in (("en", ""), ("de", "<2de> ")):
            lines = (tag + " ".join(encode(line, out_type=str)) for line in TEXT)
            (folder / f"{name}.{side}").write_text("\n".join(lines) + "\n", encoding="utf-8")
    prefixes = [word for name in ("train", "valid", "test") for word in (f"--{name}pref", folder / name)]
    call("fairseq-preprocess", "-s", "en", "-t", "de", *prefixes, "--joined-dictionary", "--destdir", folder / "bin")
    train(folder / "bin", folder, "--max-update", 1)
    return ["fairseq-generate", folder / "bin", "--path", folder / "checkpoint_last.pt", "--cpu", "--score-reference"]


MODEL = ["--bpe", "sentencepiece", "--sentencepiece-model"]


@pytest.mark.parametrize("removes, has_model", [(False, True), (True, True), (True, False)])
def test_generated_lines_are_the_text(translating, byte_pieces, removes, has_model):
    flags = [*(["--remove-bpe", "sentencepiece"] if removes else []), *([*MODEL, byte_pieces] if has_model else [])]
    printed = call(*translating, *flags)
    tag = "" if has_model else "<2de> "  # without its model, a control symbol is text
    assert outputs(printed, "D") == outputs(printed, "T") == {n: [tag + line] for n, line in enumerate(TEXT)}


def test_score_undoes_bytes_in_the_output_of_fairseq_alone(translating, byte_pieces, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(SentencepieceBPE, "decode", SentencepieceBPE.decode.__wrapped__)
    monkeypatch.setattr(data_utils, "post_process", data_utils.post_process.__wrapped__)
    (tmp_path / "ref").write_text("".join(f"<2de> {line}\n" for line in TEXT), encoding="utf-8")
    for flags in ([*MODEL, byte_pieces], ["--remove-bpe", "sentencepiece"]):
        (tmp_path / "out").write_text(call(*translating, *flags), encoding="utf-8")
        files = ["--generate-output", tmp_path / "out", "--ref", tmp_path / "ref"]
        score.main([*map(str, files), "--target-lang", "th", "--json"])  # a language with few metrics
        (system,) = json.loads(capsys.readouterr().out)["systems"]
        assert system["undone"] == ["bytes of SentencePiece"]
        assert {metric["name"]: metric["score"] for metric in system["metrics"]}["chrF2"] == 100


def test_sources_with_bytes_are_tokenised_as_in_the_data(translating, byte_pieces):
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    config = TranslationConfig(data=str(translating[1]), source_lang="en", target_lang="de", dataset_impl=None)
    settings = {"source": "en", "moses": None, "subwords": {"kind": "sentencepiece", "file": byte_pieces.name}}
    (report,) = export_checks.check_text(str(byte_pieces.parent), settings, TranslationTask.setup_task(config))
    assert report.startswith("4 of 4 sources")
