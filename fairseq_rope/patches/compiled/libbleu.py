"""``fairseq.libbleu`` in Python: the counts of fairseq's own BLEU, in three methods of its ``Scorer``."""

from collections import Counter
from typing import Any

import torch
from fairseq.scoring import bleu


def provide() -> None:
    """Give fairseq's ``Scorer`` the methods below."""
    bleu.Scorer.__init__ = init
    bleu.Scorer.reset = reset
    bleu.Scorer.add = add


def init(self: bleu.Scorer, cfg: bleu.BleuConfig) -> None:
    """Begin without any sentence. ``cfg`` has the numbers of the symbols ``pad``, ``eos`` and ``unk``."""
    self.pad, self.eos, self.unk = cfg.pad, cfg.eos, cfg.unk
    self.stat = bleu.BleuStat()


def reset(self: bleu.Scorer, one_init: bool = False) -> None:
    """Set all counts to 0, or with ``one_init`` those of 2-grams to 4-grams to 1, which smooths the score."""
    self.stat = bleu.BleuStat()
    if one_init:
        for n in (2, 3, 4):
            setattr(self.stat, f"match{n}", 1)
            setattr(self.stat, f"count{n}", 1)


def add(self: bleu.Scorer, ref: torch.Tensor, pred: torch.Tensor) -> None:
    """Add the counts of one sentence: the reference and the hypothesis, vectors of 32-bit integers."""
    for name, sentence in (("ref", ref), ("pred", pred)):
        if not isinstance(sentence, torch.IntTensor):
            raise TypeError(f"{name} must be a torch.IntTensor (got {type(sentence)})")
    assert not ref.lt(0).any()
    reference = _trimmed(ref.view(-1).tolist(), self.pad, self.eos)
    hypothesis = _trimmed(pred.view(-1).tolist(), self.pad, self.eos)
    reference = [-999 if word == self.unk else word for word in reference]  # unknown words match none
    self.stat.reflen += len(reference)
    self.stat.predlen += len(hypothesis)
    for n in (1, 2, 3, 4):
        in_hypothesis = _ngrams(hypothesis, n)
        matches = in_hypothesis & _ngrams(reference, n)
        _increase(self.stat, f"count{n}", in_hypothesis.total())
        _increase(self.stat, f"match{n}", matches.total())


def _trimmed(sentence: list[int], pad: int, eos: int) -> list[int]:
    """Return *sentence* without padding at its ends and final ``eos``. At least one word stays."""
    begin = 0
    while begin < len(sentence) and sentence[begin] == pad:
        begin += 1
    end = len(sentence)
    while end > begin + 1 and sentence[end - 1] in (pad, eos):
        end -= 1
    return sentence[begin:end]


def _ngrams(sentence: list[int], n: int) -> "Counter[tuple[int, ...]]":
    return Counter(zip(*(sentence[first:] for first in range(n))))


def _increase(stat: Any, name: str, amount: int) -> None:
    setattr(stat, name, getattr(stat, name) + amount)
