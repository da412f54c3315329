"""One experiment: its settings, and the names of all files that its stages read and write."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from recipes.pipeline.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
SETS = ("train", "valid", "test")


class StageError(RuntimeError):
    """A stage cannot run or has failed; the message says which, and what to do."""


@dataclass
class Experiment:
    """What is run, in which folder and on what.

    Attributes:
        settings: the recipe's, with those of the command line
        work: the recipe's work folder; what depends on the data alone lies directly in it
        arch, seed: the model; what depends on these too lies in ``work/ARCH.seedSEED``
        name: what the user has added to the name of that folder
        differs: settings that make another model than the recipe's own, which adds their hash to the name
        bpe: "subword-nmt" or "sentencepiece"
        tokenize: sacreBLEU's tokeniser
        gpus: how many to train on, None for all that there are; 0 for the CPU
        data_dir: a folder of files that were fetched elsewhere, which is only read
        manifest: names, sizes, checksums and addresses of the corpus' files; None if it has none
        dry_run: print commands, run none, write nothing
    """

    settings: Settings
    work: Path
    arch: str
    seed: int
    name: str = ""
    differs: dict[str, Any] = field(default_factory=dict)
    bpe: str = "subword-nmt"
    tokenize: str = "13a"
    gpus: int | None = None
    data_dir: Path | None = None
    manifest: Path | None = None
    dry_run: bool = False

    source = property(lambda self: self.settings.source_lang)
    target = property(lambda self: self.settings.target_lang)

    # -- texts and binary data ---------------------------------------------------------------------

    def files(self) -> list[str]:
        """The names of the corpus' files, each once."""
        names = [template.partition(":")[0] for n in SETS for template in self.settings.templates(n)]
        return list(dict.fromkeys(file for name in names for file in self.sides(name)))

    def sides(self, template: str) -> tuple[str, str]:
        """*template* with {lang} and {side} filled in, for source and target."""
        source, target = (
            template.replace("{lang}", lang).replace("{side}", side)
            for lang, side in ((self.source, "src"), (self.target, "ref"))
        )
        return source, target

    def fetched(self, file: str) -> Path:
        """Where *file* of the corpus is: in the data folder if it is there, else among the downloads."""
        if self.data_dir is not None and (self.data_dir / file).exists():
            return self.data_dir / file
        return self.work / "downloads" / file

    def text(self, folder: str, name: str, lang: str) -> Path:
        """The text of the set *name* in ``work/FOLDER``: raw, tokenised, clean or bpe."""
        return self.work / folder / f"{name}.{lang}"

    def texts(self, folder: str, sets: Iterable[str] = SETS) -> list[Path]:
        """The texts of ``work/FOLDER``: train, valid and test in both languages."""
        return [self.text(folder, n, lang) for n in sets for lang in (self.source, self.target)]

    @property
    def raw_sets(self) -> list[str]:
        """The sets that have files of their own; without valid_files, stage 4 holds training pairs out."""
        return [name for name in SETS if self.settings.templates(name)]

    test_source = property(lambda self: self.text("raw", "test", self.source))
    test_reference = property(lambda self: self.text("raw", "test", self.target))
    data_bin = property(lambda self: self.work / "data-bin")

    @property
    def subwords(self) -> str:
        """The name of the file of subwords, in ``bpe/`` and beside the dictionaries."""
        return "bpecodes" if self.bpe == "subword-nmt" else "sentencepiece.bpe.model"

    @property
    def binary_data(self) -> list[Path]:
        """The files in ``data-bin``: sets, dictionaries and subwords."""
        languages = (self.source, self.target)
        pair = "-".join(languages)
        names = [f"{n}.{pair}.{lang}.{end}" for n in SETS for lang in languages for end in ("bin", "idx")]
        return [self.data_bin / name for name in (*names, *(f"dict.{n}.txt" for n in languages), self.subwords)]

    # -- the model ---------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """What the name of the model's folder has after its seed; "" for the recipe's own settings."""
        if self.name or not self.differs:
            return self.name
        return hashlib.sha256(json.dumps(self.differs, sort_keys=True).encode()).hexdigest()[:8]

    # The name of the model's folder for the recipe's own settings.
    unlabelled = property(lambda self: f"{self.arch}.seed{self.seed}")
    model = property(lambda self: self.work / ".".join(filter(None, (self.unlabelled, self.label))))
    checkpoints = property(lambda self: self.model / "checkpoints")
    last_checkpoint = property(lambda self: self.checkpoints / "checkpoint_last.pt")
    # fairseq's lines of JSON about whole epochs. Before those of each process that trained comes one line about the
    # process: commit, versions, hardware, batches, command.
    history = property(lambda self: self.checkpoints / "history.jsonl")
    averaged = property(lambda self: self.model / "averaged.pt")
    generated = property(lambda self: self.model / "generate.txt")  # the output of fairseq-generate
    hypotheses = property(lambda self: self.model / f"hypotheses.{self.target}")  # plain text, in the test set's order
    score = property(lambda self: self.model / "score.json")
    exported = property(lambda self: self.model / "ctranslate2")  # a folder
