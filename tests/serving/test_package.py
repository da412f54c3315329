"""fairseq_rope/serving/package.py. test_argos_programs.py installs packages in the real programs."""

import json
import shutil
import zipfile
from types import SimpleNamespace

import pytest
import sentencepiece
from subword_nmt.learn_bpe import learn_bpe

from fairseq_rope.serving import package
from fairseq_rope.serving.exported_folder import SETTINGS
from fairseq_rope.tools import package as package_command
from tests.serving.exports import exported

NAME = "translate-en_de-1_0"


@pytest.fixture(scope="module")
def served(trained, data_bin, tmp_path_factory):
    """An exported model with BPE codes that join each word of the corpus."""
    folder = tmp_path_factory.mktemp("bpe")
    text = (data_bin.parent / "text" / "train.en").read_text() + (data_bin.parent / "text" / "train.de").read_text()
    data = shutil.copytree(data_bin, folder / "data")
    with open(data / "bpecodes", "w", encoding="utf-8") as codes:
        learn_bpe(text.splitlines(), codes, num_symbols=1000)
    return exported(trained, data, folder / "served")


@pytest.fixture
def run(served, data_bin, tmp_path, capsys):
    """run(*flags): package the model, or another one, into tmp_path/packages; return what is printed."""

    def run(*flags, model=served, data=data_bin):
        words = ["--model", model, "--data", data, "--output", tmp_path / "packages", *flags]
        package_command.main(list(map(str, words)))
        return capsys.readouterr().out

    return run


def refusal(run, *flags, **options):
    with pytest.raises(SystemExit) as ended:
        run(*flags, **options)
    return str(ended.value.code)


def test_a_package_has_the_layout_that_the_programs_read(run, served, tmp_path):
    printed = run()
    packages = tmp_path / "packages"
    assert sorted(path.name for path in packages.iterdir()) == ["index.json", NAME, f"{NAME}.argosmodel"]
    assert json.loads((packages / "index.json").read_text()) == []
    assert json.loads((packages / NAME / "metadata.json").read_text()) == {
        **{"package_version": "1.0", "argos_version": "1.9.0", "type": "translate"},
        **{"from_code": "en", "from_name": "English", "to_code": "de", "to_name": "German"},
    }
    files = {path.relative_to(packages).as_posix(): path for path in (packages / NAME).rglob("*") if path.is_file()}
    assert files[f"{NAME}/bpe.model"].read_bytes() == (served / "bpecodes").read_bytes()
    for name in ("config.json", "model.bin", "shared_vocabulary.json"):
        assert files[f"{NAME}/model/{name}"].read_bytes() == (served / name).read_bytes()
    with zipfile.ZipFile(packages / f"{NAME}.argosmodel") as archive:
        assert {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")} == {
            name: path.read_bytes() for name, path in files.items()
        }
    assert "on 20 validation sentences" in printed


def test_only_replace_replaces_packages_of_the_same_languages(run, tmp_path):
    older, other = (tmp_path / "packages" / name for name in ("translate-en_de-0_9", "translate-de_en-1_0"))
    for folder in (older, other):
        folder.mkdir(parents=True)
    (tmp_path / "packages" / "index.json").write_text('["mine"]')
    assert f"--output {tmp_path / 'packages'}: has {older.name}" in refusal(run, "--force")
    run("--force", "--replace")
    run("--force", "--replace")
    assert not older.exists() and other.exists() and (tmp_path / "packages" / NAME / "metadata.json").exists()
    assert json.loads((tmp_path / "packages" / "index.json").read_text()) == ["mine"]
    assert [path.name for path in tmp_path.iterdir()] == ["packages"]


MOSES = {"source": "en", "target": "de", "dash_splits": False}
SENTENCEPIECE = {"kind": "sentencepiece", "file": "sentencepiece.bpe.model"}


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"subwords": None}, "no subwords"),
        ({"moses": None}, "BPE is without Moses"),
        ({"subwords": SENTENCEPIECE}, "Moses' tokeniser and sentencepiece"),
        ({"moses": {**MOSES, "dash_splits": True}}, "(@-@)"),
        ({"segments": {"tokens": 9, "separator": "<sep>"}}, "--segment-tokens 1"),
    ],
)
def test_models_whose_text_the_programs_tokenise_differently_are_refused(run, served, tmp_path, settings, reason):
    model = shutil.copytree(served, tmp_path / "other")
    own = json.loads((model / SETTINGS).read_text())
    (model / SETTINGS).write_text(json.dumps({**own, **settings}))
    sentence = refusal(run, "--force", model=model)
    assert f"--model {model}: " in sentence and reason in sentence
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_a_package_is_refused_if_it_translates_worse_or_cannot_be_checked(run, data_bin, tmp_path, monkeypatch):
    data = shutil.copytree(data_bin, tmp_path / "data", ignore=shutil.ignore_patterns("valid.*"))
    assert f"--data {data}: " in refusal(run, data=data)
    sources, references = (
        (data_bin.parent / "text" / f"valid.{lang}").read_text().split("\n") for lang in ("en", "de")
    )
    known = dict(zip(sources, references, strict=True))
    translations = {"wrong": lambda lines: ["nothing"] * len(lines), "right": lambda lines: [known[n] for n in lines]}
    for here, there in (("wrong", "right"), ("right", "wrong")):
        monkeypatch.setattr(package.Translator, "translate", lambda self, lines, how=here: translations[how](lines))
        monkeypatch.setattr(
            package, "translate_as_programs", lambda model, settings, lines, how=there: translations[how](lines)
        )
        if there == "right":
            assert "sacreBLEU 100.00 in the programs and 0.00 here" in run()
        else:
            assert "sacreBLEU 0.00 in the programs and 100.00 here" in refusal(run, "--replace")
    run("--replace", "--force", data=data)


class Echo:
    """Stands for ctranslate2.Translator: the translation of a sentence is the sentence."""

    def __init__(self, folder, **options):
        pass

    def translate_batch(self, lines, beam_size, length_penalty, replace_unknowns, max_batch_size):
        assert (beam_size, length_penalty, replace_unknowns) == (4, 0.2, True), "as in the programs"
        return [SimpleNamespace(hypotheses=[line]) for line in lines]


def test_the_programs_normalise_punctuation_or_replace_underscores(served, tmp_path, monkeypatch):
    monkeypatch.setattr("ctranslate2.Translator", Echo)
    settings = json.loads((served / SETTINGS).read_text())
    lines = ["the “dog” – sees", "a well-known ‘cat’"]
    echoed = package.translate_as_programs(str(served), settings, lines)
    assert echoed == ['the "dog" - sees', "a well-known 'cat'"]
    options = {"model_type": "char", "vocab_size": 20, "hard_vocab_limit": False, "minloglevel": 2}
    text, prefix = iter(["the big_dog sees “a” cat"] * 50), str(tmp_path / "sentencepiece.bpe")
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=text, model_prefix=prefix, **options)
    settings = {"moses": None, "subwords": SENTENCEPIECE}
    assert package.translate_as_programs(str(tmp_path), settings, ["the big_dog “a”"]) == ["the big dog “a”"]
