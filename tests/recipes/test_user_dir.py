"""Encodings of the user's own in a recipe and in a comparison: the setting user_dir."""

import json
import re

import pytest

from fairseq_rope.positions import ENCODINGS
from recipes.compare.__main__ import main as compare
from recipes.pipeline.__main__ import main
from recipes.run.machine import code_of
from tests import forked_programs
from tests.commands import ENVIRONMENT, ROOT, run_program
from tests.recipes.small_demo import SHORT_OUTPUTS, SMALL, run_here, setting_flags, small_corpus, usage_error

SETTINGS = setting_flags(*SMALL, *SHORT_OUTPUTS, "max_epochs=1", "average_checkpoints=1")
MINE = ["--position-encoding", "recency"]


@pytest.fixture
def mine(tmp_path, monkeypatch):
    """A user dir with the example of the documentation, and flags of the small demo that use it."""
    page = (ROOT / "docs" / "encodings.md").read_text()
    (code,) = re.findall(r"```python\n(# my_positions/__init__\.py\n.*?)```", page, re.DOTALL)
    folder = tmp_path / f"my encodings {tmp_path.name}"  # fairseq imports each name once in a process
    folder.mkdir()
    (folder / "__init__.py").write_text(code)
    monkeypatch.setitem(ENCODINGS, "recency", None)
    where = ["--data-dir", str(small_corpus()), "--work-dir", str(tmp_path / "work"), *SETTINGS]
    return folder, ["demo", *where, "--set", f"user_dir={folder}"]


def test_a_comparison_and_a_recipe_train_export_and_score_an_encoding_of_the_user(tmp_path, mine, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])  # of the jobs
    monkeypatch.setenv("FORKED_PROGRAMS", forked_programs.folder())
    folder, words = mine
    of_page = [*"--baseline rope --seeds 1 --jobs 2 --gpus 0 --system".split(), "rope=--arch transformer_rope"]
    of_page += ["--system", f"recency=--arch transformer_rope {' '.join(MINE)}"]
    run_here([*words, *of_page], main=compare)
    (results,) = (tmp_path / "work").glob("compare*/results.json")
    runs = json.loads(results.read_text())["runs"]
    assert {system: [run["seed"] for run in of] for system, of in runs.items()} == {"rope": [1], "recency": [1]}
    (process,) = runs["recency"][0]["training"]["processes"]
    commit, _, code = process["commit"].partition(", user_dir ")
    assert code == code_of(folder) and ", " not in commit, "the report says so if trainings differ in it"
    printed = run_here([*words, "--gpus", "0", "--stop-stage", "11", "--", *MINE, "--recency-strength", "0.5"])
    assert printed.count(f"--user-dir '{folder}'") == 4, "train, average, translate, export"
    model = next((tmp_path / "work").glob("transformer_rope.seed1.*/averaged.pt"))
    start = setting_flags(f"start_checkpoint={model}", f"start_data={tmp_path}/work/data-bin")
    # In a process of its own, which reads the old model, whose encoding is mine
    run_program("python", "-m", "recipes.pipeline", *words, *start, "--gpus", 0, "--dry-run", "--", *MINE, cwd=ROOT)
    (exported,) = (tmp_path / "work").glob("transformer_rope.seed1.*/ctranslate2/fairseq_rope.json")
    assert json.loads(exported.read_text())["target"] == "de"


def test_the_code_of_a_user_dir_is_known_by_all_its_python_files(tmp_path):
    (tmp_path / "mine").mkdir()
    codes = [code_of(tmp_path)]
    for name, text in (("__init__.py", "1"), ("mine/a.py", "2"), ("mine/a.py", "3"), ("mine/b.py", "2")):
        (tmp_path / name).write_text(text)
        codes.append(code_of(tmp_path))
    (tmp_path / "mine" / "b.py").rename(tmp_path / "c.py")
    codes.append(code_of(tmp_path))
    assert len({*codes}) == 6 and all(re.fullmatch("[0-9a-f]{12}", code) for code in codes)
    (tmp_path / "notes").write_text("4")
    assert code_of(tmp_path) == codes[-1]


def test_a_user_dir_that_does_not_exist_or_registers_nothing_is_refused(tmp_path, mine, capsys):
    folder, words = mine
    wrong = ["--set", f"user_dir={tmp_path}/none"]
    assert f"--set user_dir={tmp_path}/none: must be a folder that exists" in usage_error(
        capsys, main, [*words, *wrong]
    )
    flag = ["--", "--user-dir", str(folder)]
    refused = usage_error(capsys, main, [*words, *flag])
    assert "--user-dir among the flags for fairseq-train: set user_dir=DIR instead" in refused
    (folder / "__init__.py").write_text("import torch\n")
    done = run_program("python", "-m", "recipes.pipeline", *words, "--gpus", "0", check=False, cwd=ROOT)
    why = f"--arch transformer_rope: {folder}/__init__.py must import fairseq_rope.plugin, which registers the models"
    assert done.stderr.splitlines() == [f"recipes/demo: {why}"]
