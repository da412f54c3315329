"""Stage 22: translate the joined sentences (fairseq-generate), as stage 9 does the test set."""

from pathlib import Path

from recipes.compare import stage21_join
from recipes.pipeline.commands import Shell, quoted
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.stage import Stage
from recipes.pipeline.stage09_translate import SETTINGS, translate


def hypotheses(x: Experiment, times: int) -> Path:
    """The translations of *times* sentences a line, plain text."""
    return x.model / "joined" / f"{times}.{x.target}"


class TranslateJoined(Stage):
    number = 22
    title = "translate joined sentences"
    per_model = True
    settings = SETTINGS

    def inputs(self, x: Experiment) -> list[Path]:
        return [x.averaged, *stage21_join.Join().outputs(x)]

    def outputs(self, x: Experiment) -> list[Path]:
        return [hypotheses(x, times) for times in stage21_join.TIMES]

    def run(self, x: Experiment, shell: Shell) -> None:
        shell.command(f"mkdir -p {quoted(x.model / 'joined')}")
        for times in stage21_join.TIMES:
            translate(
                x,
                shell,
                stage21_join.data(x),
                stage21_join.subset(times),
                stage21_join.texts(x, times)[0],
                x.model / "joined" / f"{times}.generate.txt",
                hypotheses(x, times),
            )
