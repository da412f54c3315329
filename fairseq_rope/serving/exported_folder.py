"""The folder of an exported model: its files and settings, what may be in them, and how they are written."""

import json
import os
import re
from numbers import Integral, Real
from typing import Any

from ..errors import InputError
from ..files import checksum
from ..text.subwords import SUBWORDS

SETTINGS = "fairseq_rope.json"  # in the folder: how to tokenise text, and which checkpoint was exported
INT8 = ("int8", "int8_float32")
QUANTIZATIONS = ("float32", *INT8, "int16", "float16", "bfloat16")
SHORTLIST = "vmap.txt"  # in the folder, if it has a shortlist; the name that CTranslate2 knows
# The files that CTranslate2 and Tokeniser read. Others, such as a licence, may be added to an exported folder.
READ = re.compile(
    "|".join([r"model\.bin|config\.json|\w*vocabulary\.\w+", *map(re.escape, (SHORTLIST, *SUBWORDS.values()))])
)
# The longest line that is translated. Memory grows with the square of its tokens, and the time of BPE with
# the square of the characters of a word.
LONGEST_LINE = 4096  # tokens
CHARACTERS = 8 * LONGEST_LINE
# The least and the largest value of numeric options. Larger ones would exhaust the memory or overflow.
LIMITS = {
    "beam": (1, 1000),
    "nbest": (1, 1000),
    "threads": (1, 1024),
    "jobs": (1, 1024),
    "max_len_b": (0, 10_000),
    "sampling_topk": (0, 1_000_000),
    "seed": (0, 2**32 - 2),
    "lenpen": (-100, 100),
    "segment_tokens": (1, LONGEST_LINE),
}


class ExportError(InputError):
    """The model cannot be exported, a flag cannot be used, or a check failed; the message says which."""


class TranslateError(InputError):
    """A folder or file cannot be used, or a line cannot be translated; the message says which one and why."""


def is_allowed(option: str, value: Any) -> bool:
    """Return whether *value* is a number within the LIMITS of *option*; all but a length penalty are integers."""
    least, most = LIMITS[option]
    kind = Real if option == "lenpen" else Integral
    return isinstance(value, kind) and not isinstance(value, bool) and least <= value <= most  # type: ignore[operator]


def refuse_options(**options: Any) -> None:
    """Raise a TranslateError if one of *options* is in LIMITS, and its value is neither None nor allowed."""
    for name, value in options.items():
        if name in LIMITS and value is not None and not is_allowed(name, value):
            kind = "a number" if name == "lenpen" else "an integer"
            raise TranslateError(f"{name} {value!r}: must be {kind} from {LIMITS[name][0]} to {LIMITS[name][1]}")


def exported_settings(folder: str) -> dict[str, Any]:
    """Return the settings of an exported *folder*; raise a TranslateError if a value is not one that export writes."""
    try:
        with open(os.path.join(folder, SETTINGS), encoding="utf-8") as file:
            settings = json.load(file)
        if not isinstance(settings, dict):
            raise ValueError("it is not a JSON object")
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        folders = "must be a folder that fairseq-rope export wrote"
        raise TranslateError(f"--model {folder}: {folders}, and {SETTINGS} cannot be read there ({reason})") from None
    for name, is_valid in _valid(settings).items():
        if not is_valid:
            value = json.dumps(settings.get(name))[:100]
            raise TranslateError(f"--model {folder}: in {SETTINGS}, {name} is {value}, which export does not write")
    return settings


def _valid(settings: dict[str, Any]) -> dict[str, bool]:
    """Return for each setting whether its value is allowed. The folder may come from someone else."""
    moses, positions, segments, sums = map(settings.get, ("moses", "positions", "segments", "sha256"))
    counts = [positions.get(side, 0) for side in ("source", "target")] if isinstance(positions, dict) else [0]
    return {
        "moses": moses is None or _has_types(moses, source=str, target=str, dash_splits=bool),
        # No other file is opened.
        "subwords": settings.get("subwords") in [None, *({"kind": kind, "file": SUBWORDS[kind]} for kind in SUBWORDS)],
        "positions": all(count is None or (type(count) is int and count >= 1) for count in counts),
        **{name: is_allowed(name, settings.get(name)) for name in ("beam", "lenpen", "max_len_b")},
        "quantization": isinstance(settings.get("quantization"), str),
        "segments": segments is None or is_segments(segments),
        "sha256": isinstance(sums, dict) and all(re.fullmatch(r"\w[\w.-]*", name, re.ASCII) for name in sums),
    }


def _has_types(value: Any, **types: type) -> bool:
    return isinstance(value, dict) and all(type(value.get(name)) is kind for name, kind in types.items())


def is_segments(value: Any) -> bool:
    """Return whether *value* has the number of tokens of segments, and a separator that is one token."""
    return (
        _has_types(value, tokens=int, separator=str)
        and is_allowed("segment_tokens", value["tokens"])
        and value["separator"].split() == [value["separator"]]
    )


def separator_of(settings: dict[str, Any]) -> str:
    """Return the separator of sentences in the segments of a model with *settings*; "" if it has no segments."""
    return (settings.get("segments") or {}).get("separator", "")


def refuse_changed_files(folder: str, checksums: dict[str, str]) -> None:
    """Raise a TranslateError if a file that would be read has changed, or is not in the record *checksums*."""
    for name in sorted(os.listdir(folder)):
        if name not in checksums and READ.fullmatch(name):
            raise TranslateError(f"--model {folder}: {name} was not exported: {SETTINGS} does not name it; remove it")
    for name, expected in checksums.items():
        try:
            same = checksum(os.path.join(folder, name)) == expected
        except OSError as error:
            raise TranslateError(f"--model {folder}: {name} cannot be read ({error.strerror})") from None
        if not same:
            changed = f"{name} is not the file that was exported: its SHA-256 differs from the one in {SETTINGS}"
            raise TranslateError(f"--model {folder}: {changed}; copy or export the model again")


def source_vocabulary(folder: str) -> list[str]:
    """Return the words of the source that the model in *folder* knows."""
    paths = (os.path.join(folder, f"{side}_vocabulary.json") for side in ("shared", "source"))
    with open(next(filter(os.path.exists, paths)), encoding="utf-8") as file:
        words: list[str] = json.load(file)
    return words


README = """# {source} to {target}

A model for CTranslate2, converted by fairseq-rope {version} from {checkpoint}.

    pip install '/path/to/fairseq-rope[ctranslate2]'    # the path of a clone of its repository
    fairseq-rope translate --model . < raw.{source} > translated.{target}

or in Python:

    from fairseq_rope.serving.translator import Translator
    translator = Translator(".")
    print(translator.translate("A small dog runs."))

The search is the same as in

    fairseq-interactive --beam {beam} --lenpen {lenpen} --max-len-a 1 --max-len-b {max_len_b}

`fairseq_rope.json` has the settings, and checksums of the other files, which are compared when the model is loaded.
"""


def write_settings(folder: str, settings: dict[str, Any]) -> None:
    """Write *settings*, the checksums of the files in *folder*, and a README into *folder*."""
    sums = {name: checksum(os.path.join(folder, name)) for name in sorted(os.listdir(folder))}
    with open(os.path.join(folder, SETTINGS), "w", encoding="utf-8") as out:
        json.dump({**settings, "sha256": sums}, out, indent=1, ensure_ascii=False)
        out.write("\n")
    with open(os.path.join(folder, "README.md"), "w", encoding="utf-8") as out:
        out.write(README.format(**settings))
