"""Find the training that the settings describe: in the model's folder, or in a folder that was renamed before."""

import hashlib
import itertools
import json
import re
from pathlib import Path
from typing import Any

from recipes.pipeline.checkpoints import check_limit
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.settings import LEARNT_FROM
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.moves import Moves, first_unused
from recipes.run.precision import last_process
from recipes.run.stamps import Stamps

ARCH = "--arch"  # its name in what identifies a training


def learnt_from(experiment: Experiment, stage: TranslationStage, stamps: Stamps) -> dict[str, Any]:
    """What identifies a training: the architecture, the data, and the settings that must not change when it resumes."""
    can_change = {*stage.settings} - {*LEARNT_FROM}
    same = {name: value for name, value in stamps.of(stage).items() if name not in can_change}
    return {**same, ARCH: experiment.arch}


def begun(experiment: Experiment, checkpoints: Path, stamps: Stamps) -> dict[str, Any] | None:
    """:func:`learnt_from` of the training in the folder *checkpoints*; None if begun.json cannot be read."""
    try:
        training = stamps.current(json.loads((checkpoints / "begun.json").read_text()))
    except (OSError, ValueError, AttributeError):
        return None
    return {ARCH: trained_arch(checkpoints / "history.jsonl") or experiment.arch, **training}


def trained_arch(history: Path) -> str:
    """The architecture of the training in the file *history*; "" if it is not known."""
    found = re.search(rf" {ARCH} (\S+)", last_process(history).get("command", ""))
    return found[1] if found else ""


def choose_training(experiment: Experiment, stage: TranslationStage, stamps: Stamps, moves: Moves) -> None:
    """Make the model's folder the one of the training that the settings and data describe, or leave none.

    A folder with checkpoints of another training is renamed. If the wanted training was renamed before, its folder gets
    its name back.
    """
    if not all(path.exists() or path in stamps.remade for path in stage.inputs(experiment)):
        return  # a dry run, before there is data
    wanted = learnt_from(experiment, stage, stamps)
    trainings = {
        folder: begun(experiment, folder / "checkpoints", stamps)
        for folder in sorted(experiment.work.glob(f"{experiment.model.name}*"))
        if folder.name.partition(".old-")[0] == experiment.model.name
    }
    current = trainings.pop(experiment.model, None)
    if current == wanted:
        check_limit(experiment)
        return
    earlier = next((folder for folder, training in trainings.items() if training == wanted), None)
    trained = any(experiment.checkpoints.glob("*.pt"))
    if trained or earlier is not None and experiment.model.exists():
        moves.move(
            experiment.model, _aside(experiment.model, current), "has another architecture, other settings or data"
        )
    if earlier is not None:
        moves.move(earlier, experiment.model, "has these settings and data")
        check_limit(experiment)


def _aside(folder: Path, training: dict[str, Any] | None) -> Path:
    """An unused path ``FOLDER.old-HASH`` for *folder* while another training has its name."""
    digest = hashlib.sha256(json.dumps(training, sort_keys=True).encode()).hexdigest()[:8]
    name = f"{folder.name.partition('.old-')[0]}.old-{digest}"
    return first_unused(folder.with_name(name if n == 1 else f"{name}-{n}") for n in itertools.count(1))
