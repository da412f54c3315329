"""``--compile``: the losses of a resumed training, and the translations of its averaged model, are those without it."""

import re

import pytest
import torch
from torch._dynamo.utils import counters

from fairseq_rope.tools.average import main as average
from tests.commands import PLUGIN, call, outputs, train, valid_losses

SLOW = ["rope", "t5"]
NIGHTLY = ["rope --rope-layout half --rope-fraction 0.5", "sinusoidal", "learned", "alibi", "shaw"]
ENCODINGS = [
    *(pytest.param(encoding, marks=pytest.mark.slow) for encoding in SLOW),
    *(pytest.param(encoding, marks=pytest.mark.nightly) for encoding in NIGHTLY),
]


@pytest.fixture(autouse=True)
def without_code(monkeypatch):
    """Compile to a graph of the same operations, without machine code, which takes torch minutes."""
    compile_module = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compile_module(module, backend="aot_eager"))
    torch._dynamo.reset()
    counters.clear()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_losses_and_translations_are_those_without_it(data_bin, tmp_path, encoding):
    flags = ["--position-encoding", *encoding.split(), "--dropout", 0, "--log-interval", 1, "--max-tokens", 100]
    logs, translations = [], []
    for folder, more in (("plain", []), ("compiled", ["--compile"])):
        log = "".join(train(data_bin, tmp_path / folder, *flags, *more, "--max-epoch", n) for n in (1, 3))  # resumes
        logs.append([*map(float, [*re.findall(r'"loss": "(.*?)"', log), *valid_losses(log).values()])])
        average(
            ["--inputs", str(tmp_path / folder), "--num-epoch-checkpoints", "2", "--output", str(tmp_path / "a.pt")]
        )
        words = [data_bin, "--user-dir", PLUGIN, "--path", tmp_path / "a.pt", "--cpu", "--max-tokens", 500]
        translations.append(outputs(call("fairseq-generate", *words)))
    assert len(logs[0]) >= 50 and logs[0] == pytest.approx(logs[1], abs=0.003)
    assert translations[0] == translations[1]
    assert not counters["graph_break"] and 4 <= counters["stats"]["unique_graphs"] <= 24


def test_a_scaling_that_depends_on_the_source_is_refused(build):
    with pytest.raises(ValueError, match="--compile: .*--rope-scaling"):
        build(compile=True, rope_scaling='{"rope_type": "dynamic", "factor": 2, "original_max_position_embeddings": 8}')
