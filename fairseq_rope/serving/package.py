"""Write an exported model as a package for Argos Translate and LibreTranslate.

The package gets its name only after :func:`check_package` has translated a part of the validation set as these programs
do.
"""

import argparse
import json
import math
import os
import re
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

from .. import __version__
from ..errors import naming_what_fairseq_reads, refuse_other_bytes
from ..files import written_whole
from ..text.segments import divided
from ..text.subwords import SUBWORDS
from ..text.tokens import Tokeniser
from .argos import BEAM, BPE_CODES, LENGTH_PENALTY, METADATA, MODEL, SENTENCEPIECE, Package
from .ctranslate2_search import score
from .export_checks import SAME_SOURCES, bleu, check_scores, evenly, in_words, refuse_lower_bleu, validation_pairs
from .exported_folder import (
    INT8,
    SETTINGS,
    SHORTLIST,
    TranslateError,
    exported_settings,
    refuse_changed_files,
    separator_of,
)
from .target import ExportError, Pair, Scores, Target, Words
from .translator import Translator

ARGOS_VERSION = "1.9.0"  # of Argos Translate, the first that reads BPE codes
INDEX = "index.json"  # of the packages that LibreTranslate can download
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


@dataclass
class Argos(Target):
    """The package of an exported model for Argos Translate and LibreTranslate, before it is compressed.

    Args:
        model: the exported folder
        settings: of *model*
        files: paths by their names in the package, besides those of *model*: the sentence splitter
        texts: contents of other files by their names in the package
        folder: as in :class:`Target`
    """

    model: str
    settings: dict[str, Any]
    files: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    folder: str = ""

    def refuse(self) -> None:
        """Raise an ExportError if the programs would tokenise text in another way than the model's settings say."""
        moses, kind = self.settings["moses"], (self.settings["subwords"] or {}).get("kind")
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
                raise ExportError(f"--model {self.model}: {reason}")

    def write(self, folder: str) -> None:
        """Write the tree of the package into *folder*, with symbolic links to the files."""
        self.folder = folder
        for name, path in self.all_files().items():
            link = os.path.join(folder, name)
            os.makedirs(os.path.dirname(link), exist_ok=True)
            os.symlink(os.path.abspath(path), link)
        for name, text in self.texts.items():
            with open(os.path.join(folder, name), "w", encoding="utf-8") as out:
                out.write(text)

    def score(self, pairs: Sequence[Pair]) -> Scores:
        return score(os.path.join(self.folder, MODEL), pairs)

    def translate(self, sources: Sequence[Words]) -> list[Words]:
        package, text = self.package, self.source_text
        try:
            return package.search([text.plain(source)] for source in sources)
        except RuntimeError as error:  # an output can be longer than the positions of the model
            raise ExportError(f"--model {self.model}: the search of the programs fails with it ({error})") from None

    @cached_property
    def package(self) -> Package:
        """The written package, loaded as the programs load it."""
        return Package(self.folder)

    @cached_property
    def source_text(self) -> Tokeniser:
        """Converts tokens of a source into plain text."""
        moses = self.settings["moses"] and {**self.settings["moses"], "target": self.settings["source"]}
        return Tokeniser(self.model, {**self.settings, "moses": moses})

    def all_files(self) -> dict[str, str]:
        """Return the files of the package, by their names there."""
        names = sorted(name for name in os.listdir(self.model) if name.endswith("_vocabulary.json"))
        files = {f"{MODEL}/{name}": os.path.join(self.model, name) for name in ("config.json", "model.bin", *names)}
        kind = self.settings["subwords"]["kind"]
        name = SENTENCEPIECE if kind == "sentencepiece" else BPE_CODES
        return {**files, name: os.path.join(self.model, SUBWORDS[kind]), **self.files}


# -- what a package can hold -----------------------------------------------------------------------


def languages(args: argparse.Namespace, settings: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Return the codes and the names of the languages that the flags name, or those of the model.

    Raises:
        ExportError: a code is not allowed, or belongs to the other side
    """
    trained = [str(settings.get(side, "")).lower().replace("_", "-") for side in ("source", "target")]
    if not all(trained):
        raise ExportError(f"--model {args.model}: {SETTINGS} has no source or target language; export the model again")
    own = [CODES.get(code, code) for code in trained]
    source, target = codes = args.languages or own
    if not all(re.fullmatch("[a-z]{2,3}", code) for code in codes) or source == target:
        shown = (
            f"--languages {source} {target}"
            if args.languages
            else f"--model {args.model}: the languages are {', '.join(own)}"
        )
        allowed = "two codes of two or three lower-case letters, such as en de (pb is Portuguese of Brazil, and zt is "
        raise ExportError(f"{shown}: must be {allowed}traditional Chinese); --languages names them")
    if source == own[1] or target == own[0]:
        raise ExportError(
            f"--languages {source} {target}: the model in --model {args.model} translates {' to '.join(own)}"
        )
    return codes, args.names or [NAMES.get(code, code) for code in codes]


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
        ExportError: *path* is neither a model of MiniSBD nor a pipeline of spaCy
    """
    if path is None:
        return {}
    if os.path.isfile(path) and path.endswith(".onnx"):
        return {f"minisbd/{os.path.basename(path)}": path}
    if not os.path.isfile(os.path.join(path, "config.cfg")):
        allowed = "a MiniSBD model (a file .onnx) or a folder that spaCy wrote (with config.cfg)"
        raise ExportError(f"--splitter {path}: must be {allowed}")
    with open(os.path.join(path, "config.cfg"), encoding="utf-8", errors="replace") as config:
        pipes = re.search(r"^pipeline\s*=\s*\[(.*?)\]", config.read(), re.M | re.S)
    if pipes is not None and '"sentencizer"' in pipes[1]:
        raise ExportError(
            f"--splitter {path}: has the pipe sentencizer, which the programs add; save it without this pipe"
        )
    files = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    return {f"spacy/{os.path.relpath(file, path)}": file for file in sorted(files)}


# -- the check -------------------------------------------------------------------------------------


def validation_sentences(data: str, settings: dict[str, Any], count: int) -> list[Pair]:
    """Return up to *count* sentences of the validation set in *data* with their references, in tokens.

    Segments are divided into their sentences. Sentences with unknown words, and those that are too long for the model,
    are left out.

    Raises:
        ExportError: *data* is not a data folder with these languages, or the validation set is damaged
    """
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    from .. import plugin  # noqa: F401  reads data as export does

    source, target = settings["source"], settings["target"]
    for name in (f"dict.{source}.txt", f"dict.{target}.txt"):
        if not os.path.isfile(os.path.join(data, name)):
            raise ExportError(f"--data {data}: must be the folder of the dictionaries, and has no {name}")
    options = {"source_lang": source, "target_lang": target, "dataset_impl": None}
    with naming_what_fairseq_reads(f"--data {data}"):
        task = TranslationTask.setup_task(TranslationConfig(data=data, **options))
    separator = separator_of(settings)
    unknown, limit = task.source_dictionary.unk_word, settings["positions"]["source"] or math.inf
    pairs: list[Pair] = []
    for source_words, target_words in in_words(task, validation_pairs(task, math.inf, math.inf)):
        sentences, _ = divided(source_words, source_words.count(separator) + 1, separator)
        references, is_same = divided(target_words, len(sentences), separator)
        if is_same:
            both = zip(sentences, references)
            pairs += [pair for pair in both if all(pair) and unknown not in pair[0] + pair[1] and len(pair[0]) < limit]
    return evenly(pairs, count)


def check_package(target: Argos, pairs: Sequence[Pair], force: bool) -> str:
    """Compare the written package of *target* with its model, and return sentences about the differences.

    *pairs* are sentences with their references, in tokens.

    Raises:
        ExportError: the scores differ; or, without *force*, too many sentences have other tokens, or BLEU is lower by
            more than LOSS
    """
    model, settings, package = target.model, target.settings, target.package
    quantization = None if settings["quantization"] == "float32" else settings["quantization"]
    most = settings["positions"]["target"] or math.inf
    if scored := [pair for pair in pairs if len(pair[1]) < most]:
        check_scores(target, scored, score(model, scored).log_probs, quantization, whose="those of the model")
    target_text = Tokeniser(model, settings)
    lines = [target.source_text.plain(source) for source, _ in pairs]
    references = [target_text.plain(reference) for _, reference in pairs]
    others = [line for line, (tokens, _) in zip(lines, pairs) if package.tokens(line) != tokens]
    translations = target.translate([source for source, _ in pairs])
    with Translator(model, shortlist=False) as translator:
        own_translations = translator.translate(lines)
    package_bleu, own_bleu = (
        bleu(texts, references, settings["target"])
        for texts in ([package.plain(tokens) for tokens in translations], own_translations)
    )
    report = (
        f"package: {len(others)} of {len(lines)} sentences of the validation set have other tokens than in the data"
    )
    advice = "; train with normalised punctuation in the source (normalise_punctuation: source in a recipe)"
    report += f", such as: {others[0]}" if others else ""
    if len(lines) - len(others) < SAME_SOURCES * len(lines) and not force:
        raise ExportError(f"{report}: nothing was written (--force writes it anyway){advice}")
    report += (
        f"\npackage: sacreBLEU {package_bleu:.2f} on them with beam {BEAM} and length penalty {LENGTH_PENALTY}, as in "
        f"the programs, and {own_bleu:.2f} with fairseq-rope translate, beam {settings['beam']} and length penalty "
        f"{settings['lenpen']}"
    )
    refuse_lower_bleu(package_bleu, own_bleu, LOSS, f"{report}; it", force)
    blanks = sum("_" in line for line in references)
    if blanks and (settings["subwords"] or {}).get("kind") == "sentencepiece":
        report += f"\nwarning: {blanks} of the references have an underscore, which the programs replace with a blank"
    return report


# -- the file --------------------------------------------------------------------------------------

NOT_UTF_8 = "must be UTF-8; your shell gave other bytes"
README = """# {from_name} to {to_name}

A package for Argos Translate and LibreTranslate, written by fairseq-rope {version} from {checkpoint}.

Licence: {licence}
Data: {data}

{report}
"""


def write_zip(
    path: str, top: str, files: dict[str, str], texts: dict[str, str], check: Callable[[], None] = lambda: None
) -> None:
    """Write *files* and *texts* into the zip file *path*, below the folder *top*, completely or not at all.

    The dates of the files are constant, so that the same model gives the same package. *check* is called before the
    package gets its name.
    """
    suffix = f".{os.getpid()}.tmp"  # another process can write the same package
    with written_whole(path, suffix=suffix) as (out,), zipfile.ZipFile(out, "w") as archive:
        for name, text in texts.items():
            archive.writestr(zipfile.ZipInfo(f"{top}/{name}"), text)
        for name, file in files.items():
            with (
                open(file, "rb") as model,
                archive.open(zipfile.ZipInfo(f"{top}/{name}"), "w", force_zip64=True) as member,
            ):
                shutil.copyfileobj(model, member, 1 << 20)
        check()


def refuse_another_export(model: str, checksums: dict[str, str]) -> None:
    """Raise an ExportError if a file of the folder *model* has another checksum than in *checksums*."""
    try:
        refuse_changed_files(model, checksums)
    except TranslateError:
        raise ExportError(f"--model {model}: has changed since it was checked; repeat the command") from None


def refuse_to_install(folder: str, top: str, replace: bool) -> None:
    """Raise an ExportError if the package *top* must not be unpacked into *folder*."""
    if os.path.isfile(folder) or not os.path.isdir(os.path.dirname(os.path.realpath(folder))):
        raise ExportError(f"--install {folder}: must be a folder, or a new one in a folder that exists")
    if os.path.ismount(folder):
        raise ExportError(f"--install {folder}: is a mount point, and must be a folder in it")
    for path in (os.path.dirname(os.path.realpath(folder)), *([folder] if os.path.isdir(folder) else [])):
        if not os.access(path, os.W_OK | os.X_OK):
            beside = "" if path == folder else ": the package is unpacked beside the folder first"
            raise ExportError(f"--install {folder}: no permission to write into {path}{beside}")
    index = os.path.join(folder, INDEX)
    if os.path.exists(index) and not replace:
        with open(index, "rb") as file:
            if file.read().strip() != b"[]":
                raise ExportError(f"--install {folder}: has an {INDEX} with packages; --replace empties it")
    pair = top.rpartition("-")[0]
    names = os.listdir(folder) if os.path.isdir(folder) else []
    others = sorted(name for name in names if name.startswith(f"{pair}-"))
    if others and not (replace and others == [top]):
        advice = "--replace replaces it" if others == [top] else "remove it, because only one of them would be used"
        raise ExportError(f"--install {folder}: has the package {others[0]} already; {advice}")


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
        if os.path.exists(installed):
            os.rename(installed, os.path.join(beside, "old"))
        os.rename(new, installed)
    with written_whole(os.path.join(folder, INDEX)) as (index,):
        index.write(b"[]\n")


def create(args: argparse.Namespace) -> tuple[str, str]:
    """Write the package that the flags name, and return its path and the report of the check.

    Raises:
        InputError: the model cannot be packaged, or the check failed
    """
    settings = exported_settings(args.model)
    refuse_changed_files(args.model, settings["sha256"])
    target = Argos(args.model, settings)
    target.refuse()
    (from_code, to_code), (from_name, to_name) = languages(args, settings)
    for flag, text in (("licence", args.licence), ("trained-on", args.trained_on)):
        refuse_other_bytes(text, f"--{flag}", NOT_UTF_8)
    for name in (from_name, to_name):
        refuse_other_bytes(name, "--names", NOT_UTF_8)
    if not re.fullmatch(r"\d+(\.\d+)*", args.package_version):
        raise ExportError(f"--package-version {args.package_version}: must be numbers and dots, such as 1.0")
    top = f"translate-{from_code}_{to_code}-{args.package_version.replace('.', '_')}"
    output = args.output if args.output is not None else os.path.dirname(os.path.realpath(args.model))
    if not os.path.isdir(output):
        raise ExportError(f"--output {output}: must be a folder that exists")
    path = os.path.join(output, f"{top}.argosmodel")
    if os.path.exists(path) and not args.replace:
        raise ExportError(f"--output {output}: {top}.argosmodel exists already; --replace replaces it")
    if args.install is not None:
        refuse_to_install(args.install, top, args.replace)
    target.files = splitter_files(args.splitter)
    metadata = {
        **{"package_version": args.package_version, "argos_version": ARGOS_VERSION, "type": "translate"},
        **{"from_code": from_code, "from_name": from_name, "to_code": to_code, "to_name": to_name},
    }
    target.texts[METADATA] = json.dumps(metadata, indent=1) + "\n"  # ASCII: Windows reads it in its own encoding
    pairs = validation_sentences(args.data, settings, SENTENCES)
    report = "package: not checked, because the data have no validation set"
    if pairs:
        with tempfile.TemporaryDirectory() as folder:
            target.write(folder)
            report = check_package(target, pairs, args.force)
    elif not args.force:
        raise ExportError(f"--data {args.data}: has no validation set to check the package (--force writes it anyway)")
    fields = {"version": __version__, "checkpoint": settings.get("checkpoint"), "report": report, **metadata}
    target.texts["README.md"] = README.format(licence=args.licence, data=args.trained_on, **fields)
    # The check takes minutes, in which the model can be exported again.
    write_zip(
        path, top, target.all_files(), target.texts, partial(refuse_another_export, args.model, settings["sha256"])
    )
    if args.install is not None:
        install(path, top, args.install)
    return path, "\n".join([report, *(f"warning: {sentence}" for sentence in warnings(args.model, settings))])
