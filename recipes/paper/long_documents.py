"""RoFormer §4.5, Table 5: long Chinese documents: which of B and C belongs to A?

    python -m recipes.paper.long_documents --data-dir DIR

A masked language model is trained on characters of Chinese, and then tuned on triples as in CAIL2019-SCM, once for each
limit of tokens. A, B and C are cut so that A with B, and A with C, fit the limit. The checkpoint with the best accuracy
in validation is tested.
"""

import argparse
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from fairseq_rope.errors import InputError
from recipes.paper import masked_lm
from recipes.paper.results import Panels, Rows, curve_of, curves_of
from recipes.paper.runs import Data, PaperRun, Training
from recipes.paper.study import Study, build_parser, existing, main
from recipes.paper.texts import binarise, tokens_in, triples_of

SPECIAL = 4  # tokens besides the two texts: <s> B </s> </s> A </s>
TEXTS = {"train": "text.train.txt", "valid": "text.valid.txt"}
SETS = ("train", "valid", "test")
KINDS = {"model": str, "pre-training": str, "fine-tuning": str, "limits": list}


def run_study(study: Study) -> None:
    args, settings = study.args, study.settings
    limits = settings["limits"]
    if not limits or not all(type(limit) is int and limit > 2 * SPECIAL for limit in limits):
        raise InputError(f"{args.settings}: limits is {limits}, and must be numbers of tokens above {2 * SPECIAL}")
    positions = positions_of(f"{settings['model']} {settings['fine-tuning']} {study.flags}")
    if max(limits) > positions:
        must = f"must be at most --max-positions, which is {positions}"
        raise InputError(f"{args.settings}: limits has {max(limits)}, and {must}")
    texts = {name: existing("--data-dir", args.data_dir / file) for name, file in TEXTS.items()}
    triples = {name: existing("--data-dir", args.data_dir / f"{name}.json") for name in SETS}

    def make(folder: Path) -> None:
        read = {name: triples_of(path) for name, path in triples.items()}
        masked_lm.prepare(texts, 0, folder / "text")
        for limit in limits:
            prepare(read, limit, folder / "text", folder / str(limit))

    sources = {f"{name}.txt": path for name, path in texts.items()} | {f"{name}.json": triples[name] for name in SETS}
    data = Data(sources, make)
    ranking = "--criterion sentence_ranking --num-classes 2 --init-token 0 --separator-token 2"

    def trainings(encoding: str, seed: int, folder: Path) -> tuple[Training, ...]:
        own = f"{settings['model']} --position-encoding {encoding}"
        first = f"--criterion masked_lm {own} {settings['pre-training']} {study.flags}"
        later = f"{ranking} {own} {settings['fine-tuning']} {study.flags}"
        start = folder / "text" / "checkpoint_last.pt"
        tuned = (
            Training(str(limit), study.data / str(limit), "sentence_ranking", later, start, "accuracy", is_tested=True)
            for limit in limits
        )
        return (Training("text", study.data / "text", masked_lm.TASK, first), *tuned)

    study.run(data, trainings, report)


def positions_of(flags: str) -> int:
    """The number of positions of a model with these *flags* of fairseq-train."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--max-positions", type=int, default=512)  # RoBERTa's
    return parser.parse_known_args(shlex.split(flags))[0].max_positions


def prepare(sets: dict[str, list[tuple[str, str, str, int]]], limit: int, text: Path, folder: Path) -> None:
    """Write the binary data of the triples in *sets*, whose texts are cut to fit *limit* tokens in pairs.

    *text* is the folder of the dictionary.
    """
    tokenise, longest = tokens_in(text), (limit - SPECIAL) // 2
    for name, triples in sets.items():
        for number, texts in enumerate(zip(*(triple[:3] for triple in triples))):
            part = folder / f"input{number}"
            part.mkdir(parents=True, exist_ok=True)
            (part / "dict.txt").write_bytes((text / "dict.txt").read_bytes())
            binarise((tokenise(text)[:longest] for text in texts), part / "dict.txt", part / name)
        write_labels((str(triple[3]) for triple in triples), folder, name)


def write_labels(labels: Iterable[str], folder: Path, name: str) -> None:
    (folder / "label").mkdir(parents=True, exist_ok=True)
    (folder / "label" / f"{name}.label").write_text("".join(f"{label}\n" for label in labels))


def report(runs: list[PaperRun]) -> tuple[Rows, Panels]:
    """The accuracies of each encoding at each limit, and the curves of both trainings."""
    columns = ("validation accuracy (%)", "test accuracy (%)")
    rows: dict[str, dict[str, dict[int, float]]] = {}
    curves: dict[str, list[tuple[list[int], list[float]]]] = {}
    for run in runs:
        for training in run.trainings[1:]:
            system = f"{run.system}-{training.name}"
            updates, accuracies = curve_of(run.validations(training.name), training.metric)
            row = rows.setdefault(system, {column: {} for column in columns})
            row[columns[0]][run.seed] = max(accuracies)
            row[columns[1]][run.seed] = float(run.test(training.name)[f"test_{training.metric}"])
            curves.setdefault(system, []).append((updates, accuracies))
    return rows, {"loss of pre-training (bits per masked token)": curves_of(runs, "text"), columns[0]: curves}


def cli_main(words: Sequence[str] | None = None) -> None:
    parser = build_parser("long_documents", "RoFormer §4.5: long Chinese documents.", ("rope", "learned"))
    files = ", ".join([*TEXTS.values(), *(f"{name}.json" for name in SETS)])
    data_dir = f"folder with {files}, which can be gzipped"
    parser.add_argument("--data-dir", type=Path, required=True, metavar="DIR", help=data_dir)
    main(parser, words, KINDS, run_study)


if __name__ == "__main__":
    cli_main()
