"""The frame of a run: checks, the lock and signals."""

import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from fairseq_rope.errors import InputError, handle_signals, sentence_of
from recipes.pipeline.check_machine import check_machine
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.stages import STAGES, needed
from recipes.run.lock import locked_when_free
from recipes.run.runner import Runner


@contextlib.contextmanager
def at_work(experiment: Experiment, recipe: str, program: str) -> Iterator[Callable[[Experiment], Runner[Experiment]]]:
    """Lock the work folder of *experiment*, and yield a function that makes the Runner of an experiment in it.

    An error or a signal ends the process with one sentence. *program* is the command that repeats this run.
    """
    recipe = str(Path("recipes") / recipe)
    ended = contextlib.ExitStack()
    try:
        if experiment.dry_run:
            yield runner_of
            return
        check_machine(experiment)
        refused = f"{recipe}: another run uses {experiment.work}"
        held = ended.enter_context(locked_when_free(experiment.work / ".lock", refused))
        for number, handler in handle_signals(_stop).items():  # so that the running command ends too
            ended.callback(signal.signal, number, handler)
        yield functools.partial(runner_of, locks=(held,), program=program)
    except InputError as error:
        sys.exit(f"{recipe}: {error}")
    except OSError as error:
        sys.exit(f"{recipe}: {sentence_of(error, experiment.work)}")
    except KeyboardInterrupt:
        _stop(signal.SIGINT, None)
    finally:
        ended.close()


def runner_of(experiment: Experiment, locks: tuple[int, ...] = (), program: str = "") -> Runner[Experiment]:
    """The runner of the stages that *experiment* needs. :class:`.Runner` describes the other arguments."""
    return Runner(experiment, needed(STAGES, experiment), locks, program)


def announce(experiment: Experiment) -> None:
    """Print the model's folder, the settings that name it, and the tokeniser of the target language."""
    if experiment.differs:
        changed = ", ".join(f"{name}={value}" for name, value in experiment.differs.items())
        print(f"model folder: {experiment.model.name}; changed settings: {changed}")
    tokenize = experiment.tokenize
    print(f"target language {experiment.target}: scored with sacreBLEU's tokeniser {tokenize}", flush=True)


def _stop(number: int, _frame: object) -> None:
    print("recipes: stopped; run the same command to continue", file=sys.stderr)
    sys.exit(128 + number)
