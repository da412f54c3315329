"""The numbers of each run and of the data, from the files that stages wrote. :mod:`.comparison` compares them."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fairseq_rope.text.languages import TOKENIZERS
from fairseq_rope.text.segments import SEPARATOR
from recipes.compare import bootstrap, stage13_join, stage14_translate_joined
from recipes.compare.curves import read_history
from recipes.compare.stage12_score_with import ScoreWith
from recipes.compare.stage13_join import lines
from recipes.pipeline.checkpoints import to_average
from recipes.pipeline.experiment import SETS, Experiment
from recipes.pipeline.fairseq_train import patience
from recipes.pipeline.stages import TRAIN
from recipes.run.run import ROOT, StageError
from recipes.run.runner import Runner
from recipes.text.segments import Divided


def definition(run: Experiment) -> dict[str, Any]:
    """What a run is, known before training."""
    defined = {"seed": run.seed, "architecture": run.arch, "flags": run.settings.fairseq_train_flags}
    search = {"training_of": run.training_of, "generate": run.settings.fairseq_generate_flags}
    return defined | (search if run.training_of else {})


def numbers_of_run(run: Experiment) -> dict[str, Any]:
    """The numbers of one finished run.

    Besides its definition, scores and training, which the report prints, these are "sets", one for the test set and one
    for each length of stage 13, and "scorers", for each program that has scored the run, the sum and the number of the
    scores of each line's sentences (N, 2). A set has "statistics", those of :func:`.bootstrap.statistics` for each line
    (N, 10), and, if the text has documents, their score ("document_score") and the share of segments with other
    separators than their source ("other_separators"). A line is what the model translates at once: a sentence, joined
    sentences, or a segment.
    """
    score = json.loads(run.score.read_text(encoding="utf-8"))["systems"][0]
    training = read_history(run.history)
    log = Runner(run.training).log(TRAIN)
    parameters = re.findall(r"num\. shared model params: ([\d,]+)", log.read_text("utf-8") if log.exists() else "")
    by_length = score["sacreBLEU_by_source_length"]
    metrics = {metric["name"]: {key: metric[key] for key in ("score", "signature")} for metric in score["metrics"]}
    tokenize = tokeniser_of(score["metrics"][0]["signature"])
    scorers = {scorer.name: ScoreWith(scorer) for scorer in run.scorers}
    return {
        **definition(run),
        "metrics": metrics,
        "by_length": [{key: row[key] for key in ("words", "sentences", "score")} for row in by_length],
        "training": vars(training),
        "patience": patience(run.training),
        "curve_is_whole": bool(run.settings.save_every_updates)
        or training.last_epoch == to_average(run.training)[-1][0],
        "parameters": int(parameters[-1].replace(",", "")) if parameters else None,
        "sets": [_set_of_run(run, length, tokenize) for length in (None, *stage13_join.lengths(run))],
        "scorers": {
            name: _by_line(run, None, np.array([(sentence, 1) for sentence in stage.scores(run)]))
            for name, stage in scorers.items()
            if stage.is_done(run)
        },
    }


def tokeniser_of(signature: str) -> str:
    """The tokeniser in a sacreBLEU signature, without a version as in ja-mecab-0.996-IPA."""
    tokeniser = signature.partition("|tok:")[2].partition("|")[0]
    return next((name for name in TOKENIZERS if re.match(rf"{name}(-\d|$)", tokeniser)), tokeniser)


def _set_of_run(run: Experiment, length: int | None, tokenize: str) -> dict[str, Any]:
    """The numbers of *run* on the set of stage 13 with *length*; None: on the test set of stage 9."""
    if length is None:
        hypotheses, documents, separators = run.hypotheses, run.document_hypotheses, run.separators
        texts = run.test_references
    else:
        hypotheses, separators = stage14_translate_joined.files(run, length)[1:]
        documents = stage14_translate_joined.documents(run, length)
        texts = stage13_join.texts(run, length)[1:]
    references = [*map(lines, texts)]
    translations = lines(hypotheses)
    if len(translations) != len(references[0]):
        has = f"{hypotheses} has {len(translations)} lines, and {texts[0]} has {len(references[0])}"
        raise StageError(f"{has}: remove it, and run the comparison again")
    statistics = bootstrap.statistics(translations, *references, tokenize=tokenize)
    numbers: dict[str, Any] = {"statistics": _by_line(run, length, statistics)}
    if run.unit.has_documents:
        whole = bootstrap.statistics(lines(documents), *map(lines, run.reference_documents), tokenize=tokenize)
        counts = Divided(**json.loads(separators.read_text(encoding="utf-8")))
        numbers["document_score"] = bootstrap.corpus_bleu(whole.sum(axis=0))
        numbers["other_separators"] = counts.with_other_separators / counts.segments
    return numbers


def _by_line(run: Experiment, length: int | None, rows: np.ndarray) -> np.ndarray:
    """*rows* of sentences, summed over the sentences of each line of the set with *length*."""
    if not run.unit.has_documents:
        return rows
    sentences = [line.split().count(SEPARATOR) + 1 for line in lines(_in_subwords(run, length))]
    return np.add.reduceat(rows, np.cumsum([0, *sentences[:-1]]))


def numbers_of_data(experiment: Experiment, recipe: str) -> dict[str, Any]:
    """The numbers of the data, as JSON: titles and files, sizes, and the source lengths of each set."""
    training = lines(experiment.text(experiment.in_subwords, "train", experiment.source))
    longest = max(len(line.split()) for line in training)
    return {
        "longest_in_training": longest,
        "data": _title_and_files(experiment, recipe),
        "sizes": _sizes(experiment),
        "sets": [_set_of_data(experiment, length, longest) for length in (None, *stage13_join.lengths(experiment))],
    }


def _title_and_files(experiment: Experiment, recipe: str) -> dict[str, Any]:
    """The title of the data, and the files of each set.

    The recipe names data that its manifest or its own folder has. The user's texts have the name of their folder.
    """
    data_dir, folder = experiment.data_dir, ROOT / "recipes" / recipe
    title = folder.name
    if data_dir is not None and data_dir.parent != folder and experiment.manifest is None:
        title = f"{data_dir.name} ({experiment.source}-{experiment.target})"
    corpora = {name: experiment.corpora(name) for name in experiment.given(SETS)}
    return {"title": title, "files": {name: [file for files in corpora[name] for file in files] for name in corpora}}


def _sizes(experiment: Experiment) -> dict[str, int]:
    """The number of pairs or segments for training and validation, and that of the sentences of the test set."""
    paths: Mapping[str, Path] = {
        **{name: experiment.text(experiment.in_subwords, name, experiment.source) for name in ("train", "valid")},
        "test": experiment.test_source,
    }
    return {name: len(lines(path)) for name, path in paths.items()}


def _in_subwords(experiment: Experiment, length: int | None) -> Path:
    """The source of a set as fairseq reads it, with a segment a line if the text has documents."""
    if length is None:
        return experiment.text(experiment.in_subwords, "test", experiment.source)
    return stage13_join.in_subwords(experiment, length)[0]


def _set_of_data(experiment: Experiment, length: int | None, longest: int) -> dict[str, Any]:
    """The lengths of the source of a set. *longest* is the number of subwords of the longest source in training."""
    if experiment.unit.has_documents:
        size = {"tokens": length or experiment.settings.segment_tokens}
    else:
        size = {"times": length or 1}
    counts = [len(line.split()) for line in lines(_in_subwords(experiment, length))]
    return {
        **size,
        "lines": len(counts),
        "subwords": sum(counts) / len(counts),
        "longer_than_in_training": sum(count > longest for count in counts),
    }
