"""The source distribution and the wheel: their files and metadata, and that an installed wheel registers nothing."""

import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile

import pytest
import yaml

from fairseq_rope import __version__
from tests.commands import LIMIT, PLUGIN, ROOT

NEEDED = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
# The rest of a link of Markdown
TARGET = re.compile(r"\]\(([^)\s]+)\)")


def python(*words, cwd, **environment):
    """What Python prints with *words* as its arguments."""
    command, variables = [sys.executable, *map(str, words)], {**os.environ, **environment}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the source distribution, and the wheel that is built from it as `python -m build` does."""
    folder = tmp_path_factory.mktemp("packaging")
    clone, sources, dist = folder / "clone", folder / "sources", folder / "dist"
    shutil.copytree(PLUGIN, clone / PLUGIN.name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "recipes", "docs"):  # which setuptools could find
        (clone / name).mkdir()
        (clone / name / "test_nothing.py").touch()
    for name in NEEDED:
        shutil.copy(ROOT / name, clone / name)
    python("-c", BUILD, "build_sdist", dist, cwd=clone)
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        archive.extractall(sources, filter="data")
    python("-c", BUILD, "build_wheel", dist, cwd=next(sources.iterdir()))
    return dist


@pytest.fixture(scope="module")
def wheel(built):
    """The folder in which the wheel is installed. pip would write the same files."""
    folder = built.parent / "installed"
    with zipfile.ZipFile(next(built.glob("*.whl"))) as archive:
        archive.extractall(folder)
    return folder


def test_citation_and_changelog_have_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == __version__
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert next(section for section in sections if section != "Unreleased") == __version__


@pytest.mark.slow
def test_the_source_distribution_has_what_the_wheel_is_built_from(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tops = {name.partition("/")[0] for name in names} - {""}
    assert tops == {*NEEDED, PLUGIN.name, "PKG-INFO", "setup.cfg", "fairseq_rope.egg-info"}


@pytest.mark.slow
def test_the_wheel_has_the_whole_plugin_and_nothing_else(wheel):
    here = {path.relative_to(ROOT) for path in PLUGIN.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    files = {path.relative_to(wheel) for path in wheel.rglob("*") if path.is_file()}
    assert {path for path in files if not path.parts[0].endswith(".dist-info")} == here


@pytest.mark.slow
def test_the_description_is_the_readme_without_links_to_files_of_the_repository(wheel):
    """PyPI would resolve them as addresses of its own, which do not exist. Pictures of the repository are left out."""
    (file,) = wheel.glob("*.dist-info/METADATA")
    description = email.message_from_string(file.read_text(encoding="utf-8")).get_payload()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "![" in readme and "![" not in description
    texts = [line for line in readme.splitlines() if not line.startswith("![")]
    outside = [link for link in TARGET.findall(readme) if link.startswith("https://")]
    assert outside and TARGET.findall(description) == outside
    words = [re.findall(r"\w+", TARGET.sub("", text)) for text in ("\n".join(texts), description)]
    assert words[0] == words[1]


NOT_ASKED = """
import importlib.metadata, sys
import fairseq, fairseq.models, fairseq.tasks, fairseq.criterions, fairseq.options
assert not [name for name in sys.modules if name.split(".")[0] == "fairseq_rope"]
distribution = importlib.metadata.distribution("fairseq-rope")
assert distribution.version == sys.argv[2], distribution.version
assert {entry.group for entry in distribution.entry_points} == {"console_scripts"}

from argparse import Namespace
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
def ours():
    names = {*ARCH_MODEL_REGISTRY, *MODEL_REGISTRY, *CRITERION_REGISTRY}
    return names & {"transformer_rope", "transformer_rope_tiny", "fused_label_smoothed_cross_entropy"}
assert not ours()
fairseq.utils.import_user_module(Namespace(user_dir=sys.argv[1]))
assert len(ours()) == 3
assert sys.modules["fairseq_rope"].__file__.startswith(sys.argv[1])
"""


@pytest.mark.slow
def test_beside_a_users_fairseq_the_wheel_registers_nothing_until_user_dir_asks(wheel, tmp_path):
    user_dir = python("-m", "fairseq_rope", "--user-dir", cwd=tmp_path, PYTHONPATH=str(wheel)).strip()
    assert user_dir == str(wheel / "fairseq_rope")
    python("-c", NOT_ASKED, user_dir, __version__, cwd=tmp_path, PYTHONPATH=str(wheel))


@pytest.mark.slow
def test_the_import_of_the_wheel_alone_loads_neither_torch_nor_fairseq(wheel, tmp_path):
    code = "import fairseq_rope, sys; print(fairseq_rope.__file__); print({'torch', 'fairseq'} & {*sys.modules})"
    file, loaded = python("-c", code, cwd=tmp_path, PYTHONPATH=str(wheel)).splitlines()
    assert file.startswith(str(wheel)) and loaded == "set()"
