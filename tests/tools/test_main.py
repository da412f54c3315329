"""The command fairseq-rope: its tools, their help, and the errors that they share."""

import errno
import os
import subprocess
import sys

import pytest
import torch

import fairseq_rope
from fairseq_rope import __file__ as package
from fairseq_rope import __version__
from fairseq_rope.__main__ import TOOLS, main
from fairseq_rope.errors import REQUIREMENTS, ending_in_one_sentence
from fairseq_rope.files import written_whole
from tests.commands import LIMIT, ROOT

NEEDED = {
    "average": "--inputs none.pt --output out",
    "convert-layout": "--path none.pt --rope-layout half --output out",
    "score": "--sys none --ref none --target-lang de",
    "export": "--path none.pt --data none --output out",
    "package": "--model none --data none",
    "translate": "--model none",
}


@pytest.mark.parametrize("tool", [(), *((name,) for name in TOOLS)])
def test_help_shows_an_example_on_one_line_and_the_version_is_printed(capsys, tool):
    for flag in ("--help", "--version"):
        with pytest.raises(SystemExit) as ended:
            main([*tool, flag])
        assert not ended.value.code
    lines = capsys.readouterr().out.splitlines()
    name = " ".join(("fairseq-rope", *tool))
    assert lines[-1] == f"{name} {__version__}"
    example = lines[lines.index("example:") + 1]
    assert example.startswith(f"  {name} ") and len(example) > len(name) + 20


HELP = """
import contextlib, os, sys
sys.modules.update(dict.fromkeys(sys.argv[1].split()))  # an entry of None: the package is not installed
from fairseq_rope.__main__ import TOOLS, main
for tool in TOOLS:
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            main([tool, "--help"])
        except SystemExit as ended:
            assert not ended.code, ended.code
"""


def test_the_help_of_each_tool_needs_no_other_package():
    missing = " ".join(["torch", "fairseq", "numpy", *REQUIREMENTS])
    command = [sys.executable, "-c", HELP, missing]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr


def test_every_tool_is_listed_and_the_path_for_user_dir_is_printed(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(f"  {name:15} {what}\n" in printed for name, what in TOOLS.items())
    main(["--user-dir"])
    assert capsys.readouterr().out == package[: -len("/__init__.py")] + "\n"
    with pytest.raises(SystemExit, match="2"):
        main([])
    assert f"a tool is needed: {', '.join(TOOLS)}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words, message",
    [
        ("score --sys x --ref --src", "argument --ref: expected at least one argument"),
        ("scroe", "argument TOOL: invalid choice: 'scroe'"),
    ],
)
def test_a_wrong_command_line_ends_with_one_sentence_and_without_the_list_of_flags(capsys, words, message):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    tool = " ".join(["fairseq-rope", *(name for name in words.split()[:1] if name in TOOLS)])
    sentence, hint = capsys.readouterr().err.splitlines()
    assert sentence.startswith(f"{tool}: error: {message}") and hint == f"see {tool} --help"


@pytest.mark.parametrize("tool", ["average", "convert-layout", "translate"])
@pytest.mark.parametrize("output", ["/dev/null", ".", "none/out"])
def test_an_impossible_output_path_is_refused_before_any_input_is_read(tool, output):
    with pytest.raises(SystemExit, match=f"--output {output}: must be a file in a folder that exists"):
        main([tool, *NEEDED[tool].split(), "--output", output])


@pytest.mark.parametrize("tool", ["average", "convert-layout", "export"])
def test_a_user_dir_and_files_are_looked_for_before_a_model_is_read(tmp_path, monkeypatch, tool):
    monkeypatch.chdir(tmp_path)
    words = [tool, *NEEDED[tool].split(), "--user-dir", "mine"]
    (tmp_path / "none").mkdir()
    with pytest.raises(SystemExit, match=f"fairseq-rope {tool}: none.pt: No such file or directory"):
        main(words)
    (tmp_path / "none.pt").touch()
    with pytest.raises(SystemExit, match=f"fairseq-rope {tool}: --user-dir mine: must be a folder that exists"):
        main(words)


@pytest.mark.parametrize(
    "tool, missing",
    [
        *(("average", "torch"), ("average", "fairseq"), ("export", "ctranslate2")),
        *(("score", "sacrebleu"), ("score", "sacremoses")),
    ],
)
def test_a_missing_package_is_named_in_one_sentence(tmp_path, monkeypatch, tool, missing):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none.pt").touch()
    (tmp_path / "none").mkdir()
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, f"{missing}.data", raising=False)  # a module that is loaded needs no parent
    monkeypatch.delitem(sys.modules, "fairseq_rope.checkpoints")  # which average imports when it runs
    monkeypatch.setattr(fairseq_rope, "checkpoints", None, raising=False)  # so that it is restored, too
    how = (
        f": pip install '{REQUIREMENTS[missing]}'"
        if missing in REQUIREMENTS
        else " (docs/install.md in the repository says how to install it)"
    )
    with pytest.raises(SystemExit) as stopped:
        main([tool, *NEEDED[tool].split()])
    assert stopped.value.code == f"fairseq-rope {tool}: {missing} is not installed{how}"


@pytest.mark.parametrize(
    "error, sentence",
    [
        (ImportError("fairseq-rope needs torch 2.6 or newer, and this is torch 2.5.1"), "fairseq-rope needs torch 2.6"),
        (ImportError("libX.so.1: cannot open shared object file"), "libX.so.1: cannot open shared object file"),
        (ImportError("libX.so.1: cannot open shared object file", name="_ext"), "libX.so.1: cannot open shared object"),
        (ImportError("cannot import name 'BLEU' from 'sacrebleu'", name="sacrebleu"), "cannot import name 'BLEU' from"),
    ],
)
def test_an_import_error_of_a_package_that_is_not_missing_is_printed(error, sentence):
    with pytest.raises(SystemExit, match=f"^program: {sentence}"), ending_in_one_sentence("program"):
        raise error


# Tools that print, and PYTHONUNBUFFERED; an empty value has no effect
PRINTING = pytest.mark.parametrize(
    "tool, unbuffered",
    [("score", ""), *(pytest.param(*row, marks=pytest.mark.slow) for row in (("average", "1"), ("--user-dir", "")))],
)


def run_into(stdout, tool, unbuffered, tmp_path):
    """Run *tool* with *stdout* as its standard output."""
    text, checkpoint = tmp_path / "test.de", tmp_path / "model.pt"
    text.write_text("ein Haus\n")
    torch.save({"model": {"w": torch.ones(1)}}, checkpoint)
    flags = {
        "score": ["--sys", text, "--ref", text, "--target-lang", "de"],
        "average": ["--inputs", checkpoint, "--output", tmp_path / "average.pt"],
    }
    command = [sys.executable, "-m", "fairseq_rope", tool, *flags.get(tool, [])]
    env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    pipe = subprocess.PIPE
    return subprocess.run(command, cwd=ROOT, env=env, stdout=stdout, stderr=pipe, text=True, timeout=LIMIT)


@PRINTING
def test_a_tool_whose_output_nobody_reads_ends_without_a_message(tool, unbuffered, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    done = run_into(writer, tool, unbuffered, tmp_path)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


@PRINTING
def test_a_tool_that_cannot_write_its_output_says_why(tool, unbuffered, tmp_path):
    with open("/dev/full", "w") as full:
        done = run_into(full, tool, unbuffered, tmp_path)
    program = "fairseq-rope" if tool == "--user-dir" else f"fairseq-rope {tool}"
    assert (done.returncode, done.stderr) == (1, f"{program}: No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [True, False])
def test_a_tool_that_nohup_starts_goes_on_after_the_terminal_is_closed(ignored):
    code = (
        "import os, signal\n"
        "from fairseq_rope.errors import ending_in_one_sentence\n"
        f"signal.signal(signal.SIGHUP, signal.{'SIG_IGN' if ignored else 'SIG_DFL'})\n"
        "with ending_in_one_sentence('program'):\n"
        "    os.kill(os.getpid(), signal.SIGHUP)\n"
        "    print('goes on')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert (ended.returncode, ended.stdout) == ((0, "goes on\n") if ignored else (129, "")), ended.stderr


def test_a_folder_with_the_name_of_an_output_keeps_all_old_files(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "b").mkdir()
    paths = [str(tmp_path / name) for name in "ab"]
    with pytest.raises(IsADirectoryError, match=paths[1]), written_whole(*paths):
        pass
    assert (tmp_path / "a").read_text() == "old" and sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_no_old_file_stays_beside_a_new_one(tmp_path, monkeypatch):
    """A process is killed between two renames, here by an error."""
    paths, replace = [tmp_path / "a", tmp_path / "b"], os.replace
    for path in paths:
        path.write_text("old")

    def killed(source, target):
        if target == str(paths[1]):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(KeyboardInterrupt), written_whole(*map(str, paths)) as files:
        for file in files:
            file.write(b"new")
    assert paths[0].read_text() == "new" and not paths[1].exists()


def test_an_error_when_the_output_gets_its_name_names_the_output(tmp_path, monkeypatch):
    def refuse(source, target):  # as in a folder with the sticky bit, where the file of another user cannot be replaced
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), source, None, target)

    monkeypatch.setattr(os, "replace", refuse)
    path = str(tmp_path / "out")
    with pytest.raises(PermissionError) as refused, written_whole(path):
        pass
    assert refused.value.filename == path and not list(tmp_path.iterdir())


def test_missing_packages_are_named_as_in_pyproject_toml():
    setup = (ROOT / "pyproject.toml").read_text()
    assert [name for name in REQUIREMENTS.values() if f'"{name}' not in setup] == []


@pytest.mark.parametrize("kept", [slice(0, 0), slice(-3000), slice(300), slice(5000, None)])
def test_a_truncated_checkpoint_is_named_as_such(tmp_path, capsys, kept):
    torch.save({"model": {"weight": torch.ones(5000)}}, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[kept])
    for tool, arguments in NEEDED.items():
        if "none.pt" in arguments:
            words = arguments.replace("none.pt", f"{tmp_path}/cut.pt").replace("none", str(tmp_path)).split()
            with pytest.raises(SystemExit) as stopped:
                main([tool, *words[:-1], str(tmp_path / "out")])
            reason = "it is truncated or damaged; copy it again, or use another one"
            assert stopped.value.code == f"fairseq-rope {tool}: {tmp_path}/cut.pt is not a valid checkpoint: {reason}"
    assert [path.name for path in tmp_path.iterdir()] == ["cut.pt"]


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_scores_are_printed_where_the_output_has_no_dash(tmp_path, encoding):
    lines = "Das ist ein Satz für alle.\nUnd das ist noch einer.\n"
    for name in ("reference", "système", "other"):
        (tmp_path / name).write_text(lines, encoding="utf-8")
    files = ["--sys", tmp_path / "système", tmp_path / "other", "--ref", tmp_path / "reference"]
    command = [sys.executable, "-m", "fairseq_rope", "score", *files, "--target-lang", "de"]
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=180)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.decode(encoding)
    assert r"sacreBLEU \u2013 detokenised text" in printed and "100.00" in printed
    assert f"{tmp_path}/syst" + ("\xe8me" if encoding == "latin-1" else r"\xe8me") in printed


def test_a_file_is_complete_when_it_is_synced(tmp_path, monkeypatch):
    """A power cut after the sync must not leave a part of it."""
    sizes, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (sizes.append(os.fstat(number).st_size), fsync(number)))
    with written_whole(str(tmp_path / "a")) as (file,):
        file.write(b"x" * 10)
    assert sizes[0] == 10
