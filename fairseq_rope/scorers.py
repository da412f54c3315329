"""Scores of sentences by programs that the user names: ``--scorer NAME='COMMAND'``.

The command is quoted as for a shell, but no shell runs it: it is split into words, and the placeholders in each word
are replaced by the paths of texts with one sentence a line. The program prints one number for each sentence.
"""

import contextlib
import math
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

from .errors import InputError
from .lines import split

PLACEHOLDERS = ("{source}", "{hypothesis}", "{reference}")
BUILT_IN = ("sacreBLEU", "BLEU", "chrF2", "chrF2++", "TER")  # no program can have these names
COMET = re.compile(r"^.*\tSegment \d+\tscore: (\S+)$", re.MULTILINE)  # what comet-score prints for a sentence


@dataclass(frozen=True)
class Scorer:
    """A program that scores sentences."""

    name: str
    command: str  # quoted as for a shell, with PLACEHOLDERS
    lower_is_better: bool = False

    def scores(
        self, source: Sequence[str], hypothesis: Sequence[str], references: Sequence[Sequence[str]]
    ) -> list[float]:
        """Return the score of each sentence of *hypothesis*, and pass on what the program writes to standard error.

        An InputError is raised if the program fails, or does not print one finite number for each sentence.
        """
        with tempfile.TemporaryDirectory() as folder:
            paths = []
            for number, lines in enumerate((source, hypothesis, *references)):
                paths.append(os.path.join(folder, str(number)))
                with open(paths[-1], "w", encoding="utf-8", newline="\n") as file:
                    # Many programs also split lines at CR, NEL, U+2028 and similar characters.
                    file.writelines(" ".join(line.splitlines()) + "\n" for line in lines)
            # A word with {reference} is repeated for each reference.
            words = [
                word.replace("{source}", paths[0]).replace("{hypothesis}", paths[1]).replace("{reference}", reference)
                for word in shlex.split(self.command)
                for reference in (paths[2:] if "{reference}" in word else [""])
            ]
            run = subprocess.run(
                words, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", errors="replace", check=False
            )
        sys.stderr.write(run.stderr)
        where = f"--scorer {self.name}: {words[0]}"
        if run.returncode != 0:
            last = (run.stderr.strip().splitlines() or ["it wrote nothing to standard error"])[-1].strip()
            raise InputError(f"{where} ended with status {run.returncode}: {last}")
        printed = COMET.findall(run.stdout) or split(run.stdout)
        if len(printed) != len(hypothesis):
            must = f"must print one number a line for each of the {len(hypothesis)} sentences"
            raise InputError(f"{where} printed {len(printed)} lines, and {must}")
        values = []
        for number, text in enumerate(printed, 1):
            with contextlib.suppress(ValueError):
                values.append(float(text))
            if len(values) != number or not math.isfinite(values[-1]):
                raise InputError(f"{where} printed {text!r} for sentence {number}, which must be a finite number")
        return values


def read_scorers(values: Sequence[str], lower_is_better: Sequence[str]) -> list[Scorer]:
    """Return the programs that the values of ``--scorer`` and ``--lower-is-better`` describe.

    An InputError is raised if a value cannot be used, or a program does not exist.
    """
    scorers: dict[str, Scorer] = {}
    for value in values:
        name, _, command = value.partition("=")
        where = f"--scorer {' '.join(value.split())}"
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise InputError(f"{where}: the command cannot be read: {str(error).lower()}") from None
        unknown = [text for text in re.findall(r"\{\w+\}", command) if text not in PLACEHOLDERS]
        if not words:
            raise InputError(f"{where}: must have the form NAME='COMMAND'")
        for allowed, refusal in (
            (re.fullmatch(r"\w[\w.+-]*", name), f"the name {name} must consist of letters, digits, _, ., + and -"),
            (name.casefold() not in map(str.casefold, BUILT_IN), f"{name} is the name of a metric that is built in"),
            (name.casefold() not in map(str.casefold, scorers), f"the name {name} is given twice"),
            (not unknown, f"{''.join(unknown[:1])} must be one of {', '.join(PLACEHOLDERS)}"),
            ("{hypothesis}" in command, "the command must contain {hypothesis}"),
            (shutil.which(words[0]), f"the program {words[0]} does not exist or cannot be executed"),
        ):
            if not allowed:
                raise InputError(f"{where}: {refusal}")
        scorers[name] = Scorer(name, command, name in lower_is_better)
    for name in lower_is_better:
        if name not in scorers:
            raise InputError(f"--lower-is-better {name}: must be a name of --scorer ({', '.join(scorers) or 'none'})")
    return list(scorers.values())
