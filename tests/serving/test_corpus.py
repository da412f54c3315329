"""fairseq-rope translate --output-dir: shards, refused lines, several starts, and processes that are killed."""

import gzip
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

import fairseq_rope.serving
from fairseq_rope.launch.jobs import Launcher, Outcome
from fairseq_rope.locks import locked, note_holder
from fairseq_rope.serving import corpus, shards
from fairseq_rope.serving.exported_folder import SETTINGS
from fairseq_rope.serving.translator import Translator
from fairseq_rope.tools import translate
from tests.commands import ENVIRONMENT, LIMIT, ROOT, default_signals, run_program

WORDS = "the a dog cat sees takes red blue big old house book under over".split()
ODD = ["", "the dog\r", "a cat\u2028sees", "  ", "\x0bbig", "the\tbook", "house\x85red"]  # only \n ends a line


def sentences(count, seed=1):
    draw = random.Random(seed)
    return [" ".join(draw.choices(WORDS, k=draw.randint(1, 8))) for _ in range(count)]


def write(path, lines, end="\n"):
    """Write *lines*, texts or bytes, to *path*, whose name may end with .gz."""
    data = b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines) + end.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def words_of(model, folder, inputs, *flags):
    flags = [*map(str, flags)] if "--shard-lines" in flags else ["--shard-lines", "10", *map(str, flags)]
    return ["--model", str(model), "--output-dir", str(folder), "--threads", "1", *flags, "--input", *map(str, inputs)]


def start(model, folder, inputs, *flags):
    """Start the command as a user does."""
    words = [sys.executable, "-m", "fairseq_rope", "translate", *words_of(model, folder, inputs, *flags)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    return subprocess.Popen(words, cwd=ROOT, env=ENVIRONMENT, preexec_fn=default_signals, **pipes)


def end(process):
    """Wait for the end of *process*. Returns its status and what it printed to standard error."""
    _, err = process.communicate(timeout=LIMIT)
    return process.returncode, err


def outputs(folder):
    """The names of the files in *folder*, and their lines."""
    texts = {path.name: path.read_bytes().decode() for path in folder.iterdir() if path.is_file()}
    assert all(text.endswith("\n") or not text for text in texts.values())
    return {name: text.split("\n")[:-1] for name, text in texts.items()}


@pytest.fixture
def translated_shards(monkeypatch):
    """Translate the shards in this process. The value is a list of those that have been begun."""
    begun = []

    def outcomes(tasks, function, *_):
        for task in tasks:
            begun.append(str(task))
            yield Outcome(task, function(task), "")

    monkeypatch.setattr(corpus, "outcomes", outcomes)
    return begun


@pytest.fixture
def run(model, tmp_path, translated_shards, monkeypatch, capsys):
    """run(inputs, *flags): the command in this process, in the folder *tmp_path*. Returns its error or None."""
    monkeypatch.chdir(tmp_path)

    def run(inputs, *flags):
        translated_shards.clear()
        try:
            translate.main(words_of(model, "out", inputs, *flags))
        except SystemExit as stopped:
            if isinstance(stopped.code, int):
                return stopped.code
            assert stopped.code.startswith("fairseq-rope translate: ") and "\n" not in stopped.code
            return stopped.code.removeprefix("fairseq-rope translate: ")

    return run


# -- results -----------------------------------------------------------------------------------------


def test_the_output_has_the_lines_that_translate_writes_for_plain_and_compressed_files(model, tmp_path, monkeypatch):
    monkeypatch.delattr(signal, "SIGPIPE")
    plain = write(tmp_path / "plain.en", ["\ufeffthe dog", *ODD, *sentences(14)], end="")
    compressed = write(tmp_path / "packed.en.gz", [*sentences(12, seed=2), *ODD, ""])
    (tmp_path / "empty.en").touch()
    inputs = [plain, compressed, tmp_path / "empty.en"]
    assert end(start(model, tmp_path / "out", inputs, "--jobs", 2)) == (0, "")
    expected = {"empty.en": []}
    for path in (plain, compressed):
        translate.main(["--model", str(model), "--input", str(path), "--output", str(tmp_path / "one")])
        expected[path.name.removesuffix(".gz")] = (tmp_path / "one").read_bytes().decode().split("\n")[:-1]
    assert list(map(len, expected.values())) == [0, 22, 20]
    assert outputs(tmp_path / "out") == expected
    left = {path.name for path in (tmp_path / "out" / "shards").iterdir()}
    assert left == {"plan.json", "lock", "0.joined", "1.joined", "2.joined"}


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no PYTHONSAFEPATH")
def test_processes_do_not_import_modules_of_the_current_folder(model, tmp_path):
    """A folder of a translator's own programs can have a tokenize.py, a name of Python's own modules."""
    for name in ("tokenize.py", "queue.py"):
        (tmp_path / name).write_text("raise SystemExit('imported')\n")
    write(tmp_path / "a", ["the dog"])
    run_program("fairseq-rope", "translate", *words_of(model, tmp_path / "out", [tmp_path / "a"]), cwd=tmp_path)
    assert list(map(len, outputs(tmp_path / "out").values())) == [1]


LONE = b"a \xed\xa0\x80 dog"  # a lone surrogate, which is not UTF-8
BAD = {
    3: (b"\xff dog", "the byte 0xff is not UTF-8"),
    10: (b"x" * 40_000, "has 40000 characters, more than the limit of 32768: split the line"),
    11: (b"x" * 300_000, "has more than 32768 characters: split the line"),
    12: (LONE, "the byte 0xed is not UTF-8"),
    25: (b"dog " * 5000, "has 5000 tokens, more than the limit of this model, 4096: split the line"),
}


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize("name", ["in", "in.gz"])
def test_lines_that_cannot_be_translated_are_empty_and_listed(
    model, run, tmp_path, capsys, monkeypatch, name, in_pieces
):
    if in_pieces:  # as with files of many megabytes, and shards of more than 512 lines
        for module in (shards, corpus):
            monkeypatch.setattr(module, "BLOCK", 7)
        monkeypatch.setattr(shards, "LINES", 3)
    lines = sentences(30)
    with Translator(str(model)) as translator:
        expected = translator.translate(lines)
    for number, (line, _) in BAD.items():
        lines[number - 1], expected[number - 1] = line, ""
    write(tmp_path / name, lines)
    assert run([name]) is None
    listed = [f"{number}\t{reason}" for number, (_, reason) in BAD.items()]
    assert outputs(tmp_path / "out") == {"in": expected, "in.refused.tsv": listed}
    warning = f"{name}: lines that were not translated and are empty: 5, listed in out/in.refused.tsv"
    assert warning in capsys.readouterr().err


def test_strict_ends_at_a_refused_line_and_keeps_the_finished_shards(run, tmp_path, translated_shards):
    lines = sentences(30)
    lines[14] = BAD[3][0]
    write(tmp_path / "in", lines)
    sentence = "in, line 15: the byte 0xff is not UTF-8"
    assert run(["in"], "--strict") == sentence
    assert translated_shards == ["lines 1 to 10 of in", "lines 11 to 20 of in"]
    assert run(["in"], "--strict") == sentence and translated_shards == ["lines 11 to 20 of in"]
    assert run(["in"]) is None and translated_shards == ["lines 11 to 20 of in", "lines 21 to 30 of in"]
    assert len(outputs(tmp_path / "out")["in"]) == 30
    assert run(["in"], "--strict") == sentence and not translated_shards, "a line that an earlier start refused"


def test_the_flags_of_the_search_are_used(model, run, tmp_path):
    lines = sentences(12)
    write(tmp_path / "in", lines)
    assert run(["in"], "--beam", 2, "--lenpen", 3.0) is None
    with Translator(str(model)) as translator:
        assert outputs(tmp_path / "out")["in"] == translator.translate(lines, 2, 3.0) != translator.translate(lines)


@pytest.mark.parametrize("flags, expected", [((), (True, False)), (("--no-shortlist", "--replace-unk"), (False, True))])
def test_the_flags_reach_the_translator_of_each_shard(run, tmp_path, monkeypatch, flags, expected):
    made = []

    class Noted(Translator):
        def __init__(self, folder, threads, device, shortlist, replace_unk, sampling):
            super().__init__(folder, threads, device, shortlist, replace_unk, sampling)
            made.append((self, (shortlist, replace_unk)))

    monkeypatch.setattr(shards, "Translator", Noted)
    write(tmp_path / "in", sentences(12))
    assert run(["in"], "--max-len-b", 3, *flags) is None
    assert [options for _, options in made] == [expected] * 2
    assert {translator.settings["max_len_b"] for translator, _ in made} == {3}
    assert all(len(line.split()) <= 15 for line in outputs(tmp_path / "out")["in"])


def test_a_corpus_has_the_same_draws_with_any_number_of_processes_and_after_an_interruption(
    model, run, tmp_path, monkeypatch
):
    lines = [*sentences(24), "x" * 40_000, *["the dog sees a cat"] * 15]
    for name in ("a", "b"):
        write(tmp_path / name, lines)
    flags = ["--sampling", "--seed", 5]
    assert end(start(model, tmp_path / "side", [tmp_path / "a", tmp_path / "b"], *flags, "--jobs", 2))[0] == 0
    translate_shard = corpus.translate_shard
    with monkeypatch.context() as patch:

        def interrupted(how, shard):
            if shard.first == 21:
                raise KeyboardInterrupt
            translate_shard(how, shard)

        patch.setattr(corpus, "translate_shard", interrupted)
        assert run(["a", "b"], *flags) == 130
    was = "--seed was 5 when --output-dir out was begun, and is now 6"
    assert was in run(["a", "b"], "--sampling", "--seed", 6)
    assert "--sampling was used when --output-dir out was begun, and is now not used" in run(["a", "b"])
    assert "--sampling-topk was all words when" in run(["a", "b"], *flags, "--sampling-topk", 3)
    assert run(["a", "b"], *flags) is None
    for name in ("a", "b", "a.refused.tsv", "b.refused.tsv"):
        assert (tmp_path / "out" / name).read_text() == (tmp_path / "side" / name).read_text()
    first, second = ((tmp_path / "out" / name).read_text().splitlines() for name in ("a", "b"))
    assert first != second and first[24] == "" and len(first) == len(second) == 40
    assert first[25:30] != first[30:40:2], "the same lines in two shards have other draws"


# -- several starts ----------------------------------------------------------------------------------


def test_a_second_start_continues_and_a_third_one_says_that_all_is_done(
    run, tmp_path, monkeypatch, capsys, translated_shards
):
    write(tmp_path / "a", sentences(25))
    write(tmp_path / "b.gz", sentences(8, seed=2))
    bars, translate_shard, progress = [], corpus.translate_shard, translate._progress
    monkeypatch.setattr(translate, "_progress", lambda **options: bars.append(options) or progress(**options))
    with monkeypatch.context() as patch:

        def interrupted(how, shard):
            if shard.first == 11:
                raise KeyboardInterrupt
            translate_shard(how, shard)

        patch.setattr(corpus, "translate_shard", interrupted)
        assert run(["a", "b.gz"]) == 130
    assert run(["a", "b.gz"]) is None
    assert translated_shards == ["lines 11 to 20 of a", "lines 21 to 25 of a", "lines 1 to 8 of b.gz"]
    first = {name: (tmp_path / "out" / name).stat() for name in ("a", "b")}
    capsys.readouterr()
    assert run(["a", "b.gz"]) is None and not translated_shards
    assert capsys.readouterr().out == "out/a: done before\nout/b: done before\n"
    assert {name: (tmp_path / "out" / name).stat() for name in ("a", "b")} == first
    assert [(bar["total"], bar["initial"]) for bar in bars] == [(33, 0), (33, 10), (33, 33)]


def change_setting(model, name, value):
    settings = json.loads((model / SETTINGS).read_text())
    (model / SETTINGS).write_text(json.dumps({**settings, name: value}))


@pytest.mark.parametrize(
    "change, flags, inputs, message",
    [
        (None, ["--beam", 2], "ab", "--beam was 4 when --output-dir out was begun, and is now 2: give the"),
        (None, ["--replace-unk"], "ab", "--replace-unk was False when --output-dir out was begun, and is now True"),
        (None, ["--no-shortlist"], "ab", "--no-shortlist was False when --output-dir out was begun, and is now True"),
        (None, ["--shard-lines", 9], "ab", "--shard-lines was 10 when --output-dir out was begun, and is now 9"),
        (None, [], "ba", "--input was {0}/a {0}/b when --output-dir out was begun, and is now {0}/b {0}/a: give"),
        (lambda folder: (folder / "a").write_text("dog\n"), [], "ab", "--input {0}/a was 6 bytes of 20"),
        (lambda folder: os.utime(folder / "b", ns=(5, 5)), [], "ab", "1970-01-01 00:00:00.000000005 UTC: give the"),
        (lambda folder: change_setting(folder / "model", "moses", None), [], "ab", "--model: the SHA-256 of fairseq_"),
    ],
)  # fmt: skip
def test_a_start_with_other_settings_is_refused(
    model, run, tmp_path, translated_shards, change, flags, inputs, message
):
    shutil.copytree(model, tmp_path / "model")
    write(tmp_path / "a", ["a dog"])
    write(tmp_path / "b", ["b"])
    assert run("ab", "--model", "model") is None
    (change or bool)(tmp_path)
    sentence = run(inputs, "--model", "model", *flags)
    assert message.format(tmp_path) in sentence and sentence.endswith("give the same value, or another --output-dir")


def test_another_path_of_the_same_model_and_other_processes_are_possible(model, run, tmp_path, translated_shards):
    shutil.copytree(model, tmp_path / "model")
    write(tmp_path / "a", sentences(12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_join", lambda file: sys.exit("fairseq-rope translate: stopped"))
        assert run(["a"]) == "stopped" and len(translated_shards) == 2
    assert run([tmp_path / "a"], "--model", "model", "--jobs", 3, "--threads", 2) is None and not translated_shards
    assert len(outputs(tmp_path / "out")["a"]) == 12


def test_an_input_that_changes_while_it_is_translated_is_refused(run, tmp_path, monkeypatch):
    write(tmp_path / "a", sentences(30))
    translate_shard = corpus.translate_shard

    def changing(how, shard):
        translate_shard(how, shard)
        write(tmp_path / "a", sentences(31))

    monkeypatch.setattr(corpus, "translate_shard", changing)
    assert run(["a"]) == "--input a: has changed since its first lines were translated"


def test_a_model_that_is_replaced_while_it_translates_is_refused(model, run, tmp_path, monkeypatch):
    shutil.copytree(model, tmp_path / "model")
    write(tmp_path / "a", sentences(30))
    translate_shard = corpus.translate_shard

    def replacing(how, shard):
        translate_shard(how, shard)
        change_setting(tmp_path / "model", "checkpoint", "another.pt")

    with monkeypatch.context() as patch:
        patch.setattr(corpus, "translate_shard", replacing)
        assert run(["a"], "--model", "model") == "--model model: has changed since the first lines were translated"
    assert len(list((tmp_path / "out" / "shards").glob("*.txt"))) == 1, "only the shard of the first model"


def test_a_damaged_gzip_file_is_refused_before_work_begins(run, tmp_path, translated_shards):
    whole = gzip.compress("\n".join(sentences(30)).encode())
    (tmp_path / "in.gz").write_bytes(whole[:-9])
    assert run(["in.gz"]).startswith("in.gz: is not a valid gzip file (") and not translated_shards
    (tmp_path / "in.gz").write_bytes(whole)
    assert run(["in.gz"]) is None and len(translated_shards) == 3


OF_SLURM = ["--output-dir", "out", "--input", "a", "--launcher", "slurm", "--slurm", "time=9"]

# -- refusals ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words, message",
    [
        (["--input", "a", "b"], "--input a b: must be one file without --output-dir"),
        (["--input", "a", "--jobs", "2"], "--jobs 2: needs --output-dir"),
        (["--input", "a", "--shard-lines", "2"], "--shard-lines 2: needs --output-dir"),
        (["--strict"], "--strict: needs --output-dir"),
        (["--launcher", "slurm", "--slurm", "time=9"], "--launcher slurm: needs --output-dir"),
        (OF_SLURM[:-2], "--launcher slurm: needs --slurm time=MINUTES"),
        (["--output-dir", "out", "--input", "a", "--slurm", "time=9"], "--slurm time=9: needs --launcher slurm"),
        ([*OF_SLURM, "--slurm", "tme=9"], "--launcher slurm --slurm time=9 tme=9: "),
        (["--output-dir", "out"], "--output-dir: needs --input with files, and cannot read standard input"),
        (["--output-dir", "out", "--input", "a", "-"], "--output-dir: needs --input with files, and cannot read"),
        (["--output-dir", "out", "--input", "a", "--output", "b"], "--output b: is not supported with --output-dir"),
        (["--output-dir", "out", "--input", "a", "--nbest", "2"], "--nbest 2: is not supported with --output-dir"),
        (["--output-dir", "out", "--input", "a", "--documents"], "--documents: is not supported with --output-dir"),
        (["--output-dir", "out", "--input", "none"], "--input none: does not exist"),
        (["--output-dir", "out", "--input", "folder"], "--input folder: must be a file"),
        (["--output-dir", "a", "--input", "b"], "--output-dir a: must be a folder, or not exist"),
        (["--output-dir", "out", "--input", "a", "folder/a.gz"], "the outputs of this file and of a would both be a"),
        (["--output-dir", "out", "--input", "a.tmp", "a"], "this file and of a.tmp would both be a.tmp; rename one"),
        (["--output-dir", "out", "--input", "a", "a.refused.tsv"], "would both be a.refused.tsv; rename one of them"),
        (["--output-dir", "out", "--input", "folder/shards"], "an output cannot have the name 'shards'; rename the in"),
        (["--output-dir", "out", "--input", "gzipped"], "--input gzipped: is compressed with gzip; its name must"),
        (["--output-dir", "100%all", "--input", "a"], "/100%all: must not contain %a, which stands for a job's number"),
        (["--output-dir", "other", "--input", "b"], "--output-dir: other/b exists already; remove it, or give another"),
        (["--output-dir", "other", "--input", "other/b"], "--output-dir other: other/b is an input; give"),
        (["--input", "other/b", "--output", "other/b"], "--output other/b: is the input; give another file"),
        (["--output-dir", "foreign", "--input", "b"], "its folder shards is not of this command; give another folder"),
        (["--output-dir", "out", "--input", "b", "--model", "folder"], "--model folder: must be a folder"),
    ],
)  # fmt: skip
def test_contradictions_are_refused_in_one_sentence_and_leave_nothing(model, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("submitit.slurm.slurm.shutil.which", lambda name: "/usr/bin/srun")
    for name in ("folder", "other", "foreign/shards"):
        Path(name).mkdir(parents=True)
    for name in "a b a.tmp a.refused.tsv folder/a.gz folder/shards other/b foreign/shards/mine".split():
        Path(name).touch()
    write(Path("text.gz"), ["a dog"]).rename("gzipped")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stopped:
        translate.main(["--model", str(model), *words])
    assert message in stopped.value.code and "\n" not in stopped.value.code
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("flag, value", [("--jobs", "0"), ("--shard-lines", "0")])
def test_numbers_out_of_their_range_are_refused(capsys, flag, value):
    with pytest.raises(SystemExit, match="^2$"):
        translate.main(["--model", "model", "--output-dir", "out", flag, value])
    assert f"{flag} {value}: must be an integer from 1 to 1000000" in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "{}", '{"settings": {}}', '{"settings": [1], "files": []}', '{"settings": {}, "files": [{}]}'],
)
def test_a_damaged_plan_is_refused_by_name(run, tmp_path, content):
    write(tmp_path / "a", sentences(2))
    assert run(["a"]) is None
    (tmp_path / "out" / "shards" / "plan.json").write_text(content)
    assert run(["a"]) == "--output-dir out: out/shards/plan.json is damaged; give another folder"


def test_two_processes_do_not_translate_into_the_same_folder(run, tmp_path):
    write(tmp_path / "a", sentences(2))
    (tmp_path / "out" / "shards").mkdir(parents=True)
    with locked(tmp_path / "out" / "shards" / "lock") as lock:
        note_holder(lock.descriptor)
        assert f"out: another process is translating into it: process {os.getpid()}, since 2" in run(["a"])
    assert run(["a"]) is None


def test_an_output_that_is_foreign_or_was_removed_is_not_written_again(run, tmp_path, monkeypatch):
    write(tmp_path / "a", sentences(12))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "_join", lambda file: sys.exit("fairseq-rope translate: stopped"))
        assert run(["a"]) == "stopped"
    (tmp_path / "out" / "a").write_text("mine")
    assert run(["a"]) == "--output-dir: out/a is not from this command; remove it, or give another folder"
    (tmp_path / "out" / "a").unlink()
    assert run(["a"]) is None
    (tmp_path / "out" / "a").unlink()
    assert run(["a"]) == "--output-dir: out/a was finished and is gone; to translate a again, give another folder"


def test_submitit_is_named_if_it_is_missing(model, tmp_path, monkeypatch):
    for name in list(sys.modules):
        if name.startswith(("submitit", "fairseq_rope.launch", "fairseq_rope.serving.corpus")):
            monkeypatch.delitem(sys.modules, name)
    for parent, name in ((fairseq_rope, "launch"), (fairseq_rope.serving, "corpus")):  # a new import replaces them
        monkeypatch.setattr(parent, name, getattr(parent, name))
    monkeypatch.setitem(sys.modules, "submitit", None)
    path = write(tmp_path / "a", ["a"])
    with pytest.raises(SystemExit, match="^fairseq-rope translate: submitit is not installed: pip install 'submitit>"):
        translate.main(words_of(model, tmp_path / "out", [path]))


# -- processes that are killed -----------------------------------------------------------------------


def processes():
    """The number, the parent's number, the state and the command of each process."""
    words = ["ps", "-e", "-ww", "-o", "pid=,ppid=,stat=,command="]
    listed = subprocess.run(words, capture_output=True, text=True, check=True, timeout=LIMIT).stdout
    rows = (line.split(maxsplit=3) for line in listed.splitlines())
    return [(int(pid), int(parent), state, "".join(command)) for pid, parent, state, *command in rows]


def descendants(process):
    """The numbers of the processes that *process* has started, and that these have started, with their commands."""
    rows, commands = processes(), {process.pid: ""}
    for _ in range(4):
        commands.update({pid: command for pid, parent, _, command in rows if parent in commands})
    del commands[process.pid]
    return commands


def running(pids):
    return [pid for pid, _, state, _ in processes() if pid in pids and not state.startswith("Z")]


def until(condition, what):
    limit = time.monotonic() + LIMIT / 5
    while not (result := condition()):
        assert time.monotonic() < limit, f"waited for {what}"
        time.sleep(0.02)
    return result


def translating(process):
    """The processes that translate shards for *process*, when there is one."""

    def of_shards():
        return [pid for pid, command in descendants(process).items() if "submitit.core._submit" in command]

    return until(of_shards, "a process of a shard")


@pytest.fixture(scope="module")
def killed_runs(model, tmp_path_factory):
    """Two inputs, and their outputs if nothing is killed."""
    folder = tmp_path_factory.mktemp("killed")
    inputs = [write(folder / "a", [*sentences(30), b"\xff"]), write(folder / "b.gz", sentences(12, seed=2))]
    assert end(start(model, folder / "out", inputs, "--jobs", 2, "--shard-lines", 16))[0] == 0
    return inputs, outputs(folder / "out")


def test_a_killed_process_fails_its_shard_only_and_the_same_command_continues(model, tmp_path, killed_runs):
    inputs, expected = killed_runs
    flags = ("--shard-lines", 16)
    process = start(model, tmp_path / "out", inputs, *flags)
    os.kill(translating(process)[0], signal.SIGKILL)
    status, err = end(process)
    assert status == 1
    (log,) = (tmp_path / "out" / "shards" / "jobs").rglob("*_log.out")
    reason = f"lines 1 to 16 of {inputs[0]}: its process ended without a result (log: {log})"
    assert err.splitlines()[-1] == (
        f"fairseq-rope translate: 1 of 3 shards failed, and the same command continues: {reason}"
    )
    assert outputs(tmp_path / "out") == {"b": expected["b"]}
    assert end(start(model, tmp_path / "out", inputs, *flags))[0] == 0
    assert outputs(tmp_path / "out") == expected


@pytest.mark.parametrize(
    "sent, status", [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow)]
)
def test_a_signal_ends_the_command_and_its_processes_quietly(model, tmp_path, killed_runs, sent, status):
    process = start(model, tmp_path / "out", killed_runs[0], "--jobs", 2)
    translating(process)
    pids = descendants(process)
    process.send_signal(sent)
    assert end(process) == (status, "")
    assert running(pids) == []


MOMENTS = [0.4, *(pytest.param(moment, marks=pytest.mark.slow) for moment in (1.0, 2.0))]


@pytest.mark.parametrize("seconds", MOMENTS)
def test_after_a_kill_of_the_command_its_processes_end_and_the_next_start_continues(
    model, tmp_path, killed_runs, seconds
):
    inputs, expected = killed_runs
    flags = ("--jobs", 2, "--shard-lines", 16)
    process = start(model, tmp_path / "out", inputs, *flags)
    time.sleep(seconds)
    if seconds == 0.4:  # the moment is that of a shard
        translating(process)
    pids = descendants(process)
    process.kill()
    process.communicate(timeout=LIMIT)
    again = start(model, tmp_path / "out", inputs, *flags)  # at once, while the others may still be ending
    assert end(again)[0] == 0
    assert outputs(tmp_path / "out") == expected
    until(lambda: not running(pids), "the end of the processes")


def test_a_shard_that_another_process_is_just_finishing_is_not_translated_again(tmp_path):
    """A process of a killed run needs some time to end. There is no model here, so that translating would fail."""
    path = write(tmp_path / "in", ["a dog"])
    shard = shards.Shard(str(path), shards.state_of(str(path)), 1, 1, 0, str(tmp_path / "shard"), False)
    how = shards.How("none", {}, False, False, 1, "cpu", False)
    with ThreadPoolExecutor(1) as pool:
        with locked(shard.lock):
            translating = pool.submit(shards.translate_shard, how, shard)
            with pytest.raises(TimeoutError):
                translating.result(timeout=0.3)
            Path(shard.text).write_text("HUND\n")
        assert translating.result(timeout=LIMIT) is None
    assert Path(shard.text).read_text() == "HUND\n"


class InCapitals:
    """A translator in place of the exported model's. It calls *meanwhile* at the beginning and before the last line."""

    def __init__(self, meanwhile):
        self.meanwhile = meanwhile

    def chunk_with_errors(self, lines, first, done):
        self.meanwhile()
        done(len(lines) - 1)
        self.meanwhile()
        done(1)
        return (line.upper() for line in lines)


def a_shard(tmp_path, lines):
    path = write(tmp_path / "in", lines)
    return shards.Shard(str(path), shards.state_of(str(path)), 1, len(lines), 0, str(tmp_path / "shard"), False)


def test_two_processes_on_a_disk_without_locks_write_files_of_their_own(tmp_path):
    """The second one begins while the first one translates, and ends before it."""
    shard, how = a_shard(tmp_path, ["dog", "cat"]), shards.How("none", {}, False, False, 1, "cpu", False)
    written = []

    def finish():
        if not shard.is_finished:
            shards._write(InCapitals(lambda: None), how, shard)
            written.append(os.stat(shard.text))

    with pytest.raises(shards._FinishedByAnother):
        shards._write(InCapitals(finish), how, shard)
    assert Path(shard.text).read_text() == "DOG\nCAT\n" and written == [os.stat(shard.text)]
    assert {path.name for path in tmp_path.iterdir()} == {"in", "shard.txt", "shard.refused.tsv", "shard.count"}


# -- the progress bar --------------------------------------------------------------------------------


class Bar:
    """Has the lines that the progress bar shows."""

    n = 100

    def update(self, lines):
        self.n += lines


def test_the_bar_moves_while_shards_are_translated_and_goes_back_if_one_fails(tmp_path, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    bar, shard = Bar(), a_shard(tmp_path, ["dog", "cat", "house"])
    other = replace(shard, stem=str(tmp_path / "other"), lines=20)
    Path(shard.count).write_text("3\n")  # of an earlier start
    progress = corpus._Progress(bar)
    shown = []

    def look():
        clock[0] += 1
        progress.looked()
        shown.append(bar.n)

    for each in (shard, other):
        progress.begun(each, "")
    look()
    shards._write(InCapitals(look), shards.How("none", {}, False, False, 1, "cpu", False), shard)
    Path(other.count).write_text("15")
    look()
    progress.looked()  # in the same second
    assert shown == [100, 100, 102, 118]
    progress.ended(shard, is_finished=True)
    assert bar.n == 100 + 3 + 15
    progress.ended(other, is_finished=False)
    assert bar.n == 100 + 3
    progress.begun(other, "")
    look()
    assert bar.n == 100 + 3, "the lines are not counted twice"
    assert not Path(shard.count).exists() and not Path(other.count).exists()


def test_counts_are_read_at_most_once_a_second_and_for_a_twentieth_of_the_time(tmp_path, monkeypatch):
    clock, reads = [1000.0], []
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def read(shard):
        reads.append(clock[0])
        clock[0] += 0.5
        return 0

    progress = corpus._Progress(Bar())
    progress.begun(a_shard(tmp_path, ["dog"]), "")
    monkeypatch.setattr(corpus, "lines_translated", read)
    while clock[0] < 1030:
        progress.looked()
        clock[0] += 0.1
    assert all(10.5 < later - earlier < 10.7 for earlier, later in itertools.pairwise(reads)) and len(reads) == 3


def test_waiting_is_a_warning_which_recipes_show(tmp_path, capsys):
    progress, shard = corpus._Progress(Bar()), a_shard(tmp_path, ["dog"])
    progress.waits(shard, "SLURM is full")
    progress.waits(None, "SLURM is off")
    begin = "fairseq-rope translate: warning: "
    assert capsys.readouterr().err == f"{begin}lines 1 to 1 of {shard.input}: SLURM is full\n{begin}SLURM is off\n"


def test_a_result_that_a_network_file_system_shows_late_is_waited_for(tmp_path, monkeypatch):
    shard = a_shard(tmp_path, ["dog"])
    Path(shard.refused).touch()
    waits = iter([None, Path(shard.text).touch])
    monkeypatch.setattr(time, "sleep", lambda _: (next(waits) or bool)())
    assert corpus._lacking(shard) == ""
    Path(shard.text).unlink()
    monkeypatch.setattr(corpus, "LATE", 0)
    assert corpus._lacking(shard) == f"it is translated, but {shard.text} does not appear on this machine"


AT_EVERY_STEP = """
import json, os, signal, sys
from pathlib import Path
from fairseq_rope.launch.jobs import Outcome
from fairseq_rope.serving import corpus, shards
from fairseq_rope.tools import translate

class InCapitals:
    def __init__(self, *_):
        self.settings = {}
    def __enter__(self):
        return self
    def __exit__(self, *_):
        pass
    def chunk_with_errors(self, lines, first, done):
        return (line.upper() for line in lines)

def outcomes(tasks, function, *_):
    return (Outcome(task, function(task), "") for task in tasks)

corpus.outcomes, shards.Translator = outcomes, InCapitals
words, folder, stride = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])

def started(number):
    "Start the command in a new process, which is killed before the step of this number. Returns its status."
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    steps = iter(range(1, 10_000))
    def counted(function):
        def call(*args, **kwargs):
            if next(steps) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)
        return call
    for name in ("replace", "unlink", "fsync", "makedirs"):
        setattr(os, name, counted(getattr(os, name)))
    translate.main([*words, "--output-dir", str(out)])
    os._exit(0)

results = []
for number in range(1, 10_000, stride):
    out = folder / str(number)
    status = started(number)
    statuses = [status] + [started(step) for step in ((2, 5, 0) if number % 2 else (0,))]
    results.append([statuses[-1], {path.name: path.read_text("latin-1") for path in out.iterdir() if path.is_file()}])
    if not status:
        break
print(json.dumps(results))
"""


@pytest.mark.parametrize("stride", [7, pytest.param(2, marks=pytest.mark.slow)])
def test_a_kill_before_any_change_of_a_file_loses_and_doubles_nothing(model, tmp_path, stride):
    """The translations are capitals here, so that a start takes milliseconds."""
    lines = [*(f"line {number}" for number in range(1, 26))]
    inputs = [write(tmp_path / "a", lines, end=""), write(tmp_path / "b.gz", [*lines[:12], b"\xff"])]
    words = json.dumps(["--model", str(model), "--shard-lines", "10", "--input", *map(str, inputs)])
    done = subprocess.run(
        [sys.executable, "-c", AT_EVERY_STEP, words, str(tmp_path / "out"), str(stride)],
        capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=LIMIT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    capitals = [line.upper() for line in lines]
    texts = {
        "a": [*capitals, ""],
        "b": [*capitals[:12], "", ""],
        "b.refused.tsv": ["13\tthe byte 0xff is not UTF-8", ""],
    }
    expected = {name: "\n".join(text) for name, text in texts.items()}
    results = json.loads(done.stdout.splitlines()[-1])
    assert len(results) > 50 / stride
    assert [number for number, result in enumerate(results, 1) if result != [0, expected]] == []


@pytest.mark.parametrize(
    "flags, jobs, gpus, threads",
    [
        ([], 1, [], 8),
        (["--jobs", 4], 4, [], 2),
        (["--jobs", 4, "--device", "cuda"], 4, ["5", "7"], 2),
        (["--jobs", 4, "--device", "auto", "--threads", 3], 4, ["5", "7"], 3),
    ],
)
def test_processes_of_this_machine_divide_its_cores_and_gpus(monkeypatch, flags, jobs, gpus, threads):
    monkeypatch.setattr(translate, "available_cores", lambda: 8)
    monkeypatch.setattr("ctranslate2.get_cuda_device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert launcher_of(*flags) == (Launcher(jobs, gpus), threads)


SIX_CORES = {"cpus_per_task": 6, "srun_args": ["--cpus-per-task=6"]}


@pytest.mark.parametrize(
    "flags, jobs, more, threads",
    [
        ([], None, {}, 1),
        (["--jobs", 4, "--slurm", "cpus_per_task=6"], 4, SIX_CORES, 6),
        (["--slurm", "cpus_per_task=6", "--threads", 3], None, SIX_CORES, 3),
        (["--device", "cuda"], None, {"gpus_per_node": 1}, 1),
        (["--device", "cuda", "--slurm", "gpus_per_node=2"], None, {"gpus_per_node": 2}, 1),
        (["--slurm-partition", "p"], None, {"partition": "p"}, 1),
    ],
)
def test_jobs_of_slurm_have_what_the_flags_request(flags, jobs, more, threads):
    given = launcher_of("--launcher", "slurm", "--slurm", "time=9", *flags)
    assert given == (Launcher(jobs, slurm={"time": 9, **more}), threads)


def launcher_of(*flags):
    words = ["--model", "model", "--input", "a", "--output-dir", "out", *map(str, flags)]
    return translate._launcher(translate.build_parser().parse_args(words))


# -- the processes -----------------------------------------------------------------------------------


def test_an_error_that_all_processes_would_have_ends_the_run_in_one_sentence(model, tmp_path):
    path = write(tmp_path / "a", sentences(40))
    status, err = end(start(model, tmp_path / "out", [path], "--device", "cuda"))
    assert status == 1 and err.startswith(f"fairseq-rope translate: --model {model}, --device cuda: ")
    assert len(err.splitlines()) == 1


# -- memory ------------------------------------------------------------------------------------------

MEMORY = """
import os, resource, sys
from fairseq_rope.launch.jobs import Outcome
from fairseq_rope.serving import corpus
from fairseq_rope.tools import translate

def outcomes(tasks, function, *_):
    for task in tasks:
        with open(task.refused, "w"), open(task.text, "w") as text:
            text.writelines("x\\n" for _ in range(task.lines))
        yield Outcome(task, None, "")

corpus.outcomes = outcomes
translate.main(sys.argv[1:])
try:
    (peak,) = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
except FileNotFoundError:  # not on Linux, where the other number includes the peak of the process that started this one
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(int(peak))
"""


@pytest.mark.parametrize("name", ["in", "in.gz"])
def test_the_memory_of_dividing_and_joining_does_not_grow_with_the_input(model, tmp_path, name):
    peaks = []
    for lines in (10_000, 1_000_000):
        folder = tmp_path / str(lines)
        folder.mkdir()
        path = folder / name
        text = b"the dog sees\n" * lines
        path.write_bytes(gzip.compress(text, 1) if name.endswith(".gz") else text)
        words = words_of(model, folder / "out", [path], "--shard-lines", 20_000)
        done = subprocess.run(
            [sys.executable, "-c", MEMORY, *words],
            capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT, timeout=LIMIT,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout.split()[-1]) / 1024)
        assert (folder / "out" / "in").stat().st_size == 2 * lines
    assert peaks[1] < peaks[0] + 8, "MiB; the file has 13 MiB"


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path):
    path = tmp_path / "in"
    with open(path, "wb") as file:
        file.truncate(200 << 20)  # zeros, which take no space on the disk
        file.seek(0, os.SEEK_END)
        file.write(b"\nthe dog\n")
    tracemalloc.start()
    try:
        assert shards.divide(str(path), 10) == (2, [0])
        with open(path, "rb") as file:
            lines = [shards._next_line(file) for _ in range(2)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert lines[1] == b"the dog" and peak < 4 << 20


def test_inputs_with_numbers_of_two_digits_keep_their_shards(run, tmp_path):
    """The shards of input 11 are not removed with those of input 1."""
    names = [f"{number}.gz" for number in range(12)]
    for name in names:
        write(tmp_path / name, sentences(2))
    assert run(names) is None
    assert {name: len(lines) for name, lines in outputs(tmp_path / "out").items()} == {name[:-3]: 2 for name in names}
