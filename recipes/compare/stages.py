"""The stages of a run of a comparison."""

import dataclasses
import re

from recipes.compare.stage12_score_with import ScoreWith
from recipes.compare.stage14_translate_joined import TranslateJoined
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.stages import TO_SCORE, TRAIN
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run import launch
from recipes.run.stamps import Stamps


def stages_of(run: Experiment) -> tuple[TranslationStage, ...]:
    """The stages of a run, in order. A run that is only trained, for tuning, has no others."""
    if run.tuned:
        return (TRAIN,)
    own = (stage for stage in TO_SCORE if stage.per_model and not (run.training_of and stage.trains))
    return (*own, TranslateJoined(), *map(ScoreWith, run.scorers))


def finished(run: Experiment) -> bool:
    """Whether the stages of *run* are done with the present settings and inputs.

    A run in another precision or with other batches on each device counts, too: the report says how trainings differ.
    """
    return launch.is_done(run, stages_of)


def outdated(run: Experiment) -> str:
    """Which setting or input of *run* has changed since all its stages have ended; "" if none has, or one has not."""
    stamps = Stamps(run)
    ended = [(stage, stamps.last(stage)) for stage in stages_of(run)]
    if any(stamp is None for _, stamp in ended):
        return ""
    return next(filter(None, (stamps.changed(stage, stamp) for stage, stamp in ended if stamp is not None)), "")


def runs_in_folders(experiment: Experiment) -> list[Experiment]:
    """The runs of the system of *experiment* that have a model folder, from any seed, in the order of the seeds."""
    start = f"{experiment.system}.seed"
    names = (folder.name.removeprefix(start) for folder in experiment.work.glob(f"{start}*"))
    seeds = sorted({int(number[0]) for number in map(re.compile(r"\d+").match, names) if number})
    runs = (dataclasses.replace(experiment, seed=seed) for seed in seeds)
    return [run for run in runs if run.model.exists()]
