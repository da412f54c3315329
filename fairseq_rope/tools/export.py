"""The command ``fairseq-rope export``: convert a checkpoint to CTranslate2, and check the result."""

import argparse
import os
from collections.abc import Sequence

from ..errors import ending_in_one_sentence
from ..serving import shortlist
from ..serving.ctranslate2_model import POSITIONS
from ..serving.export import MAX_LEN_B, SUBWORD_FLAGS, convert, overrides_of, refuse_missing_files, refuse_other_folders
from ..serving.exported_folder import QUANTIZATIONS, refuse_out_of_range
from ..serving.replaced_folder import replacing
from ..text.segments import FILE as SEGMENTS
from ..text.subwords import SUBWORDS
from . import FILE, INTEGER, NUMBER, REQUIRED, SWITCH, USER_DIR, add_flags, command_parser, load_user_dir

LANGUAGES = ("--source-lang", "--target-lang")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    description = "Convert a checkpoint to CTranslate2, and check the result. The position encodings\n"
    description += f"sinusoidal, shape, alibi, t5 and kerple are exported for sentences of up to {POSITIONS} tokens."
    example = "--path averaged.pt --data data-bin --output served --quantization int8"
    parser = command_parser("export", description, example)
    default = "default: %(default)s"
    kinds = {"choices": QUANTIZATIONS, "default": "float32"}
    tokenizer = "how plain text is tokenised before the subwords; default: moses, but none with sentencepiece"
    tokens = (
        "the number of tokens in the longest segments of documents that the model was trained on, for translate "
        f"--documents; default: the one in --data's {SEGMENTS}, if it has this file"
    )
    overrides = "a Python dictionary with other values of the checkpoint's options, as for fairseq-generate"
    languages = "for a checkpoint without languages, if --data has only the dictionaries; both must be given"
    force = (
        "as --replace, and write the model even if too few sentences of the validation set are tokenised as in the "
        "data or translated as by the checkpoint, or if a shortlist costs BLEU or cannot be checked"
    )
    rows = [
        ("--path", {**REQUIRED, **FILE}, "a checkpoint of transformer_rope or transformer"),
        ("--data", {**REQUIRED, "metavar": "DIR"}, "the folder of its dictionaries (data-bin)"),
        *((flag, {"metavar": "LANG"}, languages) for flag in LANGUAGES),
        ("--output", {**REQUIRED, "metavar": "DIR"}, "the folder to write"),
        ("--model-overrides", {"default": "{}", "metavar": "DICT"}, overrides),
        ("--quantization", kinds, f"the type of the weights; {default}"),
        ("--tokenizer", {"choices": ("moses", "none")}, tokenizer),
        ("--segment-tokens", INTEGER, tokens),
        USER_DIR,
        ("--replace", SWITCH, "replace an exported model"),
        ("--force", SWITCH, force),
    ]
    add_flags(parser, rows)
    rows = [
        (flag, FILE, f"the {kind} model; default: {SUBWORDS[kind]} in --data") for flag, kind in SUBWORD_FLAGS.items()
    ]
    add_flags(parser.add_mutually_exclusive_group(), rows)
    corpus = "build a shortlist from two files of parallel text, or without files from the training set in --data"
    rows = [("--shortlist", {"nargs": "*", "metavar": "FILE"}, corpus)]
    add_flags(parser.add_argument_group("a shortlist, with which large vocabularies are searched faster"), rows)
    longer = f"how many tokens longer than its source an output may be; {default}"
    rows = [
        ("--beam", {**INTEGER, "default": 4}, f"beam size; {default}"),
        ("--lenpen", {**NUMBER, "default": 0.6}, f"length penalty; {default}"),
        ("--max-len-b", {**INTEGER, "default": MAX_LEN_B}, longer),
    ]
    add_flags(parser.add_argument_group("the default search of fairseq-rope translate"), rows)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command; after an error, exit with status 1 and print one sentence to standard error."""
    parser = build_parser()
    args = parser.parse_args(argv)
    refuse_out_of_range(parser, args)
    if len(args.shortlist or []) not in (0, 2):
        parser.error(f"--shortlist {' '.join(args.shortlist)}: takes two files, or none")
    if (args.source_lang is None) != (args.target_lang is None):
        parser.error(f"{' and '.join(LANGUAGES)}: both must be given, or none")
    with ending_in_one_sentence("fairseq-rope export"):
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
