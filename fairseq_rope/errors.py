"""Errors whose message explains the cause, and how the command-line tools print them: as one sentence."""

import contextlib
import difflib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterable, Iterator

# The requirement for each module that a tool may lack, as in pyproject.toml.
REQUIREMENTS = {
    "ctranslate2": "ctranslate2>=4.8.2,<5",
    "eflomal": "eflomal>=2,<3",
    "sacrebleu": "sacrebleu>=2.3,<3",
    "sacremoses": "sacremoses==0.2.0",
    "sentencepiece": "sentencepiece>=0.1.99,<0.3",
    "subword_nmt": "subword-nmt>=0.3.8,<0.4",
    "tqdm": "tqdm>=4.66.3,<5",
}

CLOSE = 0.75  # from 0 to 1: how alike a misspelt word and the one that a message suggests must be


def nearest(word: str, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown *word*: the nearest one of *known*; "" if none is near."""
    names = difflib.get_close_matches(word, list(known), 1, CLOSE)
    return f"; the nearest one is {names[0]}" if names else ""


def flag_of(option: str) -> str:
    """Return the flag of an option of fairseq or of this plugin: ``label_smoothing`` is ``--label-smoothing``."""
    return f"--{option.replace('_', '-')}"


class InputError(ValueError):
    """An input cannot be used; the message names the flag or file, its value and what is allowed."""


@contextlib.contextmanager
def ending_in_one_sentence(program: str) -> Iterator[None]:
    """End the program with status 1 and one sentence after an InputError, an OSError or a missing package.

    Ctrl-C (status 130), SIGHUP (129) and SIGTERM (143) end it without a message, and so does a closed pipe that should
    take its output (141, as after SIGPIPE); temporary files are removed.
    """
    # Otherwise, fairseq's wav2vec2_classification.py lets all packages log everything to standard error.
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    previous_handlers = {}
    if threading.current_thread() is threading.main_thread():  # others cannot set signal handlers
        for number in (signal.SIGHUP, signal.SIGTERM):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
                previous_handlers[number] = signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        yield
        sys.stdout.flush()
    except ImportError as missing:
        # torch is too old, a system library is missing, or a module exists and cannot be loaded
        if missing.name is None or not isinstance(missing, ModuleNotFoundError):
            sys.exit(f"{program}: {missing}")
        package = missing.name.split(".")[0]
        page = "docs/install.md in the repository"
        known = package in REQUIREMENTS
        how = f": pip install '{REQUIREMENTS[package]}'" if known else f" ({page} says how to install it)"
        sys.exit(f"{program}: {package} is not installed{how}")
    except InputError as error:
        sys.exit(f"{program}: {error}")
    except OSError as error:
        reason = str(error.strerror or error)
        sentence = f"{error.filename}: {reason}" if error.filename else reason
        sys.exit(128 + signal.SIGPIPE if isinstance(error, BrokenPipeError) else f"{program}: {sentence}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        _discard_output()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _discard_output() -> None:
    """Discard what standard output holds if it cannot be written. Otherwise, Python tries again when it exits."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def naming_what_fairseq_reads(where: str) -> Iterator[None]:
    """Raise an InputError that begins with *where* if fairseq cannot read a dictionary or set up a task.

    fairseq raises a ValueError, a RuntimeError or an Exception for a damaged dictionary.
    """
    try:
        yield
    except Exception as error:
        if type(error) not in (Exception, ValueError, RuntimeError):
            raise
        raise InputError(f"{where}: {' '.join(str(error).split())}") from error


def refuse_output(path: str, flag: str = "--output") -> None:
    """Raise an InputError if *path* exists and is not a file, or if its folder does not exist."""
    is_other = os.path.exists(path) and not os.path.isfile(path)  # a folder, or /dev/null
    if is_other or not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise InputError(f"{flag} {path}: must be a file in a folder that exists")


def warn(tool: str, message: str) -> None:
    """Print a warning of ``fairseq-rope TOOL`` to standard error."""
    print(f"fairseq-rope {tool}: warning: {message}", file=sys.stderr)
