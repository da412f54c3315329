"""Stage 22: translate the joined sentences (fairseq-generate), as stage 9 translates the test set."""

from pathlib import Path

from recipes.compare import stage21_join
from recipes.pipeline.commands import Shell, quoted
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.stage import Stage
from recipes.pipeline.stage09_translate import SETTINGS, translate


def hypotheses(experiment: Experiment, times: int) -> Path:
    """The file of plain translations with *times* sentences a line."""
    return experiment.model / "joined" / f"{times}.{experiment.target}"


class TranslateJoined(Stage):
    number = 22
    title = "translate joined sentences"
    per_model = True
    settings = SETTINGS

    def inputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.averaged, *stage21_join.Join().outputs(experiment)]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return [hypotheses(experiment, times) for times in stage21_join.TIMES]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        shell.command(f"mkdir -p {quoted(experiment.model / 'joined')}")
        data = stage21_join.data(experiment)
        for times in stage21_join.TIMES:
            source, generated = stage21_join.texts(experiment, times)[0], f"{times}.generate.txt"
            outputs = experiment.model / "joined" / generated, hypotheses(experiment, times)
            translate(experiment, shell, data, stage21_join.subset(times), source, *outputs)
