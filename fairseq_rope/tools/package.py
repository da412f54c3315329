"""The command ``fairseq-rope package``: write an exported model as a package for Argos Translate and LibreTranslate."""

from collections.abc import Sequence

from ..errors import ending_in_one_sentence
from ..serving.package import create
from . import Parser, command_parser


def build_parser() -> Parser:
    """Return the parser of the command line."""
    example = "--model served --data data-bin --output packages"
    parser = command_parser("package", "Write a package for Argos Translate and LibreTranslate.", example)
    folders = {
        "--model": "a folder that fairseq-rope export wrote",
        "--data": "the data folder, whose validation set is used to check the package",
        "--output": "the folder of packages, for these programs' ARGOS_PACKAGES_DIR",
    }
    for flag, what in folders.items():
        parser.add_argument(flag, required=True, metavar="DIR", help=what)
    replace = "replace existing packages of these languages, and the index of the folder"
    parser.add_argument("--replace", action="store_true", help=replace)
    parser.add_argument("--force", action="store_true", help="write the package without a check")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; after an error, exit with status 1 and print one sentence to standard error."""
    args = build_parser().parse_args(argv)
    with ending_in_one_sentence("fairseq-rope package"):
        print(create(args.model, args.data, args.output, args.replace, args.force))
