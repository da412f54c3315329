"""Train the new runs of a comparison in the precision of the earlier ones, or say that they differ."""

import itertools
import sys
from collections.abc import Sequence

from recipes.compare.stages import finished, runs_in_folders
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.fairseq_train import asked, devices_and_precision, refuse_another, warning
from recipes.pipeline.stages import TRAIN


def choose_precision(compared: Sequence[Experiment], runs: Sequence[Experiment], on_this_machine: bool) -> None:
    """With ``precision: auto``, give the new runs among *runs* the precision of the earlier ones, and print it.

    *compared* has one run of each system and setting. The trained runs of these systems and settings, from any seed,
    are the earlier ones. Raises a StageError if one of *runs* resumes a training in another precision than the user
    asks for.
    """
    for run in runs:
        refuse_another(run, TRAIN.resumed(run))
    in_folders = itertools.chain.from_iterable(map(runs_in_folders, filter(_is_automatic, compared)))
    earlier = list(dict.fromkeys(filter(None, map(TRAIN.resumed, in_folders))))
    for run in (*compared, *runs) if earlier else ():
        run.precision_of_others = earlier[0]
    new_runs = [run for run in runs if _is_automatic(run) and not run.training_of and not TRAIN.resumed(run)]
    if earlier and new_runs:
        chosen = earlier[0]
        if on_this_machine and chosen != "fp32":  # every device computes fp32
            _, chosen = devices_and_precision(new_runs[0])
        why = "" if chosen == earlier[0] else f", because this machine does not compute {earlier[0]} in hardware"
        print(f"precision: auto: earlier runs are in {' and '.join(earlier)}, new ones in {chosen}{why}", flush=True)
    for run in runs if on_this_machine else ():
        slow = "" if finished(run) else warning(run, TRAIN.resumed(run))
        if slow:
            print(f"recipes.compare: warning: {slow}", file=sys.stderr)
            break


def _is_automatic(run: Experiment) -> bool:
    return asked(run)[0] == "auto"
