"""The documentation: its notebook runs, its links have targets, and its tables have the values of the code."""

import cmath
import csv
import json
import re
import shutil
import subprocess
import sys
from argparse import ArgumentParser
from importlib import import_module
from itertools import cycle
from unittest import mock

import matplotlib.pyplot as plt
import pytest
import torch
from fairseq.models.transformer import TransformerModel
from fairseq.options import get_training_parser, parse_args_and_arch

from fairseq_rope.__main__ import TOOLS
from fairseq_rope.positions import ENCODINGS
from fairseq_rope.transformer import TransformerRopeModel
from fairseq_rope.transformer.architectures import ARCHITECTURES, BLOCKS, ENCODINGS_OF, ONE_SIDED, twin_of
from fairseq_rope.transformer.options import read
from tests.commands import LIMIT, ROOT

PAGES = sorted(
    page
    for part in ("*.md", "docs/*.md", "recipes/*.md", "recipes/*/*.md", "benchmarks/*.md")
    for page in ROOT.glob(part)
)

NOTEBOOK = ROOT / "docs" / "rope_from_its_equation.ipynb"


def anchors(page):
    """The anchors that GitHub and mkdocs give to the headings of *page*, or the functions of a Python file."""
    if page.suffix == ".py":
        return re.findall(r"^def (\w+)\(", page.read_text(), re.M)
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", heading.lower(), flags=re.ASCII).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_has_a_file_and_a_heading(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        if "://" not in link:
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_the_notebook_derives_what_the_module_computes():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    plt.switch_backend("agg")
    names: dict[str, object] = {}
    for source in sources:
        with mock.patch.object(plt, "show") as show:
            exec(source, names)  # the last cell asserts that the plugin's module gives the same numbers
        assert bool(plt.get_fignums()) == show.called  # Jupyter's backend displays the open figures
        plt.close()
    # Known values of the equation for d = 4: m = 1 and m = 4.
    rotate = names["rotate_by_the_equation"]
    expected = torch.tensor([-0.84147, 0.54030, -0.01000, 0.99995])
    assert torch.allclose(rotate(torch.tensor([0.0, 1.0, 0.0, 1.0]), 1), expected, atol=1e-5)
    expected = torch.tensor([0.0516, -0.7052, 0.4796, 0.5196])
    assert torch.allclose(rotate(torch.full((4,), 0.5), 4), expected, atol=1e-4)
    # The drawn bound is the mean of |S_j|, equation 37.
    for head_dim, curve in zip((32, 64, 128), names["axes"].get_lines(), strict=True):
        for distance in (0, 1, 50, 512):
            angles = [distance * 10000.0 ** (-2 * i / head_dim) for i in range(head_dim // 2)]
            sums = [abs(sum(cmath.exp(1j * angle) for angle in angles[:j])) for j in range(1, head_dim // 2 + 1)]
            at_zero = (head_dim // 2 + 1) / 2  # the mean of 1 … d/2
            assert curve.get_ydata()[distance] == pytest.approx(sum(sums) / len(sums) / at_zero, abs=1e-6)


@pytest.mark.slow
def test_jupyter_executes_the_notebook_and_shows_its_picture():
    """.ci/run calls make docs, which installs nbclient, before the tests."""
    nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed; make docs installs it")
    notebook = pytest.importorskip("nbformat").read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=LIMIT, resources={"metadata": {"path": ROOT}}).execute()
    (picture,) = (
        output["data"]["image/png"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "image/png" in output.get("data", {})
    )
    assert len(picture) > 10_000


def flags_of(model):
    """The flags that *model* adds to fairseq-train."""
    parser = ArgumentParser()
    model.add_args(parser)
    return {flag for action in parser._actions for flag in action.option_strings}


def test_the_tables_have_every_architecture_every_flag_and_every_tool():
    training, encodings = ((ROOT / "docs" / page).read_text() for page in ("training.md", "encodings.md"))
    named = re.findall(r"^\| `([\w]+)` \| `(\w+)` \|$", training, re.M)
    twins = {twin_of(arch): arch for model, of in ARCHITECTURES.items() if model not in ONE_SIDED for arch in of}
    assert dict(named) == {**twins, **BLOCKS}
    one_sided = {twin_of(arch) for model in ONE_SIDED for arch in ARCHITECTURES.get(model, ())}
    assert one_sided | {"roberta_rope_small"} == set(re.findall(r"`((?:transformer_lm|roberta)_rope\w*)`", training))
    assert all(f"| `{arch}` | `{fairseq_arch}` |" in encodings for arch, fairseq_arch in BLOCKS.items())
    new = flags_of(TransformerRopeModel) - flags_of(TransformerModel)
    assert "--rope-base" in new
    documented = {"--compile", *re.findall(r"`(--[\w-]+)", encodings)}
    assert "transformer_rope --compile\n" in training
    assert [flag for flag in new if not {flag, re.sub("^--(encoder|decoder)-", "--", flag)} & documented] == []
    assert set(re.findall(r"^\| `([a-z0-9-]+)`[^|]*\| [^|]*\| [^|]*\| [^|]*\|$", encodings, re.M)) >= set(ENCODINGS)
    assert all(f"`{prefix}`" in encodings for prefix in ENCODINGS_OF)
    assert re.findall(r"^\| `(\w[\w-]*)` \| .*\(docs/", (ROOT / "README.md").read_text(), re.M) == list(TOOLS)


def documented_defaults():
    """The flags in the pages' tables whose default is a value, that value, and an encoding that uses the flag."""
    pages = [(ROOT / "docs" / page).read_text() for page in ("training.md", "encodings.md")]
    for table in re.findall(r"^\| flag \| default \|.*\n((?:\|.*\n)+)", "\n".join(pages), re.M):
        for flags, default, used_by, *_ in (row.split("|")[1:] for row in table.splitlines()[1:]):
            encoding = re.match(" `([a-z0-9-]+)`", used_by)  # the column "used by", which one page has
            values = [re.fullmatch(r"`?(\w+)`?(?:: .*| \(off\))?", part) for part in default.strip().split(", ")]
            for flag, value in zip(re.findall("`(--[a-z-]+)", flags), cycle(values)):
                if value is not None and value[1] not in ("off", "none"):
                    yield pytest.param(flag, value[1], encoding[1] if encoding else "rope", id=flag)


def options_of(*words):
    """The options of the model that fairseq-train builds with the flags *words*."""
    return read(parse_args_and_arch(get_training_parser(), ["data", *words]))


@pytest.mark.parametrize("flag, value, encoding", list(documented_defaults()))
def test_a_documented_default_is_that_of_the_flag(flag, value, encoding):
    """docs/compatibility.md promises these defaults: a model with the flag is the one without it."""
    arch = ("--arch", f"transformer_{encoding.replace('-', '_')}")
    without = options_of(*arch)
    assert flag == "--position-encoding" or flag.removeprefix("--").replace("-", "_") in without.values
    assert options_of(*arch, flag, value) == without


def test_the_names_that_stay_stable_can_be_imported():
    table = (ROOT / "docs" / "compatibility.md").read_text().split("## Python names")[1].split("## Not stable")[0]
    rows = [re.findall(r"`([\w.]+)`", row) for row in table.splitlines() if row.startswith("| `fairseq_rope")]
    assert len(rows) == 4
    assert [
        (module, name) for module, *names in rows for name in names if not hasattr(import_module(module), name)
    ] == []


@pytest.fixture(scope="module")
def pictures():
    """The module docs/pictures.py, which is in no package."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        return import_module("pictures")
    finally:
        sys.path.remove(str(ROOT / "docs"))


@pytest.mark.parametrize("name", ["scores", "long_context", "losses", "encodings_scores"])
def test_a_picture_has_the_points_of_its_table(pictures, name):
    drawn = pictures.as_svg(pictures.PICTURES[name])
    saved = (ROOT / "docs" / f"{name}.svg").read_text()
    points = [[float(number) for number in re.findall(r"(?<=[ \"])-?\d+\.\d(?=[ \"])", svg)] for svg in (saved, drawn)]
    assert len(points[0]) > 500 and points[0] == pytest.approx(points[1], abs=2), "run python docs/pictures.py"
    assert "#000000" not in drawn and "#ffffff" not in drawn  # readable on white and on black


def test_the_scores_of_the_readme_stand_on_the_page_of_results():
    table = re.search(r"(?:^\|.*\n)+", (ROOT / "README.md").read_text(), re.M)[0]
    rows = [re.findall(r"[\d.]+ ± [\d.]+|(?<=\| )-?\d+\.\d+(?= \|)", row) for row in table.splitlines()[2:]]
    pages = "".join(page.read_text() for page in ROOT.glob("docs/results*.md"))
    assert len(rows) == 5
    for sinusoids, rope, gain in rows:
        assert sinusoids in pages and rope in pages
        assert float(gain) == pytest.approx(float(rope.split()[0]) - float(sinusoids.split()[0]))


def test_the_table_of_runs_has_the_scores_of_the_page_and_of_the_picture(pictures):
    with (ROOT / "docs" / "data" / "runs.csv").open(encoding="utf-8", newline="") as file:
        runs = {row["sacrebleu"] for row in csv.DictReader(file) if row["seeds"] in "123"}
    assert {row["sacrebleu"] for row in pictures.table("scores")} <= runs
    results = (ROOT / "docs" / "results.md").read_text()
    tables = re.findall(r"^\| \| seed 1 \|.*\n\|[-|]+\n((?:\|.*\n)+)", results, re.M)
    scores = [cell for table in tables for cell in re.findall(r"(?<=\| )\d+\.\d+(?= \|)", table)]
    assert len(scores) >= 40 and set(scores) <= runs | set(re.findall(r"\| (0\.\d+) \|", results))


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("node"), reason="node is not installed")
def test_the_search_looks_for_the_words_of_a_pasted_flag():
    queries = ("--rope-scaling", "fairseq --position-encoding alibi", "rope -alibi", "well-known")
    script = (
        ROOT / "docs" / "search.js"
    ).read_text() + f"; {json.dumps(queries)}.map(q => console.log(flagsAsWords(q)))"
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, check=True, timeout=LIMIT)
    expected = ["+rope* +scaling*", "fairseq +position* +encoding* alibi", "rope -alibi", "well-known"]
    assert done.stdout.splitlines() == expected
