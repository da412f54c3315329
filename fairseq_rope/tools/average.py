"""Average the weights of several checkpoints: ``python -m fairseq_rope average``.

The flags of fairseq's ``scripts/average_checkpoints.py``, which no longer loads its own checkpoints on
torch >= 2.6. Sums are kept in float64 and each weight is given back in its own type; the running sum and
one checkpoint are in memory at a time. The output keeps everything else of the newest checkpoint but
``last_optimizer_state``, and appears under its name only when it is whole.
"""

import argparse
import filecmp
import itertools
import os
import re
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

from .. import __version__
from ..errors import InputError, ending_in_one_sentence, refuse_output

if TYPE_CHECKING:
    from torch import Tensor


# Options of the model that change what the same weights compute.
MEANING = (
    *("rope_base", "rope_layout", "rope_fraction", "no_token_positional_embeddings"),
    *("encoder_attention_heads", "decoder_attention_heads"),
    *("encoder_normalize_before", "decoder_normalize_before"),
    *("activation_fn", "no_scale_embedding", "adaptive_softmax_cutoff", "alignment_heads", "alignment_layer"),
    # With shared weights one tensor stands in the checkpoint under several names.
    *("share_all_embeddings", "share_decoder_input_output_embed", "merge_src_tgt_embed"),
    *("tie_adaptive_weights", "tie_adaptive_proj"),
    *("share_encoder_embeddings", "share_decoder_embeddings", "share_encoders", "share_decoders"),
)


class AverageError(InputError):
    """What was asked for cannot be averaged; the message names the flag or file."""


def average_checkpoints(paths: Sequence[str]) -> Dict[str, Any]:
    """The state of the first of *paths*, its weights replaced by the mean over all of them.

    Floating-point weights are summed in float64 and cast back to the type they have in the first
    checkpoint; integer entries (counters) get the mean rounded down, as fairseq's script gives.

    Raises:
        AverageError: two of *paths* are the same checkpoint, or the names, the shapes or the meaning of
            their weights differ
        fairseq_rope.patches.loading.CheckpointError: a file is not a whole fairseq checkpoint
        OSError: a file cannot be read
    """
    import torch

    from ..patches.loading import load_checkpoint

    refuse_repetition(paths)
    state: Dict[str, Any] = {}
    sums: Dict[str, Tensor] = {}
    types: Dict[str, torch.dtype] = {}
    for number, path in enumerate(paths):
        loaded = load_checkpoint(path)
        loaded.pop("last_optimizer_state", None)  # twice the weights, of no use to an average
        weights = loaded.pop("model")
        if number == 0:
            state = loaded
            types = {name: weight.dtype for name, weight in weights.items()}
            sums = {
                name: weight.to(torch.float64 if weight.is_floating_point() else torch.int64, copy=True)
                for name, weight in weights.items()
            }
        else:
            refuse_other_model(paths[0], state, path, loaded)
            _add(sums, weights, paths[0], path)
        del loaded, weights  # before the next one is read
    state["model"] = {}
    for name, dtype in types.items():
        total = sums.pop(name)
        mean = total / len(paths) if total.is_floating_point() else total // len(paths)
        state["model"][name] = mean.to(dtype)
    return state


def refuse_repetition(paths: Sequence[str]) -> None:
    """Raise an AverageError if two of *paths* are one file, also through a link, or copies of one file."""
    for first, second in itertools.combinations(paths, 2):
        if os.path.samefile(first, second) or filecmp.cmp(first, second, shallow=False):
            raise AverageError(f"{second} is the same checkpoint as {first}; each can be given once")


def refuse_other_model(first: str, first_state: Dict[str, Any], path: str, state: Dict[str, Any]) -> None:
    """Raise an AverageError if the options in *state* give its weights another meaning than in *first_state*.

    An option that one of them lacks has its default there. A checkpoint without options fits every other one.

    Args:
        first, path: the files of *first_state* and of *state*, for the message
    """
    from ..patches.loading import languages_of, part_of
    from .convert_layout import model_name, model_options

    options, first_options = model_options(state), model_options(first_state)
    if options is None or first_options is None:
        return
    values = [("the model", model_name(options), model_name(first_options))]
    for name in MEANING:
        flag = "--" + name.replace("_", "-")
        values.append((flag, getattr(options, name, None), getattr(first_options, name, None)))
    languages, first_languages = (languages_of(part_of(each, "task")) for each in (state, first_state))
    if None not in languages and languages == first_languages[::-1]:
        values.append(("the direction", "-".join(languages), "-".join(first_languages)))
    for what, value, first_value in values:
        if (value or None) != (first_value or None):  # None and False are one value of a flag
            raise AverageError(
                f"{path} and {first} are not of the same model: {what} is {value} in the former and "
                f"{first_value} in the latter"
            )


def _add(sums: Dict[str, "Tensor"], weights: Dict[str, "Tensor"], first: str, path: str) -> None:
    """Add the weights of *path* to the sums begun with *first*."""
    missing, surplus = sorted(set(sums) - set(weights)), sorted(set(weights) - set(sums))
    if missing or surplus:
        differences = [
            f"{what} {', '.join(names[:5])}{' …' if len(names) > 5 else ''}"
            for what, names in (("it lacks", missing), ("only it has", surplus))
            if names
        ]
        raise AverageError(f"{path} and {first} are not of the same model: {'; '.join(differences)}")
    for name, weight in weights.items():
        if weight.shape != sums[name].shape:
            raise AverageError(
                f"{path} and {first} are not of the same model: {name} has shape {tuple(weight.shape)} "
                f"in the former and {tuple(sums[name].shape)} in the latter"
            )
        sums[name] += weight


def last_checkpoints(
    folder: str, count: int, flag: str, pattern: str, upper_bound: Optional[int] = None
) -> List[str]:
    """The *count* newest checkpoints in *folder* whose whole name matches *pattern*, newest first.

    Args:
        pattern: a regular expression; its first group is the number to sort by
        upper_bound: only numbers up to this one

    Raises:
        AverageError: there are fewer than *count*; *flag* is named in the message
    """
    if not os.path.isdir(folder):
        raise AverageError(f"{flag} needs one folder of checkpoints as --inputs, and {folder} is none")
    numbered = []
    for name in os.listdir(folder):
        match = re.fullmatch(pattern, name)
        if match and (upper_bound is None or int(match.group(1)) <= upper_bound):
            numbered.append((int(match.group(1)), os.path.join(folder, name)))
    newest_first = [path for _, path in sorted(numbered, reverse=True)]
    if len(newest_first) < count:
        bound = "" if upper_bound is None else f" up to --checkpoint-upper-bound {upper_bound}"
        found = ", ".join(os.path.basename(path) for path in newest_first) or "none"
        raise AverageError(
            f"{flag} {count} asks for more checkpoints than {folder} holds{bound}: found "
            f"{len(newest_first)} ({found})"
        )
    return newest_first[:count]


def best_checkpoints(inputs: Sequence[str], count: int) -> List[str]:
    """The *count* best of ``checkpoint.best_METRIC_VALUE.pt``, best first.

    Which end is best stands in the checkpoints (``--maximize-best-checkpoint-metric``); fairseq's own
    script always takes the lowest values, which for BLEU are the worst.

    Args:
        inputs: checkpoint files, or one folder that holds them

    Raises:
        AverageError: a name holds no value, or there are fewer than *count*
    """
    from ..patches.loading import load_checkpoint

    flag = "--num-best-checkpoints"
    pattern = r"checkpoint[._]best_.*?(-?\d+\.?\d*)\.pt"
    if len(inputs) == 1 and os.path.isdir(inputs[0]):
        names = [name for name in os.listdir(inputs[0]) if re.fullmatch(pattern, name)]
        inputs = [os.path.join(inputs[0], name) for name in names]
    if len(inputs) < count:
        raise AverageError(f"{flag} {count} asks for more checkpoints than the {len(inputs)} found")
    valued = []
    for path in inputs:
        match = re.fullmatch(pattern, os.path.basename(path))
        if match is None:
            raise AverageError(f"{flag}: the name of {path} is not checkpoint.best_METRIC_VALUE.pt")
        valued.append((float(match.group(1)), path))
    state = load_checkpoint(valued[0][1])
    in_cfg = ((state.get("cfg") or {}).get("checkpoint") or {}).get("maximize_best_checkpoint_metric")
    in_args = getattr(state.get("args"), "maximize_best_checkpoint_metric", None)  # fairseq < 0.10
    maximize = bool(in_cfg or in_args)
    return [path for _, path in sorted(valued, reverse=maximize)][:count]


def build_parser() -> argparse.ArgumentParser:
    """The command line, named as fairseq's ``scripts/average_checkpoints.py``."""
    parser = argparse.ArgumentParser(
        prog="fairseq-rope average",
        description="Average the weights of several fairseq checkpoints.",
        epilog="example: fairseq-rope average "
        "--inputs checkpoints --num-epoch-checkpoints 5 --output averaged.pt",
    )
    parser.add_argument("--inputs", required=True, nargs="+", help="checkpoint files, or one folder of them")
    parser.add_argument("--output", required=True, metavar="FILE", help="where to write the average")
    number = parser.add_mutually_exclusive_group()
    number.add_argument(
        "--num-epoch-checkpoints", type=int, metavar="N", help="take the last N checkpointEPOCH.pt"
    )
    number.add_argument(
        "--num-update-checkpoints", type=int, metavar="N", help="take the last N checkpoint_EPOCH_UPDATE.pt"
    )
    number.add_argument(
        "--num-best-checkpoints",
        type=int,
        metavar="N",
        help="take the best N checkpoint.best_METRIC_VALUE.pt",
    )
    parser.add_argument(
        "--checkpoint-upper-bound",
        type=int,
        metavar="N",
        help="leave out epochs (--num-epoch-checkpoints) or updates (--num-update-checkpoints) above N",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def _choose(args: argparse.Namespace) -> List[str]:
    chosen = {
        flag: count
        for flag, count in (
            ("--num-epoch-checkpoints", args.num_epoch_checkpoints),
            ("--num-update-checkpoints", args.num_update_checkpoints),
            ("--num-best-checkpoints", args.num_best_checkpoints),
        )
        if count is not None
    }
    if args.checkpoint_upper_bound is not None and not set(chosen) & {
        "--num-epoch-checkpoints",
        "--num-update-checkpoints",
    }:
        raise AverageError(
            "--checkpoint-upper-bound needs --num-epoch-checkpoints or --num-update-checkpoints"
        )
    if not chosen:
        return list(args.inputs)
    ((flag, count),) = chosen.items()
    if count < 1:
        raise AverageError(f"{flag} {count}: must be at least 1")
    if flag == "--num-best-checkpoints":
        return best_checkpoints(args.inputs, count)
    if len(args.inputs) != 1:
        raise AverageError(f"{flag} needs one folder of checkpoints as --inputs, got {len(args.inputs)}")
    pattern = r"checkpoint(\d+)\.pt" if flag == "--num-epoch-checkpoints" else r"checkpoint_\d+_(\d+)\.pt"
    return last_checkpoints(args.inputs[0], count, flag, pattern, args.checkpoint_upper_bound)


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the command; exits with status 1 and one sentence on standard error if it cannot."""
    args = build_parser().parse_args(argv)
    with ending_in_one_sentence("fairseq-rope average"):
        from ..patches.saving import save_whole

        refuse_output(args.output)
        paths = _choose(args)
        print("averaging", *paths, sep="\n  ", flush=True)
        save_whole(average_checkpoints(paths), args.output)
    print(f"wrote {args.output}")
