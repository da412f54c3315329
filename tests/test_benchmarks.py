"""benchmarks/: a process and its peak memory, the rows of a table, and whole benchmarks with tiny models."""

import json
import os
import sys

import pytest
import torch

from benchmarks import corpus, long_inputs, processes, programs, serve, subjects
from benchmarks import train as training
from benchmarks.alternating import report
from benchmarks.generate import ARCHS
from benchmarks.processes import OutOfMemoryError, in_a_process
from benchmarks.subjects import dictionary
from fairseq_rope.patches import optimizers


@pytest.mark.slow
def test_a_process_returns_its_result_and_its_own_peak():
    result, peak = in_a_process(eval, "__import__('torch').ones(300 << 18).sum().item()", limit=1 << 30)
    assert result == 300 << 18 and 290 < peak < 360


@pytest.mark.slow
@pytest.mark.parametrize(
    "run, args, error",
    [
        (eval, ("__import__('torch').ones(300 << 18)",), OutOfMemoryError),
        (eval, ("b'x' * (300 << 20)",), OutOfMemoryError),
        (os.abort, (), OutOfMemoryError),
        (int, ("two",), SystemExit),
    ],
)
def test_a_process_that_fails_is_reported(run, args, error):
    with pytest.raises(error):
        in_a_process(run, *args, limit=(1 << 30) // 5)


@pytest.mark.parametrize("failing", [None, *ARCHS])
def test_rows_are_medians_beside_fairseqs_and_say_which_model_needs_too_much(monkeypatch, capsys, failing):
    calls = []
    seconds = {ARCHS[0]: iter([9.0, 8.0, 1.0]), ARCHS[1]: iter([3.0, 2.0, 4.0])}

    def measured(work, arch, size, tokens, limit):
        assert (size, tokens, limit) == ("base", 9, 5)
        calls.append(arch)
        if arch == failing:
            raise OutOfMemoryError("more than 3 GiB are needed")
        return next(seconds[arch]), {ARCHS[0]: 400.0, ARCHS[1]: 100.0}[arch]

    monkeypatch.setattr(processes, "in_a_process", measured)
    measured_rows = processes.measure(long_inputs.encoding_seconds, ARCHS, 3, "base", 9, limit=5)
    rows = {row["model"]: row for row in measured_rows}
    if failing is None:
        assert calls == [*ARCHS, *reversed(ARCHS), *ARCHS]
        # The quotients of the rounds are 3, 4 and 1/4.
        expected = {"seconds": 3.0, "times as fast": 3.0, "peak MiB": 100.0, "of the memory": 0.25}
        assert rows[ARCHS[1]] == {"model": ARCHS[1], **expected}
    else:
        assert calls.count(failing) == 1 and rows[failing]["seconds"] == "more than 3 GiB are needed"
        (other,) = set(ARCHS) - {failing}
        assert calls.count(other) == 3 and rows[other]["seconds"] in (8.0, 3.0)
    report("encoder", list(rows.values()), as_json=False)
    printed = capsys.readouterr().out
    assert all(arch in printed for arch in ARCHS) and (failing is None or "more than 3 GiB are needed" in printed)


TINY = {"layers": 1, "width": 16, "ffn_width": 16, "heads": 2, "vocab": 60}


def test_steps_train_the_yardstick_with_fairseqs_adam_and_the_others_with_the_plugins(monkeypatch):
    for module in (subjects, training):
        monkeypatch.setitem(module.SIZES, "small", TINY)
    monkeypatch.setitem(training.TOKENS, "small", 200)
    candidates = {**training.CANDIDATES, "bf16": training.Candidate("transformer_rope", bf16=True)}
    for name, candidate in candidates.items():
        one = training.Training(candidate, "small")
        before = {key: weight.clone() for key, weight in one.model.state_dict().items()}
        one.step()
        adam = optimizers.FairseqAdam if name == "transformer" else optimizers.Adam
        assert type(one.optimizer.optimizer) is adam
        dtype = torch.bfloat16 if candidate.bf16 else torch.float32
        after = one.model.state_dict()
        assert {after[key].dtype for key in before} == {dtype}
        assert not torch.equal(after["decoder.layers.0.fc1.weight"], before["decoder.layers.0.fc1.weight"])


@pytest.mark.nightly
def test_whole_programs_are_measured_beside_fairseqs(monkeypatch, capsys):
    monkeypatch.setattr(programs, "SIZES", {"small": TINY})
    words = ["programs", "--size", "small", "--rounds", "1", "--updates", "4", "--bf16", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    programs.main()
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["model"] for row in rows] == list(programs.FLAGS) and rows[0]["times as fast"] == 1
    for row in rows:
        assert row["times as fast"] == pytest.approx(row["words/s"] / rows[0]["words/s"])


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--batch-tokens", "0"], "--batch-tokens 0: "),
        (["--candidates", "9"], "--candidates 9: "),
        (["--shortlist", "/nowhere"], "--shortlist /nowhere: "),
    ],
)
def test_wrong_flags_of_serve_end_in_one_sentence(monkeypatch, capsys, flags, message):
    monkeypatch.setattr(sys, "argv", ["serve", *flags])
    with pytest.raises(SystemExit):
        serve.main()
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_corpus_is_translated_with_each_number_of_processes(monkeypatch, capsys, tmp_path):
    vocabulary = dictionary(TINY["vocab"])
    model = serve.Exported(TINY, vocabulary, [([vocabulary.nspecial], 2)], "int8", tmp_path / "model").folder
    (tmp_path / "lines").write_text("w1 w2\nw3\nw4 w5 w6\n")
    calls, translate = [], corpus.translate

    def observed(*args):
        translate(*args)
        _, text, _, *numbers = args
        outputs = {path.read_text().count("\n") for path in text.parent.glob("output*/text")}
        calls.append((numbers, outputs, text.read_text().splitlines()[2:5]))

    monkeypatch.setattr(corpus, "translate", observed)
    flags = f"corpus --model {model} --input {tmp_path / 'lines'} --lines 40 --rounds 1 --json"
    monkeypatch.setattr(sys, "argv", flags.split())
    corpus.main()
    again = ["w4 w5 w6", "w1 w2", "w3"]
    assert calls == [([1, 2], {40}, again), ([2, 1], {40}, again)] * 2
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["processes"] for row in rows] == list(corpus.CANDIDATES) and rows[0]["times as fast"] == 1
