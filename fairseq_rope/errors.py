"""Errors that a message explains, and how the command-line tools end with them: in one sentence."""

import contextlib
import logging
import os
import signal
import sys
import threading
from typing import Iterator

# What pip calls the packages that tools need, as in pyproject.toml.
REQUIREMENTS = {
    "ctranslate2": "ctranslate2>=4.6.3,<5",
    "sacrebleu": "sacrebleu>=2.3,<3",
    "sacremoses": "sacremoses==0.2.0",
    "sentencepiece": "sentencepiece>=0.1.99,<0.3",
    "subword_nmt": "subword-nmt>=0.3.8,<0.4",
    "tqdm": "tqdm>=4.66.3,<5",
}


class InputError(ValueError):
    """What was given cannot be used; the message names the flag or file, its value and what is allowed."""


@contextlib.contextmanager
def ending_in_one_sentence(program: str) -> Iterator[None]:
    """End the program with status 1 and one sentence at an InputError, an OSError or a missing package.

    Ctrl-C ends it with status 130, SIGHUP with 129 and SIGTERM with 143, as shells count them. They print
    nothing, and temporary files are removed.
    """
    # On import, fairseq asks for tensorboardX, which no tool needs.
    logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
    in_main_thread = threading.current_thread() is threading.main_thread()  # others cannot set signal handlers
    signals = (signal.SIGHUP, signal.SIGTERM) if in_main_thread else ()
    before = {number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in signals}
    try:
        yield
    except ImportError as missing:
        package = (missing.name or str(missing)).split(".")[0]
        if package in REQUIREMENTS:
            sys.exit(f"{program}: {package} is not installed: pip install '{REQUIREMENTS[package]}'")
        sys.exit(f"{program}: {package} is not installed (docs/install.md says how to install it)")
    except InputError as error:
        sys.exit(f"{program}: {error}")
    except OSError as error:
        named = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
        sys.exit(f"{program}: {named}")
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def refuse_output(path: str, flag: str = "--output") -> None:
    """Raise an InputError if *path* cannot be a file: it is something else, or its folder is not there."""
    is_other = os.path.exists(path) and not os.path.isfile(path)  # a folder, or /dev/null
    if is_other or not os.path.isdir(os.path.dirname(os.path.abspath(path))):
        raise InputError(f"{flag} {path}: must be a file in a folder that exists")
