"""The search: missing constraints, groups of a diverse search, prefixes of several sentences from Python, ensembles.

These functions replace fairseq's; the table in ``patches/table.py`` says why.
"""

import copy
import functools
import inspect
from typing import Any

import torch
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.search import DiverseBeamSearch, LexicallyConstrainedBeamSearch
from fairseq.sequence_scorer import SequenceScorer
from torch import Tensor

from ..errors import InputError
from .saving import InPlaceOf

_init_constraints = LexicallyConstrainedBeamSearch.init_constraints
_diverse_step = DiverseBeamSearch.step
_generate = GeneratorHubInterface.generate
_score = SequenceScorer.generate
_generate_arguments = inspect.signature(_generate)


@functools.wraps(_init_constraints)
def init_constraints(self: Any, batch_constraints: Tensor | None, beam_size: int) -> None:
    if batch_constraints is None:
        raise InputError(
            f"--constraints {self.representation}: there are no constraints; fairseq-generate does not read any, and "
            "fairseq-interactive reads them from its input, each after a tab"
        )
    _init_constraints(self, batch_constraints, beam_size)


@functools.wraps(_diverse_step)
def diverse_step(
    self: Any,
    step: int,
    lprobs: Tensor,
    scores: Tensor | None,
    prev_output_tokens: Tensor | None = None,
    original_batch_idxs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
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

    def build_generator(self, models: Any, args: Any, prefix_allowed_tokens_fn: Any = None, **arguments: Any) -> Any:
        """Pass the function on if there is one: translation_multi_simple_epoch does not know this argument."""
        if prefix_allowed_tokens_fn is not None:
            arguments["prefix_allowed_tokens_fn"] = prefix_allowed_tokens_fn
        return self._replaced.build_generator(models, args, **arguments)

    def inference_step(self, generator: Any, models: Any, sample: dict[str, Any], **arguments: Any) -> Any:
        numbers = sample["id"]
        own = {name: rows.to(numbers.device).index_select(0, numbers) for name, rows in self._rows.items()}
        return self._replaced.inference_step(generator, models, sample, **{**arguments, **own})


@functools.wraps(_generate)
def generate(self: Any, tokenized_sentences: Any, *args: Any, **kwargs: Any) -> Any:
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


@functools.wraps(_score)
def score(self: Any, models: Any, sample: Any, **kwargs: Any) -> Any:
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
