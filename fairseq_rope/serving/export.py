"""Convert a checkpoint to CTranslate2, to translate without fairseq.

Converts ``transformer_rope``, which CTranslate2's own converters do not support, and fairseq's
``transformer``. The exported model gets its name only after the checks in :mod:`.export_checks`.
"""

import argparse
import ast
import json
import os
import re
import shutil
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import naming_what_fairseq_reads, warn
from ..files import naming
from ..lines import lines_of
from ..text.segments import FILE as SEGMENTS
from ..text.segments import SEPARATOR
from ..text.subwords import SUBWORDS
from ..text.tokens import Pair, Tokeniser
from . import shortlist
from .ctranslate2_model import position_limits, quantize, to_spec
from .ctranslate2_support import refuse_unsupported
from .export_checks import (
    NEEDED,
    Reference,
    check_model,
    check_shortlist,
    check_text,
    shortlist_samples,
    words_of_pairs,
)
from .exported_folder import SETTINGS, SHORTLIST, ExportError, is_segments, separator_of, write_settings

if TYPE_CHECKING:
    from fairseq.data import Dictionary

MAX_LEN_B = 50  # an output may have this many tokens more than its source, as in the recipes
SPACE_OF_GPT2 = "\u0120"  # begins a word in its byte-level subwords; fairseq's own files have their numbers


def subwords_of(data: str, tokenizer: str | None, *dictionaries: "Dictionary") -> dict[str, str] | None:
    """Return the setting ``subwords``: the kind and the file of the subword model in the folder *data*, or None.

    *dictionaries* are those of the source and the target. Raises an ExportError if the file is missing although they
    have subwords, or, without ``--tokenizer none``, if the source has subwords of GPT-2.
    """
    for kind, name in SUBWORDS.items():
        if os.path.isfile(os.path.join(data, name)):
            return {"kind": kind, "file": name}
    for dictionary in dictionaries:
        words = dictionary.symbols[dictionary.nspecial :]
        if any(word.endswith("@@") or word.startswith("\u2581") for word in words):
            lacking = f"a dictionary has subwords, and the folder has neither {' nor '.join(SUBWORDS.values())}"
            raise ExportError(f"--data {data}: {lacking}; copy the file into it")
    words = dictionaries[0].symbols[dictionaries[0].nspecial :]
    of_gpt2 = [word for word in words if word.startswith(SPACE_OF_GPT2) or word.isdecimal()]
    if tokenizer != "none" and len(of_gpt2) > len(words) / 4:
        like = f"words of the source are like the subwords of GPT-2 ({', '.join(of_gpt2[:3])})"
        other = "and text cannot be divided into these; with --tokenizer none, the input must have them"
        raise ExportError(f"--data {data}: {like}, {other}")
    return None


def has_only_small_letters(dictionary: "Dictionary") -> bool:
    """Return whether the words of *dictionary* have letters that could be capital ones, and none that are."""
    words = " ".join(word for word in dictionary.symbols if not re.fullmatch(r"<.*>|madeupword\d+|&.*;", word))
    return words == words.lower() != words.title()  # Georgian has capital letters, but begins no word with one


def tokenisation(
    tokenizer: str | None, kind: str | None, dictionary: "Dictionary", source: str, target: str
) -> dict[str, Any] | None:
    """Return the setting ``moses``: how Moses tokenises text before the subwords of *kind*; None if it does not."""
    if tokenizer == "none" or (tokenizer is None and kind == "sentencepiece"):
        return None
    return {"source": source, "target": target, "dash_splits": "@-@" in dictionary}  # Moses' -a makes @-@ of hyphens


def segment_settings(data: str, tokens: int | None, task: Any) -> dict[str, Any] | None:
    """Return the setting ``segments`` of the folder *data*, with *tokens* of ``--segment-tokens`` if they are given."""
    path = os.path.join(data, SEGMENTS)
    segments: Any = {"separator": SEPARATOR}
    if os.path.exists(path):
        try:
            with open(path, encoding="utf-8") as file:
                segments = json.load(file)
        except (ValueError, RecursionError) as error:
            raise ExportError(f"{path}: cannot be read ({error})") from None
    elif tokens is None:
        return None
    if isinstance(segments, dict) and tokens is not None:
        segments = {**segments, "tokens": tokens}
    if not is_segments(segments):
        raise ExportError(f"{path}: must be an object with the number of tokens and the separator, one token")
    separator = segments["separator"]
    if segments["tokens"] == 1:  # trained on single sentences
        return None
    for dictionary in (task.source_dictionary, task.target_dictionary):
        if dictionary.index(separator) < dictionary.nspecial:  # a word that is not there has the index of <unk>
            raise ExportError(f"--data {data}: the separator of segments, {separator}, is not in both dictionaries")
    return {"tokens": segments["tokens"], "separator": separator}


def build_shortlist(args: argparse.Namespace, folder: str, settings: dict[str, Any], task: Any) -> shortlist.Shortlist:
    """Return the shortlist of the corpus that ``--shortlist`` names, or of the training set in ``--data``."""
    if args.shortlist:
        moses = settings["moses"] and {**settings["moses"], "source": settings["target"]}
        tokens = [Tokeniser(folder, {**settings, "moses": side}).tokens for side in (settings["moses"], moses)]
        lines = zip(*(lines_of(path) for path in args.shortlist))

        def known(line: str, side: int) -> list[str]:  # the search, too, replaces words that are not in the dictionary
            dictionary = (task.source_dictionary, task.target_dictionary)[side]
            return [token if token in dictionary else dictionary.unk_word for token in tokens[side](line)]

        pairs: Iterator[Pair] = ((known(source, 0), known(target, 1)) for source, target in lines)
    else:
        training = f"--shortlist: --data {args.data}: its training set"
        try:
            task.load_dataset("train")
            data = task.dataset("train")
        except FileNotFoundError:
            raise ExportError(f"{training} is missing; name two files of parallel text") from None
        except Exception as error:  # as in validation_pairs
            raise ExportError(f"{training} cannot be read ({error})") from error
        if data.tgt is None:
            raise ExportError(f"{training} has no target side; name two files of parallel text")
        numbers = ((data.src[n].tolist()[:-1], data.tgt[n].tolist()[:-1]) for n in range(len(data)))
        pairs = words_of_pairs(task, numbers)
    return shortlist.build(pairs, separator=separator_of(settings))


def overrides_of(args: argparse.Namespace) -> dict[str, Any]:
    """Return the options of ``--model-overrides``. Raises an ExportError if they are no dictionary of options."""
    try:
        overrides = ast.literal_eval(args.model_overrides)
    except (ValueError, SyntaxError):
        overrides = None
    if not isinstance(overrides, dict) or not all(isinstance(name, str) for name in overrides):
        raise ExportError(
            f"--model-overrides {args.model_overrides}: must be a Python dictionary, like {{'dropout': 0.1}}"
        )
    return overrides


def load(args: argparse.Namespace) -> tuple[Any, Any]:
    """Return the model of the checkpoint, in float32 and eval mode, and its task."""
    from fairseq import checkpoint_utils
    from fairseq.tasks.translation import TranslationTask

    from .. import plugin  # noqa: F401  registers the models and safe loading

    overrides = overrides_of(args)
    if args.source_lang:
        overrides |= {"source_lang": args.source_lang, "target_lang": args.target_lang}
    # Buckets of lengths would pad the sentences of the data, by which the model is checked. The files of pretrained
    # embeddings have no use once the checkpoint has the embeddings.
    overrides |= {"data": args.data, "num_batch_buckets": 0, "encoder_embed_path": None, "decoder_embed_path": None}
    # The checkpoint can have been trained on data of another kind, such as plain text.
    ends = {os.path.splitext(name)[1] for name in os.listdir(args.data)}
    if ".idx" in ends and ".fasta" not in ends:
        overrides["dataset_impl"] = None
    with naming_what_fairseq_reads(f"--path {args.path}, --data {args.data}"):
        models, _, task = checkpoint_utils.load_model_ensemble_and_task([args.path], overrides)
    if type(task) is not TranslationTask:
        model = f"it is a {type(models[0]).__name__} with the task {type(task).__name__}"
        raise ExportError(f"--path {args.path}: {model}, and must be a model of --task translation")
    for dictionary in (task.source_dictionary, task.target_dictionary):
        # fairseq's reader of FASTA adds unknown words to the dictionary, for which the model has no embeddings.
        dictionary.encode_line = partial(dictionary.encode_line, add_if_not_exist=False)
    return models[0].float().eval(), task


def settings_of(args: argparse.Namespace, model: Any, task: Any) -> dict[str, Any]:
    """Return the settings of the exported folder."""
    import ctranslate2
    import fairseq
    import torch

    from ..transformer.meaning import meaning

    source, target = task.cfg.source_lang, task.cfg.target_lang
    subwords = subwords_of(args.data, args.tokenizer, task.source_dictionary, task.target_dictionary)
    kind = subwords["kind"] if subwords else None
    return {
        "source": source,
        "target": target,
        "moses": tokenisation(args.tokenizer, kind, task.source_dictionary, source, target),
        "subwords": subwords,
        "positions": position_limits(model),
        "beam": args.beam,
        "lenpen": args.lenpen,
        "max_len_b": args.max_len_b,
        "segments": segment_settings(args.data, args.segment_tokens, task),  # null: not trained on segments
        "quantization": args.quantization,
        "checkpoint": os.path.basename(args.path),
        "model": meaning(model.cfg),
        "version": __version__,
        "versions": {module.__name__: module.__version__ for module in (ctranslate2, fairseq, torch)},
    }


def convert(args: argparse.Namespace, folder: str) -> str:
    """Write the model that the flags name into the new *folder*, and return the report of the checks."""
    import ctranslate2  # noqa: F401  named first if it is missing

    model, task = load(args)
    refuse_unsupported(model, args.path, args.quantization)
    settings = settings_of(args, model, task)
    if has_only_small_letters(task.source_dictionary):
        warn("export", f"--data {args.data}: the source has no capital letters, so translate's input must have none")
    with naming(f"--output {args.output}"):
        os.mkdir(folder)
        if settings["subwords"]:
            name = settings["subwords"]["file"]
            shutil.copyfile(os.path.join(args.data, name), os.path.join(folder, name))
        text_report = check_text(folder, settings, task, args.force)
        built = None
        if args.shortlist is not None:
            samples = shortlist_samples(settings, task, args.force)
            built = build_shortlist(args, folder, settings, task)
        reference = Reference(model, task, settings)
        report = []
        # Only float32 scores are exact enough to tell the right model from a wrong one, so they come first.
        for quantization in dict.fromkeys(["float32", args.quantization]):
            spec = to_spec(model, task.source_dictionary, task.target_dictionary)
            spec.validate()
            quantize(spec, quantization)
            spec.save(folder)
            report.append(check_model(folder, reference, quantization, args.force))
        if not reference.validation:
            text_report.append(f"translations were not compared: the data lack {NEEDED} that the model can translate")
        if built is not None:
            built.write(os.path.join(folder, SHORTLIST))
            text_report.append(check_shortlist(folder, settings, samples, args.force))
        write_settings(folder, settings)
    return "\n".join([*report, *text_report])


def refuse_missing_files(args: argparse.Namespace) -> None:
    """Raise an ExportError or an OSError if a file or folder that *args* name does not exist."""
    os.stat(args.path)
    if not os.path.isdir(args.data):
        raise ExportError(f"--data {args.data}: must be the folder of the dictionaries")
    if args.shortlist:
        shortlist.refuse_corpus(*args.shortlist)
    if not os.path.isdir(os.path.dirname(os.path.realpath(args.output))):
        raise ExportError(f"--output {args.output}: must be in a folder that exists")


def refuse_other_folders(output: str, args: argparse.Namespace) -> None:
    """Raise an ExportError if *output* exists and must not be replaced."""
    if not os.path.exists(output):
        return
    own = {"model.bin", "config.json", SETTINGS, SHORTLIST, "README.md", *SUBWORDS.values()}
    others = {name for name in os.listdir(output) if name not in own and not name.endswith("_vocabulary.json")}
    if others or SETTINGS not in os.listdir(output):
        what = f"files that are not a model's ({min(others)})" if others else "no exported model"
        raise ExportError(f"--output {args.output}: exists and has {what}; it is not replaced")
    if not args.replace and not args.force:
        raise ExportError(f"--output {args.output}: exists already; --replace replaces it")
