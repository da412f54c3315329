"""What the command lines of all runs have in common."""

import argparse
import difflib
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from fairseq_rope.tools import escape_unencodable_output
from recipes.run.yaml_file import SettingsError

LARGEST_SEED = 2**31 - 1  # NumPy's seeds have 32 bits, and fairseq adds the number of the epoch


class RunParser(argparse.ArgumentParser):
    """A parser whose error message is one sentence, without all flags before it. It takes no abbreviated flags.

    With abbreviations, ``--seed 5`` would mean ``--seeds 5`` where there is no ``--seed``.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

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


def refuse_lost_validations(flags: str) -> None:
    """Raise a SettingsError if the *flags* for fairseq-train keep its validations out of the log, which is read."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--log-format", nargs="?", default="json", const="")
    parser.add_argument("--disable-validation", nargs="?", const="")
    read, _ = parser.parse_known_args(shlex.split(flags))
    if read.disable_validation is not None:
        raise SettingsError("--disable-validation among the flags for fairseq-train: the report needs the losses")
    if read.log_format != "json":
        must = "must be json, because the report is made from the log"
        raise SettingsError(f"--log-format {shlex.quote(read.log_format)} among the flags for fairseq-train: {must}")


def refuse_work(work: Path) -> None:
    """Raise a SettingsError if fairseq cannot read files in the folder *work*, because it splits their paths."""
    for sign, name in ((":", "colon"), (",", "comma")):
        if sign in str(work):
            must = f"must not contain a {name}, because fairseq splits paths at {name}s"
            raise SettingsError(f"--work-dir {work}: {must}")
