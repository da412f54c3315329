"""What the command lines of all runs have in common."""

import argparse
import difflib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from fairseq_rope.tools import escape_unencodable_output
from recipes.run.yaml_file import SettingsError


class RunParser(argparse.ArgumentParser):
    """A parser whose error message is one sentence, without all flags before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> tuple[argparse.Namespace, str]:
    """The parsed flags, and the words after a lone ``--``, quoted for a shell."""
    escape_unencodable_output()  # all commands that print results parse their flags here
    words = list(words)
    end = words.index("--") if "--" in words else len(words)
    args, unknown = parser.parse_known_args(words[:end])
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        near = difflib.get_close_matches(unknown[0].partition("=")[0], flags, n=1, cutoff=0.75)
        meant = f"did you mean {near[0]}? Otherwise " if near else ""
        parser.error(f"{unknown[0]}: unknown flag; {meant}write flags for fairseq-train after a lone --")
    return args, shlex.join(words[end + 1 :])


def refuse_work(work: Path) -> None:
    """Raise a SettingsError if fairseq cannot read files in the folder *work*, because it splits their paths."""
    for sign, name in ((":", "colon"), (",", "comma")):
        if sign in str(work):
            must = f"must not contain a {name}, because fairseq splits paths at {name}s"
            raise SettingsError(f"--work-dir {work}: {must}")
