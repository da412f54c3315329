"""recipes/text/tokenise.py: the same output as sacremoses' own command, any text, and interruptions."""

import contextlib
import io
import os
import signal
import subprocess
import sys
import time
import unicodedata

import pytest
from click.testing import CliRunner
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer, MosesTokenizerConfig
from hypothesis import given, settings
from hypothesis import strategies as st
from sacremoses.cli import cli

from fairseq_rope.errors import InputError
from fairseq_rope.lines import CHUNK_BYTES, count_lines, read_chunks
from recipes.text import lines
from recipes.text.tokenise import main
from tests.commands import ENVIRONMENT, LIMIT, ROOT
from tests.recipes.texts import DIRTY_LINES, read_lines, start_tool, write_lines

CLEAN = {
    "en": [
        "It's the U.S. President's “state-of-the-art” 3.5% plan, isn't it?",
        "Mr. Smith & Co. paid $1,000,000 (approx.) in Jan. 2014... really?!",
        "See http://www.statmt.org/wmt14/ or e-mail a_b@c.org | [sic] <b>bold</b> 'quoted'.",
        "No. 5 is alive; 10,5 or 10.5 -- and 5 000 000.",
        "  two  blanks\tand a tab ",
        "",
        "…",
    ],
    "de": [
        "„Das ist’s“, sagte Dr. Müller – z. B. am 3. Oktober 2013.",
        "Die EU-Kommission (Brüssel) zahlt 1.000,50 € bzw. ca. 5 %.",
        "»Wie geht's?«, fragte er: 'Gut...'",
        '"Und „das“, sagte er, "ist alles."',
        "Preis: 5\u00a0000\u00a0EUR & mehr",
        "",
    ],
}


def blanked(line):
    """*line* after Moses' remove-non-printing-char.perl, without the two separators that the script leaves."""
    return "".join(" " if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029" else c for c in line)


def run(*words):
    """Run the tool in this process."""
    main([str(word) for word in words])


def tokenise(tmp_path, lines_, *flags, lang="en"):
    """The lines that the tool writes for *lines_*."""
    source = write_lines(tmp_path / "in", lines_)
    run("--lang", lang, "--input", source, "--output", tmp_path / "out", *flags)
    return read_lines(tmp_path / "out")


def sacremoses(lang, lines_, *commands):
    text = "".join(line + "\n" for line in lines_)
    done = CliRunner().invoke(cli, ["-l", lang, "-q", *commands], input=text, catch_exceptions=False)
    return done.stdout.split("\n")[:-1]


@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore:.*get_text_stream:DeprecationWarning")
@pytest.mark.parametrize("lang", ["en", "de"])
def test_the_output_equals_that_of_sacremoses_and_fairseqs_tokenizer(tmp_path, lang):
    text = CLEAN[lang] + [blanked(line) for line in DIRTY_LINES]
    fairseqs = MosesTokenizer(MosesTokenizerConfig(source_lang=lang, moses_no_dash_splits=True))
    plain = tokenise(tmp_path, text, lang=lang)
    assert plain == sacremoses(lang, text, "tokenize") == [fairseqs.encode(line) for line in text]
    normalised = tokenise(tmp_path, CLEAN[lang], "--normalise-punctuation", lang=lang)
    assert normalised == sacremoses(lang, CLEAN[lang], "normalize", "tokenize") != plain[: len(CLEAN[lang])]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cn"], exclude_characters="\n")), min_size=1))
def test_any_text_keeps_its_lines(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("any")
    assert tokenise(folder, text, "--no-tokeniser") == [blanked(line) for line in text]
    assert len(tokenise(folder, text)) == len(text)


@pytest.mark.parametrize(
    "text, share",
    [
        (["Akẹ́kọ̀ọ́ ń lọ.", "Ó wá."], "50.0%"),
        (["मैं घर जा रहा हूँ।"], "100.0%"),
        (["كيف حالك؟", "نعم"], "50.0%"),
        (["I ❤\ufe0f you"], "100.0%"),
        ([*CLEAN["de"], "Tiếng Việt?"], None),
        (["yes"] * 100 + ["за́мок"], None),
    ],
)
def test_the_share_of_lines_that_moses_breaks_is_printed(tmp_path, capsys, text, share):
    tokenise(tmp_path, text)
    printed = capsys.readouterr().out
    assert f"{share} " in printed and "bpe=sentencepiece" in printed if share else "%" not in printed
    tokenise(tmp_path, text, "--no-tokeniser")
    assert "%" not in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_write_the_same_as_one(tmp_path, monkeypatch):
    monkeypatch.setattr(lines, "SHARE", 1)
    text = [f"{n}. {line}" for n in range(230) for line in CLEAN["en"] + DIRTY_LINES]
    (tmp_path / "in").write_bytes("\n".join(text).encode())  # the last line has no end
    assert os.path.getsize(tmp_path / "in") > 2 * CHUNK_BYTES
    for workers in (1, 2):
        out = tmp_path / f"out{workers}"
        monkeypatch.setattr(lines, "available_cores", lambda workers=workers: workers)
        run("--lang", "en", "--input", tmp_path / "in", "--output", out, "--no-tokeniser")
    assert read_lines(tmp_path / "out1") == read_lines(tmp_path / "out2") == [blanked(line) for line in text]


@settings(deadline=None)
@given(st.binary(min_size=1), st.integers(1, 9))
def test_chunks_join_to_the_file_and_end_at_line_ends(tmp_path_factory, contents, size):
    path = tmp_path_factory.mktemp("chunks") / "text"
    contents = contents.decode("latin-1")
    path.write_bytes(contents.encode())
    chunks = list(read_chunks(io.BytesIO(contents.encode()), "text", size))
    assert all(chunk.endswith("\n") for chunk in chunks)
    assert "".join(chunks) == contents + ("" if contents.endswith("\n") else "\n")
    assert count_lines(str(path)) == "".join(chunks).count("\n")


@pytest.mark.parametrize(
    "source, out, workers, values",
    [
        ("empty", "out", 1, "FOLDER/empty"),
        ("latin", "out", 1, "FOLDER/latin, line 9001: .*0xf6"),
        pytest.param("latin", "out", 2, "FOLDER/latin, line 9001: .*0xf6", marks=pytest.mark.slow),
        ("none", "out", 1, "FOLDER/none"),
        ("in", "no/out", 1, "FOLDER/no/out"),
    ],
)
def test_bad_input_is_refused_and_an_earlier_output_stays(tmp_path, monkeypatch, source, out, workers, values):
    monkeypatch.setattr(lines, "SHARE", 1)
    monkeypatch.setattr(lines, "available_cores", lambda: workers)
    (tmp_path / "empty").write_bytes(b"")
    # The wrong byte is in the second chunk. A CR does not end a line.
    (tmp_path / "latin").write_bytes(b"a line\r of text\n" * 9000 + "Größe\n".encode("latin-1"))
    write_lines(tmp_path / "in", ["a"])
    (tmp_path / "out").write_text("of an earlier run")
    paths = ["--input", tmp_path / source, "--output", tmp_path / out]
    with pytest.raises(SystemExit, match="^recipes.text.tokenise: " + values.replace("FOLDER", str(tmp_path))):
        run("--lang", "en", "--no-tokeniser", *paths)
    assert (tmp_path / "out").read_text() == "of an earlier run" and not (tmp_path / "out.tmp").exists()


def test_a_changed_number_of_lines_is_refused(tmp_path):
    source = write_lines(tmp_path / "in", ["a", "b"])
    with pytest.raises(InputError, match="in: .*2 .*in2 .*4"):
        lines.convert_file(lambda: lambda some: [f"{line}\n" for line in some], source, source + "2", "")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


@pytest.fixture
def at_work(tmp_path):
    """The tool in the middle of a long text, and its two worker processes."""
    source, part = write_lines(tmp_path / "in", CLEAN["en"] * 15000), tmp_path / "out.tmp"
    two = sorted(os.sched_getaffinity(0))[:2]
    words = ["--lang", "en", "--input", source, "--output", tmp_path / "out"]
    process = start_tool(*words, start_new_session=True, preexec_fn=lambda: os.sched_setaffinity(0, two))
    while not part.exists() or part.stat().st_size == 0:
        assert process.poll() is None, process.communicate(timeout=LIMIT)
        time.sleep(0.05)
    words = ["pgrep", "-f", "-P", str(process.pid), "spawn_main"]
    children = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT).stdout.split()
    yield process, children
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT)


def is_alive(pid):
    ps = subprocess.run(["ps", "-o", "stat=", "-p", pid], capture_output=True, text=True, timeout=LIMIT)
    return not ps.stdout.startswith("Z") and ps.stdout != ""  # a zombie has ended


@pytest.mark.slow
@pytest.mark.parametrize("killed", ["interrupted", "a worker"])
def test_a_stopped_run_leaves_no_process_and_no_output(at_work, tmp_path, killed):
    process, children = at_work
    assert len(children) == 2
    if killed == "interrupted":
        for pid in children:  # Ctrl-C also reaches the workers, which ignore it
            os.kill(int(pid), signal.SIGINT)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
    else:
        os.kill(int(children[0]), signal.SIGKILL)
    _, err = process.communicate(timeout=LIMIT)
    assert process.returncode == {"interrupted": 130, "a worker": 1}[killed] and "Traceback" not in err
    assert killed != "a worker" or f"{tmp_path}/in: " in err.splitlines()[-1]
    deadline = time.monotonic() + 20
    while any(map(is_alive, children)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_text_tools_start_without_torch_and_fairseq():
    tools = [f"recipes.text.{name}" for name in ("fetch", "extract", "tokenise", "clean", "bpe", "translations")]
    room = [f"fairseq_rope.text.{path.stem}" for path in (ROOT / "fairseq_rope/text").glob("[!_]*.py")]
    imports = "; ".join(f"import {name}" for name in tools + room)
    code = f"import sys; {imports}; sys.exit(bool({{'torch', 'fairseq'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, check=True, timeout=LIMIT)
