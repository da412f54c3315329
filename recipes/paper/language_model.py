"""RoFormer §4.4, Figure 3 on the right: a language model of characters with linear attention, with and without RoPE.

    python -m recipes.paper.language_model --enwik8 enwik8

The paper adds RoPE to Performer, with 12 layers, on enwik8. Here a token is a byte, as usual with enwik8. Every byte of
a set is predicted once, in blocks of the training's length, so that the loss in bits is that of bits per character.
"""

import gzip
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fairseq_rope.errors import InputError
from fairseq_rope.lines import naming_damage
from fairseq_rope.positions import ENCODINGS
from recipes.paper.results import Panels, Rows, curves_of
from recipes.paper.runs import Data, PaperRun, Training
from recipes.paper.study import Study, build_parser, existing, main
from recipes.paper.texts import write_binary
from recipes.text.fetch import Entry, what_is_wrong

ENWIK8 = Entry("enwik8", 100_000_000, "md5:a1fa5ffddb56f4953e226637dabbb36a", ())
PARTS = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}  # bytes
BLOCK = 2**20  # bytes of an item in the binary data
KINDS = {"model": str, "training": str}


def run_study(study: Study) -> None:
    args = study.args
    possible = [
        name for name, encoding in ENCODINGS.items() if "decoder" in encoding.sides and not encoding.changes_scores()
    ]
    if set(study.encodings) - set(possible):
        raise InputError(f"--encodings {args.encodings}: linear attention can only have {', '.join(possible)}")
    if bool(args.enwik8) == bool(args.data_dir):
        raise InputError("one of --enwik8 and --data-dir must be given, and not both")
    if args.enwik8:
        sources = {"enwik8": existing("--enwik8", args.enwik8)}
        if wrong := what_is_wrong(sources["enwik8"], ENWIK8):
            raise InputError(f"--enwik8 {args.enwik8}: {wrong}")
    else:
        sources = {name: existing("--data-dir", args.data_dir / f"{name}.txt") for name in PARTS}
    settings = study.settings
    data = Data(sources, lambda folder: prepare(parts_of(sources), folder))

    def trainings(encoding: str, seed: int, folder: Path) -> tuple[Training, ...]:
        fixed = "--criterion cross_entropy --attention-type linear"
        flags = f"{fixed} {settings['model']} {settings['training']} --position-encoding {encoding} {study.flags}"
        return (Training("train", study.data, "language_modeling", flags, is_tested=True),)

    study.run(data, trainings, report)


def report(runs: list[PaperRun]) -> tuple[Rows, Panels]:
    """Bits per character at the end of each run, and the curves."""
    rows: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        losses = run.validations("train")[-1]["valid_loss"], run.test("train")["test_loss"]
        columns = rows.setdefault(run.system, {"validation (bits per character)": {}, "test (bits per character)": {}})
        for column, loss in zip(columns.values(), losses):
            column[run.seed] = float(loss)
    return rows, {"validation loss (bits per character)": curves_of(runs, "train")}


def parts_of(sources: dict[str, Path]) -> dict[str, bytes]:
    """The bytes of each part: those of its own file, or of enwik8."""
    whole = {name: uncompressed(path) for name, path in sources.items()}
    return divided(whole["enwik8"], PARTS) if "enwik8" in whole else whole


def uncompressed(path: Path) -> bytes:
    """The bytes of *path*, which can be gzipped. Raises an InputError if it is damaged or empty."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        with naming_damage(str(path)):
            data = gzip.decompress(data)
    if not data:
        raise InputError(f"{path}: is empty")
    return data


def divided(whole: bytes, sizes: dict[str, int]) -> dict[str, bytes]:
    """*whole* in consecutive parts of *sizes* bytes."""
    ends = np.cumsum([*sizes.values()])
    return {name: whole[end - size : end] for (name, size), end in zip(sizes.items(), ends)}


def prepare(parts: dict[str, bytes], folder: Path) -> None:
    """Write a dictionary of all 256 bytes, and the binary data of *parts*, without ends of lines between items."""
    import torch
    from fairseq.data import Dictionary

    dictionary = Dictionary()
    first = dictionary.nspecial
    for byte in range(256):
        dictionary.add_symbol(f"{byte:02x}")
    folder.mkdir(parents=True)
    dictionary.save(str(folder / "dict.txt"))
    for name, part in parts.items():
        numbers = np.frombuffer(part, dtype=np.uint8)
        items = (
            torch.from_numpy(numbers[n : n + BLOCK].astype(np.int32) + first) for n in range(0, len(numbers), BLOCK)
        )
        write_binary(items, len(dictionary), folder / name)


def cli_main(words: Sequence[str] | None = None) -> None:
    parser = build_parser(
        "language_model",
        "RoFormer §4.4: character language models with linear attention.",
        ("rope", "sinusoidal", "none"),
    )
    parser.add_argument("--enwik8", type=Path, metavar="FILE", help="enwik8, unpacked; its size and MD5 are checked")
    data_dir = "folder with train.txt, valid.txt and test.txt, or the same gzipped, instead of enwik8"
    parser.add_argument("--data-dir", type=Path, metavar="DIR", help=data_dir)
    main(parser, words, KINDS, run_study)


if __name__ == "__main__":
    cli_main()
