"""One experiment: its settings, and the paths of all files that its stages read and write."""

import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fairseq_rope.scorers import Scorer
from fairseq_rope.text import segments
from fairseq_rope.text.subwords import SUBWORDS
from recipes.pipeline.settings import Settings
from recipes.pipeline.start import read_sharing
from recipes.pipeline.unit import SEGMENTS, SENTENCES
from recipes.run.run import Run
from recipes.run.shell import quoted
from recipes.text.extract import ARCHIVE

LEARNT: tuple[str, ...] = ("train", "valid")  # the sets on which the model depends
TEST: tuple[str, ...] = ("test",)
SETS = (*LEARNT, *TEST)
TRANSLATED = "translated"  # the set of pairs whose sources or targets a model has made
MONOLINGUAL = "monolingual"  # the text of the target language whose sources it makes


def file_of(place: str) -> str:
    """The file of *place*, FILE or ARCHIVE:MEMBER."""
    archive = ARCHIVE.fullmatch(place)
    return archive[1] if archive else place


@dataclass
class Experiment(Run):
    """One run of a recipe: settings, folders, architecture, seed and device."""

    settings: Settings  # the recipe's settings with the overrides of the command line
    work: Path  # the recipe's work folder; files that depend only on the data are directly in it
    arch: str
    seed: int  # files that depend on the model are in ``work/SYSTEM.seedSEED``
    name: str = ""  # the user's suffix to the name of that folder
    # Settings that differ from the recipe's own and change the model; their hash is the default suffix.
    differs: dict[str, Any] = field(default_factory=dict)
    bpe: str = "subword-nmt"  # or "sentencepiece"
    tokenize: str = "13a"  # sacreBLEU's tokeniser
    gpus: int | None = None  # to train on; None: all of them; 0: the CPU
    data_dir: Path | None = None  # the folder of files that the user has, which is never written to
    manifest: Path | None = None  # names, sizes, checksums and URLs of the corpus' files
    dry_run: bool = False  # print commands, run none, write nothing
    system: str = ""  # the name of the model in comparisons; default: *arch*
    scorers: tuple[Scorer, ...] = ()  # programs that score the translations, in comparisons
    training_of: str = ""  # the system whose model it is, if it differs from that only in the search; default: its own
    tuned: str = ""  # "KEY=VALUE" of a run that is only trained, to choose the value
    precision_of_others: str = ""  # of the earlier runs of a comparison, which ``precision: auto`` takes for new ones

    def __post_init__(self) -> None:
        self.system = self.system or self.arch

    languages = property(lambda self: f"--source-lang {self.source} --target-lang {self.target}")  # as flags
    source = property(lambda self: self.settings.source_lang)
    target = property(lambda self: self.settings.target_lang)

    @functools.cached_property
    def sharing(self) -> str:
        """The flags for shared embeddings: those of start_checkpoint. Raises a SettingsError if that does not fit."""
        if self.start_checkpoint is None:
            return "--share-all-embeddings "
        return read_sharing(self.settings, self.arch, self.start_checkpoint, self.start_dictionaries)

    @property
    def title(self) -> str:
        return ", ".join(filter(None, [self.system, f"seed {self.seed}", self.tuned]))

    def values(self) -> dict[str, Any]:
        return asdict(self.settings)

    # What a line of the text is that fairseq reads.
    unit = property(lambda self: SEGMENTS if self.settings.segment_tokens else SENTENCES)

    # -- texts and binary data ---------------------------------------------------------------------

    def files(self, sets: Iterable[str] = SETS) -> list[str]:
        """The names of the files of *sets* that stage 1 fetches or finds, without duplicates."""
        places = [place for n in sets for corpus in self.corpora(n) for place in corpus]
        names = dict.fromkeys(map(file_of, places))
        return [name for name in names if not Path(name).is_absolute()]

    def corpora(self, name: str) -> list[tuple[str, ...]]:
        """The source, the target and the further references of each corpus of the set *name*: FILE or ARCHIVE:MEMBER.

        An absolute path is a file of the user, which stage 2 reads where it is.
        """
        corpora = []
        for template, *references in self.settings.templates(name):
            source, target = self.sides(template)
            corpora.append((source, target, *(self.sides(reference)[1] for reference in references)))
        return corpora

    def sides(self, template: str) -> tuple[str, str]:
        """*template* for the source and for the target, with {lang} and {side} filled in."""
        source, target = (template.replace("{lang}", lang) for lang in (self.source, self.target))
        return source.replace("{side}", "src"), target.replace("{side}", "ref")

    def fetched(self, file: str) -> Path:
        """The path of *file* of the corpus: in the data folder if it exists there, else in ``downloads``."""
        if self.data_dir is not None and (self.data_dir / file).exists():
            return self.data_dir / file
        return self.work / "downloads" / file

    def text(self, folder: str, name: str, lang: str) -> Path:
        """The path of the set *name* in ``work/FOLDER``; *folder* is raw, tokenised, clean, bpe or segments."""
        return self.work / folder / f"{name}.{lang}"

    def texts(self, folder: str, sets: Iterable[str]) -> list[Path]:
        """The paths of *sets* in ``work/FOLDER``, each in both languages."""
        return [self.text(folder, n, lang) for n in sets for lang in (self.source, self.target)]

    def given(self, sets: Iterable[str]) -> list[str]:
        """Those of *sets* that have files. Without valid_files, stage 4 takes the validation set from the training set.

        A recipe may have no test set.
        """
        return [name for name in sets if self.settings.templates(name)]

    # The exported model that makes one side of TRANSLATED; "": there are no such pairs.
    translator = property(lambda self: self.settings.back_translation_model or self.settings.distillation_model)

    # The set of pairs whose sources or targets that model makes, if there is one.
    translated = property(lambda self: [TRANSLATED] if self.translator else [])

    @property
    def learnt_from(self) -> list[str]:
        """The sets of sentences that have files in ``raw`` and on which the model depends."""
        return [*self.given(LEARNT), *self.translated]

    # The test set in ``raw``, once for each of its references: test, test.2, test.3, …
    with_references = property(lambda self: [f"test.{n + 1}" if n else "test" for n in range(self.settings.references)])
    test_source = property(lambda self: self.text("raw", f"test{self.unit.plain}", self.source))
    test_references = property(lambda self: self._of_references(self.unit.plain))
    reference_documents = property(lambda self: self._of_references(".documents"))  # one document a line

    def _of_references(self, kind: str) -> list[Path]:
        return [self.text("raw", f"{name}{kind}", self.target) for name in self.with_references]

    in_subwords = property(lambda self: self.unit.folder)
    data_bin = property(lambda self: self.work / "data-bin")

    # The name of the subword model's file, in ``bpe/`` and beside the dictionaries.
    subwords = property(lambda self: SUBWORDS[self.bpe.replace("-", "_")])

    @property
    def binary_data(self) -> list[Path]:
        """The files in ``data-bin`` on which the model depends: sets, dictionaries, subword model, form of segments."""
        more = [*(f"dict.{lang}.txt" for lang in (self.source, self.target)), self.subwords]
        more += [segments.FILE] if self.unit.has_documents else []
        return [*self.binary_sets(LEARNT), *(self.data_bin / name for name in more)]

    def binary_sets(self, sets: Iterable[str]) -> list[Path]:
        """The files of *sets* in ``data-bin``."""
        pair, both = f"{self.source}-{self.target}", (self.source, self.target)
        return [self.data_bin / f"{n}.{pair}.{lang}.{end}" for n in sets for lang in both for end in ("bin", "idx")]

    @property
    def start_checkpoint(self) -> Path | None:
        """The checkpoint of the old model, if the training starts from one."""
        path = self.settings.start_checkpoint.replace("{system}", self.training.system)
        return Path(path.replace("{seed}", str(self.seed))) if path else None

    # The folder with the dictionaries and the subword model of the old model, if the training starts from one.
    start_data = property(lambda self: Path(self.settings.start_data) if self.settings.start_data else None)

    @property
    def start_dictionaries(self) -> list[Path]:
        """The dictionaries of the old model: source, target. Empty if there is none."""
        return [self.start_data / f"dict.{n}.txt" for n in (self.source, self.target)] if self.start_data else []

    @property
    def user_dir(self) -> str:
        """The flag ``--user-dir`` of fairseq's programs, which run in the project's folder."""
        return f"--user-dir {quoted(self.settings.user_dir or 'fairseq_rope')}"

    @property
    def own_user_dir(self) -> str:
        """The flag ``--user-dir`` of ``fairseq-rope``, which needs none for the plugin, and a blank; "" without one."""
        return f"{self.user_dir} " if self.settings.user_dir else ""

    # -- the model ---------------------------------------------------------------------------------

    @property
    def label(self) -> str:
        """The suffix of the model's folder; "" for the recipe's own settings."""
        if self.name or not self.differs:
            return self.name
        return hashlib.sha256(json.dumps(self.differs, sort_keys=True).encode()).hexdigest()[:8]

    @property
    def training(self) -> "Experiment":
        """The run that trained the model."""
        return replace(self, system=self.training_of, training_of="") if self.training_of else self

    @property
    def unlabelled(self) -> str:
        return f"{self.system}.seed{self.seed}"

    @property
    def model(self) -> Path:
        return self.work / ".".join(filter(None, (self.unlabelled, self.label)))

    @property
    def resumable(self) -> tuple[Path, ...]:
        return (self.checkpoints,)

    start_copy = property(lambda self: self.model / "start.pt")  # the checkpoint from which the training starts
    checkpoints = property(lambda self: self.model / "checkpoints")
    last_checkpoint = property(lambda self: self.checkpoints / "checkpoint_last.pt")
    # fairseq's JSON lines about whole epochs. A line about the training process (commit, versions, hardware, batches,
    # command) comes before its epochs, and a line with its peak memory after them.
    history = property(lambda self: self.checkpoints / "history.jsonl")
    averaged = property(lambda self: self.model / "averaged.pt")
    generated = property(lambda self: self.model / "generate.txt")  # the output of fairseq-generate
    hypotheses = property(lambda self: self.model / f"hypotheses.{self.target}")  # plain text, in the test set's order
    score = property(lambda self: self.model / "score.json")
    # Of a text with documents: how many translated segments have other separators than their source, the translated
    # documents, one a line, and their score.
    separators = property(lambda self: self.model / "separators.json")
    document_hypotheses = property(lambda self: self.model / f"documents.{self.target}")
    document_score = property(lambda self: self.model / "score.documents.json")
    exported = property(lambda self: self.model / "ctranslate2")  # a folder
