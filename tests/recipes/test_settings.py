"""recipes/pipeline/settings.py and arguments.py: settings, languages, and recipes in other folders."""

import os
import re
import shlex
import shutil
import signal
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml
from fairseq import options
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import MMapIndexedDataset

from fairseq_rope.errors import InputError
from fairseq_rope.metrics import load_tokeniser
from fairseq_rope.scorers import Scorer
from recipes.compare import stage13_join
from recipes.compare.stage12_score_with import ScoreWith
from recipes.pipeline import fairseq_train, stage06_binarise, stage09_translate, stage10_score
from recipes.pipeline.__main__ import build_parser, main
from recipes.pipeline.arguments import called, describe_experiment
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.settings import FIELDS, check_values, read_settings
from recipes.pipeline.stages import SCORE, STAGES
from recipes.run.runner import Runner, write_down
from recipes.run.shell import Shell, run_logged
from recipes.run.yaml_file import SettingsError
from tests.commands import ENVIRONMENT, LIMIT, ROOT
from tests.recipes.small_demo import describe, run_here, setting_flags, usage_error

DEMO = ROOT / "recipes" / "demo" / "settings.yaml"


@pytest.fixture
def changed(tmp_path):
    """changed(old, new): a copy of the demo's settings.yaml with the text *new* in place of *old*."""

    def changed(old, new):
        text = DEMO.read_text()
        assert text.count(old) == 1
        (tmp_path / "settings.yaml").write_text(text.replace(old, new))
        return tmp_path / "settings.yaml"

    return changed


def described(*settings, flags=()):
    """The experiment of the demo with *settings*, each KEY=VALUE, and other *flags*."""
    return describe("demo", *setting_flags(*settings), *flags)


# -- YAML --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "old, name, written, value",
    [
        *(("4.0e-3", "learning_rate", rate, 2e-3) for rate in ("2e-3", "2.0e-3", "0.002", "2E-3", "+.2e-2")),
        *(("de", "target_lang", code, code) for code in "no pt-BR zh_CN zh-Hant-TW eng_Latn es-419".split()),
        ("0.1", "dropout", "0", 0.0),
        ("0.1", "dropout", "1", 1.0),
        ('""', "fairseq_generate_flags", "'7'", "7"),
    ],
)
def test_values_are_read_in_every_notation(changed, old, name, written, value):
    for settings in (
        read_settings(changed(f"{name}: {old}", f"{name}: {written}")),
        read_settings(DEMO, [f"{name}={written.strip(chr(39))}"]),
    ):
        check_values(settings)
        assert (getattr(settings, name), type(getattr(settings, name))) == (value, type(value))


def test_written_settings_are_read_back_unchanged(changed, tmp_path):
    settings = read_settings(changed("target_lang: de", "target_lang: no"))
    write_down(described(), "command", tmp_path)
    assert read_settings(tmp_path / "settings.yaml") == read_settings(DEMO)
    (tmp_path / "written.yaml").write_text(yaml.safe_dump(asdict(settings)))
    assert read_settings(tmp_path / "written.yaml") == settings


def test_flags_after_a_lone_double_hyphen_keep_their_quotes():
    scaling = ["--rope-scaling", '{"rope_type": "linear", "factor": 4}']
    assert shlex.split(described(flags=["--", *scaling]).settings.fairseq_train_flags) == scaling


def test_help_describes_every_setting(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        main(["demo", "--help"])  # as recipes/demo/run.sh does
    printed = capsys.readouterr().out
    assert "recipe " not in printed.partition("Flags after")[0].replace("a recipe ", "")
    assert re.findall(r"^  (\w+) \(\w+", printed, re.MULTILINE) == list(FIELDS)
    for line in (
        "target_lang (str, a language's code, like en or pt-BR; required): code of the target language",
        "max_words (int, 1 or more; default: 250): remove training pairs with a longer side, in words",
        "dropout (float, 0 to 1; default: 0.1): probability of dropout",
        "beam (int, 1 or more; default: 4): beam size",
        "export_quantization (str, one of float32, int8, ",
        "export_shortlist (bool, true or false; default: false): whether stage 11 builds a shortlist, ",
        'fairseq_train_flags (str; default: ""): more flags for fairseq-train',
    ):
        assert f"\n  {line}" in printed


@pytest.mark.parametrize(
    "contents, message",
    [
        (b"", ": is empty, and must have lines of the form NAME: VALUE"),
        (b"# only a comment\n", ": is empty, and must have lines"),
        (b"layers: 3\nwidth: [1\n", ", line 3: is not YAML: "),
        (b"- layers\n", ": has no names of settings, and must have lines"),
        (b"{}\n", ": is empty, and must have lines"),
        (b"layers\n", ": has no names of settings, and must have lines"),
        (b"layers: \x00\n", ": is not YAML: special characters are not allowed"),
        ("layers: ä\n".encode("latin-1"), ", line 1: the byte 0xe4 is not UTF-8"),
    ],
)
def test_a_broken_settings_file_is_refused_by_name(tmp_path, capsys, contents, message):
    (tmp_path / "settings.yaml").write_bytes(contents)
    refusal = usage_error(capsys, main, [str(tmp_path), "--dry-run"])
    assert f"run.sh: error: {tmp_path}/settings.yaml{message}" in refusal


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("beam: 4", "beem: 4", "settings.yaml has beem, which no recipe has; the nearest is beam"),
        ("source_lang: en", "", "settings.yaml has no source_lang, which every recipe has"),
        ("beam: 4", "beam: 4\nbeem: 4", "settings.yaml has beem, which no recipe has; the nearest is beam"),
        ("beam: 4", "beam: 4; touch X", "beam is '4; touch X', and must be of type int"),
        ("beam: 4", "beam: 4\n7: x", "settings.yaml has 7, which no recipe has; the nearest is "),
        ("beam: 4", "beam: 4\nfoo: 2026-13-45", "settings.yaml has foo, which no recipe has; the nearest is "),
        ("beam: 4", "beam: 2026-01-01", "beam is '2026-01-01', and must be of type int"),
        ("memory_gb: 2.0", "memory_gb: -1", "--set memory_gb=-1.0: must be 0 or more"),
        ('fairseq_train_flags: ""', "fairseq_train_flags:", "fairseq_train_flags is None, and must be of type str"),
        ("dropout: 0.1", "dropout: low", "dropout is 'low', and must be of type float"),
        ("target_lang: de", "target_lang: true", "target_lang is True, and must be of type str"),
        ("target_lang: de", "target_lang: de/x", "target_lang=de/x: must be a language's code, like en or"),
    ],
)
def test_wrong_settings_are_refused_by_name(changed, old, new, message):
    with pytest.raises(SettingsError, match=re.escape(message)):
        check_values(read_settings(changed(old, new)))


def test_a_short_recipe_has_the_settings_of_the_papers_model(tmp_path):
    """Those of recipes/wmt14_en_de/settings.yaml, which says of each where it is from."""
    own = {"source_lang": "en", "target_lang": "fr", "train_files": "a.{lang}", "valid_files": "b.{lang}"}
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump(own))
    settings = read_settings(tmp_path / "settings.yaml", ["beam=2"])
    check_values(settings)
    of_paper = asdict(read_settings(ROOT / "recipes" / "wmt14_en_de" / "settings.yaml"))
    assert asdict(settings) == of_paper | own | {"test_files": "", "beam": 2, "disk_gb": 0, "memory_gb": 0}


# -- in commands -------------------------------------------------------------------------------------


TEXTS = [name for name, setting in FIELDS.items() if setting.type is str and "_lang" not in name]


@pytest.mark.parametrize("name", TEXTS)
def test_no_setting_can_inject_a_shell_command(tmp_path, capsys, name):
    """The PATH has programs that do nothing, so that only bash itself could run the injected command."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in "python mkdir rm mv cp tee grep sort cut fairseq-preprocess fairseq-train fairseq-generate".split():
        (programs / program).symlink_to(shutil.which("true"))
    (programs / "touch").symlink_to(shutil.which("touch"))
    settings = read_settings(DEMO)
    for setting in ("start_checkpoint", "start_data") if name.startswith("start_") else [name]:
        setattr(settings, setting, f"; touch {tmp_path}/X; echo $(touch {tmp_path}/X) #")
    experiment = Experiment(settings, tmp_path / "work", "transformer_rope", 1, gpus=0, dry_run=True)
    experiment.sharing = ""  # in place of reading start_checkpoint
    for stage in STAGES:
        Runner(experiment).ensure(stage)
    commands = re.findall(r"^  \$ (.*)$", capsys.readouterr().out, re.MULTILINE)
    assert len(commands) > 20
    for command in commands:
        words = [shutil.which("bash"), "-c", command]
        subprocess.run(words, env={"PATH": str(programs)}, cwd=tmp_path, timeout=LIMIT)
    assert not (tmp_path / "X").exists()


def test_quoted_words_in_flags_stay_one_word():
    experiment = described("fairseq_generate_flags=--nbest 2  --model-overrides \"{'a': 'b c'}\"")
    command = stage09_translate.command(experiment, experiment.data_bin, "test")
    words = ["bash", "-c", f"printf '%s\\n' {command}"]
    printed = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT)
    assert printed.stdout.splitlines()[-4:] == ["--nbest", "2", "--model-overrides", "{'a': 'b c'}"]


# -- languages without spaces between words ------------------------------------------------------------


@pytest.mark.parametrize("lang, tokenize", [("zh_CN", "zh"), ("th", "char")])
def test_languages_without_spaces_use_sentencepiece_and_their_own_tokeniser(tmp_path, capsys, lang, tokenize):
    for each in ("en", lang):
        (tmp_path / f"train.{each}.gz").touch()
    words = ["demo", "--data-dir", str(tmp_path), "--set", f"target_lang={lang}"]
    assert describe(*words).label == "", "sentencepiece is the default for the language"
    main([*words, "--dry-run"])
    printed = capsys.readouterr().out
    scored = f"target language {lang}: scored with sacreBLEU's tokeniser {tokenize}\n"
    assert printed.index(scored) < printed.index("stage 1")
    assert f"--target-lang {lang.partition('_')[0]} --tokenize {tokenize} --json" in printed
    assert printed.count("--no-tokeniser") == 6 and "subword" not in printed
    refusal = usage_error(capsys, main, [*words, "--bpe", "subword-nmt"])
    assert f"and {lang.partition('_')[0]} has none" in refusal


SENTENCEPIECE = "ja>en:13a en>bo:char en>dz:char en>zh:zh en>zho_Hans:zh en>cmn:zh en>wuu:zh en>lzh:zh en>nan:zh"
SENTENCEPIECE += " en>hak:zh en>jpn:char en>tha:char en>lao:char en>khm:char en>mya:char en>my:char en>ko:13a"


@pytest.mark.parametrize("pair", [*SENTENCEPIECE.split(), "en>pt-BR:13a", "de>en:13a"])
def test_either_language_decides_the_subwords_and_the_target_decides_the_tokeniser(pair):
    source, target, tokenize = re.fullmatch("(.+)>(.+):(.+)", pair).groups()
    experiment = described(f"source_lang={source}", f"target_lang={target}")
    bpe = "sentencepiece" if pair in SENTENCEPIECE.split() else "subword-nmt"
    assert (experiment.bpe, experiment.tokenize) == (bpe, tokenize)
    if "ko" in target:
        assert described(f"target_lang={target}", flags=["--bpe", "subword-nmt"]).bpe == "subword-nmt"


def test_a_requested_tokeniser_is_loaded_before_the_first_stage(monkeypatch):
    experiment = described("target_lang=zh", flags=["--tokenize", "flores200"])
    assert experiment.tokenize == "flores200"

    def no_network(url, path):
        raise OSError(f"{url}: no network")

    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_spm.download_file", no_network)
    monkeypatch.setattr("sacrebleu.tokenizers.tokenizer_spm.SACREBLEU_DIR", "/nowhere")
    with pytest.raises(InputError, match="--tokenize flores200: .*no network"):
        load_tokeniser(experiment.tokenize)
    load_tokeniser(described("target_lang=zh").tokenize)


def test_the_score_uses_and_depends_on_the_tokeniser(capsys):
    keys = {}
    for lang, tokenize in (("de", "13a"), ("de", "char"), ("de", "intl"), ("zh", "zh"), ("zh", "13a")):
        words = ["demo", "--set", f"target_lang={lang}", "--tokenize", tokenize]
        main([*words, "--dry-run", "--stage", "10"])
        assert f"--target-lang {lang} --tokenize {tokenize} --json" in capsys.readouterr().out
        keys[lang, tokenize] = str(Runner(describe(*words)).stamps.of(SCORE))
    assert len({*keys.values()}) == 5


# -- recipes elsewhere -------------------------------------------------------------------------------


def texts(folder):
    """Write three sets of plain text into *folder*, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("train", "valid", "test"):
        for lang in ("en", "de"):
            (folder / f"{name}.{lang}").write_text("".join(f"{lang} {name} line {n}\n" for n in range(40)))
    return folder


FILES = setting_flags(*(f"{name}_files={name}.{{lang}}" for name in ("train", "valid", "test")))


def until_raw(recipe, *flags, clone=None, **kwargs):
    """Run stages 1 and 2 with the run.sh in the folder *recipe*."""
    command = ["bash", str(recipe / "run.sh"), "--stop-stage", "2", *map(str, flags)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment["FAIRSEQ_ROPE"] = str(clone or "")
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT, **kwargs)


@pytest.mark.parametrize("work", ["work", "."])
def test_the_work_folder_can_be_the_data_folder_or_be_in_it(tmp_path, work):
    texts(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    where = ["--data-dir", str(tmp_path), "--manifest", "none", "--work-dir", str(tmp_path / work)]
    run_here(["multi30k_en_de", *where, "--stop-stage", "2", *FILES])
    assert (tmp_path / work / "raw" / "test.de").read_bytes() == before[tmp_path / "test.de"]
    assert {path: path.read_bytes() for path in before} == before


@pytest.mark.parametrize(
    "german, message",
    [
        ("Ein Satz , aus Tokens .", r"raw/test.de, line 1: looks tokenised"),
        ("A sentence.", r"\(extract and check\): train_files=train.{lang}: train.en and train.de are equal"),
    ],
)
def test_a_tokenised_reference_and_equal_sides_are_refused_before_training(tmp_path, german, message):
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.en").write_text("A sentence.\n" * 40)
        (tmp_path / f"{name}.de").write_text(f"{german}\n" * 40)
    where = ["--data-dir", str(tmp_path), "--manifest", "none", "--work-dir", str(tmp_path / "w")]
    with pytest.raises(SystemExit, match=f"^recipes/multi30k_en_de: stage 2 .*{message}"):
        run_here(["multi30k_en_de", *where, "--stop-stage", "2", *FILES])


@pytest.mark.parametrize("folder", ["raw", "bpe", "stamps", "transformer_rope.seed1/checkpoints"])
def test_a_data_folder_that_the_recipe_would_overwrite_is_refused(tmp_path, capsys, folder):
    texts(tmp_path / folder)
    where = ["--data-dir", str(tmp_path / folder), "--work-dir", str(tmp_path), "--manifest", "none"]
    message = f"--data-dir {tmp_path}/{folder}: the recipe would overwrite {tmp_path}/{folder}/train.en"
    assert message in usage_error(capsys, main, ["multi30k_en_de", *where, *FILES])


@pytest.mark.parametrize("recipe", ["demo", "multi30k_en_de", "wmt14_en_de"])
@pytest.mark.parametrize("manifest", [[], ["--manifest", "none"]])
def test_a_data_folder_with_other_names_is_refused_with_the_settings_that_name_its_files(
    tmp_path, capsys, recipe, manifest
):
    own = texts(tmp_path / "own")
    where = [recipe, "--data-dir", str(own), "--work-dir", str(tmp_path / "work"), *manifest]
    refusal = usage_error(capsys, main, [*where, "--dry-run"])
    assert f"--data-dir {own}: has none of the recipe's files, " in refusal
    assert "; it has test.de, test.en, train.de, train.en, valid.de, valid.en; " in refusal
    settings = re.search(r"with ((?:--set \S+ ?)+) \(docs/your_own_data.md\)", refusal)[1]
    main([*where, *shlex.split(settings), "--dry-run"])
    printed = capsys.readouterr().out
    assert " train.en train.de valid.en valid.de\n" in printed and " test.en test.de\n" in printed
    assert not (tmp_path / "work").exists()


def test_the_refusal_of_other_names_lists_what_is_in_the_folder(tmp_path, capsys):
    where = ["multi30k_en_de", "--data-dir", str(tmp_path)]
    assert "; it is empty; " in usage_error(capsys, main, where)
    for name in (".hidden", "my dev.en.gz", "my dev.de.gz", "train.en", "notes", *(f"z{n}" for n in range(20))):
        (tmp_path / name).touch()
    (tmp_path / "folder").mkdir()
    refusal = usage_error(capsys, main, where)
    assert "; it has folder/, my dev.de.gz, my dev.en.gz, notes, train.en, z0, z1, " in refusal
    assert " and 13 more; " in refusal and ".hidden" not in refusal
    words = shlex.split(re.search(r"--set .* (?=\()", refusal)[0])
    assert words[1::2] == ["train_files=NAME.{lang}", "valid_files='my dev.{lang}.gz'", "test_files=NAME.{lang}"]
    (tmp_path / "test_2016_flickr.en.gz").touch()  # one of the recipe's files: the others are downloaded
    describe(*where)


def test_a_copied_recipe_runs_outside_the_clone_with_its_own_texts(tmp_path, capsys):
    own = tmp_path / "my_recipe"
    shutil.copytree(ROOT / "recipes" / "multi30k_en_de", own, ignore=shutil.ignore_patterns("work", "data"))
    settings = own / "settings.yaml"
    text = re.sub(r"^(train|valid|test)_files: .*$", r"\1_files: \1.{lang}", settings.read_text(), flags=re.M)
    settings.write_text(text)
    done = until_raw(own)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "set FAIRSEQ_ROPE to" in done.stderr
    # The copied manifest.tsv lists other files.
    done = until_raw(own, clone=ROOT)
    assert done.returncode == 2
    assert "manifest.tsv: has none of the recipe's files, train.en, " in done.stderr.splitlines()[-1]
    manifest, header = own / "manifest.tsv", "file\tbytes\tchecksum\turl\n"
    original = manifest.read_text()
    manifest.write_text(f"{header}train.en\t-\tsha256:{'0' * 64}\thttp://127.0.0.1:9/train.en\n")
    (tmp_path / "train.de").touch()
    message = "manifest.tsv: has no train.de, valid.en, valid.de, test.en, test.de: add their URLs"
    assert message in usage_error(capsys, main, [str(own), "--data-dir", str(tmp_path)])  # lists some of the files
    manifest.write_text(original)
    decoy = tmp_path / "recipes" / "pipeline" / "__main__.py"
    decoy.parent.mkdir(parents=True)
    decoy.write_text("raise SystemExit('the wrong one')")
    done = until_raw(own, "--data-dir", texts(tmp_path / "texts"), clone=ROOT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (own / "work" / "raw" / "train.en").exists()
    command = yaml.safe_load((own / "work" / "run.yaml").read_text())["command"]
    assert command.startswith(f"bash {ROOT}/recipes/pipeline/run.sh {own} --stop-stage 2 --data-dir ")
    subprocess.run([*shlex.split(command), "--dry-run"], cwd=tmp_path, env=ENVIRONMENT, check=True, timeout=LIMIT)


def test_a_flag_of_the_command_counts_more_than_one_of_the_settings():
    """fairseq takes the last one."""
    experiment = describe("demo", "--set", "fairseq_train_flags=--clip-norm 1", "--", "--clip-norm", "2")
    words = shlex.split(fairseq_train.command(experiment, 0, "fp32"))[1:]
    args, _ = options.get_training_parser().parse_known_args(words)
    assert args.clip_norm == 2.0


def test_further_references_are_inputs_of_the_scores(tmp_path):
    files = "test_files=test.{lang},second.{lang},third.de"
    texts = tmp_path / "texts"
    texts.mkdir()
    names = ("train.en", "train.de", "valid.en", "valid.de", "test.en", "test.de", "second.de", "third.de")
    for name in names:
        (texts / name).write_text("a\n")
    given = [f"{part}_files={part}.{{lang}}" for part in ("train", "valid")]
    experiment = describe("demo", "--work-dir", tmp_path, "--data-dir", texts, *setting_flags(*given, files))
    (of_test_set,) = (stage for stage in STAGES if stage.number == 2 and stage.of_test_set)
    names_of = lambda stage: {path.name for path in stage.inputs(experiment)}  # noqa: E731
    assert names_of(of_test_set) >= {"test.en", "test.de", "second.de", "third.de"}
    for stage in (SCORE, ScoreWith(Scorer("own", "program {hypothesis} {reference} {source}"))):
        references = {path for path in stage.inputs(experiment) if path.suffix == ".de"} - {experiment.hypotheses}
        assert len(references) == 3 and references == set(experiment.test_references)
    words = shlex.split(stage10_score.command(experiment))
    assert words[words.index("--src") + 1] == str(tmp_path / "raw" / "test.en")
    assert [Path(word).name for word in words[words.index("--ref") + 1 :][:4]] == [
        *(path.name for path in experiment.test_references),
        "--src",
    ]


def test_a_command_that_has_ended_before_its_interruption_is_no_error(tmp_path, monkeypatch):
    """As with a job that SLURM cancels: it ends the command, and then this process."""

    def interrupted(line):
        os.killpg(int(line), signal.SIGKILL)
        os.waitpid(int(line), 0)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_logged(SCORE, "echo $$; sleep 60", interrupted, tmp_path / "log", ())


def test_the_share_of_segments_is_that_of_the_settings(tmp_path, capsys):
    given = setting_flags("segment_tokens=99", "segment_share=0.3")
    stage06_binarise.join(describe("demo", "--work-dir", tmp_path, *given), Shell(SCORE), ["train", "valid"])
    of_train, of_valid = (line for line in capsys.readouterr().out.splitlines() if "segments join" in line)
    assert of_train.endswith(" --tokens 99 --share 0.3") and of_valid.endswith(" --tokens 99")


def test_each_side_of_a_test_set_is_binarised_with_its_own_dictionary(tmp_path):
    """As with the dictionaries of an old model, start_data. Those that the recipes make are joined."""
    experiment = describe("demo", "--work-dir", tmp_path)
    texts = {"en": ["the dog sees a cat"] * 8, "de": ["der Hund sieht die Katze"] * 8}
    for folder in ("bpe", "data-bin"):
        (tmp_path / folder).mkdir()
    for lang, lines in texts.items():
        for folder, name in (("bpe", f"test.{lang}"), ("raw", f"test.{lang}")):
            (tmp_path / folder).mkdir(exist_ok=True)
            (tmp_path / folder / name).write_text("\n".join(lines) + "\n")
        words = sorted({word for line in lines for word in line.split()}, reverse=lang == "de")
        (tmp_path / "data-bin" / f"dict.{lang}.txt").write_text("".join(f"{word} 1\n" for word in words))
    (of_test_set,) = (stage for stage in STAGES if stage.number == 6 and stage.of_test_set)
    for stage, folder, name, times in (
        (of_test_set, experiment.data_bin, "test", 1),
        (stage13_join.Join(), stage13_join.data(experiment), "test1", 4),
    ):
        stage.run(experiment, Shell(stage, tmp_path / "script", tmp_path / "log"))
        for lang, lines in texts.items():
            data = MMapIndexedDataset(str(folder / f"{name}.en-de.{lang}"))
            dictionary = Dictionary.load(str(experiment.data_bin / f"dict.{lang}.txt"))
            decoded = [" ".join(dictionary[n] for n in data[row].tolist()[:-1]) for row in range(len(data))]
            assert decoded == [" ".join(lines[:times])] * (8 // times)


def test_a_recipe_is_named_by_its_folder_or_by_its_name(tmp_path, capsys):
    main(["demo", "--dry-run", "--stage", "10"])
    by_name = capsys.readouterr().out
    main([str(ROOT / "recipes" / "demo"), "--dry-run", "--stage", "10"])
    assert capsys.readouterr().out == by_name
    refusal = usage_error(capsys, main, [str(tmp_path), "--dry-run"])
    assert f"{tmp_path} must be a folder with settings.yaml, or one of demo, documents_en_de, multi30k" in refusal


def test_the_recorded_command_runs_the_recipe_for_any_position_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert called("demo", ["demo", "--seed", "2"]) == "bash recipes/demo/run.sh --seed 2"
    assert called("my own", ["my own"]) == "bash 'recipes/my own/run.sh'"
    assert called("/my/own", ["/my/own"]) == "bash recipes/pipeline/run.sh /my/own"
    assert called("/my/own", ["own", "--seed", "2"]) == "bash recipes/pipeline/run.sh /my/own --seed 2"
    assert called("demo", ["--seed", "2", "demo"]) == "bash recipes/pipeline/run.sh --seed 2 demo"
    monkeypatch.chdir(tmp_path)  # relative paths among the flags are from there
    assert called("demo", ["demo", "--work-dir", "w"]) == f"bash {ROOT}/recipes/demo/run.sh --work-dir w"


@pytest.mark.parametrize("recipe", ["demo", "multi30k_en_de", "documents_en_de", "wmt14_en_de"])
def test_a_recipe_runs_although_cdpath_is_exported(recipe, tmp_path):
    """With it, cd prints where it goes."""
    command = ["bash", f"recipes/{recipe}/run.sh", "--list", "--work-dir", str(tmp_path)]
    environment = {**ENVIRONMENT, "CDPATH": "."}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT)
    assert done.stdout == f"{tmp_path}: has no model yet\n", done.stderr


def test_the_list_shows_no_setting_of_the_recipe_as_changed(tmp_path, capsys):
    folder = shutil.copytree(ROOT / "recipes" / "demo", tmp_path / "own", ignore=shutil.ignore_patterns("work"))
    text = (folder / "settings.yaml").read_text()
    text = re.sub('^user_dir: ""', "user_dir: .", text, flags=re.M)
    text = re.sub('^fairseq_train_flags: ""', "fairseq_train_flags: ' --clip-norm 1 '", text, flags=re.M)
    (folder / "settings.yaml").write_text(text)
    parser = build_parser(recipe_is_known=True)
    words = [str(folder), "--work-dir", str(tmp_path / "work")]
    experiment = describe_experiment(parser, parser.parse_args(words), "transformer_rope", 1, "")
    assert experiment.settings.user_dir == os.getcwd() and not experiment.differs
    experiment.model.mkdir(parents=True)
    (experiment.model / "settings.yaml").write_text(yaml.safe_dump(dict(experiment.values())))
    main([*words, "--list"])
    assert capsys.readouterr().out.splitlines()[-1].split() == ["transformer_rope.seed1", "-", "-"]


def test_each_text_has_the_rules_of_its_own_language(tmp_path, capsys):
    """French words end with an apostrophe, English ones begin with one."""
    for lang in ("en", "fr"):
        (tmp_path / f"train.{lang}.gz").touch()
    main(["demo", "--data-dir", str(tmp_path), "--set", "target_lang=fr", "--dry-run"])
    printed = capsys.readouterr().out
    commands = re.findall(r"recipes\.text\.tokenise --lang (\w+) --input \S+\.(\w+) ", printed)
    assert {*commands} == {("en", "en"), ("fr", "fr")} and len(commands) == 6
    texts = ["train_files=text.{lang}", "valid_files=text.{lang}", "test_files=text.{lang}", "target_lang=fr"]
    for lang in ("en", "fr"):
        (tmp_path / f"text.{lang}").touch()
    main(
        [
            "documents_en_de",
            "--data-dir",
            str(tmp_path),
            "--work-dir",
            str(tmp_path / "work"),
            *setting_flags(*texts),
            "--dry-run",
        ]
    )
    assert "--moses en fr" in capsys.readouterr().out


def test_a_newline_at_the_end_of_the_flags_of_a_recipe_changes_no_setting(tmp_path):
    """As YAML's ">" without "-" leaves it."""
    text = (ROOT / "recipes" / "demo" / "settings.yaml").read_text()
    assert 'fairseq_train_flags: ""' in text
    folded = "fairseq_train_flags: >\n  --weight-decay 0.1\n"
    (tmp_path / "settings.yaml").write_text(re.sub('fairseq_train_flags: "".*\n', folded, text))
    assert describe(str(tmp_path), "--data-dir", ROOT / "recipes" / "demo" / "corpus", "--manifest", "none").label == ""
