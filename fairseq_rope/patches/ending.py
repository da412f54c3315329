"""Ending fairseq's programs with one sentence, without a traceback, if the error's message explains the cause."""

import errno
import os
import sys
import traceback
from types import TracebackType

import fairseq
from omegaconf.errors import InterpolationKeyError

from ..errors import InputError
from .criteria import USUAL

_excepthook = sys.excepthook


def sentence_for(error: BaseException, trace: TracebackType | None) -> str | None:
    """Return one sentence for an *error* whose message explains the cause, and None if a traceback is necessary.

    It does if this package or fairseq raises it on purpose, or if the system cannot read or write a file.
    """
    if isinstance(error, InputError):
        return str(error)
    task = getattr(error.parent_node, "_name", None) if isinstance(error, InterpolationKeyError) else None
    if task in USUAL:  # it reads options of its criterion, and this one lacks them
        return f"--task {task}: its criterion must be {USUAL[task]}, or have the same options"
    place = traceback.extract_tb(trace)[-1] if trace else None
    packages = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(fairseq.__file__))
    raised = place is not None and place.filename.startswith(packages) and (place.line or "").startswith("raise ")
    if isinstance(error, OSError):
        if error.filename and error.strerror:
            return f"{error.filename}: {error.strerror}"
        known = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
        return str(error) if known or raised else None
    if type(error) in (Exception, ValueError) and raised and "\n" not in str(error):
        return str(error)
    return None


def program_of(trace: TracebackType | None) -> str | None:
    """Return the name of fairseq's program that runs in *trace*, like "fairseq-train"; None if there is none."""
    for frame, _ in traceback.walk_tb(trace):
        folder, file = os.path.split(frame.f_code.co_filename)
        if os.path.basename(folder) == "fairseq_cli" and frame.f_code.co_name == "cli_main":
            return f"fairseq-{os.path.splitext(file)[0].replace('_', '-')}"
    return None


def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print one sentence if an *error* that it explains ends one of fairseq's programs, and a traceback otherwise."""
    program = program_of(trace)
    sentence = sentence_for(error, trace) if program else None
    if sentence is None:
        _excepthook(kind, error, trace)
    else:
        print(f"{program}: error: {sentence}", file=sys.stderr)
