"""One line in place of a traceback, if an input that this plugin refuses ends one of fairseq's programs."""

import os
import re
import sys
from types import TracebackType

from ..errors import InputError
from .registry import replaces

_excepthook = sys.excepthook
# How an error of this kind ends the traceback of another process, as torch.multiprocessing.spawn reports it
OF_PROCESS = re.compile(r"^(?:fairseq_rope\.[\w.]*Error: |ValueError: (?=--))(.*)\s*\Z", re.MULTILINE)


def refusal(error: BaseException) -> str | None:
    """Return the message of an InputError, or of a ValueError that begins with a flag; None for another error."""
    for cause in (error, error.__context__):  # fairseq's trainer raises another error if a checkpoint is refused
        if isinstance(cause, InputError) or (isinstance(cause, ValueError) and str(cause).startswith("--")):
            return str(cause)
    of_process = OF_PROCESS.search(str(error)) if type(error).__name__ == "ProcessRaisedException" else None
    return of_process[1] if of_process else None


@replaces(
    "sys.excepthook",
    prevents="an unreadable error",
    until="fairseq's programs end with one line for errors that are the user's",
)
def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print the one line, or the traceback of another error or of another program.

    An input that this plugin refuses, such as a checkpoint of the opposite direction, would end fairseq's programs with
    a traceback. Here they end with one line. Other errors and other programs keep theirs.
    """
    program, line = os.path.basename(sys.argv[0]), refusal(error)
    if line is None or not program.startswith("fairseq-"):
        _excepthook(kind, error, trace)
    else:
        print(f"{program}: error: {line}", file=sys.stderr)
