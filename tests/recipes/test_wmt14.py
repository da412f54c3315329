"""All stages of recipes/wmt14_en_de, on small tarballs with the names and structure of WMT14's.

FAIRSEQ_ROPE_TEST_DATA=DIR uses the tarballs and the manifest.tsv in DIR instead.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from recipes.pipeline.__main__ import main
from tests import forked_programs
from tests.commands import ENVIRONMENT, LIMIT, ROOT, call, outputs
from tests.recipes.site import Reply, Site
from tests.recipes.small_demo import label, run_here
from tests.recipes.wmt14_lookalike import write_lookalike

REAL = os.environ.get("FAIRSEQ_ROPE_TEST_DATA")
# A model that trains in seconds. All other settings are the recipe's own.
SMALL = (
    "layers=1 width=32 ffn_width=32 heads=2 max_updates=12 save_every_updates=2 tokens_per_update=1000 "
    f"disk_gb=0.1 vocab_size={4000 if REAL else 300} max_len_b=5 precision=fp32 "
    # With --max-len-a above 0, the length of a translation without an end depends on its batch.
    "fairseq_generate_flags=--max-len-a=0"
).split()

MODEL = f"transformer_rope.seed1.{label('wmt14_en_de', SMALL)}"


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of five tarballs and their manifest. Tests must not write to it."""
    if REAL:
        return Path(REAL)
    folder = tmp_path_factory.mktemp("lookalike")
    write_lookalike(folder, pairs=200, seed=1)
    return folder


def words(data, work, *flags):
    """The arguments of the recipe with *data* in the folder *work*."""
    where = ["--manifest", str(data / "manifest.tsv"), "--data-dir", str(data), "--work-dir", str(work)]
    settings = [word for setting in SMALL for word in ("--set", setting)]
    return ["wmt14_en_de", *where, "--gpus", "0", *settings, *flags]


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory):
    """A work folder with all stages finished, and the output of the run."""
    work = tmp_path_factory.mktemp("wmt14")
    return work, run_here(words(data, work))


def lines(path):
    return path.read_bytes().decode("utf-8").split("\n")[:-1]


@pytest.mark.slow
def test_the_recipe_runs_from_tarballs_to_bleu(finished):
    work, printed = finished
    score = json.loads((work / MODEL / "score.json").read_text())
    names = [metric["name"] for metric in score["systems"][0]["metrics"]]
    assert names == ["sacreBLEU", "tokenised BLEU", "tokenised BLEU, compound split", "chrF2++", "TER"]
    assert re.fullmatch(r"sacreBLEU \d+\.\d\d", printed.splitlines()[-1])
    assert [*dict.fromkeys(re.findall(r"^stage (\d+): ", printed, re.MULTILINE))] == [str(n) for n in range(1, 11)]
    assert not (work / "downloads").exists(), "the data folder has all files"


@pytest.mark.slow
def test_both_sides_keep_the_same_number_of_lines(finished):
    work, _ = finished
    for name in ("train", "valid", "test"):
        raw, cleaned = (
            {len(lines(work / folder / f"{name}.{lang}")) for folder in folders for lang in ("en", "de")}
            for folders in (("raw", "tokenised"), ("bpe",) if name == "test" else ("clean", "bpe"))
        )
        assert len(raw) == len(cleaned) == 1
        # Only the training set loses its dirty pairs.
        assert (max(raw) > max(cleaned)) == (name == "train")
    assert len(lines(work / MODEL / "hypotheses.de")) == len(lines(work / "raw" / "test.en"))
    for path in (work / "bpe").glob("*.*"):  # and no line has a character at which fairseq would split it
        assert all(len(line.splitlines()) <= 1 for line in lines(path)), path


@pytest.mark.slow
def test_the_last_five_checkpoints_are_kept_and_averaged(finished):
    work, _ = finished
    model = work / MODEL
    names = [path.name for path in (model / "checkpoints").glob("checkpoint_*_*.pt")]
    assert sorted(int(re.findall(r"\d+", name)[1]) for name in names) == [4, 6, 8, 10, 12]
    log = (model / "logs" / "stage08_average.log").read_text()
    assert all(name in log for name in names)


@pytest.mark.slow
def test_fairseq_interactive_with_the_documented_flags_gives_the_recipes_translations(finished, monkeypatch):
    """fairseq-interactive with the flags of docs/recipes.md gives the translations of the test set."""
    work, _ = finished
    model = work / MODEL
    page = (ROOT / "docs" / "recipes.md").read_text()
    flags = "--tokenizer moses --moses-no-dash-splits --bpe subword_nmt --bpe-codes data-bin/bpecodes"
    assert f"`{flags}`" in page
    monkeypatch.chdir(work)
    printed = call(
        "fairseq-interactive", "data-bin", "--user-dir", ROOT / "fairseq_rope", "--source-lang", "en",
        "--target-lang", "de", "--path", model / "averaged.pt", "--beam", 4, "--lenpen", 0.6, "--cpu",
        "--max-len-a", 0, "--max-len-b", 5, *flags.split(),
        stdin="".join(f"{line}\n" for line in lines(work / "raw" / "test.en")[:10]),
    )  # fmt: skip
    translated = [texts[0] for _, texts in sorted(outputs(printed, "D").items())]
    assert translated == lines(model / "hypotheses.de")[:10]


@pytest.mark.slow
def test_a_dry_run_prints_the_commands_of_a_run_and_writes_nothing(finished, data, tmp_path):
    work, printed = finished
    run, dry_run = (
        re.findall(r"^  \$ (.*)$", output, re.MULTILINE)
        for output in (printed, run_here(words(data, work, "--dry-run")))
    )
    assert run == dry_run and len(run) > 20
    main(words(data, tmp_path / "new", "--dry-run"))
    assert not (tmp_path / "new").exists()


def test_files_that_the_data_folder_lacks_are_downloaded_and_incomplete_ones_are_refused(data, tmp_path, monkeypatch):
    copy, work = tmp_path / "data", tmp_path / "work"
    shutil.copytree(data, copy, copy_function=shutil.copyfile)
    monkeypatch.setenv("no_proxy", "*")
    with Site() as site:
        address = site.put("dev.tgz", Reply((copy / "dev.tgz").read_bytes()))
        (copy / "dev.tgz").unlink()
        left = sorted(path.name for path in copy.iterdir())
        text = (copy / "manifest.tsv").read_text()
        (copy / "manifest.tsv").write_text(re.sub(r"(\ndev.tgz.*\t)http.*", rf"\g<1>{address}", text))
        run_here(words(copy, work, "--stop-stage", "1"))
    assert len(site.seen["dev.tgz"]) == 1
    assert [path.name for path in (work / "downloads").iterdir()] == ["dev.tgz"]
    assert sorted(path.name for path in copy.iterdir()) == left
    (copy / "dev.tgz").write_bytes((data / "dev.tgz").read_bytes()[:-1])
    refused = r"dev.tgz.* has \d+ bytes, and must have \d+"
    with pytest.raises(SystemExit, match=refused):
        run_here(words(copy, work, "--stop-stage", "2"))


@pytest.mark.slow
def test_the_documented_command_for_own_texts_runs_all_stages(tmp_path):
    """Run the command of docs/your_own_data.md."""
    texts = tmp_path / "my-texts"
    texts.mkdir()
    for name, number in (("train", 150), ("valid", 10), ("test", 10)):
        for lang in ("en", "fr"):
            (texts / f"{name}.{lang}").write_text("".join(f"{lang} word {n} of {name}.\n" for n in range(number)))
    page = (ROOT / "docs" / "your_own_data.md").read_text()
    (command,) = re.findall(r"^    (bash recipes/multi30k_en_de/run.sh --data-dir.*?)\n\n", page, re.M | re.S)
    command = command.replace("my-texts", str(texts)).replace("my-work", str(tmp_path / "my-work"))
    forking = {**ENVIRONMENT, "FORKED_PROGRAMS": forked_programs.folder()}
    small = "layers=1 width=32 ffn_width=32 heads=2 max_epochs=1 average_checkpoints=1 vocab_size=60".split()
    command += "".join(f" --set {setting}" for setting in small)
    for more in ("", " --set valid_files= --set holdout_every=20 --stop-stage 4"):
        done = subprocess.run(
            command + more, shell=True, cwd=ROOT, env=forking, capture_output=True, text=True, timeout=LIMIT
        )
        assert done.returncode == 0, done.stdout + done.stderr
        if not more:
            assert re.fullmatch(r"sacreBLEU \d+\.\d\d", done.stdout.splitlines()[-1])
    assert len(lines(tmp_path / "my-work" / "clean" / "valid.en")) == 7
