"""RoBERTa from Python for a model of plain text.

This class replaces fairseq's; the table in ``patches/table.py`` says why.
"""

from typing import Any

from fairseq.models.roberta.hub_interface import RobertaHubInterface

MASK = "<mask>"


class Words:
    """The ``bpe`` of text whose words, between blanks, are those of the dictionary."""

    def encode(self, x: str) -> str:
        return x

    def decode(self, x: str) -> str:
        return x


class RobertaHub(RobertaHubInterface):
    """fairseq's interface, which also works without a ``bpe``."""

    def __init__(self, cfg: Any, task: Any, model: Any) -> None:
        super().__init__(cfg, task, model)
        if self.bpe is None:
            self.bpe = Words()

    def fill_mask(self, masked_input: str, topk: int = 5) -> list[tuple[str, float, str]]:
        """Return for each of the *topk* most probable words the text with it, its probability, and the word."""
        filled: list[tuple[str, float, str]] = super().fill_mask(masked_input, topk)
        if not isinstance(self.bpe, Words):
            return filled
        # fairseq expects that a word contains the blank before it, as in GPT-2's BPE.
        return [(masked_input.replace(MASK, word), probability, word) for _, probability, word in filled]
