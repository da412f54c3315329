"""recipes/text/tokenise.py: against sacremoses' own command, on any line, and ended early."""

import contextlib
import io
import os
import resource
import signal
import subprocess
import sys
import time
import unicodedata
from functools import partial
from types import SimpleNamespace

import pytest
from fairseq.data.encoders.moses_tokenizer import MosesTokenizer, MosesTokenizerConfig
from hypothesis import given, settings
from hypothesis import strategies as st

from fairseq_rope.errors import InputError
from fairseq_rope.lines import CHUNK, count_lines, read_chunks
from recipes.text import lines
from recipes.text.tokenise import line_converter, main
from tests.commands import BIN, ENVIRONMENT, ROOT

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
DIRTY = [
    "carriage\rreturn", "at the end\r", "next\x85line", "line\u2028separator", "paragraph\u2029separator",
    "vertical\x0btab", "form\x0cfeed", "file\x1cseparator", "record\x1eseparator", "zero\u200bwidth",
    "\ufeffbyte order mark", "soft\u00adhyphen", "null\x00byte", "Windows' \x84quote", "private\ue000use",
]  # fmt: skip


def blanked(line):
    """Moses' remove-non-printing-char.perl, and the two separators that it leaves."""
    return "".join(" " if unicodedata.category(c)[0] == "C" or c in "\u2028\u2029" else c for c in line)


def write(path, lines_):
    path.write_bytes("".join(line + "\n" for line in lines_).encode())
    return str(path)


def read(path):
    text = path.read_bytes().decode()
    assert text.endswith("\n")
    return text.split("\n")[:-1]


def run(source, out, *flags, lang="en", workers=1):
    """Run the tool in this process."""
    words = ["--lang", lang, "--input", source, "--output", out, "--workers", workers, *flags]
    main([str(word) for word in words])


def tokenise(tmp_path, lines_, *flags, lang="en"):
    """The lines that the tool writes for *lines_*."""
    run(write(tmp_path / "in", lines_), tmp_path / "out", *flags, lang=lang)
    return read(tmp_path / "out")


def tool(*words, module="tokenise", **kwargs):
    """The tool as a process of its own."""
    command = [sys.executable, "-m", f"recipes.text.{module}", *map(str, words)]
    return subprocess.Popen(
        command, cwd=ROOT, env=ENVIRONMENT, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, **kwargs,
    )  # fmt: skip


def sacremoses(lang, lines_, *commands):
    done = subprocess.run(
        [BIN / "sacremoses", "-l", lang, "-q", *commands],
        input="".join(line + "\n" for line in lines_).encode(), capture_output=True, check=True,
    )  # fmt: skip
    return done.stdout.decode().split("\n")[:-1]


# -- what it writes --------------------------------------------------------------------------------


@pytest.mark.parametrize("lang", ["en", "de"])
def test_it_writes_what_sacremoses_own_command_writes(tmp_path, lang):
    text = CLEAN[lang] + [blanked(line) for line in DIRTY]
    assert tokenise(tmp_path, text, lang=lang) == sacremoses(lang, text, "tokenize")


@pytest.mark.parametrize("lang", ["en", "de"])
def test_punctuation_is_normalised_first_where_asked_for(tmp_path, lang):
    text = CLEAN[lang]
    normalised = tokenise(tmp_path, text, "--normalise-punctuation", lang=lang)
    assert normalised == sacremoses(lang, text, "normalize", "tokenize")
    assert normalised != tokenise(tmp_path, text, lang=lang)


def test_german_quotes_stay_unless_asked_for(tmp_path):
    assert tokenise(tmp_path, ["„Ja“"], lang="de") == ["„ Ja “"]
    assert tokenise(tmp_path, ["„Ja“"], "--normalise-punctuation", lang="de") == ["&quot; Ja &quot;"]


@pytest.mark.parametrize("lang", ["en", "de"])
def test_fairseqs_tokenizer_does_the_same_when_it_translates(tmp_path, lang):
    text = CLEAN[lang] + [blanked(line) for line in DIRTY]
    fairseqs = MosesTokenizer(MosesTokenizerConfig(source_lang=lang, moses_no_dash_splits=True))
    assert tokenise(tmp_path, text, lang=lang) == [fairseqs.encode(line) for line in text]


@pytest.mark.parametrize("flags", [[], ["--no-tokeniser"], ["--normalise-punctuation"]])
def test_what_does_not_print_becomes_blanks_and_lines_stay_lines(tmp_path, flags):
    out = tokenise(tmp_path, DIRTY, *flags)
    assert len(out) == len(DIRTY)
    assert out == [blanked(line) for line in out]
    assert "\n".join(out).splitlines() == out  # nor would anything else break them
    assert out[2].split() == ["next", "line"] and out[9].split() == ["zero", "width"]


def test_without_the_tokeniser_the_rest_is_untouched(tmp_path):
    text = CLEAN["en"] + CLEAN["de"] + DIRTY
    assert tokenise(tmp_path, text, "--no-tokeniser") == [blanked(line) for line in text]


def test_a_last_line_without_an_end_is_a_line(tmp_path, capsys):
    (tmp_path / "in").write_bytes(b"a.\nb.")
    run(tmp_path / "in", tmp_path / "out")
    assert capsys.readouterr().out.startswith(f"{tmp_path}/out: 2 lines in ")
    assert (tmp_path / "out").read_bytes() == b"a .\nb .\n"


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs", "Cn"], exclude_characters="\n")), min_size=1))
def test_any_text_keeps_its_lines(tmp_path_factory, text):
    folder = tmp_path_factory.mktemp("any")
    assert tokenise(folder, text, "--no-tokeniser") == [blanked(line) for line in text]
    assert len(tokenise(folder, text)) == len(text)


def test_several_processes_write_what_one_writes(tmp_path, capsys):
    text = [f"{n}. {line}" for n in range(230) for line in CLEAN["en"] + DIRTY]
    source = write(tmp_path / "in", text)
    assert os.path.getsize(source) > 2 * CHUNK
    for workers in (1, 2):
        run(source, tmp_path / f"out{workers}", workers=workers)
        out, err = capsys.readouterr()
        assert f"{len(text)} lines in " in out and "lines per second" in out and "per core" in out
        assert "lines/s" in err
    assert (tmp_path / "out1").read_bytes() == (tmp_path / "out2").read_bytes()


# -- reading ---------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.binary(min_size=1), st.integers(1, 9))
def test_chunks_are_the_file_in_whole_lines(tmp_path_factory, contents, size):
    path = tmp_path_factory.mktemp("chunks") / "text"
    contents = contents.decode("latin-1")
    path.write_bytes(contents.encode())
    chunks = list(read_chunks(io.BytesIO(contents.encode()), "text", size))
    assert all(chunk.endswith("\n") for chunk in chunks)
    assert "".join(chunks) == contents + ("" if contents.endswith("\n") else "\n")
    assert count_lines(str(path)) == "".join(chunks).count("\n")


def test_no_more_is_read_ahead_than_the_processes_will_need_soon():
    drawn = []

    def chunks():
        for number in range(100):
            drawn.append(number)
            yield f"{number}\n"

    make = partial(line_converter, "en", False, False)
    results = lines._in_order(make, chunks(), 2)
    assert next(results) == (1, "0\n")
    time.sleep(0.3)
    assert len(drawn) <= 2 * lines.AHEAD + 1
    assert [converted for _, converted in results] == [f"{n}\n" for n in range(1, 100)]


# -- bad input -------------------------------------------------------------------------------------


def test_bad_input_is_refused_in_one_sentence(tmp_path):
    (tmp_path / "empty").write_bytes(b"")
    # In a later chunk than the first, and after a CR, which ends no line.
    (tmp_path / "latin").write_bytes(b"a line\r of text\n" * 9000 + "Größe\n".encode("latin-1"))
    source, out = write(tmp_path / "in", ["a"]), tmp_path / "out"
    out.write_text("of an earlier run")
    no_folder = f"--output {tmp_path}/no/out: must be a file in a folder that exists"
    for words, workers, said in (
        ((tmp_path / "empty", out), 1, f"{tmp_path}/empty: is empty"),
        ((tmp_path / "latin", out), 1, f"{tmp_path}/latin, line 9001: the byte 0xf6 is not UTF-8"),
        ((tmp_path / "latin", out), 2, f"{tmp_path}/latin, line 9001: the byte 0xf6 is not UTF-8"),
        ((tmp_path / "none", out), 1, f"{tmp_path}/none: No such file or directory"),
        ((source, tmp_path / "no" / "out"), 1, no_folder),
        ((source, out), 0, "--workers 0: must be at least 1"),
    ):
        with pytest.raises(SystemExit) as ended:
            run(*words, workers=workers)
        assert str(ended.value) == f"recipes.text.tokenise: {said}"
        assert out.read_text() == "of an earlier run"
        assert not (tmp_path / "out.tmp").exists()


def test_a_line_that_becomes_two_is_refused(tmp_path):
    source = write(tmp_path / "in", ["a", "b"])
    with pytest.raises(InputError, match="after line 0: 2 lines became 4"):
        lines.convert_file(lambda: lambda some: [f"{line}\n" for line in some], source, source + "2", 1, "")
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_a_full_disk_is_said_in_one_sentence_and_leaves_nothing(tmp_path):
    source = write(tmp_path / "in", CLEAN["en"] * 2000)
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (20000, 20000))  # of a file
    process = tool("--lang", "en", "--input", source, "--output", tmp_path / "out", "--workers", 1, preexec_fn=limit)
    _, err = process.communicate()
    assert process.returncode == 1
    assert err.splitlines()[-1] == f"recipes.text.tokenise: {tmp_path}/out: File too large"
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# -- ended early -----------------------------------------------------------------------------------


@pytest.fixture
def at_work(tmp_path):
    """The tool in the middle of a long text, with two processes that work for it."""
    source = write(tmp_path / "in", CLEAN["en"] * 15000)
    process = tool(
        "--lang", "en", "--input", source, "--output", tmp_path / "out", "--workers", 2,
        start_new_session=True,
    )  # fmt: skip
    deadline = time.time() + 60
    children = []
    part = tmp_path / "out.tmp"
    while len(children) < 2 or not part.exists() or part.stat().st_size == 0:
        assert process.poll() is None and time.time() < deadline, process.communicate()
        time.sleep(0.05)
        found = subprocess.run(["pgrep", "-f", "-P", str(process.pid), "spawn_main"], capture_output=True)
        children = [int(pid) for pid in found.stdout.split()]
    yield SimpleNamespace(process=process, children=children, folder=tmp_path)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def all_gone(pids):
    """Whether none of *pids* runs any more, in a while (a zombie does not run)."""
    deadline = time.time() + 20
    while time.time() < deadline:
        ps = ["ps", "-o", "stat=", "-p", ",".join(map(str, pids))]
        states = subprocess.run(ps, capture_output=True, text=True).stdout.split()
        if all(state.startswith("Z") for state in states):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_it_ends_and_leaves_nothing(at_work, number):
    if number == signal.SIGINT:  # Ctrl-C is for all of them
        for pid in at_work.children:
            os.kill(pid, number)
    at_work.process.send_signal(number)
    _, err = at_work.process.communicate(timeout=20)
    assert at_work.process.returncode == 128 + number
    assert "Traceback" not in err
    assert all_gone(at_work.children)
    assert [path.name for path in at_work.folder.iterdir()] == ["in"]


def test_killed_it_leaves_no_process_and_no_output(at_work):
    at_work.process.kill()
    assert all_gone(at_work.children)
    assert not (at_work.folder / "out").exists()


def test_a_killed_process_of_its_ends_it_in_one_sentence(at_work):
    os.kill(at_work.children[0], signal.SIGKILL)
    _, err = at_work.process.communicate(timeout=20)
    assert at_work.process.returncode == 1
    assert err.splitlines()[-1].startswith("recipes.text.tokenise: --workers 2: one of the processes was killed")
    assert "Traceback" not in err
    assert all_gone(at_work.children)
    assert [path.name for path in at_work.folder.iterdir()] == ["in"]


def test_it_starts_without_torch_and_fairseq(tmp_path):
    names = "tokenise", "clean", "bpe"
    imports = "; ".join(f"import recipes.text.{name}" for name in names)
    code = f"import sys; {imports}; sys.exit(bool({{'torch', 'fairseq'}} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=ENVIRONMENT, check=True)
