"""The command ``fairseq-rope export``: convert a checkpoint to CTranslate2, and check the result."""

import argparse
import os
from collections.abc import Sequence

from ..errors import ending_in_one_sentence
from ..serving import shortlist
from ..serving.ctranslate2_model import POSITIONS
from ..serving.export import MAX_LEN_B, convert, overrides_of, refuse_missing_files, refuse_other_folders
from ..serving.exported_folder import QUANTIZATIONS, refuse_options
from ..serving.replaced_folder import replacing
from . import add_user_dir, command_parser, load_user_dir


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    description = "Convert a checkpoint to CTranslate2, and check the result. The position encodings\n"
    description += f"sinusoidal, shape, alibi, t5 and kerple are exported for sentences of up to {POSITIONS} tokens."
    example = "--path averaged.pt --data data-bin --output served --quantization int8"
    parser = command_parser("export", description, example)
    add = parser.add_argument
    add("--path", required=True, metavar="FILE", help="a checkpoint of transformer_rope or transformer")
    add("--data", required=True, metavar="DIR", help="the folder of its dictionaries and subword model (data-bin)")
    languages = "for a checkpoint without languages, if --data has only the dictionaries; both must be given"
    add("--source-lang", metavar="LANG", help=languages)
    add("--target-lang", metavar="LANG", help=languages)
    add("--output", required=True, metavar="DIR", help="the folder to write")
    overrides = "a Python dictionary with other values of the checkpoint's options, as for fairseq-generate"
    add("--model-overrides", default="{}", metavar="DICT", help=overrides)
    weights = "the type of the weights; default: %(default)s"
    add("--quantization", choices=QUANTIZATIONS, default="float32", help=weights)
    tokenizer = "how plain text is tokenised before the subwords; default: moses, but none with sentencepiece"
    add("--tokenizer", choices=("moses", "none"), help=tokenizer)
    tokens = (
        "the number of tokens in the longest segments of documents that the model was trained on, for translate "
        "--documents; default: the one in --data's segments.json, if it has this file"
    )
    add("--segment-tokens", type=int, metavar="N", help=tokens)
    corpus = (
        "build a shortlist, with which large vocabularies are searched faster, from two files of parallel text, or "
        "without files from the training set in --data"
    )
    add("--shortlist", nargs="*", metavar="FILE", help=corpus)
    add_user_dir(parser)
    add("--replace", action="store_true", help="replace an exported model")
    force = (
        "as --replace, and write the model even if too few sentences of the validation set are tokenised as in the "
        "data or translated as by the checkpoint, or if a shortlist costs BLEU or cannot be checked"
    )
    add("--force", action="store_true", help=force)
    add = parser.add_argument_group("the default search of fairseq-rope translate").add_argument
    add("--beam", type=int, default=4, metavar="N", help="beam size; default: %(default)s")
    add("--lenpen", type=float, default=0.6, metavar="X", help="length penalty; default: %(default)s")
    longer = "how many tokens longer than its source an output may be; default: %(default)s"
    add("--max-len-b", type=int, default=MAX_LEN_B, metavar="N", help=longer)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; after an error, exit with status 1 and print one sentence to standard error."""
    parser = build_parser()
    args = parser.parse_args(argv)
    if len(args.shortlist or []) not in (0, 2):
        parser.error(f"--shortlist {' '.join(args.shortlist)}: takes two files, or none")
    if (args.source_lang is None) != (args.target_lang is None):
        parser.error("--source-lang and --target-lang: both must be given, or none")
    with ending_in_one_sentence("fairseq-rope export"):
        refuse_options(**vars(args))
        refuse_missing_files(args)
        overrides_of(args)
        if args.shortlist is not None:
            shortlist.find_aligner()
        output = os.path.realpath(args.output)
        with replacing(output) as folder:
            refuse_other_folders(output, args)
            load_user_dir(args.user_dir)
            report = convert(args, folder)
        print(f"{report}\nwrote {args.output}")
