"""Stage 22: translate the joined sentences (fairseq-generate), as stage 9 does the test set."""

from pathlib import Path

from recipes.compare import stage21_join
from recipes.pipeline import stage08_average, stage09_translate
from recipes.pipeline.experiment import Experiment

NUMBER = 22
TITLE = "translate joined sentences"
PER_MODEL = True
SETTINGS = stage09_translate.SETTINGS


def inputs(x: Experiment) -> list[Path]:
    return [*stage08_average.outputs(x), *stage21_join.outputs(x)]


def hypotheses(x: Experiment, times: int) -> Path:
    """The translations of *times* sentences a line, plain text."""
    return x.model / "joined" / f"{times}.{x.target}"


def outputs(x: Experiment) -> list[Path]:
    return [hypotheses(x, times) for times in stage21_join.TIMES]


def run(x: Experiment) -> None:
    x.command(f"mkdir -p {x.shell(x.model / 'joined')}")
    for times in stage21_join.TIMES:
        stage09_translate.translate(
            x,
            stage21_join.data(x),
            stage21_join.subset(times),
            stage21_join.texts(x, times)[0],
            x.model / "joined" / f"{times}.generate.txt",
            hypotheses(x, times),
        )
