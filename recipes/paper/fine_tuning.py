"""RoFormer §4.3, Table 2: a pre-trained model is tuned on a task in GLUE's layout, beside one that is not pre-trained.

    python -m recipes.paper.fine_tuning --from DIR --task MRPC --train MRPC/train.tsv --dev MRPC/dev.tsv
    python -m recipes.paper.fine_tuning --from DIR --documents --train train.en.gz --dev valid.en.gz

DIR is the work folder of :mod:`recipes.paper.masked_lm`, with finished runs of the same encodings and seeds. The score
is that of the development set at the end of the training. ``--documents`` makes a task of text whose documents are
separated by blank lines: does this passage, of one or several paragraphs, follow that one?
"""

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fairseq_rope.errors import InputError
from recipes.paper.long_documents import SPECIAL, positions_of, write_labels
from recipes.paper.results import Panels, Rows, curve_of
from recipes.paper.runs import Data, PaperRun, Training
from recipes.paper.study import Study, build_parser, existing, main
from recipes.paper.texts import SUBWORDS, binarise, following_pairs, pages_of, passages_of, rows_of, tokens_in
from recipes.run.yaml_file import read_yaml_file


class Task(NamedTuple):
    """The columns of a task's files, and its metric: one of METRICS."""

    texts: tuple[str, ...]
    label: str
    metric: str = "accuracy"


TASKS = {
    "own": Task(("sentence1", "sentence2"), "label"),
    "MRPC": Task(("#1 String", "#2 String"), "Quality", "f1"),
    "SST-2": Task(("sentence",), "label"),
    "QNLI": Task(("question", "sentence"), "label"),
    "STS-B": Task(("sentence1", "sentence2"), "score", "spearman"),
    "QQP": Task(("question1", "question2"), "is_duplicate", "f1"),
    "MNLI": Task(("sentence1", "sentence2"), "gold_label"),
}
METRICS = {  # the flags with which fairseq computes a metric
    "accuracy": "",
    "f1": "--report-acc-and-f1",
    "spearman": "--report-pearson-and-spearman --regression-target",
}
KINDS = {"training": str, "passage": int}


def run_study(study: Study) -> None:
    args = study.args
    task = TASKS[args.task]
    known = existing("--from", args.start / "settings.yaml")
    starts = {
        (encoding, seed): args.start / f"{encoding}.seed{seed}" / "train" / "checkpoint_last.pt"
        for encoding in study.encodings
        for seed in study.seeds
    }
    for start in starts.values():
        existing("--from", start.with_name("valid.json"))
    sources = {"train": existing("--train", args.train), "valid": existing("--dev", args.dev)}
    passage = study.settings["passage"]
    if passage < 1:
        raise InputError(f"{args.settings}: passage is {passage}, and must be 1 character or more")
    read = {name: rows(path, task, passage if args.documents else None) for name, path in sources.items()}
    labels = sorted({row[-1] for row in read["train"]})
    check_labels(task, read, labels, sources)
    more = {"task": args.task, "documents": args.documents}
    # The settings, and the dictionary and the subwords with which the data are made.
    files = (known, *(args.start / "data" / name for name in ("dict.txt", SUBWORDS)))
    sources |= {f"--from {path.name}": path for path in files if path.exists()}
    model = read_yaml_file(known, f"--from {known}")
    of_model = f"{model['model']} {flags_of_model(model['flags after --'])}"
    pairs = args.documents or len(task.texts) == 2
    most = positions_of(f"{of_model} {study.settings['training']} {study.flags}") - (SPECIAL if pairs else SPECIAL // 2)
    data = Data(sources, lambda folder: prepare(read, task, labels, args.start / "data", folder, most), more)
    classes = 1 if task.metric == "spearman" else len(labels)
    fixed = "--criterion sentence_prediction --init-token 0 --separator-token 2 --shorten-method truncate"
    fixed += f" {METRICS[task.metric]} --num-classes {classes} {of_model}"

    def trainings(encoding: str, seed: int, folder: Path) -> tuple[Training, ...]:
        flags = f"{fixed} {study.settings['training']} --position-encoding {encoding} {study.flags}"
        both = {"pre-trained": starts[encoding, seed].resolve(), "untrained": None}
        return tuple(
            Training(name, study.data, "sentence_prediction", flags, start, task.metric) for name, start in both.items()
        )

    study.run(data, trainings, lambda runs: report(runs, task.metric))


def flags_of_model(flags: str) -> str:
    """The *flags* of fairseq-train that change the model, without those for the training."""
    from fairseq_rope.transformer.roberta import RobertaRopeModel

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    RobertaRopeModel.add_args(parser)
    parser.add_argument("--arch", "-a")
    words = shlex.split(flags)
    _, others = parser.parse_known_args(words)
    of_model = [word for word in words if not (others and word == others[0] and others.pop(0))]
    return shlex.join(of_model)


def rows(path: Path, task: Task, passage: int | None) -> list[list[str]]:
    """The texts and the label of each example in *path*; *passage* is the length of texts made from documents."""
    if passage is None:
        return rows_of(path, [*task.texts, task.label])
    pairs = following_pairs([passages for page in pages_of(path) if (passages := passages_of(page, passage))])
    if not pairs:
        must = f"must have two documents or more, one of them with two passages of {passage} characters"
        raise InputError(f"{path}: {must}; paragraphs are lines, and blank lines separate documents")
    return [[*pair] for pair in pairs]


def check_labels(task: Task, read: dict[str, list[list[str]]], labels: list[str], paths: dict[str, Path]) -> None:
    """Raise an InputError if a label is not possible."""
    if task.metric == "spearman":
        for name, examples in read.items():
            for row in examples:
                try:
                    float(row[-1])
                except ValueError:
                    raise InputError(f"{paths[name]}: the {task.label} {row[-1]} is not a number") from None
        return
    if len(labels) < 2 or (task.metric == "f1" and labels != ["0", "1"]):
        must = "0 and 1" if task.metric == "f1" else "two different ones or more"
        raise InputError(f"{paths['train']}: the labels in {task.label} are {', '.join(labels)}, and must be {must}")
    for row in read["valid"]:
        if row[-1] not in labels:
            raise InputError(f"{paths['valid']}: the label {row[-1]} is not in the training set")


def cut(texts: list[list[str]], most: int) -> list[list[str]]:
    """Return the beginnings of one or two *texts* that have at most *most* tokens together; a long one is cut first."""
    lengths = [min(len(text), most) for text in texts]
    if sum(lengths) > most:
        lengths[0] = max(most - lengths[1], min(lengths[0], most - most // 2))
        lengths[1] = min(lengths[1], most - lengths[0])
    return [text[:length] for text, length in zip(texts, lengths)]


def prepare(
    read: dict[str, list[list[str]]], task: Task, labels: Sequence[str], start: Path, folder: Path, most: int
) -> None:
    """Write the binary data of the examples in *read* with the dictionary and the subwords in *start*.

    The texts of an example are cut to *most* tokens together. fairseq would cut the second one alone.
    """
    from fairseq.data import Dictionary

    tokenise = tokens_in(start)
    inputs = [folder / f"input{number}" for number in range(len(next(iter(read.values()))[0]) - 1)]
    for part in (*inputs, folder / "label"):
        part.mkdir(parents=True)
    if task.metric != "spearman":
        dictionary = Dictionary()
        for label in labels:
            dictionary.add_symbol(label)
        dictionary.save(str(folder / "label" / "dict.txt"))
    for part in inputs:
        (part / "dict.txt").write_bytes((start / "dict.txt").read_bytes())
    for name, examples in read.items():
        texts = [cut([[*tokenise(text)] for text in row[:-1]], most) for row in examples]
        for number, part in enumerate(inputs):
            binarise((of_example[number] for of_example in texts), part / "dict.txt", part / name)
        if task.metric == "spearman":
            write_labels((row[-1] for row in examples), folder, name)
        else:
            binarise(([row[-1]] for row in examples), folder / "label" / "dict.txt", folder / "label" / name)


def report(runs: list[PaperRun], metric: str) -> tuple[Rows, Panels]:
    """The metric of each encoding, pre-trained and untrained, at the end of each training, and its curves."""
    column = f"{metric} on the development set (%)"
    table: dict[str, dict[str, dict[int, float]]] = {}
    curves: dict[str, list[Any]] = {}
    for run in runs:
        for training in run.trainings:
            updates, values = curve_of(run.validations(training.name), metric)
            system = f"{run.system}, {training.name}"
            table.setdefault(system, {column: {}})[column][run.seed] = values[-1]
            curves.setdefault(system, []).append((updates, values))
    return table, {column: curves}


def cli_main(words: Sequence[str] | None = None) -> None:
    parser = build_parser("fine_tuning", "RoFormer §4.3: fine-tuning on tasks in GLUE's layout.", ("rope", "learned"))
    add = parser.add_argument
    add("--from", dest="start", type=Path, required=True, metavar="DIR", help="work folder of recipes.paper.masked_lm")
    own = "one of GLUE's tasks, or own: files with the columns sentence1, sentence2 and label; default: own"
    add("--task", choices=TASKS, default="own", help=own)
    add("--documents", action="store_true", help="the files are text with documents, and the task is made from them")
    add("--train", type=Path, required=True, metavar="FILE", help="training set; can be gzipped")
    add("--dev", type=Path, required=True, metavar="FILE", help="development set; can be gzipped")
    main(parser, words, KINDS, run_study)


if __name__ == "__main__":
    cli_main()
