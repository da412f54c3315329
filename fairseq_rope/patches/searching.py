"""The search: words that must not repeat, groups of a diverse search, prefixes from Python, ensembles."""

import copy
import inspect
from typing import Any

import torch
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.search import DiverseBeamSearch
from fairseq.sequence_scorer import SequenceScorer
from torch import Tensor

from .registry import replaces
from .saving import InPlaceOf

_diverse_step = DiverseBeamSearch.step
_generate = GeneratorHubInterface.generate
_score = SequenceScorer.generate
_generate_arguments = inspect.signature(_generate)


@replaces(
    "fairseq.ngram_repeat_block.NGramRepeatBlock._no_repeat_ngram",
    prevents="wrong results",
    until="fairseq compares the words so far",
)
def _no_repeat_ngram(self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
    """Set the scores of words to -inf that would repeat *n* words of their hypothesis. TorchScript compiles this.

    fairseq ignores --no-repeat-ngram-size, if its extension for GPUs is not built: it looks for the last words of the
    sentence at the end of a tensor that ends with padding. Here no hypothesis repeats so many words, except where no
    other word is possible, as in a prefix that the user gives.

    Args:
        tokens: (bsz * beam_size, any length): the end of sentence, then the *step* words so far, then padding
        lprobs: (bsz * beam_size, words): the scores of the next word
    """
    size: int = self.no_repeat_ngram_size
    if step >= size:
        so_far = tokens[:, 1 : step + 1]
        ngrams = so_far.unfold(1, size, 1)  # (rows, step - size + 1, size)
        last = so_far[:, step - size + 1 :]  # (rows, size - 1)
        begins_alike = (ngrams[:, :, : size - 1] == last.unsqueeze(1)).all(dim=2)
        counts = torch.zeros_like(lprobs, dtype=torch.int32)
        counts = counts.scatter_add(1, ngrams[:, :, size - 1], begins_alike.int())
        repeats = counts > 0
        has_rest = (lprobs.masked_fill(repeats, float("-inf")) > float("-inf")).any(dim=1, keepdim=True)
        lprobs = lprobs.masked_fill_(repeats & has_rest, float("-inf"))
    return lprobs


@replaces(
    "fairseq.search.DiverseBeamSearch.step",
    prevents="wrong results",
    until="fairseq counts in the batch",
    wraps=_diverse_step,
)
def diverse_step(
    self: Any,
    step: int,
    lprobs: Tensor,
    scores: Tensor | None,
    prev_output_tokens: Tensor | None = None,
    original_batch_idxs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the next words of all groups, with sentences counted in the batch.

    With --diverse-beam-groups, fairseq takes the number of a sentence in the data set for its place in the batch. The
    second batch ends in an IndexError, and if the order differs, sentences exchange their penalties.
    """
    if original_batch_idxs is not None:
        if step == 0:
            self.sentence_numbers = original_batch_idxs
        # the place of each remaining sentence in the batch, in which fairseq counts
        original_batch_idxs = original_batch_idxs[:, None].eq(self.sentence_numbers).int().argmax(1)
    result: tuple[Tensor, Tensor, Tensor] = _diverse_step(
        self, step, lprobs, scores, prev_output_tokens, original_batch_idxs
    )
    return result


class _WithRowsOfBatch(InPlaceOf):
    """A task that gives the search of each batch those rows of *rows* that belong to its sentences."""

    def __init__(self, task: Any, rows: dict[str, Tensor]) -> None:
        super().__init__(task)
        self._rows = rows

    def inference_step(self, generator: Any, models: Any, sample: dict[str, Any], **arguments: Any) -> Any:
        numbers = sample["id"]
        own = {name: rows.to(numbers.device).index_select(0, numbers) for name, rows in self._rows.items()}
        return self._replaced.inference_step(generator, models, sample, **{**arguments, **own})


@replaces(
    "fairseq.hub_utils.GeneratorHubInterface.generate",
    prevents="wrong results",
    until="fairseq divides these arguments as it divides the sentences",
    wraps=_generate,
)
def generate(self: Any, tokenized_sentences: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the hypotheses of each sentence, with its own rows of the arguments.

    A call of generate from Python with inference_step_args, such as prefix_tokens, gives all rows to each batch,
    although batches have other sentences in another order, so sentences get the prefixes of others. For a single
    sentence it drops these arguments. Here a tensor with a row for each sentence is divided with the sentences.
    """
    if torch.is_tensor(tokenized_sentences) and tokenized_sentences.dim() == 1:
        return self.generate([tokenized_sentences], *args, **kwargs)[0]
    arguments = _generate_arguments.bind(self, tokenized_sentences, *args, **kwargs).arguments
    rows = {
        name: value
        for name, value in (arguments.get("inference_step_args") or {}).items()
        if torch.is_tensor(value) and value.dim() > 0 and len(value) == len(tokenized_sentences)
    }
    interface = copy.copy(self)
    interface.task = _WithRowsOfBatch(self.task, rows)
    return _generate(interface, tokenized_sentences, *args, **kwargs)


@replaces(
    "fairseq.sequence_scorer.SequenceScorer.generate",
    prevents="an unreadable error",
    until="fairseq adds only weights that are needed",
    wraps=_score,
)
def score(self: Any, models: Any, sample: Any, **kwargs: Any) -> Any:
    """Return the scores of references, with attention weights that can be added.

    --score-reference with several models adds the weights of their cross-attention, which the plugin's models do not
    compute if nothing reads them. Here they do if they are scored together with other models.
    """
    if len(models) == 1:
        return _score(self, models, sample, **kwargs)
    # Each model must give the weights that are added. fairseq's decoder always asks its last layer for them.
    layers = (getattr(getattr(model, "decoder", None), "layers", None) for model in models)
    last = [of_model[-1] for of_model in layers if of_model]
    before = [getattr(layer, "need_attn", True) for layer in last]
    try:
        for layer in last:
            layer.need_attn = True
        return _score(self, models, sample, **kwargs)
    finally:
        for layer, needed in zip(last, before, strict=True):
            layer.need_attn = needed
