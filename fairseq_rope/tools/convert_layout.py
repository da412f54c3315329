"""Convert a checkpoint to the other layout of the rotation: ``fairseq-rope convert-layout``.

``interleaved`` rotates the dimensions (2i, 2i+1) of a head together, ``half`` the dimensions (i, i + d/2)
(see ``fairseq_rope.positions.rotary``). Much other software supports only one of them. The rows of the query and key
projections are permuted in the same way, so their products and the output of the model do not change. The optimiser's
moments of these rows are permuted, too, so training continues from the output as it would from the input.
"""

import argparse
import os
from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import InputError, ending_in_one_sentence, flag_of, refuse_output, warn
from . import FILE, REQUIRED, SWITCH, USER_DIR, add_flags, command_parser, load_user_dir

if TYPE_CHECKING:
    from torch import Size, Tensor

    from ..transformer.options import ModelOptions, SideOptions

# Entries in the state of an optimiser that have the shape of the parameter: those of Adam with AMSGrad, Adamax,
# SGD, NAG, Adagrad and Adadelta.
MOMENTS = "exp_avg exp_avg_sq max_exp_avg_sq exp_inf momentum_buffer sum square_avg acc_delta".split()
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
    biases, in encoder and decoder, in the average of ``--store-ema`` and in the optimiser's moments. ``rope_layout``
    in the options is changed. ``last_optimizer_state`` is dropped, with a warning on standard error, if the positions
    of these rows in it are unknown. If *layout*, "interleaved" or "half", is that of *state*, *state* itself is
    returned.

    Raises:
        LayoutError: the model is not rotary, or has product-quantised projections; or there is no such *layout*
    """
    from omegaconf import DictConfig, OmegaConf

    from ..checkpoints import AVERAGES

    if layout not in CHOICES:
        raise LayoutError(f"the layout {layout} must be one of {', '.join(CHOICES)}")
    model = _model(state)
    if model.rotation("rope_layout") == layout:
        return state

    def convert(weights: dict[str, "Tensor"]) -> dict[str, "Tensor"]:
        return {name: _convert(name, weight, model, layout) for name, weight in weights.items()}

    def with_layout(options: Any) -> Any:
        if isinstance(options, DictConfig):  # of fairseq-hydra-train, as fairseq reads it
            return OmegaConf.merge(options, {"rope_layout": layout})
        is_dict = isinstance(options, dict)  # from a YAML file
        return {**options, "rope_layout": layout} if is_dict else Namespace(**{**vars(options), "rope_layout": layout})

    converted = {**state, "model": convert(state["model"])}
    if all(converted["model"][name] is weight for name, weight in state["model"].items()):
        raise LayoutError("it has no self-attention")
    extra = state.get("extra_state")
    if isinstance(extra, dict):
        averages = {name: extra[name] for name in AVERAGES if isinstance(extra.get(name), dict)}
        converted["extra_state"] = {**extra, **{name: convert(weights) for name, weights in averages.items()}}
    try:
        if state.get("last_optimizer_state"):
            converted["last_optimizer_state"] = _convert_optimiser(state, model, layout)
    except LayoutError as error:
        del converted["last_optimizer_state"]
        restart = "starts with a new optimiser and at the beginning of its learning-rate schedule"
        dropped = f"the optimiser's state is dropped: {error}. Training that resumes from the output {restart}"
        warn("convert-layout", dropped)
    if state.get("cfg"):
        converted["cfg"] = {**state["cfg"], "model": with_layout(state["cfg"]["model"])}
    else:
        converted["args"] = with_layout(state["args"])
    return converted


class _Model(NamedTuple):
    """The options of a rotary model: as its architecture completes them, and as they are read."""

    args: Namespace
    options: "ModelOptions"

    def rotation(self, name: str) -> Any:
        """Return an option of the rotation, which both sides have in common."""
        values = next(side.position for side in self.options.sides if _rotates(side))
        if name not in values:  # a user's subclass of RotaryEmbedding
            encodings = " and ".join(dict.fromkeys(side.encoding for side in self.options.sides))
            raise LayoutError(f"its position encoding is {encodings}, which has no {flag_of(name)}")
        return values[name]


def _model(state: dict[str, Any]) -> _Model:
    """Return the options of the rotary model in *state*."""
    from ..checkpoints import part_of
    from ..positions.rotary import LAYOUTS
    from ..transformer.defaults import complete
    from ..transformer.options import is_ours, read
    from ..transformer.sides import model_name

    args = complete(part_of(state, "model"))
    if args is None:
        raise LayoutError("it has no options of its model, neither in cfg nor in args")
    if not is_ours(args):
        raise LayoutError(f"its model is {model_name(args)}, which is not rotary")
    model = _Model(args, read(args))
    if not any(_rotates(side) for side in model.options.sides):
        encodings = " and ".join(dict.fromkeys(side.encoding for side in model.options.sides))
        raise LayoutError(f"its position encoding is {encodings}, which does not rotate")
    layout = model.rotation("rope_layout")
    if layout not in LAYOUTS:
        raise LayoutError(f"its rope_layout is {layout}, and must be one of {', '.join(LAYOUTS)}")
    return model


def _rotates(side: "SideOptions") -> bool:
    """Return whether the self-attention of *side* rotates queries and keys."""
    from ..positions.rotary import RotaryEmbedding

    return issubclass(side.encoding_class, RotaryEmbedding)


def _convert(name: str, rows: "Tensor", model: _Model, layout: str) -> "Tensor":
    """Return *rows*, the parameter *name* or a moment of it, of shape (C, ...), in *layout*, or *rows* itself.

    Query and key projections of attention that rotates and their norms change, or the vectors of favor's features.
    """
    from ..positions.rotary import rotary_dim

    module, _, parameter = name.rpartition(".self_attn.")
    part = parameter.split(".")[0]
    if part not in ("q_proj", "k_proj", "q_norm", "k_norm", "feature_map", "position"):
        return rows
    side = model.options.encoder if "encoder" in module.split(".") else model.options.decoder
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
    order = row_order(head_dim, rotary_dim(head_dim, model.rotation("rope_fraction")), layout)
    return rows.unflatten(0, (-1, head_dim))[:, order].flatten(0, 1)


def _convert_optimiser(state: dict[str, Any], model: _Model, layout: str) -> dict[str, Any]:
    """Return ``last_optimizer_state`` of *state* in *layout*, or raise a LayoutError if its form is not known.

    fairseq saves the state of a torch optimiser, which numbers the parameters in their order in the model and
    then in the criterion. With ``--fp16`` and without ``--fp16-no-flatten-grads``, the optimiser has only one
    parameter, the concatenation of all of them (``fairseq/optim/fp16_optimizer.py``).
    """
    import torch

    from ..checkpoints import FLOAT32_COPIES, float32_copies, option_value, part_of

    optimiser = state["last_optimizer_state"]
    if option_value(part_of(state, "distributed_training"), "ddp_backend") == "fully_sharded":
        raise LayoutError("--ddp-backend fully_sharded numbers the parameters in another order")
    try:
        (group,) = optimiser["param_groups"]
        numbers, entries = list(group["params"]), {n: dict(e) for n, e in optimiser["state"].items()}
        has_all_listed = set(entries) <= set(numbers)
    except (KeyError, TypeError, ValueError, AttributeError):
        raise LayoutError("it is not the state of one optimiser with one group of parameters") from None
    shapes = _parameter_shapes(state["model"], model.args)
    shapes.update({name: weight.shape for name, weight in (state.get("criterion") or {}).items()})
    if len(numbers) not in (1, len(shapes)):
        raise LayoutError(f"it has {len(numbers)} parameters, and the model has {len(shapes)}")
    if not has_all_listed:
        raise LayoutError("it has entries for parameters that its group does not list")
    flat = len(numbers) == 1

    def convert(number: int, entry: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            if isinstance(value, (int, float, str, type(None))):
                return value
            raise LayoutError(f"its {entry} is a {type(value).__name__}, not a tensor or number")
        if value.numel() == 1:
            return value
        if entry not in (*MOMENTS, FLOAT32_COPIES):
            raise LayoutError(f"the order of the rows of its {entry} is not known")
        names = list(shapes) if flat else [list(shapes)[numbers.index(number)]]
        sizes = [shapes[name].numel() for name in names]
        if value.shape != ((sum(sizes),) if flat else shapes[names[0]]):
            raise LayoutError(f"its {entry} of {names[0]} has the shape {tuple(value.shape)}")
        parts = zip(names, value.flatten().split(sizes))
        rows = [_convert(name, part.view(shapes[name]), model, layout).flatten() for name, part in parts]
        return (torch.cat(rows) if flat else rows[0]).view(value.shape)

    for number, values in entries.items():
        entries[number] = {entry: convert(number, entry, value) for entry, value in values.items()}
    try:
        copies = float32_copies(optimiser)
    except ValueError as error:
        raise LayoutError(str(error)) from None
    if copies is None:
        return {**optimiser, "state": entries}
    if len(copies) != len(numbers):
        raise LayoutError(f"its {FLOAT32_COPIES} are not one for each parameter")
    converted = [convert(number, FLOAT32_COPIES, copy) for number, copy in zip(numbers, copies)]
    return {**optimiser, "state": entries, FLOAT32_COPIES: converted}


def _parameter_shapes(weights: dict[str, "Tensor"], options: Namespace) -> dict[str, "Size"]:
    """Return the shapes of the trained parameters by name, in the order of ``model.parameters()``, shared ones once."""
    import torch
    from fairseq.data import Dictionary
    from fairseq.models import MODEL_REGISTRY

    from ..transformer.sides import model_name, model_sides

    sizes = []
    for side in model_sides(options):
        places = (f"{side}.embed_tokens.weight", f"{side}.sentence_encoder.embed_tokens.weight")  # RoBERTa's
        rows = [weights[place].size(0) for place in places if place in weights]
        if not rows:
            raise LayoutError(f"the order of parameters is not known for a model without {side}.embed_tokens")
        sizes += rows
    dictionaries = {size: Dictionary() for size in sizes}
    for size, dictionary in dictionaries.items():
        for number in range(size - len(dictionary)):
            dictionary.add_symbol(str(number))
    task = SimpleNamespace(source_dictionary=dictionaries[sizes[0]], target_dictionary=dictionaries[sizes[-1]])
    without_files = Namespace(**{**vars(options), "encoder_embed_path": None, "decoder_embed_path": None})
    try:
        is_roberta = model_sides(options) == ("encoder",)  # copies its initial weights to the CPU
        with torch.device("cpu" if is_roberta else "meta"):  # meta allocates no memory
            model = MODEL_REGISTRY[model_name(options)].build_model(without_files, task)
            for head in dict.fromkeys(key.split(".")[1] for key in weights if key.startswith("classification_heads.")):
                parts = (weights[f"classification_heads.{head}.{part}.weight"] for part in ("out_proj", "dense"))
                model.register_classification_head(head, *(part.size(0) for part in parts))
    except Exception as error:  # building a model can raise any exception
        raise LayoutError(f"the model cannot be built to find the order of its parameters: {error}") from None
    shapes = {name: parameter.shape for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name, shape in shapes.items():
        if name not in weights or weights[name].shape != shape:
            raise LayoutError(f"its parameter {name} does not fit the model that its options describe")
    return shapes


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    example = "--path checkpoint_best.pt --rope-layout half --output half.pt"
    parser = command_parser("convert-layout", "Convert a rotary checkpoint to the other --rope-layout.", example)
    rows = [
        ("--path", {**REQUIRED, **FILE}, "the checkpoint"),
        ("--rope-layout", {**REQUIRED, "choices": CHOICES}, "the layout of the output"),
        ("--output", {**REQUIRED, **FILE}, "where to write the output"),
        USER_DIR,
        ("--force", SWITCH, "allow --output to replace the file of --path"),
    ]
    add_flags(parser, rows)
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
        dropped = "last_optimizer_state" in state and "last_optimizer_state" not in converted
        print(f"wrote {args.output}{', without the state of the optimiser' if dropped else ''}")
