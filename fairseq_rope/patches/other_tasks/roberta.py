"""RoBERTa from Python: a model of plain text, and the probabilities of words."""

from typing import Any

import torch
from fairseq import utils
from fairseq.models.roberta.hub_interface import RobertaHubInterface

from ..registry import replaces

MASK = "<mask>"


class Words:
    """The ``bpe`` of text whose words, between blanks, are those of the dictionary."""

    def encode(self, x: str) -> str:
        return x

    def decode(self, x: str) -> str:
        return x


@replaces(
    "fairseq.models.roberta.model*.RobertaHubInterface",
    prevents="wrong results",
    until="fairseq keeps words and probabilities together, and encodes text without a BPE",
)
class RobertaHub(RobertaHubInterface):
    """fairseq's interface, which also works without a ``bpe``.

    If <s> or </s> is among the most probable words for a mask, fairseq's fill_mask drops it but not its probability, so
    the words after it get those of others. RobertaModel.from_pretrained downloads GPT-2's BPE by default, and with
    bpe=None, encode, decode and fill_mask end with "'NoneType' object has no attribute 'encode'". Here the text then
    consists of words of the dictionary.
    """

    bpe: Any

    def __init__(self, cfg: Any, task: Any, model: Any) -> None:
        super().__init__(cfg, task, model)
        if self.bpe is None:
            self.bpe = Words()

    def fill_mask(self, masked_input: str, topk: int = 5) -> list[tuple[str, float, str]]:
        """Return for each of the *topk* most probable words the text with it, its probability, and the word."""
        assert masked_input.count(MASK) == 1, f"Please add one {MASK} to the input, as in: He is a {MASK} guy"
        dictionary = self.task.source_dictionary
        text = f" {MASK} ".join(self.bpe.encode(span.rstrip()) for span in masked_input.split(MASK)).strip()
        tokens = dictionary.encode_line(f"<s> {text} </s>", append_eos=False, add_if_not_exist=False).long()
        with utils.model_eval(self.model), torch.no_grad():
            scores, _ = self.model(tokens[None].to(self.device), features_only=False, return_all_hiddens=False)
        probabilities = scores[0, tokens == self.task.mask_idx][0].softmax(0)
        words = probabilities.clone()
        words[[dictionary.bos(), dictionary.eos()]] = -1.0  # the ends of a sentence are no words
        filled = []
        for index in words.topk(topk).indices.tolist():
            piece = dictionary[index]
            word = self.bpe.decode(piece)
            if piece.startswith("\u2581"):
                word = f" {word}"
            # A word of GPT-2's BPE and of SentencePiece contains the blank before it.
            replaced = MASK if isinstance(self.bpe, Words) or f" {MASK}" not in masked_input else f" {MASK}"
            filled.append((masked_input.replace(replaced, word), probabilities[index].item(), word))
        return filled
