"""How sure trained models are that the text ends after its first sentence, though another sentence follows.

    python -m recipes.compare.full_stop WORK

reads the models of a comparison in the folder WORK, and its test set with two sentences a line. The references are
forced. After the first full stop, which another sentence follows, it prints the mean probability of the end and of the
right next word, for each model.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from fairseq import checkpoint_utils, utils

import fairseq_rope  # noqa: F401  registers the models
from fairseq_rope.errors import InputError

STOP = "."


class Sureness(NamedTuple):
    """Means over the lines whose first sentence ends with a full stop: probabilities, and the number of lines."""

    of_the_end: float
    of_the_next_word: float
    lines: int


def after_the_first_stop(target: torch.Tensor, stop: int, end: int, pad: int) -> torch.Tensor:
    """Return the place after the first full stop of each row of *target* (B, T); 0 if no other word follows it."""
    is_stop = target == stop
    place = is_stop.int().argmax(dim=1) + 1
    following = target.gather(1, place.clamp(max=target.size(1) - 1).unsqueeze(1)).squeeze(1)
    counts = is_stop.any(dim=1) & (place < target.size(1)) & (following != end) & (following != pad)
    return torch.where(counts, place, torch.zeros_like(place))


@torch.no_grad()
def sureness(checkpoint: Path, data: Path) -> Sureness:
    """Return the numbers of the model in *checkpoint* for the set "test" of the binary *data*."""
    (model,), cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], {"data": str(data)})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.eval().to(device)
    words = task.target_dictionary
    task.load_dataset("test")
    batches = task.get_batch_iterator(task.dataset("test"), max_tokens=8000).next_epoch_itr(shuffle=False)
    end = next_word = lines = 0.0
    for sample in batches:
        sample = utils.move_to_cuda(sample) if device == "cuda" else sample
        output = model(**sample["net_input"])
        probabilities = model.get_normalized_probs(output, log_probs=False)  # (B, T, V)
        target = sample["target"]
        place = after_the_first_stop(target, words.index(STOP), words.eos(), words.pad())
        rows = place.nonzero().squeeze(1)
        there = probabilities[rows, place[rows]].double()  # (rows, V)
        end += there[:, words.eos()].sum().item()
        next_word += there.gather(1, target[rows, place[rows]].unsqueeze(1)).sum().item()
        lines += len(rows)
    if not lines:
        raise InputError(f"{data}: no line of its test set has a word after a full stop ({STOP})")
    return Sureness(end / lines, next_word / lines, int(lines))


def main(argv: Sequence[str] | None = None) -> None:
    """Print a line for each model as JSON. Exits with status 1 and one sentence if there is none."""
    parser = argparse.ArgumentParser(prog="recipes.compare.full_stop", description=__doc__.partition("\n")[0])
    parser.add_argument("work", type=Path, metavar="WORK", help="the work folder of a comparison")
    args = parser.parse_args(argv)
    data, models = args.work / "joined" / "data-bin", sorted(args.work.glob("*/averaged.pt"))
    if not models or not data.exists():
        sys.exit(f"recipes.compare.full_stop: {args.work}: must be the work folder of a finished comparison")
    try:
        for checkpoint in models:
            print(json.dumps({"model": checkpoint.parent.name, **sureness(checkpoint, data)._asdict()}), flush=True)
    except InputError as error:
        sys.exit(f"recipes.compare.full_stop: {error}")


if __name__ == "__main__":
    main()
