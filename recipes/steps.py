"""The steps from raw text to a score, in their order. Each names its inputs and the settings that it reads.

``Pipeline`` connects them for one training. ``training.py`` has the steps that train and average.
"""

import filecmp
import functools
import re
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq_rope.errors import InputError
from fairseq_rope.lines import read_lines
from fairseq_rope.text.languages import UNSPACED, default_tokenize, language
from fairseq_rope.text.plain import check_plain
from fairseq_rope.text.subwords import SUBWORDS
from recipes import machine
from recipes.corpus import Corpus
from recipes.settings import Settings, corpora
from recipes.training import Average, Train, plugin
from recipes.work import Step, StepError


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
    def named_by(self) -> dict[str, str]:
        return {}  # where the files come from does not matter

    def references(self) -> list[str]:
        """Return the names of the files of the references."""
        target = self.settings["langs"][1]
        return [f"text.{n + 1}.{target}" if n else f"text.{target}" for n in range(self.settings["references"])]

    def commands(self) -> list[str]:
        (source, target), lines = self.settings["langs"], []
        lower_case = ["--lower-case"] * self.settings["lower_case"]
        corpora = [[self._path(template) for template in corpus] for corpus in self.options["corpora"]]
        for number in range(self.settings["references"]):
            name = f"text.{number + 1}" if number else "text"
            references = [f"--reference {quoted(corpus[number])}" for corpus in corpora] if number else []
            lines.append(
                f"python -m recipes.text.extract --source-lang {source} --target-lang {target} --output {name} "
                + " ".join([*lower_case, *(quoted(corpus[0]) for corpus in corpora), *references])
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
    """Removes training pairs that cannot be translations of each other; ``heldout.en`` has the pairs held out."""

    def commands(self) -> list[str]:
        s, (source, target) = self.settings, self.settings["langs"]
        held_out = f" --holdout-every {s['holdout_every']} --heldout heldout" if s["holdout_every"] else ""
        return [
            f"python -m recipes.text.clean --source-lang {source} --target-lang {target} --input "
            f"{self.at('train', 'text')} --output text --max-words {s['max_words']} "
            f"--max-ratio {s['max_length_ratio']}{held_out}"
        ]


class LearnBpe(Step):
    """Learns one byte-pair encoding over both languages."""

    def commands(self) -> list[str]:
        learn = "sentencepiece-train" if self.settings["bpe"] == "sentencepiece" else "learn"
        texts = [self.at("train", f"text.{lang}") for lang in self.settings["langs"]]
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
        text = self.inputs["text"]
        assert isinstance(text, Text)
        references = [self.at("text", name) for name in text.references()]
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

    seed: int
    settings: Settings
    precision: str  # of the training; never "auto"
    corpus: Corpus

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

    def text(self, name: str) -> Text:
        """Return the step that extracts the set *name*."""
        setting = f"{name}_files" if name in ("train", "valid") else f"test_files.{name}"
        value = str(self.settings.test_files.get(name) or getattr(self.settings, f"{name}_files", ""))
        located = [
            [self.corpus.locate(one, self.langs, setting, n > 0) for n, one in enumerate(corpus)]
            for corpus in corpora(value, setting)
        ]
        all_located = [one for corpus in located for one in corpus]
        files = {file: digest for one in all_located for file, digest in one.digests.items()}
        names = [[one.name for one in corpus] for corpus in located]
        read = self._read("lower_case", corpora=names, references=len(names[0]), files=files)
        paths = {"corpora": [[one.path for one in corpus] for corpus in located]}
        to_fetch = {file: known for one in all_located for file, known in one.to_fetch.items()}
        fetched = Fetch("fetch", name, {"files": to_fetch}, {}, {"manifest": str(self.corpus.manifest)})
        return Text("text", name, read, {"files": fetched} if to_fetch else {}, paths)

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
        is_held_out = name == "valid" and self.settings.holdout_every
        text = self.clean if name == "train" or is_held_out else self.tokenised(name)
        file = "heldout" if is_held_out else "text"
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
        read = self._read("score_flags", tokenize=self.tokenize)
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

    @property
    def tests(self) -> list[str]:
        return [*self.settings.test_files]

    @property
    def sets(self) -> list[str]:
        """The sets that have files."""
        return ["train", *["valid"] * bool(self.settings.valid_files), *self.tests]


def _scored(pipeline: Pipeline) -> list[Step]:
    return [*map(pipeline.score, pipeline.tests)] or [pipeline.average]


# Where a run can stop: the steps that it makes, with all that these need.
STEPS: dict[str, Callable[[Pipeline], list[Step]]] = {
    "fetch": lambda one: [step for name in one.sets for step in one.text(name).needs()],
    "text": lambda one: [*map(one.text, one.sets)],
    "tokenise": lambda one: [*map(one.tokenised, one.sets)],
    "clean": lambda one: [one.clean],
    "learn-bpe": lambda one: [one.learnt_bpe],
    "binarise": lambda one: [one.data_bin, *map(one.test_bin, one.tests)],
    "train": lambda one: [one.train],
    "average": lambda one: [one.average],
    "translate": lambda one: [*map(one.translate, one.tests)] or [one.average],
    "score": _scored,
    "export": lambda one: [*_scored(one), one.export],
}
