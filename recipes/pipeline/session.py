"""The frame of a run: checks, the lock, signals, and the record of its command and settings."""

import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from fairseq_rope.errors import InputError, handle_signals, sentence_of
from fairseq_rope.files import write_whole
from recipes.pipeline.experiment import Experiment, StageError
from recipes.pipeline.lock import locked_when_free
from recipes.pipeline.machine import check_machine, describe
from recipes.pipeline.runner import Runner
from recipes.pipeline.stages import STAGES


@contextlib.contextmanager
def at_work(experiment: Experiment, recipe: str, program: str) -> Iterator[Callable[[Experiment], Runner]]:
    """Lock the work folder of *experiment*, and yield a function that makes the Runner of an experiment in it.

    An error or a signal ends the process with one sentence. *program* is the command that repeats this run.
    """
    recipe = str(Path("recipes") / recipe)
    ended = contextlib.ExitStack()
    try:
        if experiment.dry_run:
            yield functools.partial(Runner, stages=STAGES)
            return
        check_machine(experiment)
        refused = f"{recipe}: another run uses {experiment.work}"
        held = ended.enter_context(locked_when_free(experiment.work / ".lock", refused))
        for number, handler in handle_signals(_stop).items():  # so that the running command ends too
            ended.callback(signal.signal, number, handler)
        record = functools.partial(write_down, experiment, program)
        yield functools.partial(Runner, stages=STAGES, locks=(held,), record=record)
    except (StageError, InputError) as error:
        sys.exit(f"{recipe}: {error}")
    except OSError as error:
        sys.exit(f"{recipe}: {sentence_of(error, experiment.work)}")
    except KeyboardInterrupt:
        _stop(signal.SIGINT, None)
    finally:
        ended.close()


def announce(experiment: Experiment) -> None:
    """Print the model's folder, the settings that name it, and the tokeniser of the target language."""
    if experiment.differs:
        changed = ", ".join(f"{name}={value}" for name, value in experiment.differs.items())
        print(f"model folder: {experiment.model.name}; changed settings: {changed}")
    tokenize = experiment.tokenize
    print(f"target language {experiment.target}: scored with sacreBLEU's tokeniser {tokenize}", flush=True)


def write_down(experiment: Experiment, program: str, folder: Path, noted: Mapping[str, Any] | None = None) -> None:
    """Write settings.yaml and run.yaml of the last stage that ran into *folder*, with what that has *noted*."""
    settings, run = asdict(experiment.settings), {"command": program, **(noted or {}), **describe()}
    for name, contents in (("settings.yaml", settings), ("run.yaml", run)):
        write_whole(folder / name, yaml.safe_dump(contents, sort_keys=False, allow_unicode=True))


def _stop(number: int, _frame: object) -> None:
    print("recipes: stopped; run the same command to continue", file=sys.stderr)
    sys.exit(128 + number)
