"""fairseq-rope translate --output-dir and --shard: parts, refused lines, several starts, and kills."""

import contextlib
import gzip
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from pathlib import Path

import pytest

from fairseq_rope.locks import locked
from fairseq_rope.serving import parts
from fairseq_rope.serving.exported_folder import SETTINGS
from fairseq_rope.serving.translator import LINES, Translator
from fairseq_rope.tools import translate
from tests.commands import ENVIRONMENT, LIMIT, ROOT, default_signals
from tests.serving.exports import sentences

ODD = ["", "the dog\r", "a cat\u2028sees", "  ", "\x0bbig", "the\tbook", "house\x85red"]  # only \n ends a line
BAD = {
    3: (b"\xff dog", "the byte 0xff is not UTF-8"),
    10: (b"x" * 40_000, "has 40000 characters, more than the limit of 32768: split the line"),
    11: (b"x" * 300_000, "has more than 32768 characters: split the line"),
    25: (b"dog " * 5000, "has 5000 tokens, more than the limit of this model, 4096: split the line"),
}


def write(path, lines, end="\n"):
    data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + end.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def start(model, folder, inputs, *flags):
    words = [sys.executable, "-m", "fairseq_rope", "translate", "--model", model, "--output-dir", folder, *flags]
    return subprocess.Popen(
        [*map(str, words), "--threads", "1", "--input", *map(str, inputs)], cwd=ROOT, env=ENVIRONMENT,
        preexec_fn=default_signals, stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8",
    )  # fmt: skip


def end(process):
    _, err = process.communicate(timeout=LIMIT)
    return process.returncode, err


def outputs(folder):
    return {path.name: path.read_bytes().decode().split("\n")[:-1] for path in folder.iterdir() if path.is_file()}


class Here:
    """In place of ProcessPoolExecutor: calls functions at once. Notes the GPUs, and the first lines of parts."""

    def __init__(self, jobs, context, begin, initargs):
        next_place = initargs[1].get
        self.places, self.parts, Here.last = [next_place() for _ in range(jobs)], [], self

    __enter__, __exit__ = (lambda self: self), (lambda self, *_: None)

    def submit(self, function, *args):
        self.parts.append(args[2])
        future = Future()
        future.set_result(function(*args))
        return future


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """run(*flags): the command in this process and the folder *tmp_path*. Returns its error or None."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(parts, "ProcessPoolExecutor", Here)

    def run(*flags):
        try:
            translate.main(["--model", str(model), *map(str, flags)])
        except SystemExit as stopped:
            return str(stopped.code).removeprefix("fairseq-rope translate: ")

    return run


@pytest.mark.slow
@pytest.mark.parametrize("jobs", [1, 3])
def test_the_output_equals_that_of_one_process_without_parts(model, tmp_path, monkeypatch, jobs):
    monkeypatch.delattr(signal, "SIGPIPE")
    plain = write(tmp_path / "plain.en", ["\ufeffthe dog", *ODD, *sentences(200)], end="")
    compressed = write(tmp_path / "packed.en.gz", [*sentences(12, seed=2), *ODD, ""])
    (tmp_path / "empty.en").touch()
    inputs = [plain, compressed, tmp_path / "empty.en"]
    assert end(start(model, tmp_path / "out", inputs, "--jobs", jobs)) == (0, "")
    expected = {"empty.en": []}
    for path in (plain, compressed):
        translate.main(["--model", str(model), "--input", str(path), "--output", str(tmp_path / "one")])
        expected[path.name.removesuffix(".gz")] = (tmp_path / "one").read_bytes().decode().split("\n")[:-1]
    assert outputs(tmp_path / "out") == expected and [*map(len, expected.values())] == [0, 208, 20]
    assert {path.suffix for path in (tmp_path / "out" / "parts").iterdir()} == {"", ".digest"}


@pytest.mark.parametrize("name", ["in", "in.gz"])
def test_lines_that_cannot_be_translated_are_empty_and_listed(model, run, tmp_path, capsys, name):
    lines = sentences(30)
    with Translator(str(model)) as translator:
        expected = translator.translate(lines)
    for number, (line, _) in BAD.items():
        lines[number - 1], expected[number - 1] = line, ""
    write(tmp_path / name, lines)
    assert run("--input", name, "--output-dir", "out") is None
    listed = [f"{number}\t{reason}" for number, (_, reason) in BAD.items()]
    assert outputs(tmp_path / "out") == {"in": expected, "in.refused.tsv": listed}
    assert f"{name}: lines that were not translated and are empty: 4, listed in out/in" in capsys.readouterr().err


@pytest.mark.parametrize("lines", [0, 1, 5, 2000, 100_000, 5_000_000])
def test_parts_follow_each_other_and_long_ones_begin_with_a_chunk(lines):
    for count in (1, 3, 64, 257):
        divided = parts.divide(lines, count)
        assert [0, *(part.stop for part in divided)] == [*(part.start for part in divided), lines]
        if lines >= count * LINES:
            assert all(part.start % LINES == 0 and len(part) for part in divided)


@pytest.mark.parametrize("name, shards", [("in", 3), ("in.gz", 8)])
def test_the_shards_joined_are_the_translation_of_the_whole(model, run, tmp_path, monkeypatch, name, shards):
    monkeypatch.delattr(signal, "SIGPIPE")
    monkeypatch.setattr(parts, "LINES", 4)  # so that each of 3 shards begins with a chunk
    write(tmp_path / name, [*sentences(24), *ODD])
    assert run("--input", name, "--output-dir", "whole") is None
    for number in range(1, shards + 1):
        shard = ("--input", name, "--shard", f"{number}/{shards}")
        assert run(*shard, "--output-dir", f"dir{number}") is None
    texts = (Path(f"dir{number}/in").read_bytes() for number in range(1, shards + 1))
    assert b"".join(texts) == Path("whole/in").read_bytes()


def test_a_model_a_search_or_an_input_that_changes_does_not_mix_with_finished_parts(model, run, tmp_path, monkeypatch):
    write(tmp_path / "in", sentences(40))
    shutil.copytree(model, tmp_path / "copy")
    monkeypatch.setattr(parts, "LINES", 2)
    monkeypatch.setattr(parts, "LONGEST_PART", 10)
    with monkeypatch.context() as patch:
        patch.setattr(parts.Source, "join", lambda self: None)
        assert run("--input", "in", "--output-dir", "out") is None and Here.last.parts == [1, 11, 21, 31]
        assert run("--input", "in", "--output-dir", "out", "--model", "copy", "--threads", 3) is None
        assert not Here.last.parts, "the same model at another path"
        settings = json.loads(Path("copy", SETTINGS).read_text())
        Path("copy", SETTINGS).write_text(json.dumps({**settings, "checkpoint": "another"}))
        for flags in (["--beam", 2], ["--replace-unk"], ["--no-shortlist"], ["--model", "copy"], ["--shard", "1/2"]):
            assert run("--input", "in", "--output-dir", "out", *flags) is None
            assert Here.last.parts == ([1, 11] if "1/2" in flags else [1, 11, 21, 31])
        assert run("--input", "in", "--output-dir", "out", "--jobs", 3) is None
        assert Here.last.parts == [1, 7, 13, 21, 27, 33], "as many parts for each process"
    assert run("--input", "in", "--output-dir", "out", "--beam", 2, "--lenpen", 3) is None
    with Translator(str(model), beam=2, lenpen=3.0) as translator:
        assert outputs(tmp_path / "out")["in"] == translator.translate(sentences(40))
    other = "out/in exists, and is not from this input, model and search; remove it, or give another folder"
    assert run("--input", "in", "--output-dir", "out") == f"--output-dir: {other}"
    os.utime("in", (5, 5))
    assert other in run("--input", "in", "--output-dir", "out", "--beam", 2, "--lenpen", 3)


def processes(*which):
    """The processes that *which* selects, which have not ended, and their commands."""
    words = ["ps", *which, "-ww", "-o", "pid=,stat=,command="]
    listed = subprocess.run(words, capture_output=True, text=True, check=False, timeout=LIMIT).stdout
    rows = (line.split(maxsplit=2) for line in listed.splitlines())
    return {int(pid): "".join(command) for pid, stat, *command in rows if not stat.startswith("Z")}


def until(condition):
    limit = time.monotonic() + LIMIT / 5
    while not (result := condition()):
        assert time.monotonic() < limit
        time.sleep(0.02)
    return result


@pytest.fixture(scope="module")
def files(model, tmp_path_factory):
    """Two inputs, and their outputs if nothing is killed."""
    folder = tmp_path_factory.mktemp("killed")
    inputs = [write(folder / "a", [*sentences(300), b"\xff"]), write(folder / "b.gz", sentences(200, seed=2))]
    assert end(start(model, folder / "out", inputs, "--jobs", 2))[0] == 0
    return inputs, outputs(folder / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    "whose, sent, status",
    [("command", signal.SIGKILL, -9), ("command", signal.SIGTERM, 143), ("command", signal.SIGINT, 130),
     ("process", signal.SIGKILL, -9)],
)  # fmt: skip
def test_after_kills_at_random_moments_the_same_command_continues(model, tmp_path, files, whose, sent, status):
    inputs, expected = files
    for _ in range(2):
        running = start(model, tmp_path / "out", inputs, "--jobs", 2)
        # It starts no process if the start before has finished.
        until(lambda command=running: processes("--ppid", str(command.pid)) or command.poll() is not None)
        found = processes("--ppid", str(running.pid))
        time.sleep(random.uniform(0, 3))
        workers = [
            str(pid)
            for pid, command in (found | processes("--ppid", str(running.pid))).items()
            if "spawn_main" in command
        ]
        if whose == "command":
            running.send_signal(sent)
        elif running.poll() is None and workers:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(int(workers[0]), sent)
        code, err = end(running)
        # A signal that comes before the command handles it ends it as any other program.
        assert code in (0, status, -sent) if whose == "command" else code == 0 or "command continues" in err
        until(lambda workers=workers: not processes("-p", ",".join(workers) or "0"))
    assert end(start(model, tmp_path / "out", inputs, "--jobs", 2))[0] == 0 and outputs(tmp_path / "out") == expected
    assert {path.suffix for path in (tmp_path / "out" / "parts").iterdir()} == {"", ".digest"}, "parts are removed"


def test_two_commands_do_not_translate_into_the_same_folder_and_a_finished_one_is_not_repeated(run, tmp_path, capsys):
    write(tmp_path / "a", sentences(2))
    (tmp_path / "out" / "parts").mkdir(parents=True)
    with locked(tmp_path / "out" / "parts" / "lock"):
        assert "--output-dir out: " in run("--input", "a", "--output-dir", "out")
    for _ in range(2):
        assert run("--input", "a", "--output-dir", "out") is None
    assert not Here.last.parts and capsys.readouterr().out == "out/a: done before\n"


def test_each_gpu_has_a_process(run, tmp_path, monkeypatch):
    write(tmp_path / "a", sentences(2))
    monkeypatch.setattr("ctranslate2.get_cuda_device_count", lambda: 2)
    monkeypatch.setattr(parts, "_translate", lambda *args: Path(args[-1]).write_text('[["x"], []]'))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    for count, (flags, places) in enumerate({(): ["5", "7"], ("--jobs", 3): ["5", "7", "5"]}.items()):
        assert run("--input", "a", "--output-dir", count, "--device", "cuda", *flags) is None
        assert Here.last.places == places


@pytest.mark.parametrize(
    "words, message",
    [
        (["--output-dir", "out"], "--output-dir: "),
        (["--output-dir", "out", "--input", "a", "--output", "b"], "--output-dir: "),
        (["--output-dir", "out", "--input", "a", "folder/a.gz"], "--input a: "),
        (["--output-dir", "out", "--input", "gzipped"], "--input gzipped: "),
        (["--output-dir", "out", "--input", "cut.gz"], "cut.gz: "),
        (["--output-dir", "folder", "--input", "folder/a.gz"], "folder/a exists"),
        (["--output-dir", "out", "--input", "a", "--shard", "3/2"], "--shard 3/2: "),
    ],
)
def test_wrong_flags_and_files_are_refused_in_one_sentence(run, tmp_path, words, message):
    (tmp_path / "folder").mkdir()
    for name in ("a", "b", "folder/a"):
        write(tmp_path / name, ["a dog"])
    write(tmp_path / "text.gz", ["a dog"]).rename("gzipped")
    (tmp_path / "cut.gz").write_bytes(write(tmp_path / "folder" / "a.gz", ["a dog"]).read_bytes()[:-9])
    sentence = run(*words)
    assert message in sentence and "\n" not in sentence and (tmp_path / "folder" / "a").read_text() == "a dog\n"
