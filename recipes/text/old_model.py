"""Prepare an old model for training on segments: give its dictionary the separator, and its weights a row for it.

python -m recipes.text.old_model dictionary --input dict.en.txt --output data-bin/dict.en.txt
python -m recipes.text.old_model checkpoint --input checkpoint_best.pt --output start.pt --source-dictionary …
"""

import argparse
import re
from collections.abc import Sequence
from typing import Any

from fairseq_rope.errors import InputError, ending_in_one_sentence, refuse_output
from fairseq_rope.files import written_whole
from fairseq_rope.lines import lines_of
from fairseq_rope.text.segments import SEPARATOR

# The weights with a row for each entry of the source dictionary, and those with a row for each entry of the target
# dictionary. Checkpoints of fairseq before 0.9 call the last one embed_out.
SOURCE = ("encoder.embed_tokens.weight",)
TARGET = ("decoder.embed_tokens.weight", "decoder.output_projection.weight", "decoder.embed_out")


def with_separator(lines: Sequence[str]) -> list[str]:
    """The *lines* of a dictionary with the separator. It replaces the first "madeupword", or else is appended."""
    if any(line.split(" ")[0] == SEPARATOR for line in lines):
        return list(lines)
    unused = next((n for n, line in enumerate(lines) if re.fullmatch(r"madeupword\d+ 0", line)), len(lines))
    return [*lines[:unused], f"{SEPARATOR} 1", *lines[unused + 1 :]]


def with_rows(weights: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """*weights*, with a new last row in those that have one row less than *sizes* gives for them.

    The new row is the mean of the others. Raises an InputError if a weight has another number of rows.
    """
    import torch

    changed = dict(weights)
    for name, size in sizes.items():
        weight = weights.get(name)
        if weight is None or len(weight) == size:
            continue
        if len(weight) != size - 1:
            raise InputError(f"{name} has {len(weight)} rows, and the dictionary has {size} entries")
        mean = weight.float().mean(dim=0, keepdim=True).to(weight.dtype)
        changed[name] = torch.cat([weight, mean])
    return changed


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="recipes.text.old_model", description=__doc__.partition("\n")[0])
    tools = parser.add_subparsers(dest="tool", required=True)
    for name, original in (("dictionary", "dict.LANG.txt"), ("checkpoint", "a checkpoint of fairseq")):
        flag = tools.add_parser(name, help=f"copy {original}, with the separator").add_argument
        flag("--input", required=True, metavar="FILE")
        flag("--output", required=True, metavar="FILE")
        if name == "checkpoint":
            flag("--source-dictionary", required=True, metavar="FILE", help="the source dictionary with the separator")
            flag("--target-dictionary", required=True, metavar="FILE", help="the target dictionary with the separator")
    args = parser.parse_args(argv)
    with ending_in_one_sentence("recipes.text.old_model"):
        refuse_output(args.output)
        if args.tool == "dictionary":
            with written_whole(args.output) as (file,):
                file.writelines(f"{line}\n".encode() for line in with_separator(list(lines_of(args.input))))
            return
        from fairseq.data import Dictionary

        from fairseq_rope.checkpoints import load_checkpoint, save_checkpoint

        state = load_checkpoint(args.input)
        state.pop("last_optimizer_state", None)  # the training starts with a new optimiser
        sides = (SOURCE, args.source_dictionary), (TARGET, args.target_dictionary)
        sizes = {name: len(Dictionary.load(path)) for names, path in sides for name in names}
        weights = with_rows(state["model"], sizes)
        rows = sum(len(weights[name]) != len(weight) for name, weight in state["model"].items() if name in sizes)
        save_checkpoint({**state, "model": weights}, args.output)
        print(f"{args.output}: the weights of {args.input}; {rows} of them have a new row for {SEPARATOR}")


if __name__ == "__main__":
    main()
