"""The folder of an exported model: its files and settings, what may be in them, and how they are written."""

import argparse
import json
import os
import re
import shutil
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from ..errors import InputError, flag_of
from ..files import checksum
from ..text.subwords import SUBWORDS

if TYPE_CHECKING:
    from .shortlist import Shortlist

SETTINGS = "fairseq_rope.json"  # in the folder: how to tokenise text, and which checkpoint was exported
INT8 = ("int8", "int8_float32")
QUANTIZATIONS = ("float32", *INT8, "int16", "float16", "bfloat16")
SHORTLIST = "vmap.txt"  # in the folder, if it has a shortlist; the name that CTranslate2 knows
# The files that CTranslate2 and Tokeniser read. Others, such as a licence, may be added to an exported folder.
READ = re.compile(
    "|".join([r"model\.bin|config\.json|\w*vocabulary\.\w+", *map(re.escape, (SHORTLIST, *SUBWORDS.values()))])
)
# The longest line that is translated. Memory grows with the square of its tokens, and the time of BPE with
# the square of the characters of a word: docs/serving.md has the measurements.
LONGEST_LINE = 4096  # tokens
CHARACTERS = 8 * LONGEST_LINE


class ExportError(InputError):
    """A model cannot be exported, a flag cannot be used, or a check failed; the message says which."""


class TranslateError(InputError):
    """A folder or file cannot be used, or a line cannot be translated; the message says which one and why."""


# The least and the largest value of numeric options. Larger ones would exhaust the memory or overflow.
RANGES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("beam", "nbest", "n"), (1, 1000)),
    **dict.fromkeys(("threads", "jobs"), (1, 1024)),
    "max_len_b": (0, 10_000),
    "sampling_topk": (0, 1_000_000),
    "seed": (0, 2**32 - 2),
    "lenpen": (-100, 100),
    "segment_tokens": (1, LONGEST_LINE),
}


def problem_of(name: str, value: Any) -> str:
    """Return what *value* of the numeric option *name* must be; "" if it is allowed."""
    least, largest = RANGES[name]
    kind, in_words = (Real, "a number") if name == "lenpen" else (Integral, "an integer")
    if isinstance(value, kind) and not isinstance(value, bool) and least <= value <= largest:  # type: ignore[operator]
        return ""
    return f"must be {in_words} from {least} to {largest}"


def is_allowed(name: str, value: Any) -> bool:
    """Return whether *value* is allowed for the setting *name* of a folder, which may come from someone else."""
    if name in RANGES:
        return not problem_of(name, value)
    if name == "quantization":
        return isinstance(value, str)
    if name == "subwords":  # no other file is opened
        return value is None or value in [{"kind": kind, "file": file} for kind, file in SUBWORDS.items()]
    if value is None:
        return name in ("moses", "segments")
    if not isinstance(value, dict):
        return False
    if name == "moses":
        return (
            all(type(value.get(key)) is str for key in ("source", "target")) and type(value.get("dash_splits")) is bool
        )
    if name == "positions":
        counts = [value.get(side, 0) for side in ("source", "target")]
        has_counts = all(count is None or (type(count) is int and count > 0) for count in counts)
        return has_counts and type(value.get("counts_padding", False)) is bool
    if name == "segments":
        separator = value.get("separator")
        has_separator = isinstance(separator, str) and separator.split() == [separator]
        return has_separator and not problem_of("segment_tokens", value.get("tokens"))
    return all(re.fullmatch(r"\w[\w.-]*", file, re.ASCII) for file in value)  # sha256


# What fairseq_rope.json must have: the checksums of the other files, and the settings of text and search
NEEDED = ("moses", "subwords", "positions", "beam", "lenpen", "max_len_b", "quantization", "segments", "sha256")


def exported_settings(folder: str) -> dict[str, Any]:
    """Return the settings of an exported *folder*; raise a TranslateError if a value is not allowed."""
    try:
        with open(os.path.join(folder, SETTINGS), encoding="utf-8") as file:
            settings = json.load(file)
        if not isinstance(settings, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        folders = "must be a folder that fairseq-rope export wrote"
        raise TranslateError(f"--model {folder}: {folders}, and {SETTINGS} cannot be read there ({reason})") from None
    for name in NEEDED:
        if not is_allowed(name, settings.get(name)):
            shown = json.dumps(settings.get(name))[:100]
            raise TranslateError(f"--model {folder}: in {SETTINGS}, {name} is {shown}, which fairseq-rope never writes")
    return settings


def separator_of(settings: dict[str, Any]) -> str:
    """Return the separator of sentences in the segments of a model with *settings*; "" if it has no segments."""
    return (settings.get("segments") or {}).get("separator", "")


def refuse_changed_files(folder: str, checksums: dict[str, str]) -> None:
    """Raise a TranslateError if a file that would be read has changed, or is not in the record *checksums*."""
    for name in sorted(os.listdir(folder)):
        if name not in checksums and READ.fullmatch(name):
            surplus = f"{name} is not one of the files that were exported, which {SETTINGS} names"
            raise TranslateError(f"--model {folder}: {surplus}; remove it, or export the model again")
    for name, expected in checksums.items():
        try:
            same = checksum(os.path.join(folder, name)) == expected
        except OSError as error:
            raise TranslateError(f"--model {folder}: {name} cannot be read ({error.strerror})") from None
        if not same:
            changed = f"{name} is not the file that was exported: its SHA-256 differs from the one in {SETTINGS}"
            raise TranslateError(f"--model {folder}: {changed}; copy or export the model again")
    if SHORTLIST in checksums and not os.path.getsize(os.path.join(folder, SHORTLIST)):
        raise TranslateError(f"--model {folder}: {SHORTLIST} is empty; export the model again")  # CTranslate2 crashes


def vocabulary(folder: str, side: str) -> tuple[str, list[str]]:
    """Return the name of the file with the words of a side, "source" or "target", in *folder*, and the words."""
    names = ("shared_vocabulary.json", f"{side}_vocabulary.json")
    name = next(name for name in names if os.path.exists(os.path.join(folder, name)))
    with open(os.path.join(folder, name), encoding="utf-8") as file:
        words: list[str] = json.load(file)
    return name, words


def refuse_out_of_range(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with the usage and an error if a number in *args* is out of its range."""
    for name in RANGES:
        value = getattr(args, name, None)
        if value is not None and (problem := problem_of(name, value)):
            parser.error(f"{flag_of(name)} {value}: {problem}")


README = """# {source} to {target}

A model for CTranslate2, converted by fairseq-rope {version} from {checkpoint}.

    pip install '/path/to/fairseq-rope[ctranslate2]'    # the path of a clone of its repository
    fairseq-rope translate --model . < raw.{source} > translated.{target}

or in Python:

    from fairseq_rope.serving.translator import Translator
    translator = Translator(".")
    print(translator.translate("A small dog runs."))

A list of sentences gives a list; `translator.translate_lines(lines)` yields the translations one by one.

The search is the same as in

    fairseq-interactive --beam {beam} --lenpen {lenpen} --max-len-a 1 --max-len-b {max_len_b}

`--beam`, `--lenpen` and `--max-len-b` of `translate` change it. CTranslate2 calls the first two beam_size and
length_penalty. `{settings}` holds the settings for text and search, the name of the checkpoint, and checksums
of the other files, which are compared when the model is loaded.
"""

DOCUMENTS = """
The model was trained on segments of documents. With `--documents`, `translate` reads text with a blank line between
documents, and translates consecutive sentences together, in segments of up to {tokens} tokens.
"""

OF_SHORTLIST = f"""
`{SHORTLIST}` is a shortlist: only the target subwords that it has for the words of a batch are scored.
`--no-shortlist` scores all of them.
"""


def write_folder(
    folder: str, spec: Any, settings: dict[str, Any], file: str | None, built: "Shortlist | None" = None
) -> None:
    """Write the model, vocabularies, subword model, shortlist, settings and README into *folder*."""
    os.makedirs(folder, exist_ok=True)
    spec.save(folder)
    if built is not None:
        built.write(os.path.join(folder, SHORTLIST))
    if file is not None:
        shutil.copyfile(file, os.path.join(folder, settings["subwords"]["file"]))
    sums = {name: checksum(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}
    with open(os.path.join(folder, SETTINGS), "w", encoding="utf-8") as out:
        json.dump({**settings, "sha256": sums}, out, indent=1, ensure_ascii=False)
        out.write("\n")
    with open(os.path.join(folder, "README.md"), "w", encoding="utf-8") as out:
        out.write(README.format(**{**settings, "settings": SETTINGS}))
        if settings.get("segments"):
            out.write(DOCUMENTS.format(**settings["segments"]))
        if built is not None:
            out.write(OF_SHORTLIST)
