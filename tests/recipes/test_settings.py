"""recipes/pipeline/settings.py: what settings.yaml may hold, and what the commands make of it."""

import os
import re
import shutil
import subprocess
from dataclasses import asdict

import pytest
import yaml

from fairseq_rope.tools.score import default_tokenize
from recipes.pipeline import stage09_translate
from recipes.pipeline.__main__ import main
from recipes.pipeline.arguments import called
from recipes.pipeline.experiment import Experiment, StageError
from recipes.pipeline.runner import Runner
from recipes.pipeline.session import write_down
from recipes.pipeline.settings import FIELDS, SettingsError, check_values, read_settings
from recipes.pipeline.stage10_score import check_tokenize
from recipes.pipeline.stages import SCORE, STAGES
from tests.commands import ROOT
from tests.recipes.small_demo import describe

DEMO = ROOT / "recipes" / "demo" / "settings.yaml"


@pytest.fixture
def changed(tmp_path):
    """changed(old, new): a copy of the demo's settings.yaml in which the text *old* is *new*."""

    def changed(old, new):
        text = DEMO.read_text()
        assert text.count(old) == 1
        (tmp_path / "settings.yaml").write_text(text.replace(old, new))
        return tmp_path / "settings.yaml"

    return changed


def described(*flags):
    return describe("demo", *flags)


# -- YAML --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["2e-3", "2.0e-3", "0.002", "2E-3", "+.2e-2"])
def test_a_number_is_read_however_it_is_written(changed, written):
    path = changed("learning_rate: 5.0e-3", f"learning_rate: {written}")
    assert read_settings(path).learning_rate == 2e-3
    check_values(read_settings(path))
    assert read_settings(DEMO, [f"learning_rate={written}"]).learning_rate == 2e-3


def test_an_integer_will_do_for_a_float_and_is_replaced_by_one(changed):
    path = changed("dropout: 0.1", "dropout: 0")
    check_values(read_settings(path))
    assert read_settings(path, ["dropout=0.5"]).dropout == 0.5


@pytest.mark.parametrize("code", ["no", "pt-BR", "zh_CN", "zh-Hant-TW", "eng_Latn", "es-419"])
def test_languages_are_read_as_text_and_may_name_a_region_or_script(changed, code):
    settings = read_settings(changed("target_lang: de", f"target_lang: {code}"))
    assert settings.target_lang == code
    check_values(settings)
    check_values(read_settings(DEMO, [f"target_lang={code}"]))


def test_what_is_kept_beside_a_model_reads_as_the_same_settings(changed, tmp_path):
    settings = read_settings(changed("target_lang: de", "target_lang: no"))
    write_down(described(), "command", tmp_path)
    assert read_settings(tmp_path / "settings.yaml") == read_settings(DEMO)
    (tmp_path / "kept.yaml").write_text(yaml.safe_dump(asdict(settings)))
    assert read_settings(tmp_path / "kept.yaml") == settings


@pytest.mark.parametrize(
    "contents, said",
    [
        (b"", ": is empty, and must have lines of the form NAME: VALUE"),
        (b"# only a comment\n", ": is empty, and must have lines"),
        (b"layers: 3\nwidth: [1\n", ", line 3: is not YAML: "),
        (b"- layers\n", ": has no names of settings, and must have lines"),
        (b"{}\n", ": is empty, and must have lines"),
        (b"layers\n", ": has no names of settings, and must have lines"),
        (b"layers: \x00\n", ": is not YAML: special characters are not allowed"),
        ("layers: ä\n".encode("latin-1"), ": is not UTF-8 at byte 8"),
    ],
)
def test_a_broken_file_is_named_in_one_sentence(tmp_path, capsys, contents, said):
    (tmp_path / "settings.yaml").write_bytes(contents)
    with pytest.raises(SystemExit) as stopped:
        main([str(tmp_path), "--dry-run"])
    assert stopped.value.code == 2
    assert f"run.sh: error: {tmp_path}/settings.yaml{said}" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    "old, new, said",
    [
        ("beam: 4", "beem: 4", "settings.yaml has no beam, which every recipe has"),
        ("beam: 4", "beam: 4\nbeem: 4", "settings.yaml has beem, which no recipe has; the nearest is beam"),
        ("beam: 4", "beam: 4; touch X", "beam is '4; touch X', and must be of type int"),
        ("beam: 4", "beam: 4\n7: x", "settings.yaml has 7, which no recipe has; the nearest is "),
        ("beam: 4", "beam: 4\nfoo: 2026-13-45", "settings.yaml has foo, which no recipe has; the nearest is "),
        ("beam: 4", "beam: 2026-01-01", "beam is '2026-01-01', and must be of type int"),
        ("disk_gb: 0.3", "disk_gb: .nan", "--set disk_gb=nan: must be 0 or more"),
        ("memory_gb: 2.0", "memory_gb: -1", "--set memory_gb=-1.0: must be 0 or more"),
        ("dropout: 0.1", "dropout: low", "dropout is 'low', and must be of type float"),
        ("target_lang: de", "target_lang: true", "target_lang is True, and must be of type str"),
        ("target_lang: de", "target_lang: de/x", "target_lang=de/x: must be a language's code, like en or"),
    ],
)
def test_wrong_settings_are_refused_by_name(changed, old, new, said):
    with pytest.raises(SettingsError, match=re.escape(said)):
        check_values(read_settings(changed(old, new)))


# -- in commands -------------------------------------------------------------------------------------


TEXTS = [name for name, setting in FIELDS.items() if setting.type is str and "_lang" not in name]


@pytest.mark.parametrize("name", TEXTS)
def test_no_setting_runs_a_command_of_its_own(tmp_path, capsys, monkeypatch, name):
    """With programs in its PATH that do nothing, so that only what bash itself makes of a command is seen."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in "python mkdir rm mv cp tee grep sort cut fairseq-preprocess fairseq-train".split():
        (programs / program).symlink_to(shutil.which("true"))
    (programs / "fairseq-generate").symlink_to(shutil.which("true"))
    (programs / "touch").symlink_to(shutil.which("touch"))
    settings = read_settings(DEMO)
    setattr(settings, name, f"; touch {tmp_path}/X; echo $(touch {tmp_path}/X) #")
    x = Experiment(settings, tmp_path / "work", "transformer_rope", 1, gpus=0, dry_run=True)
    for stage in STAGES:
        Runner(x).ensure(stage)
    commands = re.findall(r"^  \$ (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(commands) > 20
    for command in commands:
        subprocess.run([shutil.which("bash"), "-c", command], env={"PATH": str(programs)}, cwd=tmp_path)
    assert not (tmp_path / "X").exists()


def test_the_words_of_flags_stay_words(tmp_path):
    flags = "fairseq_generate_flags=--nbest 2  --model-overrides \"{'a': 'b c'}\""
    x = Experiment(read_settings(DEMO, [flags]), tmp_path, "transformer_rope", 1, gpus=0, dry_run=True)
    command = stage09_translate.command(x, x.data_bin, "test")
    printed = subprocess.run(["bash", "-c", f"printf '%s\\n' {command}"], capture_output=True, text=True)
    assert printed.stdout.splitlines()[-4:] == ["--nbest", "2", "--model-overrides", "{'a': 'b c'}"]


# -- languages without blanks between words ------------------------------------------------------------


UNSPACED = {"zh": "zh", "zh_CN": "zh", "th": "char", "my": "char"}


@pytest.mark.parametrize("lang, tokenize", UNSPACED.items())
def test_they_are_divided_by_sentencepiece_and_scored_by_their_own_tokeniser(tmp_path, capsys, lang, tokenize):
    flags = ["--data-dir", str(tmp_path), "--set", f"target_lang={lang}"]
    assert described(*flags).bpe == "sentencepiece"
    assert described(*flags).label == "", "it is the usual choice for the language"
    main(["demo", *flags, "--dry-run"])
    said = capsys.readouterr().out
    scored = f"target language {lang}: scored with sacreBLEU's tokeniser {tokenize}\n"
    assert said.index(scored) < said.index("stage 1")
    assert f"--target-lang {lang.partition('_')[0]} --tokenize {tokenize} --json" in said
    assert said.count("--no-tokeniser") == 6 and "subword" not in said
    with pytest.raises(SystemExit):
        described(*flags, "--bpe", "subword-nmt")
    assert f"and {lang.partition('_')[0]} is written without blanks" in capsys.readouterr().err


@pytest.mark.parametrize("code", ["zho_Hans", "cmn", "wuu", "lzh", "nan", "hak", "jpn", "tha", "lao", "khm", "mya"])
def test_they_are_known_by_their_other_codes(code):
    x = described("--set", f"target_lang={code}")
    assert (x.bpe, x.tokenize != "13a") == ("sentencepiece", True)
    assert described("--set", "target_lang=bo").tokenize == described("--set", "target_lang=dz").tokenize == "char"


def test_a_tokeniser_that_is_not_the_languages_own_reaches_the_score(tmp_path, capsys):
    flags = ["--data-dir", str(tmp_path), "--set", "target_lang=zh"]
    main(["demo", *flags, "--tokenize", "13a", "--dry-run"])
    assert "--target-lang zh --tokenize 13a --json" in capsys.readouterr().out
    keys = [str(Runner(described(*flags, *more)).stamps.of(SCORE)) for more in ([], ["--tokenize", "13a"])]
    assert keys[0] != keys[1]


def test_a_source_without_blanks_is_divided_by_sentencepiece_too():
    x = described("--set", "source_lang=ja", "--set", "target_lang=en")
    assert (x.bpe, x.tokenize) == ("sentencepiece", "13a")


def test_others_are_divided_by_subword_nmt_and_scored_with_13a(capsys):
    x = described("--set", "target_lang=pt-BR")
    assert (x.bpe, x.tokenize) == ("subword-nmt", "13a")
    main(["demo", "--dry-run", "--stage", "10"])
    assert "--target-lang de --tokenize 13a --json" in capsys.readouterr().out


def test_japanese_and_korean_depend_on_what_is_installed(monkeypatch):
    for spec, ja, ko in (("installed", "ja-mecab", "ko-mecab"), (None, "char", "13a")):
        monkeypatch.setattr("fairseq_rope.tools.score.find_spec", lambda name, spec=spec: spec)
        assert (default_tokenize("ja"), default_tokenize("ko")) == (ja, ko)
    assert described("--set", "target_lang=ko").bpe == "sentencepiece"
    assert described("--set", "target_lang=ko", "--bpe", "subword-nmt").bpe == "subword-nmt"


def test_another_tokeniser_is_taken_on_request_and_loaded_before_the_start(monkeypatch):
    x = described("--set", "target_lang=zh", "--tokenize", "flores200")
    assert x.tokenize == "flores200"

    def no_network(url, path):
        raise OSError(f"{url}: no network")

    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_spm.download_file", no_network)
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_spm.SACREBLEU_DIR", "/nowhere")
    with pytest.raises(StageError, match="--tokenize flores200: .*no network"):
        check_tokenize(x)
    check_tokenize(described("--set", "target_lang=zh"))


def test_the_tokeniser_is_part_of_what_a_score_depends_on():
    of = [described(*flags) for flags in ([], ["--tokenize", "char"], ["--tokenize", "intl"])]
    keys = [str(Runner(x).stamps.of(SCORE)) for x in of]
    assert len(set(keys)) == 3
    assert "--tokenize" not in keys[0], "scores of earlier versions are still up to date"


# -- recipes elsewhere -------------------------------------------------------------------------------


def texts(folder):
    """Write three sets of plain text; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "valid", "test"):
        for lang in ("en", "de"):
            (folder / f"{name}.{lang}").write_text("".join(f"{lang} {name} line {n}\n" for n in range(40)))
    return folder


FILES = [word for n in ("train", "valid", "test") for word in ("--set", f"{n}_files={n}.{{lang}}")]


def until_raw(recipe, *flags, clone=None, **kwargs):
    """Run stages 1 and 2 by the run.sh in the folder *recipe*."""
    command = ["bash", str(recipe / "run.sh"), "--stop-stage", "2", *map(str, flags)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["FAIRSEQ_ROPE"] = str(clone or "")
    return subprocess.run(command, env=environment, capture_output=True, text=True, **kwargs)


@pytest.mark.parametrize("work", ["work", "."])
def test_the_work_folder_can_lie_beside_the_texts_or_be_theirs(tmp_path, work):
    texts(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    flags = ["--data-dir", ".", "--manifest", "none", "--work-dir", work, *FILES]
    done = until_raw(ROOT / "recipes" / "multi30k_en_de", *flags, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / work / "raw" / "test.de").read_bytes() == before[tmp_path / "test.de"]
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize("folder", ["raw", "bpe", "stamps", "transformer_rope.seed1/checkpoints"])
def test_texts_that_the_recipe_would_write_over_are_refused(tmp_path, capsys, folder):
    texts(tmp_path / folder)
    with pytest.raises(SystemExit) as stopped:
        main(
            ["multi30k_en_de", "--data-dir", str(tmp_path / folder), "--work-dir", str(tmp_path)]
            + ["--manifest", "none", *FILES]
        )
    assert stopped.value.code == 2
    said = f"--data-dir {tmp_path}/{folder}: the recipe would write over {tmp_path}/{folder}/train.en"
    assert said in capsys.readouterr().err


def test_a_copied_recipe_runs_outside_the_clone_with_its_own_texts(tmp_path, capsys):
    own = tmp_path / "my_recipe"
    shutil.copytree(ROOT / "recipes" / "multi30k_en_de", own, ignore=shutil.ignore_patterns("work", "data"))
    settings = own / "settings.yaml"
    text = re.sub(r"^(train|valid|test)_files: .*$", r"\1_files: \1.{lang}", settings.read_text(), flags=re.M)
    settings.write_text(text)
    done = until_raw(own)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "set FAIRSEQ_ROPE to" in done.stderr
    # manifest.tsv came along, and is of other files.
    done = until_raw(own, clone=ROOT)
    assert done.returncode == 2
    assert "manifest.tsv: has none of the recipe's files, train.en, " in done.stderr.splitlines()[-1]
    manifest, header = own / "manifest.tsv", "file\tbytes\tchecksum\turl\n"
    others = manifest.read_text()
    manifest.write_text(f"{header}train.en\t-\tsha256:{'0' * 64}\thttp://127.0.0.1:9/train.en\n")
    with pytest.raises(SystemExit):  # it fits some of the files
        main([str(own), "--data-dir", str(tmp_path)])
    said = "manifest.tsv: has no train.de, valid.en, valid.de, test.en, test.de: write there where to fetch them"
    assert said in capsys.readouterr().err
    manifest.write_text(others)
    done = until_raw(own, "--data-dir", texts(tmp_path / "texts"), clone=ROOT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (own / "work" / "raw" / "train.en").exists()
    kept = yaml.safe_load((own / "work" / "run.yaml").read_text())["command"]
    assert kept.startswith(f"bash {own}/run.sh --stop-stage 2 --data-dir ")


def test_a_recipe_is_named_by_its_folder_or_by_its_name(tmp_path, capsys):
    main(["demo", "--dry-run", "--stage", "10"])
    by_name = capsys.readouterr().out
    main([str(ROOT / "recipes" / "demo"), "--dry-run", "--stage", "10"])
    assert capsys.readouterr().out == by_name
    with pytest.raises(SystemExit):
        main([str(tmp_path), "--dry-run"])
    assert f"{tmp_path} is no folder with settings.yaml, and none of demo, multi30k" in capsys.readouterr().err


def test_the_command_that_is_written_down_runs_the_recipe_wherever_its_name_stood():
    assert called("demo", ["demo", "--seed", "2"]) == "bash recipes/demo/run.sh --seed 2"
    assert called("/my/own", ["/my/own"]) == "bash /my/own/run.sh"
    assert called("demo", ["--seed", "2", "demo"]) == "bash recipes/pipeline/run.sh --seed 2 demo"


def test_a_setting_keeps_the_type_of_the_recipes_own():
    assert read_settings(DEMO, ["fairseq_train_flags=7"]).fairseq_train_flags == "7"
    assert read_settings(DEMO, ["dropout=1"]).dropout == 1.0
    with pytest.raises(SettingsError, match="^--set layers=true: must be of type int, like the recipe's own 2"):
        read_settings(DEMO, ["layers=true"])
