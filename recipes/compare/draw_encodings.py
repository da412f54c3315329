"""Draw what position encodings add to the scores of trained models, against the distance: a small panel for each head.

    python -m recipes.compare.draw_encodings 'TITLE=averaged.pt' … --output FILE

draws the first layer of the encoder. All words are the mean of the source vocabulary, so only positions differ. The
middle word attends to all others, and the score of its own position is the zero of the plot.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from fairseq_rope.errors import InputError, ending_in_one_sentence
from fairseq_rope.files import written_whole
from fairseq_rope.tools import USER_DIR, add_flags, load_user_dir
from recipes.compare.plots import COLOURS, rendered
from recipes.run.command_line import RunParser

KINDS = (".svg", ".png", ".pdf")


def load_model(path: Path) -> Any:
    """The translation model in the checkpoint *path*, without dictionaries. Raises an InputError if it has none."""
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_MODEL_REGISTRY
    from omegaconf import OmegaConf

    import fairseq_rope.plugin  # noqa: F401  registers the models
    from fairseq_rope.checkpoints import CheckpointError, load_checkpoint, option_value, part_of
    from fairseq_rope.patches.loading import why_weights_do_not_fit
    from fairseq_rope.transformer.defaults import as_namespace

    state = load_checkpoint(str(path))
    options, weights = part_of(state, "model"), state["model"]
    sizes = [weights.get(f"{side}.embed_tokens.weight") for side in ("encoder", "decoder")]
    arch = option_value(options, "arch") or option_value(options, "_name")
    if any(size is None for size in sizes) or arch not in ARCH_MODEL_REGISTRY:
        raise InputError(f"{path}: is not a translation model that fairseq or this plugin can build")
    dictionaries = []
    for size in sizes:
        dictionary = Dictionary()
        for number in range(len(size) - len(dictionary)):
            dictionary.add_symbol(str(number))
        dictionaries.append(dictionary)
    if option_value(options, "share_all_embeddings"):
        dictionaries[1] = dictionaries[0]
    task = argparse.Namespace(source_dictionary=dictionaries[0], target_dictionary=dictionaries[1])
    if isinstance(options, dict):  # of fairseq-hydra-train
        options = OmegaConf.create(options)
    model = ARCH_MODEL_REGISTRY[arch].build_model(as_namespace(options), task)
    try:
        model.load_state_dict(weights, strict=True)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not fit its own options: {why_weights_do_not_fit(str(error))}") from None
    return model.float().eval()


def refuse_what_has_no_scores(title: str, model: Any, side: str, largest: int) -> None:
    """Raise an InputError that names the model by its *title* if :func:`added_scores` cannot compute its scores."""
    from fairseq.modules import LearnedPositionalEmbedding

    from fairseq_rope.modules.linear_attention import LinearSelfAttention

    part = getattr(model, side)
    if not len(part.layers):
        raise InputError(f"{title}: its {side} has no layers")
    if isinstance(part.layers[0].self_attn, LinearSelfAttention):
        raise InputError(f"{title}: the linear attention of its {side} computes no scores")
    has_limit = getattr(_position(model, side), "has_limit", False)
    if has_limit or isinstance(part.embed_positions, LearnedPositionalEmbedding):
        positions = part.max_positions()
        allowed = (positions - 1) // 2 if side == "encoder" else positions - 1
        if largest > allowed:
            raise InputError(
                f"--largest {largest}: the {side} of {title} has {positions} positions, which allow at most {allowed}"
            )


def added_scores(model: Any, side: str, largest: int) -> tuple[list[int], list[list[float]]]:
    """What positions add to the scores in the first layer of *side*, by distance and head.

    Returns:
        the distances j - i, from -*largest* to *largest* (in a decoder, to 0); and for each head the score of a query i
        with a key j at each distance, less that at distance 0
    """
    import torch

    part = getattr(model, side)
    length = 2 * largest + 1 if side == "encoder" else largest + 1
    tokens = torch.full((1, length), part.padding_idx + 1)  # any word that is not padding
    with torch.no_grad():
        x = part.embed_scale * part.embed_tokens.weight.mean(dim=0).expand(1, length, -1)
        if part.embed_positions is not None:
            x = x + part.embed_positions(tokens)
        if part.layernorm_embedding is not None:
            x = part.layernorm_embedding(x)
        x = x.transpose(0, 1)  # (T, 1, C)
        layer = part.layers[0]
        if layer.normalize_before:
            x = layer.self_attn_layer_norm(x)
        # With an incremental state, fairseq's own attention computes the scores itself.
        scores, _ = layer.self_attn(x, x, x, incremental_state={}, before_softmax=True)  # (H, T, T)
    row = scores[:, largest]
    return list(range(-largest, length - largest)), (row - row[:, largest : largest + 1]).tolist()


def bound(theta: Sequence[float], largest: int) -> list[float]:
    """The bound of RoFormer, §3.4.3, at the distances 0 … *largest*: the mean of |S_1| … |S_n| for n pairs.

    S_i is the sum of exp(1j * distance * theta_t) over t < i.
    """
    import numpy as np

    angles = np.outer(np.arange(largest + 1), theta)  # (distance, pair)
    return np.abs(np.exp(1j * angles).cumsum(axis=1)).mean(axis=1).tolist()


def figure_of_models(models: Sequence[tuple[str, Any]], side: str, largest: int) -> Figure:
    """A row for each of *models* with its title, and a panel for each head; with RoPE, also one of its bound.

    Raises an InputError that names the model if a model's scores cannot be computed.
    """
    for title, model in models:
        refuse_what_has_no_scores(title, model, side, largest)
    rows = [(title, model, *added_scores(model, side, largest)) for title, model in models]
    columns = max(len(heads) for *_, heads in rows) + 1
    figure = Figure(figsize=(1.7 * columns + 1, 1.7 * len(rows) + 0.4), dpi=110, layout="constrained")
    panels = figure.subplots(len(rows), columns, sharex=True, squeeze=False)
    for (title, model, distances, heads), of_row in zip(rows, panels, strict=True):
        for number, axes in enumerate(of_row):
            if number < len(heads):
                axes.plot(distances, heads[number], color=COLOURS[0], linewidth=1.2)
                axes.set_title(f"head {number + 1}", fontsize=8)
            elif number == columns - 1 and (theta := _theta(model, side)):
                axes.plot(range(largest + 1), bound(theta, largest), color=COLOURS[1], linewidth=1.2)
                axes.set_title("bound of §3.4.3", fontsize=8)
            else:
                axes.axis("off")
            axes.grid(alpha=0.3)
            axes.tick_params(labelsize=7)
        of_row[0].set_ylabel(title, fontsize=9)
    figure.supxlabel("distance of the key from the query, in tokens", fontsize=9)
    return figure


def _position(model: Any, side: str) -> Any:
    """The encoding of the first layer of *side*; None in fairseq's own models."""
    return getattr(getattr(model, side).layers[0].self_attn, "position", None)


def _theta(model: Any, side: str) -> list[float]:
    """The angles of RoPE's pairs in the first layer of *side*; [] for other encodings, and if they change with length.

    xPos also shrinks the scores, so the bound is not about it.
    """
    from fairseq_rope.positions.rotary import RotaryEmbedding

    position = _position(model, side)
    if type(position) is not RotaryEmbedding or position.depends_on_length:
        return []
    return [float(angle) for angle in position.theta]


def main(argv: Sequence[str] | None = None) -> None:
    """Draw the models. Exits with status 1 and one sentence if a file cannot be read or written."""
    parser = RunParser(
        prog="recipes.compare.draw_encodings", description="Draw what positions add to the scores of trained models."
    )
    add = parser.add_argument
    add("models", nargs="+", metavar="TITLE=CHECKPOINT", help="checkpoints of translation models")
    add("--side", choices=("encoder", "decoder"), default="encoder", help="default: %(default)s")
    add("--largest", type=int, default=40, metavar="N", help="largest distance; default: %(default)s")
    add("--output", type=Path, required=True, metavar="FILE", help=f"ends with {', '.join(KINDS)}")
    add_flags(parser, [USER_DIR])
    args = parser.parse_args(argv)
    if args.output.suffix not in KINDS:
        parser.error(f"--output {args.output}: must end with {', '.join(KINDS)}")
    if args.largest < 1:
        parser.error(f"--largest {args.largest}: must be 1 or more")
    named = [argument.partition("=")[::2] for argument in args.models]
    for argument, (title, path) in zip(args.models, named, strict=True):
        if not title or not path:
            parser.error(f"{argument}: must be TITLE=CHECKPOINT")
    with ending_in_one_sentence(parser.prog):
        load_user_dir(args.user_dir)
        models = [(title, load_model(Path(path))) for title, path in named]
        drawn = rendered(figure_of_models(models, args.side, args.largest), args.output.suffix[1:])
        with written_whole(str(args.output)) as (file,):
            file.write(drawn)


if __name__ == "__main__":
    main()
