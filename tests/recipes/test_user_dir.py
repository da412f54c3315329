"""The setting user_dir, for an encoding of the user; and the help, which explains every setting."""

import json
import re

import pytest

from fairseq_rope.positions import ENCODINGS
from recipes.__main__ import main
from recipes.machine import code_of
from recipes.settings import FIELDS
from tests.commands import ROOT
from tests.recipes.small_demo import one, run, small_corpus


@pytest.mark.slow
def test_a_recipe_trains_scores_and_exports_an_encoding_of_the_user(tmp_path, monkeypatch):
    """The encoding is the example of the documentation."""
    page = (ROOT / "docs" / "encodings.md").read_text()
    (code,) = re.findall(r"```python\n(# my_positions/__init__\.py\n.*?)```", page, re.DOTALL)
    folder = tmp_path / f"my encodings {tmp_path.name}"  # fairseq imports each name once in a process
    folder.mkdir()
    (folder / "__init__.py").write_text(code)
    monkeypatch.setitem(ENCODINGS, "recency", None)
    words = [f"data={small_corpus(60, 60)}", f"work={tmp_path / 'work'}", f"user_dir={folder}"]
    flags = "train_flags=--position-encoding recency --recency-strength 0.5"
    printed = run("demo", *words, flags, "--until", "export")
    assert printed.count(f"--user-dir '{folder}'") == 4, "train, average, translate, export"
    assert json.loads((tmp_path / "work" / "exported" / "fairseq_rope.json").read_text())["target"] == "de"
    settings = one(tmp_path / "work", "train-*/settings.yaml").read_text()
    assert f"user_dir: {code_of(folder)}" in settings and str(folder) not in settings


def test_the_code_of_a_user_dir_is_known_by_all_its_python_files(tmp_path):
    (tmp_path / "mine").mkdir()
    codes = [code_of(tmp_path)]
    for name, text in (("__init__.py", "1"), ("mine/a.py", "2"), ("mine/a.py", "3"), ("mine/b.py", "2")):
        (tmp_path / name).write_text(text)
        codes.append(code_of(tmp_path))
    (tmp_path / "notes").write_text("4")
    assert len({*codes}) == 5 and code_of(tmp_path) == codes[-1]


def test_the_help_has_every_setting_with_its_value_in_the_recipe(capsys):
    main(["demo", "--help"])
    printed = capsys.readouterr().out
    assert [name for name in FIELDS if not re.search(rf"^  {name} +\w", printed, re.MULTILINE)] == []
    assert re.search(r"^  layers .* \[2\]$", printed, re.MULTILINE)
