"""benchmarks/: peak memory in one process each, and the benchmarks of long inputs and of linear attention."""

import json
import os
import sys

import pytest
import torch

from benchmarks import corpus, linear_attention, long_inputs, processes, programs, serve, subjects
from benchmarks import train as training
from benchmarks.alternating import report
from benchmarks.generate import ARCHS, Translating
from benchmarks.processes import OutOfMemoryError, in_a_process
from benchmarks.subjects import dictionary
from fairseq_rope.patches import optimizers
from fairseq_rope.serving.shortlist import Shortlist


def test_a_process_returns_its_result_and_its_own_peak():
    result, peak = in_a_process(eval, "__import__('torch').ones(300 << 18).sum().item()", limit=1 << 30)
    assert result == 300 << 18 and 290 < peak < 360


@pytest.mark.parametrize(
    "run, args, message",
    [
        (eval, ("__import__('torch').ones(300 << 18)",), "more than 0.2 GiB are needed"),
        (eval, ("b'x' * (300 << 20)",), "more than 0.2 GiB are needed"),
        (os.abort, (), "the system ended the process with signal 6"),
        (int, ("two",), r"int\('two',\) ended with status 1"),
    ],
)
def test_a_process_that_fails_is_reported(run, args, message):
    with pytest.raises(SystemExit if run is int else OutOfMemoryError, match=message):
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


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_the_encoder_reads_and_the_search_writes_the_stated_number_of_tokens(monkeypatch, arch):
    lengths = []
    build = long_inputs.build

    def observed(*args, **kwargs):
        model = build(*args, **kwargs)
        model.encoder.register_forward_pre_hook(lambda _, inputs: lengths.append(inputs[0].size(1)))
        return model

    monkeypatch.setattr(long_inputs, "build", observed)
    assert long_inputs.encoding_seconds(arch, "small", 40) > 0
    assert lengths == [16, 40]
    (((best, *_),),) = Translating(arch, "small", 1, 30).translate()
    assert len(best["tokens"]) == 30
    assert long_inputs.search_seconds(arch, "small", 3) > 0


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


@pytest.mark.slow
def test_whole_programs_are_measured_beside_fairseqs(monkeypatch, capsys):
    monkeypatch.setattr(programs, "SIZES", {"small": TINY})
    words = ["programs", "--size", "small", "--rounds", "1", "--updates", "4", "--bf16", "--json"]
    monkeypatch.setattr(sys, "argv", words)
    programs.main()
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["model"] for row in rows] == list(programs.FLAGS) and rows[0]["times as fast"] == 1
    for row in rows:
        assert row["times as fast"] == pytest.approx(row["words/s"] / rows[0]["words/s"])


def test_exports_keep_torchs_threads_and_use_their_shortlist(monkeypatch, tmp_path):
    """CTranslate2 changes torch's number of threads when it loads a model."""
    threads, vocabulary = torch.get_num_threads(), dictionary(60)
    monkeypatch.setattr(serve, "THREADS", 3)
    torch.set_num_threads(3)
    size = {"layers": 1, "width": 16, "ffn_width": 16, "heads": 2, "vocab": 60}
    pairs = [([5, 6], 4), ([7], 4)]
    try:
        for name, shortlist in (("without", None), ("with", Shortlist(["w9"], {}))):
            exported = serve.Exported(size, vocabulary, pairs, "float32", tmp_path / name, shortlist=shortlist)
            assert torch.get_num_threads() == exported.model.num_translators == 3
            assert exported.shortlist is (shortlist is not None)
            exported.translate()
    finally:
        torch.set_num_threads(threads)


def test_serving_is_measured_with_each_batch_size_with_and_without_each_shortlist(monkeypatch, capsys, tmp_path):
    size, asked, runs = {"layers": 1, "width": 16, "ffn_width": 16, "heads": 2, "vocab": 60}, [], {}
    full = Shortlist(["w1"], {"w5": ["w6", "w7", "w8"]})

    class Fairseqs:
        def __init__(self, *_):
            pass

        def translate(self):
            pass

    class Recorded(serve.Exported):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.possible, self.model = options["shortlist"], self  # translate() calls translate_batch()

        def translate_batch(self, batch, use_vmap, **_):
            key = use_vmap, None if self.possible is None else len(self.possible.candidates["w5"])
            runs.setdefault((self.folder.name, *key), []).append(batch)
            return []

        def first(self):
            return 0.0

    monkeypatch.setattr(serve, "read_data", lambda _, count, most: asked.append(most) or (dictionary(60), None, full))
    monkeypatch.setattr(serve, "SIZES", {"small": size})
    monkeypatch.setattr(serve, "ByFairseq", Fairseqs)
    monkeypatch.setattr(serve, "Exported", Recorded)
    flags = "--size small --rounds 1 --quantization int8 --batch-tokens 90 90 900 --candidates 1 2 --shortlist"
    monkeypatch.setattr(sys, "argv", ["serve", *flags.split(), str(tmp_path)])
    serve.main()
    assert asked == [2]
    assert [key[1:] for key in runs] == [(False, None), (True, 2), (True, 3)] * 2
    for number, batches in enumerate(runs.values()):
        tokens = 90 if number < 3 else 900
        assert sum(map(len, batches)) == 2 * 6 * 64, "an untimed round and a timed one"
        sizes = [len(batch) * (len(batch[0]) + 1) for batch in batches if len(batch) > 1]
        assert 0.7 * tokens < max(sizes) <= tokens
    assert "int8, 900 tokens a batch, shortlist of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags, message",
    [
        (["--batch-tokens", "0"], "--batch-tokens 0: must be 1 or more"),
        (["--candidates", "9"], "--candidates 9: has no use without --shortlist"),
        (["--shortlist", "/nowhere"], "--shortlist /nowhere: must be a data folder"),
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


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_each_kind_of_layer_is_trained_on_the_stated_number_of_tokens(monkeypatch, side):
    lengths, build = [], linear_attention.build

    def observed(kind):
        layer = build(kind)
        layer.q_proj.register_full_backward_hook(lambda *_: lengths.append((kind, _[2][0].size(0))))
        return layer

    monkeypatch.setattr(linear_attention, "build", observed)
    for kind in linear_attention.KINDS:
        assert linear_attention.training_seconds(kind, side, 70) > 0
    assert lengths == [(kind, 70) for kind in linear_attention.KINDS for _ in range(2)]
    assert len({type(build(kind)) for kind in linear_attention.KINDS}) == 2
