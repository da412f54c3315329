"""The layers that have no positions: ``--encoder-layers-without-positions`` and ``--decoder-layers-without-positions``.

Yang et al. 2025, "Rope to Nope and Back Again", arXiv:2501.18795; SmolLM3 has no rotation in layers 3, 7, 11, ….
Layers are numbered from 0, as in the model that is trained, also with ``--encoder-layers-to-keep``.
"""

import re
from typing import Any

from ..checkpoints import option_value
from ..positions.interface import SIDES, Option

EVERY = re.compile(r"every ([1-9]\d*)(?:st|nd|rd|th)?")


def read_layers(value: Any, flag: str) -> str:
    """Return *value*, which can also be a number or a list, as text; raise a ValueError if it has another form."""
    text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value).strip()
    numbers = re.sub(r"\s*,\s*", ",", text)
    if EVERY.fullmatch(text) or not text:
        return text
    if not re.fullmatch(r"\d+(,\d+)*", numbers):
        raise ValueError(f"{flag} {value}: must be numbers of layers from 0, such as 0,4, or 'every 4th'")
    listed = [int(number) for number in numbers.split(",")]
    twice = next((number for number in listed if listed.count(number) > 1), None)
    if twice is not None:
        raise ValueError(f"{flag} {value}: has the layer {twice} twice")
    return ",".join(map(str, sorted(listed)))


def numbers_of(text: str, layers: int) -> list[int]:
    """Return the numbers of the layers that *text* of :func:`read_layers` names, of a model that has *layers*."""
    every = EVERY.fullmatch(text)
    if every:
        step = int(every[1])
        return list(range(step - 1, layers, step))
    return [int(number) for number in text.split(",") if number]


def numbers_of_kept_layers(layers_to_keep: str) -> list[int]:
    """Return the numbers, in the model that was trained, of the layers that fairseq's pruning keeps."""
    return sorted(int(number) for number in layers_to_keep.split(","))


def is_pruned(layers: int | None, layers_to_keep: str) -> bool:
    """Return whether *layers*, the number of those in a checkpoint, are the layers to keep: no other layer is there."""
    return layers == len(numbers_of_kept_layers(layers_to_keep))


def numbers_after_pruning(args: Any) -> dict[str, str]:
    """Return the options that name the layers without positions of *args* after pruning, which renumbers the layers.

    fairseq then saves checkpoints with the number of layers that are left, and without the layers to keep
    (``prune_state_dict`` in fairseq/checkpoint_utils.py).
    """
    options = {}
    for side in SIDES:
        name, layers_to_keep = f"{side}_layers_without_positions", option_value(args, f"{side}_layers_to_keep")
        without = read_layers(option_value(args, name) or "", name)
        if layers_to_keep and without:
            kept = numbers_of_kept_layers(layers_to_keep)
            numbers = numbers_of(without, max(kept) + 1)
            options[name] = ",".join(str(number) for number, trained in enumerate(kept) if trained in numbers)
    return options


WITHOUT_POSITIONS = {
    f"{side}_layers_without_positions": Option(
        "",
        f"layers of the {side} whose self-attention has no positions: numbers from 0, such as 0,4, or 'every 4th', "
        "which is 3, 7, … as in SmolLM3",
        read_layers,
    )
    for side in SIDES
}
