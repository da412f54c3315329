"""Ending fairseq's programs with one sentence, without a traceback or a list of all flags, if the cause is known."""

import contextlib
import errno
import os
import re
import sys
import traceback
from argparse import ArgumentParser
from types import TracebackType
from typing import NoReturn

import fairseq
from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import MODEL_REGISTRY
from fairseq.options import get_training_parser
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY
from fairseq.utils import import_user_module

from ..errors import InputError, flag_of, nearest
from .causes import sentence_of_cause

_excepthook = sys.excepthook
# Named first among the values of --criterion, --task, --arch, … that have a flag.
USUAL = ("label_smoothed_cross_entropy", "translation", "transformer_rope", "transformer", "adam", "inverse_sqrt")
MOST_USERS = 6  # the most values that a message lists for a flag that belongs to them
MOST_CHOICES = 12  # the most values of a flag that a message lists
# fairseq's trainer says this, whatever went wrong while a model loaded its weights.
NO_REASON = "please ensure that the architectures match"


def sentence_for(error: BaseException, trace: TracebackType | None) -> str | None:
    """Return one sentence for an *error* with a known cause, and None if a traceback is necessary.

    A cause is known if ``CAUSES`` has it, if the system cannot read or write a file, or if this package, fairseq or a
    user dir raises the error on purpose: as an Exception or ValueError, or with a message that names a flag.
    """
    if isinstance(error, InputError):
        return str(error)
    if type(error).__name__ == "ProcessRaisedException":  # the end of a process of torch.multiprocessing.spawn
        refused = re.search(r"^(?:fairseq_rope\.[\w.]*Error: |ValueError: (?=--))(.*)\s*\Z", str(error), re.MULTILINE)
        return refused[1] if refused else None
    cause = sentence_of_cause(error, trace)
    if cause is not None:
        return cause
    place = traceback.extract_tb(trace)[-1] if trace else None
    user_dirs = [f"{path}{os.sep}" for path in getattr(import_user_module, "memo", ())]
    packages = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(fairseq.__file__), *user_dirs)
    inside = place is not None and place.filename.startswith(packages)
    raised = place is not None and inside and (place.line or "").startswith("raise ")
    if isinstance(error, OSError):
        if error.filename and error.strerror:
            return f"{error.filename}: {error.strerror}"
        if raised and isinstance(error, FileExistsError):
            return f"{error}: exists already"
        known = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
        return str(error) if known or raised else None
    if NO_REASON in str(error) and error.__context__ is not None:
        return sentence_for(error.__context__, error.__context__.__traceback__)
    if type(error) in (Exception, ValueError) and raised and "\n" not in str(error):
        hidden = None if error.__suppress_context__ else error.__context__  # what another except clause has caught
        return str(error) if hidden is None else f"{error} ({type(hidden).__name__}: {' '.join(str(hidden).split())})"
    names_flag = re.search(r"(?<!\S)--[a-z]", str(error))
    if names_flag and (raised or (inside and isinstance(error, AssertionError))):
        return " ".join(str(error.args[0]).split())
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
        sys.unraisablehook = lambda _: None  # data that could not be opened fail again when they are closed


def users_of_flag(flag: str) -> str:
    """Return what must be chosen on the command line so that fairseq knows *flag*; "" if nothing adds it."""
    choices = {flag_of(name): registry["registry"] for name, registry in REGISTRIES.items()}
    for kind, registry in {**choices, "--task": TASK_REGISTRY, "--arch": MODEL_REGISTRY}.items():
        users = []
        for name, cls in registry.items():
            parser = ArgumentParser(add_help=False, conflict_handler="resolve")
            with contextlib.suppress(Exception):  # a class of a user dir, or one that lacks a package
                if hasattr(cls, "add_args"):
                    cls.add_args(parser)
                elif getattr(cls, "__dataclass", None):
                    gen_parser_from_dataclass(parser, getattr(cls, "__dataclass")())
            if flag in parser._option_string_actions:
                users.append(name)
        if users:
            usual = next((name for name in USUAL if name in users), users[0])
            few = len(users) <= MOST_USERS
            return f"{kind} {' or '.join(users)}" if few else f"other values of {kind}, such as {usual}"
    return ""


def refuse_flags(parser: ArgumentParser, message: str) -> NoReturn:
    """Exit with status 2 and one sentence for *message*, an error of argparse, without the list of all flags."""
    unknown = re.match("unrecognized arguments: (--[^ =]+)", message)
    if unknown:
        flag, flags = unknown[1], parser._option_string_actions
        users = users_of_flag(flag)
        of_training = re.search("--(arch|criterion|optimizer|lr-scheduler)", users)
        trains = any(group.title == "Model configuration" for group in parser._action_groups)
        if not trains and (of_training or flag in get_training_parser()._option_string_actions):
            users = "fairseq-train; this program takes the options of the model from the checkpoint"
        near = nearest(flag, flags)
        message = f"{flag}: " + (f"is a flag of {users}" if users else f"unknown flag{near}")
    message = re.sub(
        r"argument (?:\S+/)?(--[\w-]+)(?:/\S+)?: invalid \w+ value: '\?\?\?'", r"\1: must be given", message
    )
    message = re.sub(
        r"argument (?:\S+/)?(--[\w-]+)(?:/\S+)?: invalid <lambda> value: '(.*)'$",  # fairseq's reader of lists
        r"\1 \2: must be a number, or a list like 1,2",
        message,
    )
    message = re.sub(r"argument (--[\w-]+): invalid eval_bool value: '(.*)'$", r"\1 \2: must be True or False", message)
    choice = re.match(r"(argument .*): invalid choice: '(.*)' \(choose from (.*)\)$", message)
    if choice and choice[3].count(",") >= MOST_CHOICES:
        names = re.sub("['\" ]", "", choice[3]).split(",")  # newer versions of Python print no quotes
        message = f"{choice[1]}: {choice[2]} is unknown" + nearest(choice[2], names)
    parser.exit(2, f"{parser.prog}: error: {message}\nsee {parser.prog} --help\n")
