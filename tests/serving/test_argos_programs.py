"""A package in the real programs: argos-translate-lt and LibreTranslate, installed in an environment of their own.

The documented command, with the model of a whole demo (``python -m recipes demo work=DIR --until export``) and an
environment that is kept between runs:

    DEMO=DIR PROGRAMS=lt SCREENSHOT=page.png pytest -s -m slow tests/serving/test_argos_programs.py

Without DEMO, the test trains a model on a few sentences. Without PROGRAMS, it installs the programs into a folder of
.venv, if they are not there in the same versions.
"""

import html
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
import venv
import zipfile
from base64 import b64decode
from pathlib import Path

import pytest

from benchmarks.web_page import SENTENCE, answers, free_port, install_package, post, serving, translated
from fairseq_rope.locks import locked
from fairseq_rope.serving.argos import Package
from tests.commands import LIMIT
from tests.recipes.small_demo import one, run, small_corpus

pytestmark = pytest.mark.slow
REQUIREMENTS = ["libretranslate==1.9.6", "spacy>=3.8,<4"]  # neither needs torch
LINES = 60

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


@pytest.fixture(scope="session")
def programs():
    return installed_programs()


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


@pytest.fixture(scope="module")
def installed(demo, programs, tmp_path_factory):
    """A folder with the package, the environment variables for the programs, and some lines of the validation set."""
    served, work = demo
    folder = tmp_path_factory.mktemp("argos")
    variables = install_package(served, work / "data-bin", folder, programs)
    lines = one(work, "text-valid-*/text.en").read_text(encoding="utf-8").splitlines()[:LINES]
    return folder, variables, lines


@pytest.fixture(scope="module")
def library(installed, programs):
    """For each line, and SENTENCE: its sentences, the library's translation, and LibreTranslate's."""
    _, variables, lines = installed
    done = subprocess.run(
        [programs / "python", "-c", LIBRARY],
        input=json.dumps([*lines, SENTENCE]),
        env=variables,
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[[")]


@pytest.fixture(scope="module")
def server(installed, programs):
    folder, variables, _ = installed
    with serving(folder, variables, programs) as address:
        yield address


def test_the_library_translates_as_the_check_predicts(installed, library):
    folder, _, lines = installed
    (unpacked,) = (path for path in (folder / "packages").iterdir() if path.is_dir())
    sentences, translations, _ = zip(*library[:LINES], strict=True)
    package = Package(str(unpacked))
    predicted = [package.plain(tokens) for tokens in package.search(sentences)]
    several = sum(len(split) > 1 for split in sentences)
    print(f"\n{len(lines)} lines, {several} with several sentences, {len(set(translations))} different translations")
    assert len(lines) == LINES and list(translations) == predicted


def test_libretranslate_answers_with_the_librarys_translations(installed, library, server):
    _, _, lines = installed
    languages = json.load(urllib.request.urlopen(f"{server}/languages", timeout=LIMIT))
    assert [language["code"] for language in languages] == ["en", "de"]
    assert translated(server, lines) == [formatted for *_, formatted in library[:LINES]]
    assert translated(server, SENTENCE) not in ("", SENTENCE)


TEXT = "urn:oasis:names:tc:opendocument:xmlns:text:1.0"
CONTENT = (
    '<?xml version="1.0" encoding="UTF-8"?><office:document-content '
    f'xmlns:office="urn:oasis:names:tc:opendocument:xmlns:office:1.0" xmlns:text="{TEXT}" office:version="1.2">'
    f"<office:body><office:text><text:p>{SENTENCE}</text:p></office:text></office:body></office:document-content>"
)


def test_a_document_comes_back_translated(server, library, tmp_path):
    document = tmp_path / "one.odt"
    with zipfile.ZipFile(document, "w") as archive:
        archive.writestr("mimetype", "application/vnd.oasis.opendocument.text")
        archive.writestr("content.xml", CONTENT)
    parts = [
        f'--x\r\nContent-Disposition: form-data; name="{n}"\r\n\r\n{v}\r\n'
        for n, v in (("source", "en"), ("target", "de"))
    ]
    head = '--x\r\nContent-Disposition: form-data; name="file"; filename="one.odt"\r\n\r\n'
    body = "".join(parts).encode() + head.encode() + document.read_bytes() + b"\r\n--x--\r\n"
    url = post(f"{server}/translate_file", body, "multipart/form-data; boundary=x")["translatedFileUrl"]
    (tmp_path / "two.odt").write_bytes(urllib.request.urlopen(url, timeout=LIMIT).read())
    with zipfile.ZipFile(tmp_path / "two.odt") as archive:
        content = html.unescape(archive.read("content.xml").decode())
    assert f"<text:p>{library[LINES][1]}</text:p>" in content


def test_the_page_translates_a_typed_sentence(server, tmp_path):
    """In headless Chromium, through the WebDriver protocol."""
    driver = shutil.which("chromedriver")
    if driver is None:
        pytest.skip("chromedriver is not installed (apt-get install chromium chromium-driver)")
    port = free_port()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--window-size=1000,700"]
    options = {"args": [*flags, f"--user-data-dir={tmp_path / 'profile'}"]}
    root = f"http://127.0.0.1:{port}/session"
    with subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL) as running:
        try:
            assert answers(f"http://127.0.0.1:{port}/status")
            started = post(root, {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options}}})
            session = f"{root}/{started['value']['sessionId']}"
            post(f"{session}/url", {"url": f"{server}/?source=en&target=de"})

            def value_of(name):
                script = f"return (document.getElementById('{name}') || {{}}).value"
                return post(f"{session}/execute/sync", {"script": script, "args": []})["value"]

            found = post(f"{session}/element", {"using": "css selector", "value": "#textarea1"})["value"]
            post(f"{session}/element/{next(iter(found.values()))}/value", {"text": SENTENCE})
            for _ in range(60):
                if value_of("textarea2"):
                    break
                time.sleep(0.5)
            assert value_of("textarea2") == translated(server, SENTENCE)
            answer = urllib.request.urlopen(f"{session}/screenshot", timeout=LIMIT)
            picture = b64decode(json.load(answer)["value"])
            Path(os.environ.get("SCREENSHOT", tmp_path / "page.png")).write_bytes(picture)
            urllib.request.urlopen(urllib.request.Request(session, method="DELETE"), timeout=LIMIT)
        finally:
            running.terminate()
