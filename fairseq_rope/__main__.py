"""The command ``fairseq-rope``, also ``python -m fairseq_rope``, which runs the tools.

Each tool is a module of ``fairseq_rope.tools`` and is imported only when it runs. So ``fairseq-rope translate`` needs
neither torch nor fairseq.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from . import __version__
from .errors import ending_in_one_sentence
from .tools import Parser, escape_unencodable_output

TOOLS = {
    "average": "average the weights of several checkpoints",
    "convert-layout": "convert a rotary checkpoint to the other --rope-layout",
    "score": "score translations: sacreBLEU, chrF2++, TER, significance",
    "export": "convert a model to CTranslate2, and check the result",
    "package": "write an exported model as a package for LibreTranslate",
    "translate": "translate text with an exported model",
}


def build_parser() -> Parser:
    """Return the parser for ``fairseq-rope``; the flags after TOOL are parsed by the tool."""
    parser = Parser(
        prog="fairseq-rope",
        description="Tools for fairseq models.",
        epilog="tools:\n" + "".join(f"  {name:15} {what}\n" for name, what in TOOLS.items()) + "\nexample:\n"
        "  fairseq-rope average --inputs checkpoints --num-epoch-checkpoints 5 --output averaged.pt\n\n"
        "The flags of each tool: fairseq-rope TOOL --help",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    user_dir = "print the path that fairseq's --user-dir needs, and exit"
    parser.add_argument("--user-dir", action="store_true", help=user_dir)
    parser.add_argument("tool", nargs="?", choices=TOOLS, metavar="TOOL", help="one of the tools below")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the tool that *argv* names.

    Exit with status 2 if it names none.
    """
    escape_unencodable_output()
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in TOOLS:
        importlib.import_module(f"fairseq_rope.tools.{words[0].replace('-', '_')}").main(words[1:])
        return
    parser = build_parser()
    args = parser.parse_args(words)
    if not args.user_dir:
        parser.error(f"a tool is needed: {', '.join(TOOLS)}")
    with ending_in_one_sentence("fairseq-rope"):
        print(os.path.dirname(os.path.abspath(__file__)))


if __name__ == "__main__":
    main()
