"""The steps from raw text to a score, in their order. Each names its inputs and the settings that it reads.

``Pipeline`` connects them for one training. ``training.py`` has the steps that train and average.
"""

import filecmp
import functools
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rope.errors import InputError
from fairseq_rope.lines import count_lines, read_lines
from fairseq_rope.text.languages import UNSPACED, default_tokenize, language
from fairseq_rope.text.plain import check_plain
from fairseq_rope.text.subwords import SUBWORDS
from recipes import machine
from recipes.settings import Settings, corpora
from recipes.text import fetch
from recipes.text.extract import ARCHIVE
from recipes.text.fetch import Entry
from recipes.training import Average, Train, plugin
from recipes.work import File, Step, StepError, Work


def quoted(*words: object) -> str:
    return shlex.join(map(str, words))


class Fetch(Step):
    """Downloads files of the manifest."""

    continues = True

    def commands(self) -> list[str]:
        files = quoted("--manifest", self.options["manifest"], "--output", ".", *self.settings["files"])
        return [f"python -m recipes.text.fetch {files}"]


class Text(Step):
    """Extracts one set: ``text.en`` and ``text.de``, and ``text.2.de`` and so on for further references.

    Its settings have the checksums of the files that it reads. Where they lie is an option.
    """

    @property
    def read_from(self) -> dict[str, str]:
        return {}

    def commands(self) -> list[str]:
        (source, target), lines = self.settings["langs"], []
        corpora = [[self._path(template) for template in corpus] for corpus in self.options["corpora"]]
        for number in range(self.settings["references"]):
            name = f"text.{number + 1}" if number else "text"
            references = [f"--reference {quoted(corpus[number])}" for corpus in corpora] if number else []
            lines.append(
                f"python -m recipes.text.extract --source-lang {source} --target-lang {target} --output {name} "
                + " ".join([*(quoted(corpus[0]) for corpus in corpora), *references])
            )
        return lines

    def _path(self, template: str) -> str:
        """Where *template* lies: an absolute path, or in the folder of the step that fetches."""
        return template if Path(template).is_absolute() else self.at("files", template)

    def check(self, folder: Path) -> None:
        source, target = (folder / f"text.{lang}" for lang in self.settings["langs"])
        if filecmp.cmp(source, target, shallow=False):
            raise StepError(f"{self.label}: {source.name} and {target.name} are equal")
        if self.label not in ("train", "valid"):
            for path in sorted(folder.glob("text*")):
                check_plain(str(path), read_lines(str(path)), path != source)


class Tokenise(Step):
    """Normalises and tokenises one set as Moses does; with sentencepiece, it only replaces characters."""

    def commands(self) -> list[str]:
        tokeniser = "" if self.settings["bpe"] == "subword-nmt" else " --no-tokeniser"
        lines = []
        for lang, side in zip(self.settings["langs"], ("source", "target")):
            normalise = " --normalise-punctuation" * (self.settings["normalise_punctuation"] in ("both", side))
            files = f"--input {self.at('text', f'text.{lang}')} --output text.{lang}"
            lines.append(f"python -m recipes.text.tokenise --lang {language(lang)} {files}{tokeniser}{normalise}")
        return lines


class Clean(Step):
    """Removes training pairs that cannot be translations of each other, and holds out a validation set."""

    def commands(self) -> list[str]:
        s, (source, target) = self.settings, self.settings["langs"]
        held_out = f" --holdout-every {s['holdout_every']} --heldout valid" if s["holdout_every"] else ""
        return [
            f"python -m recipes.text.clean --source-lang {source} --target-lang {target} --input "
            f"{self.at('train', 'text')} --output train --max-words {s['max_words']} "
            f"--max-ratio {s['max_length_ratio']}{held_out}"
        ]


class LearnBpe(Step):
    """Learns one byte-pair encoding over both languages."""

    def commands(self) -> list[str]:
        learn = "sentencepiece-train" if self.settings["bpe"] == "sentencepiece" else "learn"
        texts = [self.at("train", f"train.{lang}") for lang in self.settings["langs"]]
        size, model = self.settings["vocab_size"], subwords(self.settings["bpe"])
        return [f"python -m recipes.text.bpe {learn} --vocab-size {size} --output {model} {quoted(*texts)}"]


class ApplyBpe(Step):
    """Splits the words of one set into subwords."""

    def commands(self) -> list[str]:
        model = self.at("subwords", subwords(self.settings["bpe"]))
        encode = f"sentencepiece-encode --model {model}"
        apply = encode if self.settings["bpe"] == "sentencepiece" else f"apply --codes {model}"
        files = ((self.at("text", f"{self.settings['file']}.{lang}"), lang) for lang in self.settings["langs"])
        return [f"python -m recipes.text.bpe {apply} --input {path} --output text.{lang}" for path, lang in files]


class Binarise(Step):
    """Writes the training and validation sets as fairseq reads them, with dictionaries and subword model."""

    speaks = False

    def commands(self) -> list[str]:
        source, target = self.settings["langs"]
        model = subwords(self.settings["bpe"])
        return [
            f"fairseq-preprocess --source-lang {source} --target-lang {target} {plugin(self)} "
            f"--trainpref {self.at('train', 'text')} --validpref {self.at('valid', 'text')} --joined-dictionary "
            "--workers $(nproc) --destdir .",
            f"cp {self.at('subwords', model)} {model}",
        ]

    def check(self, folder: Path) -> None:
        check_counts(self, folder, {role: self.at(role, "text") for role in ("train", "valid")})


class BinariseTest(Step):
    """Writes one test set as fairseq reads it, with the dictionaries of the training set."""

    speaks = False

    def commands(self) -> list[str]:
        source, target = self.settings["langs"]
        return [
            f"fairseq-preprocess --source-lang {source} --target-lang {target} {plugin(self)} "
            f"--testpref {self.at('text', 'text')} --srcdict {self.at('data', f'dict.{source}.txt')} "
            f"--tgtdict {self.at('data', f'dict.{target}.txt')} --workers $(nproc) --destdir ."
        ]

    def check(self, folder: Path) -> None:
        check_counts(self, folder, {"test": self.at("text", "text")})


def check_counts(step: Step, folder: Path, prefixes: Mapping[str, str]) -> None:
    """Raise a StepError unless fairseq-preprocess counted one sentence for each line of the sets *prefixes*."""
    log = (folder / "preprocess.log").read_text(encoding="utf-8")
    counted = dict(re.findall(r"\] (.+): (\d+) sents,", log))
    for prefix in prefixes.values():
        for lang in step.settings["langs"]:
            lines = count_lines(str(folder / f"{prefix}.{lang}"))
            if counted.get(f"{prefix}.{lang}") != str(lines):
                raise StepError(f"{step.name}: {prefix}.{lang} has {lines} lines, but {folder}/preprocess.log not")


class Translate(Step):
    """Translates one test set: ``generate.txt``, and ``hypotheses.de`` with one line for each line of the source."""

    speaks = False

    def commands(self) -> list[str]:
        s, (source, target) = self.settings, self.settings["langs"]
        model = self.at("data", subwords(s["bpe"]))
        text_flags = f"--tokenizer moses --moses-no-dash-splits --bpe subword_nmt --bpe-codes {model}"
        if s["bpe"] == "sentencepiece":
            text_flags = f"--bpe sentencepiece --sentencepiece-model {model}"
        device = "" if machine.devices(self.options["gpus"], "fp32") else "--cpu "
        more = quoted(*shlex.split(s["generate_flags"]))
        return [
            f"fairseq-generate {self.at('test')} --source-lang {source} --target-lang {target} {plugin(self)} "
            f"--path {self.at('model', 'averaged.pt')} --gen-subset test --beam {s['beam']} --lenpen "
            f"{s['length_penalty']} --max-len-a 1 --max-len-b {s['max_len_b']} {text_flags} --max-tokens 8000 "
            f"--no-progress-bar {device}{more} > generate.txt",
            f"python -m recipes.text.translations --generated generate.txt --source {self.at('text', f'text.{source}')}"
            f" --output hypotheses.{target}",
        ]


class Score(Step):
    """Scores the translations of one test set with sacreBLEU and other metrics: ``score.json``."""

    speaks = False

    def commands(self) -> list[str]:
        source, target = self.settings["langs"]
        names = [f"text.{n + 1}.{target}" if n else f"text.{target}" for n in range(self.settings["references"])]
        references = [self.at("text", name) for name in names]
        more = quoted(*shlex.split(self.settings["score_flags"]))
        return [
            f"python -m fairseq_rope score --sys {self.at('translations', f'hypotheses.{target}')} "
            f"--ref {quoted(*references)} --src {self.at('text', f'text.{source}')} --target-lang {language(target)} "
            f"--tokenize {self.settings['tokenize']} --json {more} > score.json"
        ]


class Export(Step):
    """Converts the averaged model to CTranslate2: the folder ``ctranslate2``."""

    speaks = False

    def commands(self) -> list[str]:
        s = self.settings
        more = " --shortlist" if s["export_shortlist"] else ""
        if overrides := re.search(r"--model-overrides[ =]+(\S.*)", s["generate_flags"]):  # the model that was scored
            more += f" --model-overrides {quoted(shlex.split(overrides[1])[0])}"
        return [
            f"python -m fairseq_rope export {plugin(self)} --path {self.at('model', 'averaged.pt')} --data "
            f"{self.at('data')} --output ctranslate2 --quantization {s['export_quantization']} --beam {s['beam']} "
            f"--lenpen {s['length_penalty']} --max-len-b {s['max_len_b']}{more}"
        ]


def subwords(bpe: str) -> str:
    """Return the name of the file of the subword model."""
    return str(SUBWORDS[bpe.replace("-", "_")])


@dataclass(frozen=True, eq=False)
class Pipeline:
    """The steps of one system from one seed. Steps that read the same are the same step for all systems and seeds."""

    system: str
    seed: int
    settings: Settings
    precision: str  # of the training; never "auto"
    work: Work
    data: Path | None  # the user's folder with files of the corpus
    manifest: Path | None
    entries: Mapping[str, Entry]  # of the manifest
    of_sweep: str = ""  # "KEY=VALUE" of a training that chooses a value

    @property
    def title(self) -> str:
        return ", ".join(filter(None, (self.system, f"seed {self.seed}", self.of_sweep)))

    @property
    def langs(self) -> list[str]:
        return [self.settings.source_lang, self.settings.target_lang]

    @functools.cached_property
    def bpe(self) -> str:
        """The program for subwords; by default, sentencepiece where Moses' tokeniser does not divide a language."""
        unspaced = [lang for lang in self.langs if language(lang) in UNSPACED]
        if self.settings.bpe == "subword-nmt" and unspaced:
            raise InputError(f"bpe=subword-nmt: {unspaced[0]} has no blanks between words; set bpe=sentencepiece")
        if self.settings.bpe == "auto":
            return "sentencepiece" if unspaced or "ko" in map(language, self.langs) else "subword-nmt"
        return self.settings.bpe

    @functools.cached_property
    def tokenize(self) -> str:
        return self.settings.tokenize or default_tokenize(self.settings.target_lang)

    def _read(self, *names: str, **more: Any) -> dict[str, Any]:
        """The settings *names*, with the languages, the program for subwords, and *more*."""
        return {"langs": self.langs, **{name: getattr(self.settings, name) for name in names}, **more}

    def text(self, name: str) -> Step:
        """The raw text of the set *name*, whose files are the user's or those of the manifest."""
        setting = f"{name}_files" if name in ("train", "valid") else f"test_files.{name}"
        value = str(self.settings.test_files.get(name) or getattr(self.settings, f"{name}_files", ""))
        digests, to_fetch = dict[str, str](), dict[str, str]()

        def place(template: str) -> str:
            """Where *template* lies: in a folder of the user, or, without one, in that of the step that fetches."""
            folder = ""
            for file in dict.fromkeys(_file(side) for side in self._sides(template)):
                of_user, entry = self._of_user(file), self.entries.get(file)
                if of_user is not None:
                    folder, digests[of_user.path.name] = f"{of_user.path.parent}/", of_user.digest[:16]
                elif entry is not None:
                    to_fetch[file] = entry.checksum or entry.url
                    is_sha = to_fetch[file].startswith("sha256:")
                    digests[file] = to_fetch[file][7:23] if is_sha else to_fetch[file]
                else:
                    where = f"the manifest {self.manifest}" if self.manifest else "data=DIR, which is not given"
                    raise InputError(f"{setting}: {file} is neither an absolute path nor in {where}")
            return folder + _named(template) if folder else template

        templates = corpora(value, setting)
        places = [[place(template) for template in corpus] for corpus in templates]
        named = [[_named(template) for template in corpus] for corpus in templates]
        read = {"langs": self.langs, "corpora": named, "references": len(named[0]), "files": digests}
        fetch_files = Fetch("fetch", name, {"files": to_fetch}, {}, {"manifest": str(self.manifest)})
        return Text("text", name, read, {"files": fetch_files} if to_fetch else {}, {"corpora": places})

    def _of_user(self, name: str) -> File | None:
        """The file *name* of the corpus, if it is an absolute path or in the user's folder; checked by the manifest."""
        path = Path(name) if self.data is None else self.data / name
        if not path.is_absolute() or not path.exists() and name in self.entries:
            return None
        found, entry = self.work.file(path), self.entries.get(name)
        if entry is not None and path.exists() and (problem := _checked(path, entry)):
            raise InputError(f"{path} {problem}; manifest=none accepts other files")
        return found

    def _sides(self, template: str) -> list[str]:
        """*template* for the source and for the target."""
        source, target = (template.replace("{lang}", lang) for lang in self.langs)
        return [source.replace("{side}", "src"), target.replace("{side}", "ref")]

    def tokenised(self, name: str) -> Step:
        read = self._read("normalise_punctuation", bpe=self.bpe)
        return Tokenise("tokenise", name, read, {"text": self.text(name)})

    @functools.cached_property
    def clean(self) -> Step:
        read = self._read("max_words", "max_length_ratio", "holdout_every")
        return Clean("clean", "train", read, {"train": self.tokenised("train")})

    @functools.cached_property
    def learnt_bpe(self) -> Step:
        return LearnBpe("learn-bpe", "", self._read("vocab_size", bpe=self.bpe), {"train": self.clean})

    def in_subwords(self, name: str) -> Step:
        of_clean = name == "train" or name == "valid" and self.settings.holdout_every
        text, file = (self.clean, name) if of_clean else (self.tokenised(name), "text")
        inputs = {"subwords": self.learnt_bpe, "text": text}
        return ApplyBpe("apply-bpe", name, self._read(bpe=self.bpe, file=file), inputs)

    @functools.cached_property
    def data_bin(self) -> Step:
        inputs = {**{name: self.in_subwords(name) for name in ("train", "valid")}, "subwords": self.learnt_bpe}
        return Binarise("binarise", "", self._read(bpe=self.bpe), inputs)

    def test_bin(self, name: str) -> Step:
        inputs = {"text": self.in_subwords(name), "data": self.data_bin}
        return BinariseTest("binarise", name, self._read(), inputs)

    @functools.cached_property
    def train(self) -> Train:
        return Train.of(self.label, self.settings, self.precision, self.seed, self.data_bin)

    @functools.cached_property
    def average(self) -> Average:
        return Average.of(self.label, self.settings, self.train)

    def translate(self, name: str) -> Step:
        read = self._read("beam", "length_penalty", "max_len_b", "generate_flags", bpe=self.bpe)
        inputs = {
            "model": self.average, "data": self.data_bin, "test": self.test_bin(name), "text": self.text(name)
        }  # fmt: skip
        options = {"user_dir": self.settings.user_dir, "gpus": self.settings.gpus}
        return Translate("translate", f"{self.label}-{name}", read, inputs, options)

    def score(self, name: str) -> Step:
        text = self.text(name)
        read = self._read("score_flags", tokenize=self.tokenize, references=text.settings["references"])
        return Score("score", f"{self.label}-{name}", read, {"translations": self.translate(name), "text": text})

    @functools.cached_property
    def export(self) -> Step:
        names = ("export_quantization", "export_shortlist", "beam", "length_penalty", "max_len_b", "generate_flags")
        inputs, options = {"model": self.average, "data": self.data_bin}, {"user_dir": self.settings.user_dir}
        return Export("export", self.label, self._read(*names), inputs, options)

    @property
    def label(self) -> str:
        """What distinguishes the folders of this model for people. Systems with the same settings share them."""
        return f"{self.settings.arch.removeprefix('transformer_')}-seed{self.seed}"

    def steps(self, until: str) -> list[Step]:
        """The last steps that a run makes; what these need comes before them. *until* is one of ``STEPS``."""
        tests = [*self.settings.test_files]
        if until in ("fetch", "text", "tokenise"):
            sets = ["train", *["valid"] * bool(self.settings.valid_files), *tests]
            made = [self.text(name) if until != "tokenise" else self.tokenised(name) for name in sets]
            if until == "fetch":
                made = [step for text in made for step in text.needs()]
            return list({step.name: step for step in made}.values())
        if until == "export":
            return [*(self.score(name) for name in tests), self.export]
        one = {"clean": self.clean, "learn-bpe": self.learnt_bpe, "binarise": self.data_bin, "train": self.train}
        if until in one:
            return [one[until]] + [self.test_bin(name) for name in tests] * (until == "binarise")
        if until == "average" or not tests:
            return [self.average]
        return [self.translate(name) if until == "translate" else self.score(name) for name in tests]


_checked = functools.cache(fetch.check)  # each file once


def _file(place: str) -> str:
    """The file of *place*, FILE or ARCHIVE:MEMBER."""
    archive = ARCHIVE.fullmatch(place)
    return archive[1] if archive else place


def _named(place: str) -> str:
    """*place* without folders."""
    file = _file(place)
    return Path(file).name + place[len(file) :]


STEPS = tuple("fetch text tokenise clean learn-bpe binarise train average translate score export".split())
