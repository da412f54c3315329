"""benchmarks/: steps of training, and the benchmarks themselves with tiny models."""

import json
import sys
import time
from argparse import Namespace

import pytest
import torch

from benchmarks import encodings, generate, gpu, host, serve, subjects
from benchmarks import train as training
from fairseq_rope.patches import optimizers
from fairseq_rope.positions import ENCODINGS
from tests.commands import LIMIT, ROOT, run_program

TINY = {"layers": 1, "width": 16, "ffn_width": 16, "heads": 2, "vocab": 60}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(subjects.SIZES, "small", TINY)
    monkeypatch.setitem(training.TOKENS, "small", 200)
    monkeypatch.setattr(subjects, "LENGTHS", subjects.LENGTHS[:200])


def test_steps_train_the_yardstick_with_fairseqs_adam_and_the_others_with_the_plugins():
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


@pytest.mark.parametrize(
    "benchmark, flags, rows",
    [
        (training, ["--no-memory"], len(training.CANDIDATES)),
        (generate, ["--batch", "1"], len(generate.CANDIDATES)),
        pytest.param(encodings, ["--no-memory"], 1 + len(ENCODINGS), marks=pytest.mark.slow),
        (serve, ["--quantization", "int8"], 2),
    ],
)
def test_rows_are_beside_fairseqs(monkeypatch, capsys, benchmark, flags, rows):
    monkeypatch.setattr(sys, "argv", ["benchmark", "--size", "small", "--rounds", "1", "--json", *flags])
    benchmark.main()
    printed = json.loads(capsys.readouterr().out)["rows"]
    assert len(printed) == rows and printed[0]["model"].startswith("transformer")
    for row in printed:
        assert all(row[column] > 0 for column in row if "times as fast" in column)
        assert row is not printed[0] or {row[column] for column in row if "times as fast" in column} == {1}


@pytest.mark.slow
def test_a_process_returns_its_own_peak():
    assert 5 < training.peak_memory(training.CANDIDATES["transformer_rope"], "small") < 1000


@pytest.mark.nightly
def test_the_hosts_time_has_parts(tmp_path):
    data = host.write_data(tmp_path)
    times = host.update("transformer_rope", data, 8)
    assert min(times[part] for part in ("all", "forward", "backward", "optimiser")) > 0
    assert host.step("transformer_rope", data, tmp_path / "model")["all"] > 0


def test_rows_about_a_gpu_end_with_the_batch_that_does_not_fit(monkeypatch):
    monkeypatch.setenv(gpu.SWITCH, "1")  # which the benchmark changes in its process
    monkeypatch.setattr(gpu, "TRAINED", ("transformer", "transformer_rope"))
    args, right = Namespace(size="small"), gpu.speed_of

    def speed_of(one):
        if one.tokens > 300 and type(one.model).__name__ == "TransformerRopeModel":
            raise torch.OutOfMemoryError
        return right(one)

    monkeypatch.setattr(gpu, "speed_of", speed_of)
    *fitting, last = gpu.training(args, 0.0)
    assert [(row["model"], row["tokens a batch"]) for row in [*fitting, last]] == [
        (name, tokens) for name in gpu.TRAINED for tokens in gpu.TOKENS
    ]
    assert last["tokens/s"] == "does not fit" and [row["times as fast"] for row in fitting[:2]] == [1, 1]
    rows = list(gpu.generation(args, 0.0))
    assert [row["batch"] for row in rows] == [batch for batch in gpu.SENTENCES for _ in gpu.SEARCHES]


@pytest.mark.nightly
def test_a_page_about_a_gpu_has_the_parts_that_have_ended(tmp_path, data_bin):
    words = f"--device cpu --size small --minutes 1.5 --data {data_bin} --output {tmp_path / 'page.md'}".split()
    begun = time.monotonic()
    run_program("python", "-m", "benchmarks.gpu", *words, "--only", "generation", "--only", "side_by_side", cwd=ROOT)
    assert time.monotonic() - begun < 90 + LIMIT / 10
    page = (tmp_path / "page.md").read_text()
    assert page.index("\n## Generation, ") < page.index("\n## Side_by_side, ")
    assert float(page.strip().splitlines()[-1].split(" | ")[-1].strip("| ")) > 0
