"""The command fairseq-rope: its tools, their help, and the errors that they share."""

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


@pytest.mark.parametrize("words, named", [("score --sys x --ref --src", "--ref"), ("scroe", "'scroe'")])
def test_a_wrong_command_line_ends_with_one_sentence_and_without_the_list_of_flags(capsys, words, named):
    with pytest.raises(SystemExit, match="2"):
        main(words.split())
    sentence, _ = capsys.readouterr().err.splitlines()
    assert named in sentence


@pytest.mark.parametrize("tool", ["average", "convert-layout", "translate"])
@pytest.mark.parametrize("output", ["/dev/null", ".", "none/out"])
def test_an_impossible_output_path_is_refused_before_any_input_is_read(tool, output):
    with pytest.raises(SystemExit, match=f"--output {output}: "):
        main([tool, *NEEDED[tool].split(), "--output", output])


@pytest.mark.parametrize("tool", ["average", "convert-layout", "export"])
def test_a_user_dir_and_files_are_looked_for_before_a_model_is_read(tmp_path, monkeypatch, tool):
    monkeypatch.chdir(tmp_path)
    words = [tool, *NEEDED[tool].split(), "--user-dir", "mine"]
    (tmp_path / "none").mkdir()
    with pytest.raises(SystemExit, match=f"fairseq-rope {tool}: none.pt: "):
        main(words)
    (tmp_path / "none.pt").touch()
    with pytest.raises(SystemExit, match=f"fairseq-rope {tool}: --user-dir mine: "):
        main(words)


@pytest.mark.parametrize("tool, missing", [("average", "torch"), ("export", "ctranslate2"), ("score", "sacrebleu")])
def test_a_missing_package_is_named_in_one_sentence(tmp_path, monkeypatch, tool, missing):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "none.pt").touch()
    (tmp_path / "none").mkdir()
    monkeypatch.setitem(sys.modules, missing, None)
    monkeypatch.delitem(sys.modules, "fairseq_rope.checkpoints")  # which average imports when it runs
    monkeypatch.setattr(fairseq_rope, "checkpoints", None, raising=False)  # so that it is restored, too
    with pytest.raises(SystemExit) as stopped:
        main([tool, *NEEDED[tool].split()])
    assert stopped.value.code.startswith(f"fairseq-rope {tool}: {missing} is not installed")
    assert REQUIREMENTS.get(missing, "docs/install.md") in stopped.value.code


@pytest.mark.parametrize("name", [None, "sacrebleu"])
def test_an_import_error_of_a_package_that_is_not_missing_is_printed(name):
    with pytest.raises(SystemExit, match="^program: cannot import name"), ending_in_one_sentence("program"):
        raise ImportError("cannot import name 'BLEU' from 'sacrebleu'", name=name)


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])  # an empty value has no effect
def test_a_tool_whose_output_cannot_be_written_says_why_unless_nobody_reads_it(tmp_path, unbuffered):
    (tmp_path / "test.de").write_text("ein Haus\n")
    score = ["score", "--sys", tmp_path / "test.de", "--ref", tmp_path / "test.de", "--target-lang", "de"]
    reader, unread = os.pipe()
    os.close(reader)
    with open("/dev/full", "w") as full, open(unread, "w") as unread:
        for stdout, expected in ((unread, (141, "")), (full, (1, "fairseq-rope score: No space left on device\n"))):
            env = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
            command = [sys.executable, "-m", "fairseq_rope", *score]
            options = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True, "timeout": LIMIT}
            done = subprocess.run(command, cwd=ROOT, env=env, **options)
            assert (done.returncode, done.stderr) == expected


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


def test_missing_packages_are_named_as_in_pyproject_toml():
    setup = (ROOT / "pyproject.toml").read_text()
    assert [name for name in REQUIREMENTS.values() if f'"{name}' not in setup] == []


@pytest.mark.parametrize("kept", [slice(0, 0), slice(-3000)])
def test_a_truncated_checkpoint_is_named_as_such(tmp_path, capsys, kept):
    torch.save({"model": {"weight": torch.ones(5000)}}, tmp_path / "cut.pt")
    (tmp_path / "cut.pt").write_bytes((tmp_path / "cut.pt").read_bytes()[kept])
    for tool, arguments in NEEDED.items():
        if "none.pt" in arguments:
            words = arguments.replace("none.pt", f"{tmp_path}/cut.pt").replace("none", str(tmp_path)).split()
            with pytest.raises(SystemExit) as stopped:
                main([tool, *words[:-1], str(tmp_path / "out")])
            assert stopped.value.code.startswith(f"fairseq-rope {tool}: {tmp_path}/cut.pt is not a valid checkpoint: ")
    assert [path.name for path in tmp_path.iterdir()] == ["cut.pt"]


@pytest.mark.slow
def test_scores_are_printed_where_the_output_has_no_dash(tmp_path):
    lines = "Das ist ein Satz für alle.\nUnd das ist noch einer.\n"
    for name in ("reference", "système", "other"):
        (tmp_path / name).write_text(lines, encoding="utf-8")
    files = ["--sys", tmp_path / "système", tmp_path / "other", "--ref", tmp_path / "reference"]
    command = [sys.executable, "-m", "fairseq_rope", "score", *files, "--target-lang", "de"]
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, timeout=180)
    assert done.returncode == 0, done.stderr
    printed = done.stdout.decode("latin-1")
    assert r"sacreBLEU \u2013 detokenised text" in printed and "100.00" in printed
    assert f"{tmp_path}/système" in printed


def test_a_file_is_complete_when_it_is_synced(tmp_path, monkeypatch):
    """A power cut after the sync must not leave a part of it."""
    sizes, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda number: (sizes.append(os.fstat(number).st_size), fsync(number)))
    with written_whole(str(tmp_path / "a")) as (file,):
        file.write(b"x" * 10)
    assert sizes[0] == 10
