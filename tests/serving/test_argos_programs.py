"""A package in the real programs: argos-translate-lt and LibreTranslate, installed in an environment of their own.

The documented command, with the model of a whole demo (``python -m recipes demo work=DIR --until export``) and an
environment that is kept between runs:

    DEMO=DIR PROGRAMS=lt SCREENSHOT=page.png pytest -s -m slow tests/serving/test_argos_programs.py

Without DEMO, the test trains a model on a few sentences. Without PROGRAMS, it installs the programs into a folder of
.venv, if they are not there in the same versions.
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import venv
from base64 import b64decode
from pathlib import Path

import pytest

from fairseq_rope.locks import locked
from fairseq_rope.serving.exported_folder import exported_settings
from fairseq_rope.serving.package import translate_as_programs
from fairseq_rope.tools import package
from tests.commands import LIMIT
from tests.recipes.small_demo import one, run, small_corpus

pytestmark = pytest.mark.nightly
REQUIREMENTS = ["libretranslate==1.9.6", "spacy>=3.8,<4"]  # neither needs torch
LINES = 60
SENTENCE = "Click this button to open the dialog."

# For each line of standard input: its sentences, the library's translation, and what LibreTranslate makes of it.
LIBRARY = """
import html, json, sys
from argostranslate import translate
from libretranslate.language import improve_translation_formatting
translation = translate.get_translation_from_codes("en", "de")
split = translation.underlying.sentencizer.split_sentences
for line in json.load(sys.stdin):
    text = translation.translate(line)
    print(json.dumps([split(line), text, html.unescape(improve_translation_formatting(line, text))]))
"""


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """The exported model of the demo's recipe, and its work folder."""
    if "DEMO" in os.environ:
        work = Path(os.environ["DEMO"]).resolve()
    else:
        work = tmp_path_factory.mktemp("demo")
        run("demo", f"data={small_corpus(200, LINES)}", f"work={work}", "max_epochs=2", "--until", "export")
    return work / "exported", work


def installed_programs():
    """Return the bin folder of an environment with the programs, which is kept in .venv for the next run.

    .ci/run calls this while other targets run.
    """
    if "PROGRAMS" in os.environ:
        return Path(os.environ["PROGRAMS"]).resolve() / "bin"
    versions = "\n".join([sys.version, *REQUIREMENTS])
    folder = Path(sys.prefix) / "argos-programs"
    stamp = folder / "versions.txt"
    folder.mkdir(exist_ok=True)
    with locked(folder.with_suffix(".lock")):  # of parallel processes, the first one installs
        if not stamp.exists() or stamp.read_text() != versions:
            install_programs(folder)
            stamp.write_text(versions)
    return folder / "bin"


def install_programs(folder):
    """Create an environment with the programs in place of *folder*."""
    venv.create(folder, clear=True, with_pip=True)
    began = time.monotonic()
    pip = [folder / "bin" / "pip", "install", "--quiet", "--no-compile", *REQUIREMENTS]
    done = subprocess.run(pip, capture_output=True, text=True, timeout=12 * LIMIT)
    if "No matching distribution found for libretranslate" in done.stderr:
        pytest.skip(f"no package index can be reached: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    size = sum(path.lstat().st_size for path in folder.rglob("*"))
    print(f"\ninstalled {' '.join(REQUIREMENTS)} in {time.monotonic() - began:.0f} s, {size / 1e6:.0f} MB")


def install_package(served, data, folder, programs):
    """Make a package of the exported model *served*, in *folder*. Returns the environment variables of the programs.

    *programs* is the bin folder of their environment. They need no network, since spacy splits sentences.
    """
    flags = ["--model", served, "--data", data, "--output", folder / "packages", "--force"]
    package.main(list(map(str, flags)))
    (installed,) = (folder / "packages").glob("translate-*/")
    blank = f"import spacy; spacy.blank('en').to_disk({str(installed / 'spacy')!r})"
    subprocess.run([programs / "python", "-c", blank], check=True)
    return {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        **{name: str(folder / name) for name in ("HOME", "XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME")},
        "ARGOS_PACKAGES_DIR": str(folder / "packages"),
        "ARGOS_PACKAGE_INDEX": f"file://{folder}/packages/",
        "ARGOS_CHUNK_TYPE": "SPACY",
    }


@contextlib.contextmanager
def serving(folder, variables, programs):
    """Run LibreTranslate with the packages in *folder*, and yield its address."""
    address = f"http://127.0.0.1:{free_port()}"
    words = [programs / "libretranslate", "--load-only", "en,de", "--port", address.rpartition(":")[2]]
    with (
        open(folder / "log", "w") as log,
        subprocess.Popen(words, cwd=folder, env=variables, stdout=log, stderr=log) as program,
    ):
        try:
            if not answers(f"{address}/languages"):
                raise RuntimeError((folder / "log").read_text()[-3000:])
            yield address
        finally:
            program.terminate()


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def answers(url):
    """Wait up to two minutes until *url* answers."""
    for _ in range(240):
        with contextlib.suppress(urllib.error.URLError):
            urllib.request.urlopen(url).close()
            return True
        time.sleep(0.5)
    return False


def post(url, data):
    request = urllib.request.Request(url, json.dumps(data).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def translated(address, text):
    """The translations of *text*, a line or a list of lines."""
    return post(f"{address}/translate", {"q": text, "source": "en", "target": "de"})["translatedText"]


@pytest.fixture(scope="module")
def library(demo, tmp_path_factory):
    """The programs, a folder with the package, their environment variables, lines, and what LIBRARY prints for each."""
    (served, work), programs, folder = demo, installed_programs(), tmp_path_factory.mktemp("argos")
    variables = install_package(served, work / "data-bin", folder, programs)
    lines = one(work, "text-valid-*/text.en").read_text(encoding="utf-8").splitlines()[:LINES]
    command = [programs / "python", "-c", LIBRARY]
    done = subprocess.run(
        command, input=json.dumps(lines), env=variables, capture_output=True, text=True, timeout=LIMIT
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]
    return programs, folder, variables, lines, printed


def test_the_library_translates_as_the_check_predicts(demo, library):
    """The check translates sentences, and the library also divides lines into sentences."""
    model, (*_, lines, printed) = str(demo[0]), library
    single = [(line, text) for line, (sentences, text, _) in zip(lines, printed, strict=True) if len(sentences) == 1]
    predicted = translate_as_programs(model, exported_settings(model), [line for line, _ in single])
    # An output of 256 tokens, which a model after two epochs writes, can end within a word.
    assert len(single) > LINES / 2 and [text.removesuffix("@@") for _, text in single] == predicted


def test_libretranslate_serves_the_package_by_its_api_and_on_its_page(library, tmp_path):
    """The page is in headless Chromium, through the WebDriver protocol."""
    programs, folder, variables, lines, printed = library
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("chromedriver is not installed (apt-get install chromium chromium-driver)")
    port = free_port()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1000,700"]
    options = {"args": [*flags, f"--user-data-dir={tmp_path / 'profile'}"]}
    root = f"http://127.0.0.1:{port}/session"
    with (
        serving(folder, variables, programs) as server,
        subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL) as running,
    ):
        try:
            assert translated(server, lines) == [formatted for *_, formatted in printed]
            assert answers(f"http://127.0.0.1:{port}/status")
            wanted = {"goog:chromeOptions": options, "timeouts": {"implicit": 30_000}}  # ms, until an element is there
            started = post(root, {"capabilities": {"alwaysMatch": wanted}})
            session = f"{root}/{started['value']['sessionId']}"
            post(f"{session}/url", {"url": f"{server}/?source=en&target=de"})
            element = post(f"{session}/element", {"using": "css selector", "value": "#textarea1"})["value"]
            post(f"{session}/element/{next(iter(element.values()))}/value", {"text": SENTENCE})
            script = "return (document.getElementById('textarea2') || {}).value"
            for _ in range(60):
                if text := post(f"{session}/execute/sync", {"script": script, "args": []})["value"]:
                    break
                time.sleep(0.5)
            assert text == translated(server, SENTENCE) not in ("", SENTENCE)
            picture = b64decode(json.load(urllib.request.urlopen(f"{session}/screenshot", timeout=LIMIT))["value"])
            Path(os.environ.get("SCREENSHOT", tmp_path / "page.png")).write_bytes(picture)
            urllib.request.urlopen(urllib.request.Request(session, method="DELETE"), timeout=LIMIT)
        finally:
            running.terminate()
