"""Write an exported model as a package for Argos Translate and LibreTranslate, which have a search of their own."""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..files import write_whole
from ..text.languages import language
from ..text.tokens import Tokeniser
from .ctranslate2_search import available_cores
from .export_checks import bleu, refuse_lower_bleu, validation_pairs, words_of_pairs
from .exported_folder import ExportError, exported_settings
from .translator import Translator

LOSS = 1.0  # sacreBLEU that the programs' text and search may cost
# What LibreTranslate's page shows for a language; for others, the code.
NAMES = dict(
    pair.split("=")
    for pair in "ar=Arabic cs=Czech da=Danish de=German el=Greek en=English es=Spanish fi=Finnish fr=French he=Hebrew "
    "hi=Hindi hu=Hungarian id=Indonesian it=Italian ja=Japanese ko=Korean nl=Dutch pl=Polish pt=Portuguese ro=Romanian "
    "ru=Russian sv=Swedish tr=Turkish uk=Ukrainian vi=Vietnamese zh=Chinese".split()
)


def create(model: str, data: str, output: str, replace: bool, force: bool) -> str:
    """Write the package of the exported *model* into the folder *output*, unpacked and as a file; return a report.

    *data* are for :func:`check_package`, which *force* leaves out. *replace* allows to replace packages of the pair.
    """
    settings = exported_settings(model)
    refuse_text(model, settings)
    codes = {side: language(settings[name]) for side, name in (("from", "source"), ("to", "target"))}
    pair = f"translate-{codes['from']}_{codes['to']}-"
    name = f"{pair}1_0"
    os.makedirs(output, exist_ok=True)
    existing = [other for other in os.listdir(output) if other.startswith(pair)]
    if existing and not replace:
        raise ExportError(f"--output {output}: has {existing[0]} already; --replace replaces it")
    # The programs fail if a folder in *output* is not a complete package, so it is written beside that folder.
    with tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.realpath(output))) as beside:
        new = os.path.join(beside, "new", name)
        packaged = shutil.copytree(model, os.path.join(new, "model"))
        subwords = "bpe.model" if settings["subwords"]["kind"] == "subword_nmt" else "sentencepiece.model"
        shutil.copyfile(os.path.join(model, settings["subwords"]["file"]), os.path.join(new, subwords))
        # Argos Translate has BPE since 1.9.0.
        metadata = {"package_version": "1.0", "argos_version": "1.9.0", "type": "translate"}
        for side, code in codes.items():
            metadata |= {f"{side}_code": code, f"{side}_name": NAMES.get(code, code)}
        write_whole(Path(new, "metadata.json"), json.dumps(metadata, indent=1) + "\n")
        report = "package: not checked" if force else check_package(packaged, settings, data)
        archive = shutil.make_archive(new, "zip", os.path.dirname(new), name)
        for other in existing:
            os.rename(os.path.join(output, other), os.path.join(beside, other))
        os.rename(new, os.path.join(output, name))
        os.rename(archive, os.path.join(output, f"{name}.argosmodel"))
    index = Path(output, "index.json")
    if not index.exists():  # for ARGOS_PACKAGE_INDEX, so that LibreTranslate installs no other packages
        write_whole(index, "[]\n")
    return f"{report}\nwrote {os.path.join(output, name)} and {name}.argosmodel"


def refuse_text(model: str, settings: dict[str, Any]) -> None:
    """Raise an ExportError if the programs divide or tokenise text in another way than *settings* say."""
    moses, kind = settings["moses"], (settings["subwords"] or {}).get("kind")
    reasons = {
        "it has no subwords, and a package needs BPE codes or a sentencepiece model": kind is None,
        "its BPE is without Moses' tokeniser, which the programs always use": kind == "subword_nmt" and not moses,
        "it has Moses' tokeniser and sentencepiece, which the programs use alone": kind == "sentencepiece" and moses,
        "its data were split at hyphens (@-@), which the programs cannot do": moses and moses["dash_splits"],
        "it has segments of documents; export it with --segment-tokens 1": settings.get("segments"),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise ExportError(f"--model {model}: {reason}")


def translate_as_programs(model: str, settings: dict[str, Any], lines: Sequence[str]) -> list[str]:
    """Return translations of sentences by the exported *model*, as argos-translate-lt 1.12.1 computes them."""
    import ctranslate2  # argos-translate-lt itself needs another version of sacremoses

    text, options = Tokeniser(model, settings), {"beam_size": 4, "length_penalty": 0.2, "replace_unknowns": True}
    if settings["moses"]:
        from sacremoses import MosesPunctNormalizer

        lines = list(map(MosesPunctNormalizer(language(settings["source"])).normalize, lines))
    search = ctranslate2.Translator(model, inter_threads=available_cores(), intra_threads=1)
    results = search.translate_batch([text.tokens(line) for line in lines], max_batch_size=1, **options)
    translations = [text.plain(result.hypotheses[0]) for result in results]
    return translations if settings["moses"] else [line.replace("_", " ") for line in translations]


def check_package(model: str, settings: dict[str, Any], data: str) -> str:
    """Return a report on the packaged *model*; refuse it if its BLEU in the programs is lower by more than LOSS."""
    from fairseq.tasks.translation import TranslationConfig, TranslationTask

    from .. import plugin  # noqa: F401  reads data as export does

    languages = {"source_lang": settings["source"], "target_lang": settings["target"]}
    task = TranslationTask.setup_task(TranslationConfig(data=data, dataset_impl=None, **languages))
    pairs = list(words_of_pairs(task, validation_pairs(task, 200)))
    if not pairs:
        raise ExportError(f"--data {data}: has no validation set to check the package (--force writes it anyway)")
    moses = settings["moses"] and {**settings["moses"], "target": settings["source"]}
    source_text, target_text = Tokeniser(model, {**settings, "moses": moses}), Tokeniser(model, settings)
    lines = [source_text.plain(source) for source, _ in pairs]
    references = [target_text.plain(target) for _, target in pairs]
    with Translator(model, shortlist=False) as translator:
        here = bleu(translator.translate(lines), references, settings["target"])
    there = bleu(translate_as_programs(model, settings, lines), references, settings["target"])
    report = f"package: sacreBLEU {there:.2f} in the programs and {here:.2f} here, on {len(pairs)} validation sentences"
    refuse_lower_bleu(there, here, LOSS, f"{report}; it", force=False)
    return report
