"""Turn a checkpoint into the other layout of the rotation: ``python -m fairseq_rope.layout``.

``interleaved`` rotates the dimensions (2i, 2i+1) of a head together, ``half`` the dimensions (i, i + d/2)
(see ``fairseq_rope.rotary``). A permutation of the rows of the query and key projections turns one into the
other: queries and keys change their order together, so their products, and with them everything that the
model puts out, stay what they were. Other software often knows one layout only.
"""

import argparse
from argparse import Namespace
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence

from .errors import InputError, ending_in_one_sentence, refuse_output

if TYPE_CHECKING:
    from torch import Tensor


class LayoutError(InputError):
    """A checkpoint cannot be turned into the layout asked for; the message names it and says why."""


def row_order(head_dim: int, dim: int, layout: str) -> List[int]:
    """Which row of a head each row comes from when the head is turned into *layout* from the other one.

    Args:
        head_dim: D, the dimension of one attention head
        dim: d_r, how many of them, from the first on, rotate; even
        layout: the one to turn into

    Returns:
        D row numbers; the rows that do not rotate keep their place
    """
    pairs = range(dim // 2)
    if layout == "half":
        order = [2 * i for i in pairs] + [2 * i + 1 for i in pairs]
    else:
        order = [row for i in pairs for row in (i, i + dim // 2)]
    return order + list(range(dim, head_dim))


def convert_layout(state: Dict[str, Any], layout: str) -> Dict[str, Any]:
    """The checkpoint *state* in another *layout*, in new tensors where they change; *state* stays as it is.

    Rows of ``self_attn.q_proj`` and ``self_attn.k_proj``, weights and biases, in encoder and decoder, are
    put into another order, and ``rope_layout`` in the options is changed. ``last_optimizer_state`` is left
    out: its moments lie in the old order.

    Args:
        state: as ``fairseq_rope.patches.loading.load_checkpoint`` gives it
        layout: "interleaved" or "half"

    Raises:
        LayoutError: *state* is of no rotary model, or of one that is quantised by product
    """
    options = _options(state)
    state = {name: value for name, value in state.items() if name != "last_optimizer_state"}
    if options.rope_layout == layout:
        return state
    state["model"] = _convert_weights(state["model"], options, layout)
    extra = state.get("extra_state")
    if isinstance(extra, dict) and isinstance(extra.get("ema"), dict):  # of --store-ema
        state["extra_state"] = {**extra, "ema": _convert_weights(extra["ema"], options, layout)}
    if not state.get("cfg"):
        state["args"] = Namespace(**{**vars(state["args"]), "rope_layout": layout})
        return state
    model = state["cfg"]["model"]
    if isinstance(model, dict):  # of a YAML file, and nested perhaps
        model = {**model, "rope_layout": layout}
    else:
        model = Namespace(**{**vars(model), "rope_layout": layout})
    state["cfg"] = {**state["cfg"], "model": model}
    return state


def _options(state: Dict[str, Any]) -> Namespace:
    """The options of the model of *state*, with all that its named architecture fills in."""
    from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_NAME_REGISTRY
    from omegaconf import OmegaConf

    from .presets import ARCHITECTURES
    from .rotary import LAYOUTS
    from .transformer import as_namespace

    try:
        given = state["cfg"]["model"] if state.get("cfg") else state.get("args")
        options = Namespace(**(given if isinstance(given, dict) else vars(given)))
    except (KeyError, TypeError):
        raise LayoutError("it does not say of which model it is, neither in cfg nor in args") from None
    name = getattr(options, "arch", None) or getattr(options, "_name", None)
    if ARCH_MODEL_NAME_REGISTRY.get(name) not in ARCHITECTURES:
        raise LayoutError(f"it is of the architecture {name}, which is not a rotary one")
    if isinstance(given, dict):
        options = as_namespace(OmegaConf.create(given))
    ARCH_CONFIG_REGISTRY[name](options)
    if options.rope_layout not in LAYOUTS:
        raise LayoutError(
            f"its rope_layout is {options.rope_layout}, and must be one of {', '.join(LAYOUTS)}"
        )
    return options


def _convert_weights(weights: Dict[str, "Tensor"], options: Namespace, layout: str) -> Dict[str, "Tensor"]:
    weights = dict(weights)
    found = False
    for name in weights:
        module, _, parameter = name.rpartition(".self_attn.")
        if not parameter.startswith(("q_proj.", "k_proj.")):
            continue
        if parameter.split(".")[1:] not in (["weight"], ["bias"]):
            raise LayoutError(f"its {name} is neither weight nor bias, but of a quantised projection")
        side = "encoder" if "encoder" in module.split(".") else "decoder"
        heads = getattr(options, f"{side}_attention_heads")
        if weights[name].size(0) == 0 or weights[name].size(0) % heads:
            raise LayoutError(
                f"its {name} has {weights[name].size(0)} rows, which {heads} heads do not share"
            )
        weights[name] = _reorder(weights[name], heads, options.rope_fraction, layout)
        found = True
    if not found:
        raise LayoutError("it has no self-attention")
    return weights


def _reorder(rows: "Tensor", heads: int, fraction: float, layout: str) -> "Tensor":
    """(C, ...) with the rows of every head in the order of *layout*."""
    from .rotary import rotary_dim

    head_dim = rows.size(0) // heads
    order = row_order(head_dim, rotary_dim(head_dim, fraction), layout)
    return rows.unflatten(0, (heads, head_dim))[:, order].flatten(0, 1)


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    from .rotary import LAYOUTS

    parser = argparse.ArgumentParser(
        prog="fairseq_rope.layout", description="Turn a rotary checkpoint into the other --rope-layout."
    )
    parser.add_argument("--path", required=True, metavar="FILE", help="the checkpoint")
    parser.add_argument("--rope-layout", required=True, choices=LAYOUTS, help="the layout to turn it into")
    parser.add_argument("--output", required=True, metavar="FILE", help="where to write it")
    return parser


def main(argv: Optional[Sequence[str]] = None) -> None:
    """Run the command; exits with status 1 and one sentence on standard error if it cannot."""
    with ending_in_one_sentence("fairseq_rope.layout"):
        args = build_parser().parse_args(argv)
        from .patches.loading import load_checkpoint
        from .patches.saving import save_whole

        refuse_output(args.output)
        state = load_checkpoint(args.path)
        try:
            state = convert_layout(state, args.rope_layout)
        except ValueError as error:  # LayoutError, or a fraction that rotary.py refuses
            raise LayoutError(f"--path {args.path}: {error}") from None
        save_whole(state, args.output)
    print(f"wrote {args.output}")


if __name__ == "__main__":
    main()
