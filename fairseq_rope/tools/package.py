"""The command ``fairseq-rope package``: write an exported model as a package for Argos Translate and LibreTranslate."""

import argparse
from collections.abc import Sequence

from ..errors import ending_in_one_sentence
from ..serving.package import create
from . import REQUIRED, SWITCH, add_flags, command_parser


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    description = (
        "Write an exported model as a package for Argos Translate and LibreTranslate.\n"
        "The other direction is another model, and another package."
    )
    parser = command_parser("package", description, "--model served --data data-bin --install packages")
    folder = {"metavar": "DIR"}
    pair = {"nargs": 2, "metavar": ("FROM", "TO")}
    unknown = {"metavar": "TEXT", "default": "not stated"}
    rows = [
        ("--model", {**REQUIRED, **folder}, "a folder that fairseq-rope export wrote"),
        ("--data", {**REQUIRED, **folder}, "the data folder, whose validation set is used to check the package"),
        ("--output", folder, "the folder to write the package into; default: the folder that contains --model"),
        ("--install", folder, "also unpack the package into DIR, for these programs' ARGOS_PACKAGES_DIR"),
        ("--languages", pair, "codes of the languages, such as en de; default: those of the model"),
        ("--names", pair, "names of the languages for the page; default: the English names of common languages"),
        ("--package-version", {"metavar": "N.N", "default": "1.0"}, "default: %(default)s"),
        (
            *("--splitter", {"metavar": "PATH"}),
            "a sentence splitter to include: a MiniSBD model (.onnx), or a folder that spaCy wrote; default: none, and "
            "the programs download one",
        ),
        ("--licence", unknown, "the licence of the model, for the package's README"),
        ("--trained-on", unknown, "the training data, for the package's README"),
        ("--replace", SWITCH, "replace an existing package"),
        ("--force", SWITCH, "write the package although the check failed, or without a validation set"),
    ]
    add_flags(parser, rows)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; after an error, exit with status 1 and print one sentence to standard error."""
    args = build_parser().parse_args(argv)
    with ending_in_one_sentence("fairseq-rope package"):
        path, report = create(args)
        print(f"{report}\nwrote {path}")
