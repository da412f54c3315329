"""The flags of fairseq's programs: those that a program would ignore do what their help says."""

import re
import sys
from argparse import Namespace
from collections.abc import Collection
from typing import Any

from fairseq import options

from ..checkpoints import option_value
from ..errors import InputError
from .registry import replaces

_parse_args_and_arch = options.parse_args_and_arch

LOCAL_RANK = re.compile(r"^--local-rank(?==|$)")  # as torch.distributed.launch writes the flag since torch 2.0


@replaces(
    "fairseq.options.parse_args_and_arch",
    prevents="wrong results",
    until="fairseq does not set tpu for --bf16, and heeds these flags",
    wraps=_parse_args_and_arch,
)
def parse_args_and_arch(parser: Any, input_args: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Read the flags of a program, and heed those that it would ignore.

    fairseq reads --bf16 as --tpu too, so every training with --bf16 ends with "'NoneType' object has no attribute
    'xla_device'". Here only --tpu means a TPU. --local-rank, which torch.distributed.launch adds, is read as
    --local_rank. fairseq-generate ignores --num-shards, so that each shard translates everything, and --sacrebleu; here
    it heeds them. fairseq-interactive ignores --lm-path; here it refuses it.
    """
    words = sys.argv[1:] if input_args is None else list(input_args)
    words = [LOCAL_RANK.sub("--local_rank", word) if isinstance(word, str) else word for word in words]
    groups = [group.title for group in parser._action_groups]  # before a task or model adds its flags
    parsed = _parse_args_and_arch(parser, words, *args, **kwargs)
    namespace = parsed if isinstance(parsed, Namespace) else parsed[0]
    if "Generation" in groups and not kwargs.get("suppress_defaults"):  # then fairseq calls this again, without it
        _heed_flags(groups, namespace)
    if option_value(namespace, "bf16"):
        namespace.tpu = "--tpu" in words
    return parsed


def _heed_flags(groups: Collection[str | None], flags: Namespace) -> None:
    """Change the *flags* of fairseq-generate, or of fairseq-interactive, so that it does not ignore them."""
    if "Interactive" in groups:
        if flags.lm_path:
            raise InputError(f"--lm-path {flags.lm_path}: fairseq-interactive reads no language model")
        return
    if flags.sacrebleu and flags.scoring == "bleu":
        flags.scoring = "sacrebleu"
    if flags.num_shards > 1:
        flags.distributed_world_size, flags.distributed_rank = flags.num_shards, flags.shard_id
