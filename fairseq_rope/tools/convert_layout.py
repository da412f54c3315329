"""Convert a checkpoint to the other layout of the rotation: ``fairseq-rope convert-layout``.

``interleaved`` rotates the dimensions (2i, 2i+1) of a head together, ``half`` the dimensions (i, i + d/2)
(see ``fairseq_rope.positions.rotary``). Much other software supports only one of them. The rows of the query and key
projections are permuted in the same way, so their products and the output of the model do not change. The state of the
optimiser is dropped: a training that resumes from the output starts with a new one, and a new learning-rate schedule.
"""

import argparse
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import InputError, ending_in_one_sentence, refuse_output
from . import add_user_dir, command_parser, load_user_dir

if TYPE_CHECKING:
    from torch import Tensor

    from ..transformer.options import ModelOptions, SideOptions

# The LAYOUTS of the rotation, whose package imports torch: --help and errors in flags need none.
CHOICES = ("interleaved", "half")


class LayoutError(InputError):
    """A checkpoint cannot be converted to the other layout; the message says why."""


def row_order(head_dim: int, dim: int, layout: str) -> list[int]:
    """Return, for each of the *head_dim* rows of a head in *layout*, its row in the other layout.

    The first *dim* rows rotate, an even number. The others keep their positions.
    """
    pairs = range(dim // 2)
    if layout == "half":
        order = [2 * i for i in pairs] + [2 * i + 1 for i in pairs]
    else:
        order = [row for i in pairs for row in (i, i + dim // 2)]
    return order + list(range(dim, head_dim))


def convert_layout(state: dict[str, Any], layout: str) -> dict[str, Any]:
    """Return the checkpoint *state* in *layout*; *state* itself does not change.

    The rows of ``q_proj`` and ``k_proj`` of self-attention, and of the norms after them, are permuted: weights and
    biases, in encoder and decoder, and in the average of ``--store-ema``. ``rope_layout`` in the options is changed,
    and ``last_optimizer_state`` is dropped. If *layout*, "interleaved" or "half", is that of *state*, *state* itself is
    returned.

    Raises:
        LayoutError: the model is not rotary, or has product-quantised projections; or there is no such *layout*
    """
    from omegaconf import DictConfig, OmegaConf

    from ..checkpoints import AVERAGES

    if layout not in CHOICES:
        raise LayoutError(f"the layout {layout} must be one of {', '.join(CHOICES)}")
    options = _options(state)
    if _rotation(options, "rope_layout") == layout:
        return state

    def convert(weights: dict[str, "Tensor"]) -> dict[str, "Tensor"]:
        return {name: _convert(name, weight, options, layout) for name, weight in weights.items()}

    def with_layout(saved: Any) -> Any:
        if isinstance(saved, DictConfig):  # of fairseq-hydra-train, as fairseq reads it
            return OmegaConf.merge(saved, {"rope_layout": layout})
        is_dict = isinstance(saved, dict)  # from a YAML file
        return {**saved, "rope_layout": layout} if is_dict else Namespace(**{**vars(saved), "rope_layout": layout})

    converted = {**state, "model": convert(state["model"])}
    if all(converted["model"][name] is weight for name, weight in state["model"].items()):
        raise LayoutError("it has no self-attention")
    extra = state.get("extra_state")
    if isinstance(extra, dict):
        averages = {name: extra[name] for name in AVERAGES if isinstance(extra.get(name), dict)}
        converted["extra_state"] = {**extra, **{name: convert(weights) for name, weights in averages.items()}}
    converted.pop("last_optimizer_state", None)
    if state.get("cfg"):
        converted["cfg"] = {**state["cfg"], "model": with_layout(state["cfg"]["model"])}
    else:
        converted["args"] = with_layout(state["args"])
    return converted


def _options(state: dict[str, Any]) -> "ModelOptions":
    """Return the options of the rotary model in *state*."""
    from ..checkpoints import part_of
    from ..transformer.defaults import complete
    from ..transformer.options import is_ours, model_name, read

    args = complete(part_of(state, "model"))
    if args is None:
        raise LayoutError("it has no options of its model, neither in cfg nor in args")
    if not is_ours(args):
        raise LayoutError(f"its model is {model_name(args)}, which is not rotary")
    options = read(args)
    if not any(_rotates(side) for side in options.sides):
        encodings = " and ".join(dict.fromkeys(side.encoding for side in options.sides))
        raise LayoutError(f"its position encoding is {encodings}, which does not rotate")
    return options


def _rotation(options: "ModelOptions", name: str) -> Any:
    """Return an option of the rotation, which both sides have in common."""
    return next(side.position[name] for side in options.sides if _rotates(side))


def _rotates(side: "SideOptions") -> bool:
    """Return whether the self-attention of *side* rotates queries and keys."""
    from ..positions.rotary import RotaryEmbedding

    return issubclass(side.encoding_class, RotaryEmbedding)


def _convert(name: str, rows: "Tensor", options: "ModelOptions", layout: str) -> "Tensor":
    """Return *rows*, the parameter *name* of shape (C, ...), in *layout*, or *rows* itself.

    Query and key projections of attention that rotates and their norms change, or the vectors of favor's features.
    """
    from ..positions.rotary import rotary_dim

    module, _, parameter = name.rpartition(".self_attn.")
    part = parameter.split(".")[0]
    if part not in ("q_proj", "k_proj", "q_norm", "k_norm", "feature_map", "position"):
        return rows
    side = options.encoder if "encoder" in module.split(".") else options.decoder
    if part == "position":
        if _rotates(side):
            only = "which can only be converted if it has no parameters and buffers"
            raise LayoutError(f"its {name} is part of the rotation, {only}")
        return rows
    if parameter.split(".")[1:] not in (["weight"], ["bias"], ["omega"]):
        raise LayoutError(f"its {name} is not a weight or bias, but part of a quantised projection")
    if not _rotates(side) or side.uses_favor != (part == "feature_map"):
        return rows
    # Heads share the other parameters. A model whose heads were pruned has fewer than its options say.
    head_dim = side.head_dim if part in ("q_proj", "k_proj") else rows.size(0)
    if not head_dim or rows.size(0) % head_dim:
        raise LayoutError(f"its {name} has {rows.size(0)} rows, which is not a multiple of the {head_dim} of a head")
    order = row_order(head_dim, rotary_dim(head_dim, _rotation(options, "rope_fraction")), layout)
    return rows.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    example = "--path checkpoint_best.pt --rope-layout half --output half.pt"
    parser = command_parser("convert-layout", "Convert a rotary checkpoint to the other --rope-layout.", example)
    parser.add_argument("--path", required=True, metavar="FILE", help="the checkpoint")
    parser.add_argument("--rope-layout", required=True, choices=CHOICES, help="the layout of the output")
    parser.add_argument("--output", required=True, metavar="FILE", help="where to write the output")
    add_user_dir(parser)
    parser.add_argument("--force", action="store_true", help="allow --output to replace the file of --path")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; after an error, exit with status 1 and print one sentence to standard error."""
    with ending_in_one_sentence("fairseq-rope convert-layout"):
        args = build_parser().parse_args(argv)
        from ..checkpoints import load_checkpoint, save_checkpoint

        refuse_output(args.output)
        if os.path.exists(args.output) and os.path.samefile(args.path, args.output) and not args.force:
            same = f"--output {args.output}: is the file of --path {args.path}"
            raise LayoutError(f"{same}; give another name, or --force to replace it")
        os.stat(args.path)  # before fairseq is imported
        load_user_dir(args.user_dir)
        state = load_checkpoint(args.path)
        try:
            converted = convert_layout(state, args.rope_layout)
        except ValueError as error:  # a LayoutError, or a fraction that rotary.py refuses
            raise LayoutError(f"--path {args.path}: {error}") from None
        save_checkpoint(converted, args.output)
        if converted is state:
            print(f"{args.path} already has the layout {args.rope_layout}: nothing was changed")
        is_dropped = bool(state.get("last_optimizer_state")) and converted is not state
        anew = ": in a training that resumes from it, the optimiser and its learning-rate schedule start anew"
        print(f"wrote {args.output}{anew if is_dropped else ''}")
