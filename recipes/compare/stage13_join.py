"""Stage 13: make longer inputs of the test set.

It joins 2, 4 and 8 consecutive sentences. If the text has documents, it divides them into segments of several lengths.
"""

from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from fairseq_rope.lines import count_lines, lines_of
from fairseq_rope.text.segments import joined
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.lengths import LARGER_BATCH, LONGEST, MORE_ROOM, batch_of_search, of_search
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.shell import Shell, quoted
from recipes.text.segments import longest_segments, read_documents

TIMES = (2, 4, 8)  # sentences a line
TOKENS = (1, 64, 128, 256, 512, 1000)  # of a text with documents: subwords of the longest segments; 1: single sentences


def lengths(experiment: Experiment) -> tuple[int, ...]:
    """The lengths of the sets: subwords of the longest segments if the text has documents, else sentences a line."""
    return TOKENS if experiment.unit.has_documents else TIMES


def texts(experiment: Experiment, length: int) -> list[Path]:
    """The plain source and references of a set. If the text has documents, they have one sentence a line."""
    if experiment.unit.has_documents:
        return [experiment.test_source, *experiment.test_references]
    return [experiment.work / "joined" / f"{length}{_end(path)}" for path in _plain(experiment)]


def _plain(experiment: Experiment) -> list[Path]:
    """The source and the references of the test set as stage 2 extracts them."""
    source, *_ = experiment.texts("raw", ["test"])
    return [source, *(experiment.text("raw", name, experiment.target) for name in experiment.with_references)]


def _end(path: Path) -> str:
    """The name of a text of the test set without "test": the language, after the number of a further reference."""
    return path.name.removeprefix("test")


def in_subwords(experiment: Experiment, length: int) -> list[Path]:
    """The source and reference of a set as fairseq reads them."""
    return experiment.texts("joined", [f"{length}.bpe"])


def data(experiment: Experiment) -> Path:
    """The folder of the binary data. :func:`subset` names its sets."""
    return experiment.work / "joined" / "data-bin"


def subset(experiment: Experiment, length: int) -> str:
    """fairseq's name of a set: test, test1, test2, …"""
    number = lengths(experiment).index(length)
    return f"test{number or ''}"


def lines(path: Path) -> list[str]:
    """The lines of the text in *path*. Only a newline ends a line."""
    return list(lines_of(str(path)))


def check(experiment: Experiment) -> None:
    """Raise a StageError if the test set has too few lines, or if a line of stage 13 is too long for *experiment*."""
    paths = experiment.texts("bpe", ["test"])
    if not all(path.exists() for path in paths):  # the user removed them after stage 13 to save space
        return
    if experiment.unit.has_documents:
        segments = [
            (document, segment)
            for document in read_documents(list(map(str, paths)))
            for segment in longest_segments(document, max(TOKENS))
        ]
        of_sides = [
            [len(joined([document[n][side] for n in segment])) for document, segment in segments] for side in (0, 1)
        ]
        longest = [("a segment", max(of_side)) for of_side in of_sides]
    else:
        refuse_few_lines(paths[0])
        words = [[len(line.split()) for line in lines(path)] for path in paths]
        longest = [
            max(
                ((f"{times} lines", of_joined) for times in TIMES for of_joined in _sums(of_side, times)),
                key=itemgetter(1),
            )
            for of_side in words
        ]
    for path, limit, (unit, tokens) in zip(paths, of_search(experiment).values(), longest, strict=True):
        many = f"the test set has {unit} of {tokens + 1} tokens ({path})"  # with the end of the sentence
        if tokens >= limit:
            whose = f" with the flags of {experiment.system}" if experiment.system and limit != LONGEST else ""
            raise Join().error(f"{many}, more than the {limit} that fairseq takes{whose}: {MORE_ROOM}")
        if tokens >= (of_batch := batch_of_search(experiment)):
            raise Join().error(f"{many}, more than the {of_batch} of a batch: {LARGER_BATCH}")


def refuse_few_lines(source: Path) -> None:
    """Raise a StageError if the test set, whose source is in *source*, has too few lines for the longest joined one."""
    count = count_lines(str(source))
    if count < max(TIMES):
        raise Join().error(f"the test set has {count} lines, and at least {max(TIMES)} are needed")


def _sums(numbers: Sequence[int], times: int) -> list[int]:
    """The sums of *times* consecutive *numbers* each. The last ones are left out if they are fewer."""
    return [sum(numbers[n : n + times]) for n in range(0, len(numbers) - times + 1, times)]


class Join(TranslationStage):
    number = 13
    of_test_set = True
    title = "join sentences of the test set"
    settings = ("source_lang", "target_lang")
    depends_on_bpe = True
    depends_on_documents = True

    def inputs(self, experiment: Experiment) -> list[Path]:
        data = [*experiment.binary_data, *experiment.binary_sets(["test"])]
        return [*_plain(experiment), *experiment.texts("bpe", ["test"]), *data]

    def outputs(self, experiment: Experiment) -> list[Path]:
        pair = f"{experiment.source}-{experiment.target}"
        ends = [f"{pair}.{lang}.{end}" for lang in (experiment.source, experiment.target) for end in ("bin", "idx")]
        sets = lengths(experiment)
        binary = [data(experiment) / f"{subset(experiment, length)}.{end}" for length in sets for end in ends]
        written = in_subwords if experiment.unit.has_documents else texts
        return [*(path for length in sets for path in written(experiment, length)), *binary]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        if not experiment.dry_run and not experiment.unit.has_documents:
            refuse_few_lines(experiment.texts("bpe", ["test"])[0])
        folder = experiment.work / "joined"
        shell.command(f"mkdir -p {quoted(folder)}")
        (_join_to_segments if experiment.unit.has_documents else _join_lines)(experiment, shell, folder)
        final, part = data(experiment), folder / "data-bin.tmp"
        prefixes = ",".join(quoted(folder / f"{length}.bpe") for length in lengths(experiment))
        source, target = (experiment.data_bin / f"dict.{lang}.txt" for lang in (experiment.source, experiment.target))
        shell.command(f"rm -rf {quoted(part)}")
        shell.command(
            f"fairseq-preprocess {experiment.languages} --testpref {prefixes} --srcdict {quoted(source)} "
            f"--tgtdict {quoted(target)} --destdir {quoted(part)}"
        )
        shell.command(f"rm -rf {quoted(final)} && mv {quoted(part)} {quoted(final)}")


def _join_to_segments(experiment: Experiment, shell: Shell, folder: Path) -> None:
    for tokens in TOKENS:
        shell.tool(
            f"python -m recipes.text.segments join {experiment.languages} "
            f"--input {quoted(experiment.work / 'bpe' / 'test')} "
            f"--output {quoted(folder / f'{tokens}.bpe')} --tokens {tokens}"
        )


def _join_lines(experiment: Experiment, shell: Shell, folder: Path) -> None:
    for kind, paths in (("", _plain(experiment)), (".bpe", experiment.texts("bpe", ["test"]))):
        for path in paths:
            sentences = count_lines(str(path)) if path.exists() else 0  # in a dry run, it may not exist yet
            for times in TIMES:
                out = folder / f"{times}{kind}{_end(path)}"
                # The last line is dropped if it would have fewer sentences.
                count = sentences // times * times or "LINES"
                shell.write(f"head -n {count} {quoted(path)} | paste -d ' ' {'- ' * (times - 1)}-", out)
