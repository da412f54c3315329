"""The tools, one module per command, and what their command lines have in common."""

import argparse
import io
import os
import sys
from typing import NoReturn

from .. import __version__
from ..errors import InputError


class Parser(argparse.ArgumentParser):
    """Ends after an error with one sentence and no list of flags."""

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


def add_user_dir(parser: argparse.ArgumentParser) -> None:
    """Add the flag of a tool that reads models."""
    own = "your own user dir, if the model needs its encodings or architectures"
    parser.add_argument("--user-dir", metavar="DIR", help=own)


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
