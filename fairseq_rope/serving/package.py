"""Write an exported model as a package for Argos Translate and LibreTranslate.

The package gets its name only after :func:`check` has translated a part of the validation set as these programs do.
"""

import argparse
import json
import math
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Sequence
from typing import Any

from .. import __version__
from ..errors import InputError, naming_what_fairseq_reads
from ..files import written_whole
from ..text.languages import default_tokenize
from ..text.segments import divided
from ..text.subwords import SUBWORDS
from ..text.tokens import Tokeniser
from .argos import BEAM, BPE_CODES, LENGTH_PENALTY, METADATA, MODEL, SENTENCEPIECE, Package
from .export_checks import SAME_SOURCES, in_words, validation_pairs
from .exported_folder import INT8, SETTINGS, SHORTLIST, exported_settings, refuse_changed_files, separator_of
from .replaced_folder import exchange
from .translator import Translator

ARGOS_VERSION = "1.9.0"  # of Argos Translate, the first that reads BPE codes
SENTENCES = 200  # of the validation set, which are translated
LOSS = 1.0  # sacreBLEU that the programs' text and search may cost
LIMITS = {"source": 1024, "target": 256}  # tokens in the longest sentences, CTranslate2's defaults
CODES = {"pt-br": "pb", "zh-cn": "zh", "zh-hans": "zh", "zh-tw": "zt", "zh-hant": "zt"}  # the programs' own codes
NAMES = dict(
    pair.split("=")
    for pair in "ar=Arabic bg=Bulgarian bn=Bengali ca=Catalan cs=Czech da=Danish de=German el=Greek en=English "
    "eo=Esperanto es=Spanish et=Estonian eu=Basque fa=Persian fi=Finnish fr=French ga=Irish gl=Galician he=Hebrew "
    "hi=Hindi hu=Hungarian id=Indonesian is=Icelandic it=Italian ja=Japanese ko=Korean lt=Lithuanian lv=Latvian "
    "ms=Malay nb=Norwegian nl=Dutch pl=Polish pt=Portuguese ro=Romanian ru=Russian sk=Slovak sl=Slovenian sq=Albanian "
    "sr=Serbian sv=Swedish ta=Tamil th=Thai tl=Tagalog tr=Turkish uk=Ukrainian ur=Urdu vi=Vietnamese zh=Chinese".split()
)
NAMES |= {"pb": "Portuguese (Brazil)", "zt": "Chinese (traditional)"}


class PackageError(InputError):
    """A model cannot be packaged; the message says why."""


# -- what a package can hold -----------------------------------------------------------------------


def languages(args: argparse.Namespace, settings: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the codes and the names of the languages that the flags name, or those of the model.

    Raises:
        PackageError: a code is not allowed, or belongs to the other side
    """
    trained = [str(settings.get(side, "")).lower().replace("_", "-") for side in ("source", "target")]
    if not all(trained):
        raise PackageError(f"--model {args.model}: {SETTINGS} has no source or target language; export the model again")
    own = [CODES.get(code, code) for code in trained]
    source, target = codes = args.languages or own
    if not all(re.fullmatch("[a-z]{2,3}", code) for code in codes) or source == target:
        given = (
            f"--languages {source} {target}"
            if args.languages
            else f"--model {args.model}: the languages are {', '.join(own)}"
        )
        allowed = "two codes of two or three lower-case letters, such as en de (pb is Portuguese of Brazil, and zt is "
        raise PackageError(f"{given}: must be {allowed}traditional Chinese); --languages names them")
    if source == own[1] or target == own[0]:
        raise PackageError(
            f"--languages {source} {target}: the model in --model {args.model} translates {' to '.join(own)}"
        )
    return codes, args.names or [NAMES.get(code, code) for code in codes]


def refuse_unsupported(folder: str, settings: dict[str, Any]) -> None:
    """Raise a PackageError if the programs would tokenise text in another way than the model's settings say."""
    moses, kind = settings["moses"], (settings["subwords"] or {}).get("kind")
    reasons = {
        "it has no subword model, and a package needs BPE codes or a sentencepiece model": kind is None,
        "its BPE was trained without Moses' tokeniser, which a package with BPE codes always uses": (
            kind == "subword_nmt" and not moses
        ),
        "it uses Moses' tokeniser and sentencepiece, and a package with sentencepiece does not use Moses": (
            kind == "sentencepiece" and bool(moses)
        ),
        "its data were split at hyphens (@-@, Moses' -a), which a package cannot do": bool(
            moses and moses["dash_splits"]
        ),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise PackageError(f"--model {folder}: {reason}")


def warnings(folder: str, settings: dict[str, Any]) -> list[str]:
    """Return a sentence for each property of the model that a package does not have."""
    sentences = []
    if settings.get("segments"):
        sentences.append("the model was trained on segments of documents; a package translates each sentence by itself")
    if os.path.exists(os.path.join(folder, SHORTLIST)):
        sentences.append(f"the shortlist ({SHORTLIST}) is left out, because the programs do not use it")
    if settings["quantization"] not in INT8:
        sentences.append(
            f"the weights are {settings['quantization']}, and Argos Translate 1.11 may convert them to 8 bits; set "
            "ARGOS_COMPUTE_TYPE=default where you use it, or export with --quantization int8"
        )
    for side, most in LIMITS.items():
        positions = settings["positions"][side]
        if positions is not None and positions < most:
            sentences.append(
                f"the model has {positions} positions in the {side}; the programs do not check this, and end a request "
                "with a longer sentence with an error"
            )
    return sentences


def splitter_files(path: str | None) -> dict[str, str]:
    """Return the files of the sentence splitter *path*, by their names in a package.

    Raises:
        PackageError: *path* is neither a model of MiniSBD nor a pipeline of spaCy
    """
    if path is None:
        return {}
    if os.path.isfile(path) and path.endswith(".onnx"):
        return {f"minisbd/{os.path.basename(path)}": path}
    if not os.path.isfile(os.path.join(path, "config.cfg")):
        allowed = "a MiniSBD model (a file .onnx) or a folder that spaCy wrote (with config.cfg)"
        raise PackageError(f"--splitter {path}: must be {allowed}")
    files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    return {f"spacy/{os.path.relpath(file, path)}": file for file in sorted(files)}


# -- the check -------------------------------------------------------------------------------------


def validation_sentences(data: str, settings: dict[str, Any], count: int) -> list[tuple[list[str], list[str]]]:
    """Return up to *count* sentences of the validation set in *data* with their references, in tokens.

    Segments are divided into their sentences. Sentences with unknown words, and those that are too long for the model,
    are left out.

    Raises:
        PackageError: *data* is not a data folder with these languages
        ExportError: the validation set is damaged
    """
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    from .. import plugin  # noqa: F401  reads data as export does

    source, target = settings["source"], settings["target"]
    for name in (f"dict.{source}.txt", f"dict.{target}.txt"):
        if not os.path.isfile(os.path.join(data, name)):
            raise PackageError(f"--data {data}: must be the folder of the dictionaries, and has no {name}")
    options = {"source_lang": source, "target_lang": target, "dataset_impl": None}
    with naming_what_fairseq_reads(f"--data {data}"):
        task = TranslationTask.setup_task(TranslationConfig(data=data, **options))
    separator = separator_of(settings)
    unknown, limit = task.source_dictionary.unk_word, settings["positions"]["source"] or math.inf
    pairs: list[tuple[list[str], list[str]]] = []
    for one, other in in_words(task, validation_pairs(task, count)):
        sentences, _ = divided(one, one.count(separator) + 1, separator)
        references, is_same = divided(other, len(sentences), separator)
        if is_same:
            both = zip(sentences, references)
            pairs += [pair for pair in both if all(pair) and unknown not in pair[0] + pair[1] and len(pair[0]) < limit]
    return pairs[:count]


def check(
    unpacked: str, folder: str, settings: dict[str, Any], pairs: Sequence[tuple[list[str], list[str]]], force: bool
) -> str:
    """Compare the package in *unpacked* with the model in *folder*, and return sentences about the differences.

    Raises:
        PackageError: without *force*, too many sentences have other tokens, or BLEU is lower by more than LOSS
    """
    import sacrebleu

    source, target = settings["source"], settings["target"]
    of_source = Tokeniser(folder, {**settings, "moses": settings["moses"] and {**settings["moses"], "target": source}})
    of_target = Tokeniser(folder, settings)
    lines, references = [of_source.plain(one) for one, _ in pairs], [of_target.plain(two) for _, two in pairs]
    with Translator(folder, shortlist=False) as translator:
        package = Package(unpacked)
        others = [line for line, (tokens, _) in zip(lines, pairs) if package.tokens(line) != tokens]
        try:
            translations = package.translate([line] for line in lines)
        except RuntimeError as error:  # an output can be longer than the positions of the model
            raise PackageError(f"--model {folder}: the search of the programs fails with it ({error})") from None
        hypotheses = {"package": translations, "own": translator.translate(lines)}
    bleu = {
        name: sacrebleu.corpus_bleu(texts, [references], tokenize=default_tokenize(target), force=True).score
        for name, texts in hypotheses.items()
    }
    report = (
        f"package: {len(others)} of {len(lines)} sentences of the validation set have other tokens than in the data"
    )
    advice = "; train with normalised punctuation in the source (normalise_punctuation: source in a recipe)"
    report += f", such as: {others[0]}" if others else ""
    if len(lines) - len(others) < SAME_SOURCES * len(lines) and not force:
        raise PackageError(f"{report}: nothing was written (--force writes it anyway){advice}")
    report += (
        f"\npackage: sacreBLEU {bleu['package']:.2f} on them with beam {BEAM} and length penalty {LENGTH_PENALTY}, as "
        f"in the programs, and {bleu['own']:.2f} with fairseq-rope translate, beam {settings['beam']} and length "
        f"penalty {settings['lenpen']}"
    )
    if bleu["package"] < bleu["own"] - LOSS and not force:
        raise PackageError(f"{report}; it may be {LOSS} lower: nothing was written (--force writes it anyway)")
    blanks = sum("_" in line for line in references)
    if blanks and (settings["subwords"] or {}).get("kind") == "sentencepiece":
        report += f"\nwarning: {blanks} of the references have an underscore, which the programs replace with a blank"
    return report


# -- the file --------------------------------------------------------------------------------------

README = """# {from_name} to {to_name}

A package for Argos Translate and LibreTranslate, written by fairseq-rope {version} from {checkpoint}.

Licence: {licence}
Data: {data}

{report}
"""


def package_files(folder: str, settings: dict[str, Any]) -> dict[str, str]:
    """Return the files of the exported *folder* that a package has, by their names in the package."""
    names = sorted(name for name in os.listdir(folder) if name.endswith("_vocabulary.json"))
    files = {f"{MODEL}/{name}": os.path.join(folder, name) for name in ("config.json", "model.bin", *names)}
    kind = settings["subwords"]["kind"]
    name = SENTENCEPIECE if kind == "sentencepiece" else BPE_CODES
    return {**files, name: os.path.join(folder, SUBWORDS[kind])}


def unpack(files: dict[str, str], texts: dict[str, str], folder: str) -> None:
    """Create the tree of a package in *folder*, with symbolic links to *files*."""
    for name, path in files.items():
        link = os.path.join(folder, name)
        os.makedirs(os.path.dirname(link), exist_ok=True)
        os.symlink(os.path.abspath(path), link)
    for name, text in texts.items():
        with open(os.path.join(folder, name), "w", encoding="utf-8") as out:
            out.write(text)


def write_zip(path: str, top: str, files: dict[str, str], texts: dict[str, str]) -> None:
    """Write *files* and *texts* into the zip file *path*, below the folder *top*, completely or not at all.

    The dates of the files are constant, so that the same model gives the same package.
    """
    with written_whole(path) as (out,), zipfile.ZipFile(out, "w") as archive:
        for name, text in texts.items():
            archive.writestr(zipfile.ZipInfo(f"{top}/{name}"), text)
        for name, file in files.items():
            with (
                open(file, "rb") as model,
                archive.open(zipfile.ZipInfo(f"{top}/{name}"), "w", force_zip64=True) as member,
            ):
                shutil.copyfileobj(model, member, 1 << 20)


def refuse_to_install(folder: str, top: str, replace: bool) -> None:
    """Raise a PackageError if the package *top* must not be unpacked into *folder*."""
    if os.path.isfile(folder) or not os.path.isdir(os.path.dirname(os.path.realpath(folder))):
        raise PackageError(f"--install {folder}: must be a folder, or a new one in a folder that exists")
    if os.path.ismount(folder):
        raise PackageError(f"--install {folder}: is a mount point, and must be a folder in it")
    pair = top.rpartition("-")[0]
    names = os.listdir(folder) if os.path.isdir(folder) else []
    others = sorted(name for name in names if name.startswith(f"{pair}-"))
    if others and not (replace and others == [top]):
        advice = "--replace replaces it" if others == [top] else "remove it, because only one of them would be used"
        raise PackageError(f"--install {folder}: has the package {others[0]} already; {advice}")


def install(package: str, top: str, folder: str) -> None:
    """Unpack *package* as the folder *top* of *folder*, and write an empty index of packages there.

    With fewer than two packages, LibreTranslate downloads the packages of an index. The public index would also replace
    this package if it has one of a later version. With ARGOS_PACKAGE_INDEX, LibreTranslate reads the empty one.
    """
    os.makedirs(folder, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.realpath(folder))) as beside:
        with zipfile.ZipFile(package) as archive:
            archive.extractall(beside)
        new, installed = os.path.join(beside, top), os.path.join(folder, top)
        if not os.path.exists(installed):
            os.rename(new, installed)
        elif not exchange(new, installed):
            shutil.rmtree(installed)
            os.rename(new, installed)
    with written_whole(os.path.join(folder, "index.json")) as (index,):
        index.write(b"[]\n")


def create(args: argparse.Namespace) -> tuple[str, str]:
    """Write the package that the flags name, and return its path and the report of the check.

    Raises:
        InputError: the model cannot be packaged, or the check failed
    """
    settings = exported_settings(args.model)
    refuse_changed_files(args.model, settings["sha256"])
    refuse_unsupported(args.model, settings)
    (from_code, to_code), (from_name, to_name) = languages(args, settings)
    if not re.fullmatch(r"\d+(\.\d+)*", args.package_version):
        raise PackageError(f"--package-version {args.package_version}: must be numbers and dots, such as 1.0")
    top = f"translate-{from_code}_{to_code}-{args.package_version.replace('.', '_')}"
    output = args.output if args.output is not None else os.path.dirname(os.path.realpath(args.model))
    if not os.path.isdir(output):
        raise PackageError(f"--output {output}: must be a folder that exists")
    path = os.path.join(output, f"{top}.argosmodel")
    if os.path.exists(path) and not args.replace:
        raise PackageError(f"--output {output}: {top}.argosmodel exists already; --replace replaces it")
    if args.install is not None:
        refuse_to_install(args.install, top, args.replace)
    files = {**package_files(args.model, settings), **splitter_files(args.splitter)}
    metadata = {
        **{"package_version": args.package_version, "argos_version": ARGOS_VERSION, "type": "translate"},
        **{"from_code": from_code, "from_name": from_name, "to_code": to_code, "to_name": to_name},
    }
    texts = {METADATA: json.dumps(metadata, indent=1, ensure_ascii=False) + "\n"}
    pairs = validation_sentences(args.data, settings, SENTENCES)
    report = "package: not checked, because the data have no validation set"
    if pairs:
        with tempfile.TemporaryDirectory() as folder:
            unpack(files, texts, folder)
            report = check(folder, args.model, settings, pairs, args.force)
    elif not args.force:
        raise PackageError(f"--data {args.data}: has no validation set to check the package (--force writes it anyway)")
    fields = {"version": __version__, "checkpoint": settings.get("checkpoint"), "report": report, **metadata}
    texts["README.md"] = README.format(licence=args.licence, data=args.trained_on, **fields)
    write_zip(path, top, files, texts)
    if args.install is not None:
        install(path, top, args.install)
    return path, "\n".join([report, *(f"warning: {sentence}" for sentence in warnings(args.model, settings))])
