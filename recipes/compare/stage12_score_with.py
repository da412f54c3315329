"""Stage 12: score the translations of the test set with a program that the user names (``--scorer NAME=COMMAND``).

Each program has its own stage, so that a new program does not repeat the work of others. It runs after the other
stages of a run, so that a program that fails does not keep the run out of the report.
"""

import argparse
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rope.scorers import LOWER_HELP, SCORER_HELP, Scorer, read_scorers
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.stage10_score import command
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.run import ROOT
from recipes.run.shell import PROGRAMS, Shell, quoted
from recipes.run.stamps import Stamps


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name programs."""
    add = parser.add_argument
    add("--scorer", action="append", default=[], metavar="NAME=COMMAND", help=SCORER_HELP)
    add("--lower-is-better", nargs="+", action="extend", default=[], metavar="NAME", help=LOWER_HELP)


def chosen(args: argparse.Namespace) -> tuple[Scorer, ...]:
    """The programs that the flags name. Raises an InputError if one cannot run in the project's folder."""
    path = os.pathsep.join((PROGRAMS, os.environ.get("PATH", "")))
    return read_scorers(args.scorer, args.lower_is_better, str(ROOT), path)


@dataclass
class ScoreWith(TranslationStage):
    """The stage that scores with one program."""

    scorer: Scorer

    number = 12
    settings = ()
    per_model = True
    of_test_set = True
    is_needed = False
    title = property(lambda self: f"score with {self.scorer.name}")
    label = property(lambda self: f".{self.scorer.name}")

    def inputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.hypotheses, experiment.test_source, *experiment.test_references]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.model / f"scorer.{self.scorer.name}.json"]

    def depends_on(self, experiment: Experiment) -> dict[str, Any]:
        return {**super().depends_on(experiment), "--scorer": self.scorer.command}

    def run(self, experiment: Experiment, shell: Shell) -> None:
        scorer = quoted(f"{self.scorer.name}={self.scorer.command}")
        (output,) = self.outputs(experiment)
        shell.write(f"{command(experiment)} --scorer {scorer}", output)

    def is_done(self, experiment: Experiment) -> bool:
        """Whether the program has scored the present translations."""
        return Stamps(experiment).is_done(self)

    def scores(self, experiment: Experiment) -> list[float]:
        """The score of each sentence."""
        (path,) = self.outputs(experiment)
        return json.loads(path.read_text(encoding="utf-8"))["systems"][0]["metrics"][-1]["sentence_scores"]
