"""Stage 2: extract the sentences of both languages, and check them (``recipes.text.extract``)."""

import shlex
from pathlib import Path

from fairseq_rope.errors import InputError
from fairseq_rope.tools.score import check_plain, read_lines
from recipes.pipeline.experiment import SETS, Experiment, StageError, fill

NUMBER = 2
TITLE = "extract and check"
PER_MODEL = False
SETTINGS = ("train_files", "valid_files", "test_files", "source_lang", "target_lang")


def sets(x: Experiment) -> list[str]:
    """The sets that have files of their own; without valid_files, stage 4 holds training pairs out."""
    return [n for n in SETS if x.templates(n)]


def inputs(x: Experiment) -> list[Path]:
    return [x.fetched(file) for file in x.files()]


def outputs(x: Experiment) -> list[Path]:
    return x.texts("raw", sets(x))


def run(x: Experiment) -> None:
    for n in sets(x):
        where = []
        for template in x.templates(n):
            file, colon, member = template.partition(":")
            folder = x.fetched(fill(file, x.source, "src")).parent
            where.append(f"{x.named(folder / file)}{colon}{member}")
        x.tool(
            f"python -m recipes.text.extract --source-lang {x.source} --target-lang {x.target} "
            f"--output {x.shell(x.work / 'raw' / n)} {shlex.join(where)}",
            makes=x.texts("raw", [n]),
        )
    if not x.dry_run:
        check_test_set(x)


def check_test_set(x: Experiment) -> None:
    """Raise a StageError now for a test set that stage 10 would refuse, after all of the training."""
    try:
        for path in x.texts("raw", ["test"]):
            is_reference = path.suffix == f".{x.target}"
            check_plain(str(path), read_lines(str(path)), is_reference)
    except InputError as error:
        raise StageError(f"stage {NUMBER} ({TITLE}): {error}") from None
