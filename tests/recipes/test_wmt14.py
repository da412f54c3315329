"""The recipe of WMT14 with the real programs, on small tarballs with the names and structure of WMT14's."""

import json
import re
import shutil

import pytest

from fairseq_rope.serving.translator import Translator
from recipes.__main__ import main
from tests.commands import ROOT, call, outputs
from tests.recipes.site import Reply, Site
from tests.recipes.small_demo import SMALL, one, run
from tests.recipes.texts import read_lines
from tests.recipes.wmt14_lookalike import write_lookalike

pytestmark = pytest.mark.slow
TRAINING = (
    *("max_epochs=0", "max_updates=12", "save_every_updates=2", "average_checkpoints=5", "tokens_per_update=1000"),
    *("max_len_b=5", "vocab_size=300"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of five tarballs and their manifest. Tests must not write to it."""
    return write_lookalike(tmp_path_factory.mktemp("lookalike"), pairs=67).folder


def words(data, work, *more):
    return [*TRAINING, f"data={data}", f"manifest={data / 'manifest.tsv'}", f"work={work}", *map(str, more)]


@pytest.fixture(scope="module")
def work(data, tmp_path_factory):
    """The work folder of a run up to the exported model, with the programs as a user starts them."""
    folder = tmp_path_factory.mktemp("wmt14")
    main(["wmt14_en_de", *SMALL, *words(data, folder, "--until", "export")])
    return folder


def test_the_recipe_runs_from_tarballs_to_a_score_and_then_runs_nothing(data, work):
    score = json.loads(one(work, "score-rope-seed1-test-*/score.json").read_text())
    assert {"sacreBLEU", "tokenised BLEU, compound split"} < {row["name"] for row in score["systems"][0]["metrics"]}
    printed = run("wmt14_en_de", *words(data, work))
    assert "== " not in printed and re.fullmatch(r"sacreBLEU \d+\.\d\d", printed.splitlines()[-1])
    assert not [*work.glob("fetch-*")], "the data folder has all files"


def test_both_sides_have_the_same_number_of_lines_and_only_training_pairs_are_removed(work):
    for name in ("train", "valid", "test"):
        counts = [
            {len(read_lines(one(work, f"{step}-{name}-*/text.{lang}"))) for lang in ("en", "de")}
            for step in ("text", "tokenise", "apply-bpe")
        ]
        assert [len(count) for count in counts] == [1, 1, 1] and (counts[1] != counts[2]) == (name == "train")
    for path in work.glob("apply-bpe-*/text.*"):  # no line has a character at which fairseq would divide it
        assert all(len(line.splitlines()) <= 1 for line in read_lines(path)), path


def test_the_last_five_checkpoints_are_averaged_and_the_exported_model_translates(work):
    names = [path.name for path in work.glob("train-rope-seed1-*/checkpoints/checkpoint_*_*.pt")]
    assert sorted(int(re.findall(r"\d+", name)[1]) for name in names) == [4, 6, 8, 10, 12]
    log = one(work, "average-rope-seed1-*/log").read_text()
    assert all(name in log for name in names)
    assert [type(text) for text in Translator(work / "exported", threads=1).translate(["ba cor", "del"])] == [str, str]


def test_fairseq_interactive_gives_the_recipes_translations(work, monkeypatch):
    flags = "--tokenizer moses --moses-no-dash-splits --bpe subword_nmt --bpe-codes"
    monkeypatch.chdir(work)
    sources = read_lines(one(work, "text-test-*/text.en"))[:10]
    printed = call(
        "fairseq-interactive", "data-bin", "--user-dir", ROOT / "fairseq_rope", "--source-lang", "en", "--target-lang",
        "de", "--path", one(work, "average-rope-seed1-*/averaged.pt"), "--beam", 4, "--lenpen", 0.6, "--cpu",
        "--max-len-a", 0, "--max-len-b", 5, *flags.split(), "data-bin/bpecodes", stdin="\n".join([*sources, ""]),
    )  # fmt: skip
    translated = [texts[0] for _, texts in sorted(outputs(printed, "D").items())]
    assert translated == read_lines(one(work, "translate-rope-seed1-*/hypotheses.de"))[:10]


def test_two_systems_from_two_seeds_give_a_report(data, work, tmp_path):
    (tmp_path / "systems.yaml").write_text("sinusoidal: {arch: transformer}\nrotary: {}\n")
    run("wmt14_en_de", *words(data, work, f"systems={tmp_path / 'systems.yaml'}", "seeds=2", "--jobs", 2))
    assert {"sinusoidal", "rotary"} <= {*re.findall(r"\w+", (work / "report" / "report.html").read_text())}
    assert len([*work.glob("train-*")]) == 4 and len([*work.glob("binarise-test-*")]) == 1


def test_files_that_the_data_folder_lacks_are_downloaded_and_incomplete_ones_are_refused(data, tmp_path, monkeypatch):
    copy, work = tmp_path / "data", tmp_path / "work"
    shutil.copytree(data, copy)
    monkeypatch.setenv("no_proxy", "*")
    with Site() as site:
        address = site.put("dev.tgz", Reply((copy / "dev.tgz").read_bytes()))
        (copy / "dev.tgz").unlink()
        text = (copy / "manifest.tsv").read_text()
        (copy / "manifest.tsv").write_text(re.sub(r"(\ndev.tgz.*\t)http.*", rf"\g<1>{address}", text))
        run("wmt14_en_de", *words(copy, work, "--until", "fetch"))
        assert [path.name for path in one(work, "fetch-*").glob("*.tgz")] == ["dev.tgz"] and len(site.seen) == 1
    (copy / "dev.tgz").write_bytes((data / "dev.tgz").read_bytes()[:-1])
    with pytest.raises(SystemExit, match="dev.tgz"):
        run("wmt14_en_de", *words(copy, work, "--until", "text"))
