"""The tools, one module per command, and what their command lines have in common."""

import argparse
import io
import os
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from .. import __version__
from ..errors import InputError, nearest

# Keyword arguments of argparse that many flags have.
FILE: dict[str, Any] = {"metavar": "FILE"}
INTEGER: dict[str, Any] = {"type": int, "metavar": "N"}
NUMBER: dict[str, Any] = {"type": float, "metavar": "X"}
REQUIRED: dict[str, Any] = {"required": True}
SWITCH: dict[str, Any] = {"action": "store_true"}
# The row of add_flags for a tool that reads models.
USER_DIR = ("--user-dir", {"metavar": "DIR"}, "your own user dir, if the model needs its encodings or architectures")


class Parser(argparse.ArgumentParser):
    """Ends after an error with one sentence and no list of flags. For an unknown flag, it names the nearest one."""

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Return the parsed flags and the other words; an unknown flag is refused before a missing one is."""
        words = list(sys.argv[1:] if args is None else args)
        for word in words[: words.index("--") if "--" in words else None]:
            self._refuse_unknown(word)
        return super().parse_known_args(words, namespace)

    def _refuse_unknown(self, word: str) -> None:
        flag, flags = word.partition("=")[0], list(self._option_string_actions)
        if not flag.startswith("--") or " " in word or any(known.startswith(flag) for known in flags):
            return
        self.error(f"{flag}: unknown flag" + nearest(flag, flags))

    def error(self, message: str) -> NoReturn:
        """Exit with status 2, and print *message* and where to find the flags to standard error."""
        self.exit(2, f"{self.prog}: error: {message}\nsee {self.prog} --help\n")


def command_parser(tool: str, description: str, example: str) -> Parser:
    """Return the parser of ``fairseq-rope TOOL``, with ``--version``; *example* is the rest of a command line."""
    parser = Parser(
        prog=f"fairseq-rope {tool}",
        description=description,
        epilog=f"example:\n  fairseq-rope {tool} {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def add_flags(parser: Any, rows: Iterable[tuple[str, dict[str, Any], str]]) -> None:
    """Add flags to *parser*, which may be a group; each row has a flag, its other arguments, and its help."""
    for flag, arguments, what in rows:
        parser.add_argument(flag, help=what, **arguments)


def load_user_dir(path: str | None) -> None:
    """Import the folder *path*, if one is given, as fairseq imports its ``--user-dir``."""
    if path is None:
        return
    if not os.path.isdir(path):
        raise InputError(f"--user-dir {path}: must be a folder that exists")
    from fairseq.utils import import_user_module

    from .. import plugin  # noqa: F401  a user dir may register models of this package

    import_user_module(argparse.Namespace(user_dir=path))


def escape_unencodable_output() -> None:
    """Let standard output escape the characters that its encoding lacks, as standard error does.

    Otherwise, where the output is not UTF-8, a dash or a file's name ends a program before it prints its result.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
