"""Flags that fairseq's programs ignore in silence: they do what their help says, or end in one sentence.

The flags of the other programs that a program accepts and ignores are listed in docs/compatibility.md.
"""

import importlib.util
import logging
from argparse import ArgumentParser, Namespace
from typing import Any

import numpy as np
import torch
from fairseq.logging import progress_bar
from torch import Tensor

from ..checkpoints import option
from ..errors import InputError

logger = logging.getLogger(__name__)

# What each program does not do, by the flag that asks for it.
NOT_DONE_BY_INTERACTIVE = {
    "lm_path": "fairseq-interactive reads no language model: give it to fairseq-generate",
    "prefix_size": "fairseq-interactive has no references, whose first words it could keep: use fairseq-generate",
    "print_step": "fairseq-interactive prints no steps: use fairseq-generate",
    "retain_iter_history": "fairseq-interactive prints no steps: use fairseq-generate",
    "score_reference": "fairseq-interactive has no references: use fairseq-generate",
}
# Their results are entries of the hypotheses of fairseq's generator for such models; others have none.
OF_ITERATIVE_DECODING = ("print_step", "retain_iter_history")


def heed_flags(parser: ArgumentParser, given: Namespace, words: list[str]) -> None:
    """Change the options *given* so that their program does not ignore them, or raise an InputError.

    Args:
        parser: the parser of one of fairseq's programs
        given: what it read, which this function changes in place
        words: the command line
    """
    flags = parser._option_string_actions
    is_interactive, searches = "--buffer-size" in flags, "--beam" in flags
    if is_interactive:
        for name, why in NOT_DONE_BY_INTERACTIVE.items():
            if option(given, name):
                raise InputError(f"--{name.replace('_', '-')}: {why}")
        if option(given, "print_alignment") == "soft":
            raise InputError("--print-alignment soft: fairseq-interactive prints hard alignments: give hard")
    elif searches:
        for name in OF_ITERATIVE_DECODING:
            if option(given, name) and "lev" not in given.task:
                raise InputError(f"--{name.replace('_', '-')}: is for --task translation_lev, and this is {given.task}")
        if given.sacrebleu and given.scoring == "bleu":
            given.scoring = "sacrebleu"
    if searches:
        given.no_seed_provided = "--no-seed-provided" in words
    if option(given, "num_batch_buckets") and not is_interactive and not hasattr(np, "compat"):
        raise InputError(f"--num-batch-buckets {given.num_batch_buckets}: fairseq needs NumPy before 2.0 for it")
    trains = "--max-epoch" in flags
    if trains and option(given, "write_checkpoints_asynchronously") and importlib.util.find_spec("iopath") is None:
        raise InputError("--write-checkpoints-asynchronously: needs iopath, which is not installed")
    generates = searches and not is_interactive
    method = None if generates else option(given, "distributed_init_method")  # fairseq-generate is one process
    if method and not given.distributed_no_spawn and not torch.cuda.device_count():
        raise InputError(
            f"--distributed-init-method {method}: fairseq starts a process for each GPU, and there is none: start the "
            "processes yourself, with --distributed-no-spawn and --distributed-rank"
        )
    _take_one_shard(given, generates, heeds_it="--context-window" in flags)


def _take_one_shard(given: Namespace, can: bool, heeds_it: bool) -> None:
    """Let a program that *can* read one of --num-shards parts do so; others than fairseq-eval-lm refuse the flag."""
    shards, number = (option(given, name) for name in ("num_shards", "shard_id"))
    if not shards or (shards == 1 and number == 0) or heeds_it:
        return
    if not can:
        raise InputError(f"--num-shards {shards}: is for fairseq-generate and fairseq-eval-lm; this program reads all")
    if not 0 <= number < shards:
        raise InputError(f"--shard-id {number}: must be from 0 to {shards - 1}, one less than --num-shards {shards}")
    if given.distributed_world_size > 1:
        raise InputError("--num-shards and --distributed-world-size both divide the data: give one of them")
    given.distributed_world_size, given.distributed_rank = shards, number


def _no_repeat_ngram(self: Any, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int) -> Tensor:
    """Set the scores of words to -inf that would repeat *n* words of their hypothesis. TorchScript compiles this.

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
        lprobs = lprobs.masked_fill_(counts > 0, float("-inf"))
    return lprobs


def logs_without_a_package(common: Any) -> list[str]:
    """Return the options in *common* that ask for a log whose package is not installed, with a warning for each.

    fairseq gives the warning for tensorboard and wandb at every validation, without the name of the flag.
    """
    packages = {"tensorboard_logdir": ("tensorboard", "SummaryWriter"), "wandb_project": ("wandb", "wandb")}
    names = [name for name, (_, part) in packages.items() if option(common, name) and not vars(progress_bar).get(part)]
    for name in names:
        package, flag = packages[name][0], f"--{name.replace('_', '-')} {option(common, name)}"
        logger.warning(f"{flag}: writes nothing, because {package} is not installed: pip install {package}")
    return names
