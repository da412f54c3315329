"""The command ``fairseq-rope package``: write an exported model as a package for Argos Translate and LibreTranslate."""

from collections.abc import Sequence

from ..errors import ending_in_one_sentence
from ..serving.package import create
from . import REQUIRED, SWITCH, Parser, add_flags, command_parser


def build_parser() -> Parser:
    """Return the parser of the command line."""
    example = "--model served --data data-bin --output packages"
    parser = command_parser("package", "Write a package for Argos Translate and LibreTranslate.", example)
    folder = {**REQUIRED, "metavar": "DIR"}
    rows = [
        ("--model", folder, "a folder that fairseq-rope export wrote"),
        ("--data", folder, "the data folder, whose validation set is used to check the package"),
        ("--output", folder, "the folder of packages, for these programs' ARGOS_PACKAGES_DIR"),
        ("--replace", SWITCH, "replace existing packages of these languages, and the index of the folder"),
        ("--force", SWITCH, "write the package without a check"),
    ]
    add_flags(parser, rows)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; after an error, exit with status 1 and print one sentence to standard error."""
    args = build_parser().parse_args(argv)
    with ending_in_one_sentence("fairseq-rope package"):
        print(create(args.model, args.data, args.output, args.replace, args.force))
