"""The checkpoints that stage 8 averages, and checks that they are the last ones of the training."""

import contextlib
import math
import re
import shlex
from pathlib import Path

from fairseq_rope.files import NUMBERS
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.lengths import limits
from recipes.run.history import logged, number_of
from recipes.run.run import StageError


def to_average(experiment: Experiment) -> list[tuple[int, Path]]:
    """The epoch or update, and the file, of each checkpoint that stage 8 averages, in order."""
    by_update = experiment.settings.save_every_updates
    pattern = NUMBERS["update" if by_update else "epoch"]
    matches = [(re.fullmatch(pattern, path.name), path) for path in experiment.checkpoints.glob("checkpoint*.pt")]
    return sorted((int(match[1]), path) for match, path in matches if match)[-experiment.settings.average_checkpoints :]


def check_checkpoints(experiment: Experiment) -> None:
    """Raise a StageError unless all of the last checkpoints exist, one for each epoch or interval."""
    numbers = [number for number, _ in to_average(experiment)]
    by_update, count = experiment.settings.save_every_updates, experiment.settings.average_checkpoints
    every = by_update or 1
    expected = [numbers[-1] - every * n for n in reversed(range(count))] if numbers else []
    if numbers != expected or not numbers:
        unit = "updates" if by_update else "epochs"
        last = unit[:-1] if count == 1 else f"{count} {unit}"
        needed = f"the last {last} (multiples of {every})" if by_update else f"the last {last}"
        has = f"those of {', '.join(map(str, numbers))}" if numbers else "none"
        must = f"must have the checkpoints of {needed}, to average them, and has {has}"
        last_ones = next((n for n in range(1, len(numbers)) if numbers[-n - 1] != numbers[-n] - every), len(numbers))
        fewer = f"average fewer (average_checkpoints={last_ones}), " if last_ones else ""
        again = f"train longer (max_epochs, max_updates), {fewer}or train again with --name NAME or another --work-dir"
        raise StageError(f"stage 7 (train): {experiment.checkpoints} {must}: {again}")


def check_long_enough(experiment: Experiment, tokens: int) -> None:
    """Raise a StageError if training ends before there are enough checkpoints to average.

    This depends on the updates of an epoch if checkpoints are counted in one unit and the training is limited in the
    other one. *tokens* are those of an update, at most. Padding, and batch sizes that are multiples of 8, make up to
    twice as many updates as full batches would.
    """
    settings = experiment.settings
    by_update, wanted = settings.save_every_updates, settings.average_checkpoints
    if not (settings.max_epochs if by_update else settings.max_updates):
        return
    pairs = experiment.texts(experiment.in_subwords, ["train"])
    if not all(path.exists() for path in pairs):  # the user removed them after stage 6 to save space
        return
    if "--truncate-source" in shlex.split(settings.fairseq_train_flags):  # fewer tokens are trained on
        return
    longest = min(limits(settings.fairseq_train_flags).values())  # fairseq skips pairs that are longer
    with contextlib.ExitStack() as opened:
        lines = zip(*(opened.enter_context(path.open("rb")) for path in pairs), strict=False)
        sizes = (1 + max(len(side.split()) for side in pair) for pair in lines)
        all_tokens = sum(size for size in sizes if size <= longest)
    least = max(1, all_tokens // tokens)
    if by_update:
        most = 2 * all_tokens // tokens + 1
        count, limit = settings.max_epochs * most // by_update, f"max_epochs={settings.max_epochs}"
        change = "set save_every_updates=0, to save one at the end of each epoch, or train longer"
    else:
        count, limit = math.ceil(settings.max_updates / least), f"max_updates={settings.max_updates}"
        change = "average fewer, set save_every_updates, or train longer"
    if count < wanted:
        few = f"{limit} is too short for so many: an epoch has about {least} updates"
        every = f", and save_every_updates={by_update}" if by_update else ""
        raise StageError(f"stage 7 (train): average_checkpoints={wanted}: {few}{every}: {change}")


def check_limit(experiment: Experiment) -> None:
    """Raise a StageError if a checkpoint is from a longer training than the settings allow."""
    for limit, number in _trained(experiment).items():
        allowed = getattr(experiment.settings, limit)
        if allowed and number > float(f"{allowed:g}"):  # as precisely as fairseq's log has it
            earlier = experiment.model / "earlier"
            shorter = f"; results of shorter trainings are in {earlier}" if earlier.exists() else ""
            trained = f"is already trained for {number} {limit[4:]}, beyond {limit}={allowed}"
            instead = f"set {limit}={number}, or train another model with --name NAME or another --work-dir{shorter}"
            raise StageError(f"stage 7 (train): {experiment.checkpoints} {trained}: {instead}")


def _trained(experiment: Experiment) -> dict[str, int]:
    """How many epochs and updates the last checkpoint has, by the setting that limits them; {} without checkpoints."""
    last = to_average(experiment)[-1:]
    if not last:
        return {}
    ((number, path),) = last
    epoch = re.fullmatch(r"checkpoint_(\d+)_\d+\.pt", path.name)
    if epoch:
        return {"max_updates": number, "max_epochs": int(epoch[1])}
    lines = experiment.history.read_text(encoding="utf-8").splitlines() if experiment.history.exists() else []
    entries = [entry for entry in map(logged, lines) if entry.get("epoch") == number]
    updates = [number_of(entry.get(f"{part}_num_updates", "0")) for entry in entries for part in ("train", "valid")]
    return {"max_epochs": number, "max_updates": max(updates, default=0)}
