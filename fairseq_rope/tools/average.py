"""Average the weights of several checkpoints: ``fairseq-rope average``.

The flags are those of fairseq's ``scripts/average_checkpoints.py``, which cannot load checkpoints on torch >= 2.6. Only
the sums and one checkpoint are in memory at a time. Everything else in the output comes from the first checkpoint, or
from the newest one if the last are chosen, without what belongs to its weights: the state of the optimiser and the
averages of ``--store-ema``.
"""

import argparse
import os
import re
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InputError, ending_in_one_sentence, refuse_output
from ..files import NUMBERS
from . import add_user_dir, command_parser, load_user_dir

if TYPE_CHECKING:
    from torch import Tensor

# The flags that choose checkpoints by number: what they choose, and the pattern of the file names.
NUMBERED = {
    "--num-epoch-checkpoints": ("the last N checkpointEPOCH.pt", NUMBERS["epoch"]),
    "--num-update-checkpoints": ("the last N checkpoint_EPOCH_UPDATE.pt", NUMBERS["update"]),
}


class AverageError(InputError):
    """The checkpoints cannot be averaged; the message names the flag or file."""


def average_checkpoints(paths: Sequence[str]) -> dict[str, Any]:
    """Return the state of the first of *paths*, with the mean of the weights of all *paths*.

    Floating-point weights are summed in float64 and cast to the type that they have in the first checkpoint.
    The mean of integer entries (counters) is rounded down, as in fairseq's script.

    Raises:
        AverageError: two of *paths* have the same weights, or they are not of the same model
        fairseq_rope.checkpoints.CheckpointError: a file is not a complete fairseq checkpoint
    """
    import torch

    from ..checkpoints import AVERAGES, load_checkpoint

    state: dict[str, Any] = {}
    sums: dict[str, Tensor] = {}
    types: dict[str, torch.dtype] = {}
    path_of: dict[tuple[tuple[str, int], ...], str] = {}  # by the names and checksums of the weights
    for path in paths:
        loaded = load_checkpoint(path)
        # These belong to the weights of one checkpoint. The state of the optimiser is twice as large as the weights.
        loaded.pop("last_optimizer_state", None)
        if isinstance(extra_state := loaded.get("extra_state"), dict):
            for name in AVERAGES:
                extra_state.pop(name, None)
        weights = loaded.pop("model")
        if not path_of:
            state, types = loaded, {name: weight.dtype for name, weight in weights.items()}
            for name, dtype in types.items():
                real = torch.float64 if dtype.is_floating_point else torch.int64
                exact = torch.complex128 if dtype.is_complex else real
                sums[name] = torch.zeros_like(weights[name], dtype=exact)
        else:
            refuse_to_average(paths[0], state, path, loaded)
        in_bytes = ((name, weight.contiguous().reshape(-1).view(torch.uint8)) for name, weight in weights.items())
        checksums = tuple((name, zlib.crc32(data.numpy().data)) for name, data in in_bytes)
        if checksums in path_of:
            raise AverageError(f"{path} has the same weights as {path_of[checksums]}; give one of them")
        path_of[checksums] = path
        _add(sums, weights, paths[0], path)
        del loaded, weights, in_bytes  # before the next checkpoint is read
    state["model"] = {}
    for name, dtype in types.items():
        total = sums.pop(name)
        mean = total / len(paths) if dtype.is_floating_point or dtype.is_complex else total // len(paths)
        state["model"][name] = mean.to(dtype)
    return state


def refuse_to_average(first: str, first_state: dict[str, Any], path: str, state: dict[str, Any]) -> None:
    """Raise an AverageError if *state* and *first_state*, those of *path* and *first*, are not of the same model.

    A missing option has its default value. A checkpoint without options is not refused.
    """
    from ..checkpoints import languages_of, part_of
    from ..transformer.defaults import complete
    from ..transformer.meaning import meaning, option_differences
    from ..transformer.options import model_name

    options, first_options = (complete(part_of(checkpoint, "model")) for checkpoint in (state, first_state))
    if options is None or first_options is None:
        return
    values = [("the model", model_name(options), model_name(first_options))]
    values += [difference[1:] for difference in option_differences(meaning(options), meaning(first_options))]
    languages, first_languages = (languages_of(part_of(checkpoint, "task")) for checkpoint in (state, first_state))
    if None not in languages and languages == first_languages[::-1]:
        values.append(("the direction", "{}-{}".format(*languages), "{}-{}".format(*first_languages)))
    for what, value, first_value in values:
        if value != first_value:
            _refuse(path, first, f"{what} is {_shown(value)} in the former and {_shown(first_value)} in the latter")


def _add(sums: dict[str, "Tensor"], weights: dict[str, "Tensor"], first: str, path: str) -> None:
    """Add the weights of *path* to *sums*, which have the names and shapes of *first*."""
    differing = (("the former lacks", set(sums) - set(weights)), ("only the former has", set(weights) - set(sums)))
    shown = [f"{what} {', '.join(sorted(names)[:5])}{' …' * (len(names) > 5)}" for what, names in differing if names]
    if shown:
        _refuse(path, first, "; ".join(shown))
    for name, weight in weights.items():
        shape, expected = tuple(weight.shape), tuple(sums[name].shape)
        if shape != expected:
            _refuse(path, first, f"{name} has shape {shape} in the former and {expected} in the latter")
        sums[name] += weight


def _shown(value: Any) -> Any:
    return "not given" if value is None or value is False or value == "" else value


def _refuse(path: str, first: str, difference: str) -> None:
    raise AverageError(f"{path} and {first} are not of the same model: {difference}")


def last_checkpoints(folders: Sequence[str], count: int, flag: str) -> list[str]:
    """Return the *count* newest checkpoints in the only one of *folders*, newest first.

    *flag* is a key of NUMBERED, which has the pattern of their names.
    """
    if len(folders) != 1 or not os.path.isdir(folders[0]):
        raise AverageError(f"{flag} needs one folder of checkpoints as --inputs, not {' '.join(folders)}")
    if count < 1:
        raise AverageError(f"{flag} {count}: must be at least 1")
    folder = folders[0]
    in_folder = os.listdir(folder)
    matches = [match for match in (re.fullmatch(NUMBERED[flag][1], name) for name in in_folder) if match]
    newest_first = [name for _, name in sorted(((int(match[1]), match[0]) for match in matches), reverse=True)]
    if len(newest_first) < count:
        names = ", ".join(newest_first) or "none"
        (other,) = NUMBERED.keys() - {flag}
        has_others = any(re.fullmatch(NUMBERED[other][1], name) for name in in_folder)
        more = f"; it has others for {other}" if has_others else ""
        raise AverageError(f"{flag} {count}: {folder} has only {len(newest_first)} checkpoints ({names}){more}")
    return [os.path.join(folder, name) for name in newest_first[:count]]


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line; the flags are those of fairseq's script."""
    example = "--inputs checkpoints --num-epoch-checkpoints 5 --output averaged.pt"
    parser = command_parser("average", "Average the weights of several fairseq checkpoints.", example)
    inputs = "checkpoint files, or one folder of them"
    parser.add_argument("--inputs", required=True, nargs="+", action="extend", help=inputs)
    parser.add_argument("--output", required=True, metavar="FILE", help="where to write the average")
    add_user_dir(parser)
    counts = parser.add_mutually_exclusive_group()
    for flag, (what, _) in NUMBERED.items():
        counts.add_argument(flag, type=int, metavar="N", help=f"average {what}")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; after an error, exit with status 1 and print one sentence to standard error."""
    args = build_parser().parse_args(argv)
    with ending_in_one_sentence("fairseq-rope average"):
        from ..checkpoints import save_checkpoint

        refuse_output(args.output)
        counts = {flag: getattr(args, flag[2:].replace("-", "_")) for flag in NUMBERED}
        flag = next((flag for flag, count in counts.items() if count is not None), None)
        paths = args.inputs if flag is None else last_checkpoints(args.inputs, counts[flag], flag)
        for path in paths:  # before the first one is read
            os.stat(path)
            if os.path.exists(args.output) and os.path.samefile(path, args.output):
                raise AverageError(f"--output {args.output}: is one of the averaged checkpoints; give another name")
        load_user_dir(args.user_dir)
        print("averaging", *paths, sep="\n  ", flush=True)
        save_checkpoint(average_checkpoints(paths), args.output)
        print(f"wrote {args.output}")
