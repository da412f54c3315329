"""fairseq_rope/serving/package.py. test_argos_programs.py installs packages in the real programs."""

import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path
from types import SimpleNamespace

import ctranslate2
import pytest
import sentencepiece
from subword_nmt.learn_bpe import learn_bpe

from fairseq_rope.serving import argos, export_checks, package
from fairseq_rope.serving.argos import Package
from fairseq_rope.serving.exported_folder import SETTINGS, checksum
from fairseq_rope.text.tokens import Tokeniser
from fairseq_rope.tools import export
from fairseq_rope.tools import package as package_command
from tests.commands import call

TOP = "translate-en_de-1_0"
NAME = f"{TOP}.argosmodel"


@pytest.fixture(scope="module")
def served(trained, data_bin, tmp_path_factory):
    """An exported model with BPE codes that join each word of the corpus."""
    folder = tmp_path_factory.mktemp("bpe")
    text = (data_bin.parent / "text" / "train.en").read_text() + (data_bin.parent / "text" / "train.de").read_text()
    with open(folder / "codes", "w", encoding="utf-8") as codes:
        learn_bpe(text.splitlines(), codes, num_symbols=1000)
    flags = ["--path", trained / "checkpoint_last.pt", "--data", data_bin, "--bpe-codes", folder / "codes"]
    export.main(list(map(str, [*flags, "--output", folder / "served"])))
    return folder / "served"


@pytest.fixture
def run(served, data_bin, tmp_path, capsys):
    """run(*flags): package the model in tmp_path, or the one in *model*; return what is printed."""

    def run(*flags, model=served):
        package_command.main(list(map(str, ["--model", model, "--data", data_bin, "--output", tmp_path, *flags])))
        return capsys.readouterr().out

    return run


def changed(served, folder, **settings):
    """A copy of the exported model with other settings."""
    shutil.copytree(served, folder)
    own = json.loads((folder / SETTINGS).read_text())
    (folder / SETTINGS).write_text(json.dumps({**own, **settings}))
    return folder


def test_a_package_has_the_layout_that_the_programs_read(run, served, tmp_path):
    (tmp_path / "vmap.txt").write_text("the\tTHE A\n")
    sums = {**json.loads((served / SETTINGS).read_text())["sha256"], "vmap.txt": checksum(tmp_path / "vmap.txt")}
    model = changed(served, tmp_path / "with a shortlist", sha256=sums)
    (tmp_path / "vmap.txt").rename(model / "vmap.txt")
    printed = run("--licence", "CC0", "--trained-on", "200 pairs", model=model)
    with zipfile.ZipFile(tmp_path / NAME) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    own = {name: (served / name).read_bytes() for name in ("config.json", "model.bin", "shared_vocabulary.json")}
    assert json.loads(files.pop(f"{TOP}/metadata.json")) == {
        **{"package_version": "1.0", "argos_version": "1.9.0", "type": "translate"},
        **{"from_code": "en", "from_name": "English", "to_code": "de", "to_name": "German"},
    }
    readme = files.pop(f"{TOP}/README.md").decode()
    assert "CC0" in readme and "200 pairs" in readme and "sacreBLEU" in readme
    bpe = {f"{TOP}/bpe.model": (served / "bpecodes").read_bytes()}
    assert files == {**bpe, **{f"{TOP}/model/{name}": data for name, data in own.items()}}
    assert "package: 0 of 20 sentences of the validation set have other tokens" in printed
    assert "the shortlist (vmap.txt) is left out" in printed and printed.endswith(f"wrote {tmp_path / NAME}\n")
    first = (tmp_path / NAME).read_bytes()
    run("--licence", "CC0", "--trained-on", "200 pairs", "--replace")
    assert (tmp_path / NAME).read_bytes() == first


def test_an_installed_package_replaces_only_itself(run, tmp_path):
    packages = tmp_path / "packages"
    run("--install", packages)
    assert sorted(path.name for path in packages.iterdir()) == ["index.json", TOP]
    assert json.loads((packages / "index.json").read_text()) == []
    assert (packages / TOP / "model" / "model.bin").is_file() and not (packages / TOP / "model").is_symlink()
    (packages / TOP / "old").touch()
    assert refusal(run, "--install", packages, "--output", packages).endswith("--replace replaces it")
    another = refusal(run, "--install", packages, "--package-version", "2.0", "--replace")
    assert (
        another
        == f"--install {packages}: has the package {TOP} already; remove it, because only one of them would be used"
    )
    run("--install", packages, "--replace")
    assert not (packages / TOP / "old").exists() and len(list(tmp_path.iterdir())) == 2


def test_an_index_of_the_user_s_own_packages_stays_without_replace(run, tmp_path):
    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "index.json").write_text('[{"code": "translate-en_fr"}]')
    sentence = f"--install {packages}: has an index.json with packages; --replace empties it"
    assert refusal(run, "--install", packages) == sentence
    assert json.loads((packages / "index.json").read_text()) and not (packages / TOP).exists()
    run("--install", packages, "--replace")
    assert json.loads((packages / "index.json").read_text()) == [] and (packages / TOP).exists()


@pytest.mark.parametrize("locked", ["", "packages"])
def test_a_folder_without_permission_to_install_is_refused_before_the_check(run, tmp_path, monkeypatch, locked):
    """Users of these tests can be root, whom the system refuses nothing."""
    packages, forbidden = tmp_path / "packages", tmp_path / locked
    packages.mkdir()
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != forbidden and access(path, mode))
    sentence = refusal(run, "--install", packages)
    beside = "" if locked else ": the package is unpacked beside the folder first"
    assert sentence == f"--install {packages}: no permission to write into {forbidden}{beside}"
    assert [path.name for path in tmp_path.rglob("*")] == ["packages"]


def refusal(run, *flags, **options):
    with pytest.raises(SystemExit) as ended:
        run(*flags, **options)
    return str(ended.value.code).removeprefix("fairseq-rope package: ")


SENTENCEPIECE = {"kind": "sentencepiece", "file": "sentencepiece.bpe.model"}
BPE = {"kind": "subword_nmt", "file": "bpecodes"}
MOSES = {"source": "en", "target": "de", "dash_splits": False}


@pytest.mark.parametrize(
    "settings, reason",
    [
        ({"subwords": None}, "it has no subword model, and a package needs BPE codes or a sentencepiece model"),
        ({"moses": None}, "its BPE was trained without Moses' tokeniser, which a package with BPE codes always uses"),
        ({"subwords": SENTENCEPIECE}, "it uses Moses' tokeniser and sentencepiece"),
        ({"moses": {**MOSES, "dash_splits": True}}, "its data were split at hyphens (@-@, Moses' -a)"),
        ({"source": ""}, "fairseq_rope.json has no source or target language; export the model again"),
        ({"source": "xx_1"}, "the languages are xx-1, de: must be two codes of two or three lower-case letters"),
    ],
)
def test_models_that_a_package_cannot_hold_are_refused(run, served, tmp_path, settings, reason):
    model = changed(served, tmp_path / "other", **settings)
    assert refusal(run, model=model).startswith(f"--model {model}: {reason}")
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


@pytest.mark.parametrize(
    "flags, reason",
    [
        (["--languages", "EN", "de"], "--languages EN de: must be two codes of two or three lower-case letters"),
        (["--languages", "en", "en"], "--languages en en: must be two codes"),
        (["--languages", "de", "en"], "--languages de en: the model in --model {served} translates en to de"),
        (["--languages", "de", "fr"], "--languages de fr: the model in --model {served} translates en to de"),
        (["--languages", "fr", "en"], "--languages fr en: the model in --model {served} translates en to de"),
        (["--package-version", "one"], "--package-version one: must be numbers and dots, such as 1.0"),
        (["--output", "nowhere"], "--output nowhere: must be a folder that exists"),
        (["--install", "nowhere/packages"], "--install nowhere/packages: must be a folder, or a new one"),
        (
            ["--splitter", "nowhere"],
            "--splitter nowhere: must be a MiniSBD model (a file .onnx) or a folder that spaCy",
        ),
        (["--data", "nowhere"], "--data nowhere: must be the folder of the dictionaries, and has no dict.en.txt"),
        (["--model", "nowhere"], "--model nowhere: must be a folder that fairseq-rope export wrote"),
    ],
)
def test_wrong_flags_are_refused_with_one_sentence(run, served, tmp_path, flags, reason):
    sentence = refusal(run, *flags)
    assert sentence.startswith(reason.format(served=served)) and "\n" not in sentence
    assert list(tmp_path.iterdir()) == []


def test_a_splitter_with_a_pipe_that_the_programs_add_is_refused(run, tmp_path):
    """spaCy raises an error when Argos Translate adds it a second time. This is the start of a file of spaCy 3.8."""
    (tmp_path / "splitter").mkdir()
    config = '[nlp]\nlang = "en"\npipeline = {}\nbatch_size = 1000\n\n[components]\n'
    (tmp_path / "splitter" / "config.cfg").write_text(config.format('["sentencizer"]'))
    refused = refusal(run, "--splitter", tmp_path / "splitter")
    assert refused.endswith("has the pipe sentencizer, which the programs add; save it without this pipe")
    (tmp_path / "splitter" / "config.cfg").write_text(config.format("[]"))
    run("--splitter", tmp_path / "splitter", "--names", "Русский", "Français")
    with zipfile.ZipFile(tmp_path / NAME) as archive:
        metadata = archive.read(f"{TOP}/metadata.json")
        assert f"{TOP}/spacy/config.cfg" in archive.namelist()
    assert metadata.isascii() and json.loads(metadata)["from_name"] == "Русский", "Windows reads it in its own encoding"


def test_a_model_that_is_exported_again_during_the_check_is_not_packaged(run, served, tmp_path, monkeypatch):
    model, check_package = shutil.copytree(served, tmp_path / "model"), package.check_package

    def replaced(*args):
        report = check_package(*args)
        (model / "model.bin").write_bytes(b"another model")
        settings = json.loads((model / SETTINGS).read_text())
        settings["sha256"]["model.bin"] = checksum(model / "model.bin")
        (model / SETTINGS).write_text(json.dumps(settings))
        return report

    monkeypatch.setattr(package, "check_package", replaced)
    assert refusal(run, model=model) == f"--model {model}: has changed since it was checked; repeat the command"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_an_existing_package_is_not_replaced(run, tmp_path):
    (tmp_path / NAME).write_text("mine")
    assert refusal(run) == f"--output {tmp_path}: {NAME} exists already; --replace replaces it"
    assert (tmp_path / NAME).read_text() == "mine"


def test_a_package_with_other_tokens_than_the_data_is_refused(run, served, tmp_path):
    codes = "#version: 0.2\nt h\n"
    sums = {**json.loads((served / "fairseq_rope.json").read_text())["sha256"]}
    sums["bpecodes"] = hashlib.sha256(codes.encode()).hexdigest()
    model = changed(served, tmp_path / "other", sha256=sums)
    (model / "bpecodes").write_text(codes)
    sentence = refusal(run, model=model)
    assert sentence.startswith("package: 20 of 20 sentences of the validation set have other tokens than in the data")
    assert "nothing was written (--force writes it anyway)" in sentence and not (tmp_path / NAME).exists()
    assert "20 of 20" in run("--force", model=model) and (tmp_path / NAME).exists()


def test_a_package_that_translates_worse_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setattr(package, "LOSS", -101.0)  # no package is so much better
    assert "it may be -101.0 lower: nothing was written" in refusal(run)
    assert list(tmp_path.iterdir()) == []


def test_the_translations_of_the_package_are_scored_beside_those_of_the_model(run, data_bin, tmp_path, monkeypatch):
    """The package's are the references, which have 100 sacreBLEU; the model's are not."""
    references = (data_bin.parent / "text" / "valid.de").read_text().split("\n")
    sources = (data_bin.parent / "text" / "valid.en").read_text().split("\n")
    known = dict(zip(sources, references))
    monkeypatch.setattr(
        package.Argos, "translate", lambda self, pairs: [known[" ".join(source)].split() for source in pairs]
    )
    monkeypatch.setattr(package.Translator, "translate", lambda self, lines: ["nothing like it"] * len(lines))
    assert "sacreBLEU 100.00 on them with beam 4 and length penalty 0.2" in run()
    monkeypatch.setattr(package.Argos, "translate", lambda self, pairs: [["nothing"] for _ in pairs])
    monkeypatch.setattr(package.Translator, "translate", lambda self, lines: [known[line] for line in lines])
    assert "nothing was written" in refusal(run, "--replace")


def test_a_package_cannot_be_checked_without_a_validation_set(run, data_bin, tmp_path):
    data = tmp_path / "data"
    shutil.copytree(data_bin, data, ignore=shutil.ignore_patterns("valid.*"))
    reason = f"--data {data}: has no validation set to check the package (--force writes it anyway)"
    assert refusal(run, "--data", data) == reason and not (tmp_path / NAME).exists()
    assert "package: not checked" in run("--data", data, "--force")


@pytest.mark.parametrize("flags", [["--licence", "\udce9"], ["--trained-on", "\udce9"], ["--names", "a", "\udce9"]])
def test_text_of_flags_that_is_not_utf_8_is_refused_before_the_check(run, tmp_path, monkeypatch, flags):
    monkeypatch.setattr(package, "check_package", None)
    flag, *values = flags
    assert refusal(run, *flags) == f"{flag} {values[-1]}: must be UTF-8; your shell gave other bytes"
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_no_file(run, tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", fails)
    assert "No space left on device" in refusal(run)
    assert list(tmp_path.iterdir()) == []


def test_properties_that_a_package_does_not_have_are_warned_about(served, tmp_path):
    settings = json.loads((served / SETTINGS).read_text())
    assert settings["quantization"] == "float32"
    exact = "the weights are float32, and Argos Translate 1.11 may convert them to 8 bits; "
    cases = [
        ({"quantization": "int8"}, []),
        ({}, [exact]),
        (
            {"quantization": "int8", "segments": {"tokens": 9, "separator": "<sep>"}},
            ["the model was trained on segments"],
        ),
        (
            {"quantization": "int8", "positions": {"source": 512, "target": 512}},
            ["the model has 512 positions in the source"],
        ),
    ]
    for changes, expected in cases:
        sentences = package.warnings(str(served), {**settings, **changes})
        assert len(sentences) == len(expected) and all(map(str.startswith, sentences, expected)), changes


@pytest.mark.parametrize(
    "trained, flags, codes, names",
    [
        (("en", "pt-BR"), {}, ["en", "pb"], ["English", "Portuguese (Brazil)"]),
        (("zh_Hant", "gsw"), {"names": ["Chinese", "Swiss German"]}, ["zt", "gsw"], ["Chinese", "Swiss German"]),
        (("src", "tgt"), {"languages": ["fi", "sv"]}, ["fi", "sv"], ["Finnish", "Swedish"]),
    ],
)
def test_codes_and_names_of_languages(trained, flags, codes, names):
    args = SimpleNamespace(**{"model": "m", "languages": None, "names": None, **flags})
    assert package.languages(args, dict(zip(("source", "target"), trained))) == (codes, names)


def test_sentences_of_segments_are_checked_one_by_one(data_bin, tmp_path):
    pairs = [
        ("the dog <sep> a cat", "DOG THE <sep> CAT A"),
        ("a dog", "DOG A"),
        ("the <sep> cat", "CAT"),
        ("q", "A"),
        ("a big dog", "A"),
    ]
    for n, side in enumerate(("en", "de")):
        (tmp_path / f"valid.{side}").write_text("".join(f"{pair[n]}\n" for pair in pairs))
        words = (data_bin / f"dict.{side}.txt").read_text() + "<sep> 1\n"
        (tmp_path / f"words.{side}").write_text(words)
    dictionaries = ["--srcdict", tmp_path / "words.en", "--tgtdict", tmp_path / "words.de"]
    files = ["--validpref", tmp_path / "valid", "--destdir", tmp_path / "bin"]
    call("fairseq-preprocess", "-s", "en", "-t", "de", *dictionaries, *files)
    settings = {"source": "en", "target": "de", "segments": {"tokens": 9, "separator": "<sep>"}}
    settings["positions"] = {"source": 3, "target": None}  # with the end: two words
    found = package.validation_sentences(str(tmp_path / "bin"), settings, 100)
    expected = {("the dog", "DOG THE"), ("a cat", "CAT A"), ("a dog", "DOG A")}
    assert {(" ".join(one), " ".join(other)) for one, other in found} == expected


def test_segments_of_more_than_200_tokens_are_divided_before_they_are_chosen(data_bin, tmp_path):
    for side in ("en", "de"):
        one_line = " <sep> ".join(f"{word} {word}" for word in 100 * ["the" if side == "en" else "DOG"])
        (tmp_path / f"valid.{side}").write_text(f"{one_line}\n")
        (tmp_path / f"words.{side}").write_text((data_bin / f"dict.{side}.txt").read_text() + "<sep> 1\n")
    dictionaries = ["--srcdict", tmp_path / "words.en", "--tgtdict", tmp_path / "words.de"]
    files = ["--validpref", tmp_path / "valid", "--destdir", tmp_path / "bin"]
    call("fairseq-preprocess", "-s", "en", "-t", "de", *dictionaries, *files)
    settings = {"source": "en", "target": "de", "segments": {"tokens": 512, "separator": "<sep>"}}
    settings["positions"] = {"source": None, "target": None}
    found = package.validation_sentences(str(tmp_path / "bin"), settings, 30)
    assert found == [(["the", "the"], ["DOG", "DOG"])] * 30


def test_the_programs_normalise_punctuation_and_split_no_hyphens(run, served, tmp_path):
    """The truth for the text is Tokeniser, which follows fairseq, and for the normaliser the known characters."""
    run("--install", tmp_path / "packages")
    unpacked, text = (
        Package(str(tmp_path / "packages" / TOP)),
        Tokeniser(str(served), json.loads((served / SETTINGS).read_text())),
    )
    for line, normalised in (
        ("the “dog” – sees", 'the "dog" - sees'),
        ("a  well-known ‘cat’ …", "a well-known 'cat' ..."),
        ("the house", "the house"),
    ):
        assert unpacked.tokens(line) == text.tokens(normalised)
    assert unpacked.plain(["THE", "DO@@", "G", "."]) == "THE DOG."
    assert unpacked.search([[], ["the dog", "house"]])[0] == []


def test_a_package_with_sentencepiece_replaces_underscores(served, tmp_path):
    (tmp_path / "text").write_text("the big_dog sees a cat\n" * 50)
    options = {"model_type": "char", "vocab_size": 20, "hard_vocab_limit": False, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(input=str(tmp_path / "text"), model_prefix=str(tmp_path / "m"), **options)
    (tmp_path / "m.model").rename(tmp_path / argos.SENTENCEPIECE)
    (tmp_path / argos.METADATA).write_text(json.dumps({"from_code": "en", "to_code": "de"}))
    (tmp_path / argos.MODEL).symlink_to(served)
    unpacked = Package(str(tmp_path))
    assert unpacked.tokens("a dog") == list("▁a▁dog")
    assert unpacked.plain(list("▁big_dog")) == "big dog"


def test_a_package_scores_and_translates_as_the_checkpoint(served, loaded, tmp_path):
    checkpoint, task = loaded
    target = package.Argos(str(served), json.loads((served / SETTINGS).read_text()))
    target.texts[argos.METADATA] = json.dumps({"from_code": "en", "to_code": "de"})
    target.refuse()
    target.write(str(tmp_path))
    pairs = export_checks.validation_pairs(task)
    words = list(export_checks.in_words(task, pairs))
    for scores, expected in zip(target.score(words).log_probs, export_checks.torch_scores(checkpoint, task, pairs)):
        assert scores == pytest.approx(expected, abs=1e-3)
    sources = [source for source, _ in words]

    def with_options(beam_size=4, length_penalty=0.2):  # those of Argos Translate
        model = ctranslate2.Translator(str(tmp_path / argos.MODEL))
        results = model.translate_batch(sources, beam_size=beam_size, length_penalty=length_penalty)
        return [result.hypotheses[0] for result in results]

    assert target.translate(sources) == with_options()
    assert with_options(beam_size=1) != with_options() != with_options(length_penalty=3.0)


def test_a_package_with_other_scores_than_its_model_is_refused(run, tmp_path, monkeypatch):
    monkeypatch.setitem(export_checks.BOUNDS, None, -1.0)
    assert refusal(run).startswith("the exported model's scores differ from those of the model by 0 per word at most")
    assert list(tmp_path.iterdir()) == []


def test_the_readme_names_licence_and_data_and_a_minisbd_splitter_has_its_place(run, tmp_path):
    (tmp_path / "en.onnx").write_bytes(b"model")
    run("--licence", "CC0", "--trained-on", "200 pairs", "--splitter", tmp_path / "en.onnx")
    with zipfile.ZipFile(tmp_path / NAME) as archive:
        assert archive.read(f"{TOP}/minisbd/en.onnx") == b"model"
        assert b"\nLicence: CC0\nData: 200 pairs\n" in archive.read(f"{TOP}/README.md")
