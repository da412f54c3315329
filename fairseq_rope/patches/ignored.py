"""Flags that fairseq's programs ignore in silence: they do what their help says, give a warning, or are refused.

They are refused only if the result would be wrong or lost.

The flags of the other programs that a program accepts and ignores are listed in docs/compatibility.md.
"""

import importlib.util
import logging
from argparse import Namespace
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from ..checkpoints import option_value
from ..errors import InputError, flag_of
from .registry import replaces

logger = logging.getLogger(__name__)

# Flags that fairseq-interactive ignores, although they would change its translations.
NOT_DONE_BY_INTERACTIVE = {
    "lm_path": "fairseq-interactive reads no language model: give it to fairseq-generate",
    "score_reference": "fairseq-interactive has no references: use fairseq-generate",
}
# Flags that it ignores, and that would not change its translations.
WITHOUT_EFFECT_IN_INTERACTIVE = {
    "prefix_size": "fairseq-interactive has no references, whose first words it could keep; fairseq-generate has",
    "print_step": "fairseq-interactive prints no steps; fairseq-generate does",
    "retain_iter_history": "fairseq-interactive prints no steps; fairseq-generate does",
}


def heed_flags(parts: Collection[str | None], options: Namespace, words: list[str]) -> None:
    """Change the *options* so that their program does not ignore them, or raise an InputError.

    A flag that changes no result of the program gives a warning.

    Args:
        parts: the titles of the groups of flags that fairseq gave the parser of the program, before a task, model
            or criterion added its flags: they say which program it is
        options: what the parser read, which this function changes in place
        words: the command line
    """
    is_interactive, searches = "Interactive" in parts, "Generation" in parts
    generates = searches and not is_interactive
    if is_interactive:
        for name, why in NOT_DONE_BY_INTERACTIVE.items():
            if option_value(options, name):
                raise InputError(f"{flag_of(name)}: {why}")
        for name, why in WITHOUT_EFFECT_IN_INTERACTIVE.items():
            if option_value(options, name):
                logger.warning(f"{flag_of(name)}: has no effect: {why}")
    elif generates and option_value(options, "sacrebleu") and option_value(options, "scoring") == "bleu":
        options.scoring = "sacrebleu"
    if searches:
        options.no_seed_provided = "--no-seed-provided" in words
    trains = "optimization" in parts
    if (
        trains
        and option_value(options, "write_checkpoints_asynchronously")
        and importlib.util.find_spec("iopath") is None
    ):
        raise InputError("--write-checkpoints-asynchronously: needs iopath, which is not installed")
    method = None if generates else option_value(options, "distributed_init_method")  # fairseq-generate is one process
    if method and not option_value(options, "distributed_no_spawn") and not torch.cuda.device_count():
        raise InputError(
            f"--distributed-init-method {method}: fairseq starts a process for each GPU, and there is none: start the "
            "processes yourself, with --distributed-no-spawn and --distributed-rank"
        )
    # fairseq-eval-lm and fairseq's example of speech synthesis read one part themselves.
    if "dataset_data_loading" in parts and not {"LM Evaluation", "Speech Generation"} & {*parts}:
        _take_one_shard(options, generates)


def _take_one_shard(options: Namespace, reads_parts: bool) -> None:
    """Let a program that *reads_parts* read one of --num-shards parts of the data; others refuse the flag."""
    shards, number = (option_value(options, name) for name in ("num_shards", "shard_id"))
    if shards == 1 and number:
        where = "without --num-shards" if reads_parts else "in this program"
        logger.warning(f"--shard-id {number}: has no effect {where}, and all is read")
    if not shards or shards == 1:
        return
    if not reads_parts:
        raise InputError(f"--num-shards {shards}: is for fairseq-generate and fairseq-eval-lm; this program reads all")
    if options.distributed_world_size > 1:
        raise InputError("--num-shards and --distributed-world-size both divide the data: give one of them")
    options.distributed_world_size, options.distributed_rank = shards, number


@replaces(
    "fairseq.ngram_repeat_block.NGramRepeatBlock._no_repeat_ngram",
    prevents="wrong results",
    until="fairseq compares the words so far",
)
def _no_repeat_ngram(self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
    """Set the scores of words to -inf that would repeat *n* words of their hypothesis. TorchScript compiles this.

    fairseq ignores --no-repeat-ngram-size, if its extension for GPUs is not built: it looks for the last words of the
    sentence at the end of a tensor that ends with padding. Here no hypothesis repeats so many words, except in a prefix
    that the user gives.

    If no other word is possible, as in a prefix that the user gives, the words keep their scores.

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
