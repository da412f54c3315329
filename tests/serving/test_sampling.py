"""fairseq-rope translate --sampling-topk: CTranslate2's random sampling."""

import collections
import signal

import pytest
import torch

from fairseq_rope.serving.ctranslate2_search import Sampling
from fairseq_rope.serving.translator import Translator
from fairseq_rope.tools import translate
from tests.commands import run_program
from tests.serving.exports import sentences

SOURCE, DRAWS = ["the", "dog", "sees", "a", "cat"], 4000


@torch.no_grad()
@pytest.mark.parametrize("topk", [0, 3])
def test_first_words_have_the_probabilities_of_fairseqs_model(model, loaded, topk):
    fairseq_model, task = loaded
    source, target = task.source_dictionary, task.target_dictionary
    tokens = torch.tensor([[*map(source.index, SOURCE), source.eos()]])
    logits, _ = fairseq_model(tokens, torch.tensor([tokens.size(1)]), torch.tensor([[target.eos()]]))
    logits[..., [target.pad(), target.eos()]] = -torch.inf
    best = torch.softmax(logits[0, -1].double(), -1).topk(topk or len(target))
    with Translator(str(model), sampling=Sampling(topk)) as translator:
        drawn = collections.Counter(words[0] for [(words, _)] in translator._search([SOURCE] * DRAWS))
    for p, word in zip((best.values / best.values.sum()).tolist(), best.indices.tolist(), strict=True):
        assert abs(drawn[target[word]] - DRAWS * p) <= 5 * (DRAWS * p * (1 - p)) ** 0.5 + 1
    assert len(drawn) <= (topk or len(target))


@pytest.fixture
def words(model, tmp_path):
    """The flags of a sampled translation of 90 lines."""
    path = tmp_path / "in"
    path.write_text("".join(f"{line}\n" for line in sentences(90)))
    return ["--model", str(model), "--input", str(path), "--sampling-topk", "0"]


def test_the_seed_decides_the_translations(words, tmp_path, monkeypatch):
    monkeypatch.delattr(signal, "SIGPIPE")
    out = tmp_path / "out"

    def translation(*flags):
        translate.main([*words, "--output", str(out), *flags])
        return out.read_text()

    assert translation() == translation("--seed", "1") != translation("--seed", "2")


@pytest.mark.slow
def test_several_processes_draw_the_same_each_time(words, tmp_path):
    for name in ("first", "second"):
        run_program("fairseq-rope", "translate", *words, "--output-dir", tmp_path / name, "--jobs", "2")
    first, second = ((tmp_path / name / "in").read_text() for name in ("first", "second"))
    assert first == second and len(first.splitlines()) == 90
