"""RoFormer §4.2, Figure 3 on the left: masked language models with RoPE beside learned positions.

    python -m recipes.paper.masked_lm --train FILE --valid FILE

The paper compares RoFormer with BERT, which has learned positions. Here both are RoBERTa, in one set of sizes, data and
masks. The work folder is also where :mod:`recipes.paper.fine_tuning` starts.
"""

from collections.abc import Sequence
from pathlib import Path

from recipes.paper.results import Panels, Rows, curves_of
from recipes.paper.runs import Data, PaperRun, Training
from recipes.paper.study import Study, build_parser, existing, main
from recipes.paper.texts import binarise, learn_tokens, pages_of
from recipes.run.run import ROOT

TASK = "masked_lm"
DEMO = ROOT / "recipes" / "demo" / "corpus"
KINDS = {"model": str, "training": str, "subwords": int}


def run_study(study: Study) -> None:
    args, settings = study.args, study.settings
    sources = {"train": existing("--train", args.train), "valid": existing("--valid", args.valid)}
    data = Data(sources, lambda folder: prepare(sources, settings["subwords"], folder))

    def trainings(encoding: str, seed: int, folder: Path) -> tuple[Training, ...]:
        flags = f"--criterion masked_lm {settings['model']} {settings['training']} --position-encoding {encoding}"
        return (Training("train", study.data, TASK, f"{flags} {study.flags}"),)

    study.run(data, trainings, report)


def prepare(sources: dict[str, Path], subwords: int, folder: Path) -> None:
    """Write the dictionary of the training text, and the binary data of both texts, a paragraph in each item."""
    texts = {name: [line for page in pages_of(path) for line in page] for name, path in sources.items()}
    tokenise = learn_tokens(texts["train"], subwords, folder)
    for name, lines in texts.items():
        binarise(map(tokenise, lines), folder / "dict.txt", folder / name)


def report(runs: list[PaperRun]) -> tuple[Rows, Panels]:
    """The validation loss at the end of each run, and the curves."""
    column = "validation loss (bits per masked token)"
    rows: dict[str, dict[str, dict[int, float]]] = {}
    for run in runs:
        loss = run.validations("train")[-1]["valid_loss"]
        rows.setdefault(run.system, {column: {}})[column][run.seed] = float(loss)
    return rows, {column: curves_of(runs, "train")}


def cli_main(words: Sequence[str] | None = None) -> None:
    parser = build_parser("masked_lm", "RoFormer §4.2: masked language models.", ("rope", "learned"))
    text = "text, a paragraph a line; can be gzipped; default: the demo's, in English"
    for name in ("train", "valid"):
        parser.add_argument(f"--{name}", type=Path, default=DEMO / f"{name}.en.gz", metavar="FILE", help=text)
    main(parser, words, KINDS, run_study)


if __name__ == "__main__":
    cli_main()
