"""The settings of a recipe, from its settings.yaml and --set KEY=VALUE.

:class:`Settings` has the type, the range or choices, and the description of every setting.
"""

import argparse
import contextlib
import difflib
import math
import re
import shlex
from collections.abc import Callable, Iterable
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

from fairseq_rope.errors import InputError
from fairseq_rope.launch import flags as launcher_flags
from fairseq_rope.serving.exported_folder import QUANTIZATIONS
from recipes.run.yaml_file import SettingsError, read_yaml, read_yaml_file


def _setting(default: Any, description: str, least: float = -math.inf, most: float = math.inf, **more: object) -> Any:
    """A field with its default and its range. *more* has its choices, its pattern and how that looks, or its effect."""
    return field(default=default, metadata={"description": description, "least": least, "most": most, **more})


def _learnt(default: Any, description: str, least: float = -math.inf, most: float = math.inf, **more: object) -> Any:
    """A setting that changes what a model learns: another value starts a new training."""
    return _setting(default, description, least, most, learnt_from=True, **more)


_LANGUAGE: Any = {"pattern": r"[a-z]{2,3}([-_][A-Za-z0-9]{2,8})*", "looks": "be a language's code, like en or pt-BR"}
_SIDES = ("none", "source", "target", "both")
_PRECISIONS = ("auto", "fp32", "fp16", "bf16")
_SEGMENTS = (
    "n: blank lines divide the text into documents, whose consecutive sentences are joined to segments of up to n "
    "subwords; 0: the text has no documents"
)
# Each back_translation_search, and its flags of fairseq-rope translate. Edunov et al. 2018 (arXiv:1808.09381) compare
# them.
SEARCHES = {"beam": "", "sampling": " --sampling", "top10": " --sampling --sampling-topk 10"}
_SYMBOLS = ("<s>", "<pad>", "</s>", "<unk>")  # of fairseq's dictionaries
_TAG: Any = {"pattern": r"\S*", "looks": "have no blanks", "names_model": True}
_PAIR = r"\( *0?\.\d+ *, *0?\.\d+ *\)"


@dataclass
class Settings:
    """The settings. A settings.yaml must have those without a default: the languages and the training set.

    The defaults are those of RoFormer's translation model, where the paper states them, and else of transformer-base.
    """

    source_lang: str = _setting(MISSING, "code of the source language", **_LANGUAGE)
    target_lang: str = _setting(MISSING, "code of the target language", **_LANGUAGE)
    train_files: str = _setting(
        MISSING, "training set: FILE or ARCHIVE:MEMBER; {lang} is the language, {side} is src or ref; more are joined"
    )
    valid_files: str = _setting("", "validation set, written like train_files; empty with holdout_every")
    test_files: str = _setting("", "test set, written like train_files; further references after commas; empty: none")
    normalise_punctuation: str = _setting("none", "sides with normalised punctuation", choices=_SIDES, names_model=True)
    max_words: int = _setting(250, "remove training pairs with a longer side, in words", 1, names_model=True)
    max_length_ratio: float = _setting(9.0, "remove pairs with a greater ratio of lengths", 1, names_model=True)
    holdout_every: int = _setting(0, "n: use every n-th pair or document to validate, instead of valid_files", 0)
    vocab_size: int = _setting(37000, "size of the subword vocabulary of both languages together", 1, names_model=True)
    segment_tokens: int = _setting(0, _SEGMENTS, 0, names_model=True)
    segment_share: float = _setting(0.5, "share of the training sentences in segments", 0, 1, names_model=True)
    start_checkpoint: str = _setting("", "checkpoint to start from, with {system}, {seed}; or empty", names_model=True)
    start_data: str = _setting("", "folder with dictionaries and subword model of start_checkpoint", names_model=True)

    back_translation_files: str = _setting(
        "", "monolingual texts of the target language, also compressed", names_model=True
    )
    back_translation_model: str = _setting(
        "", "exported model that translates back_translation_files", names_model=True
    )
    back_translation_search: str = _setting(
        "beam",
        "back-translation by beam search, sampling from all words, or from the 10 best",
        choices=tuple(SEARCHES),
        names_model=True,
    )
    back_translation_tag: str = _setting("<bt>", "a word before each back-translated source; empty: none", **_TAG)
    back_translation_share: float = _setting(0.5, "largest share of back-translated pairs", 0, 1, names_model=True)
    distillation_model: str = _setting(
        "", "exported model that makes the targets of the training set", names_model=True
    )
    translate_flags: str = _setting("", "flags of fairseq-rope translate for both: where its processes run")

    layers: int = _learnt(6, "number of encoder layers, and of decoder layers", 1)
    width: int = _learnt(512, "size of embeddings and layers", 1)
    ffn_width: int = _learnt(2048, "size inside the feed-forward networks", 1)
    heads: int = _learnt(8, "number of attention heads", 1)
    dropout: float = _learnt(0.1, "probability of dropout", 0, 1)
    adam_betas: str = _learnt("(0.9, 0.98)", "Adam's betas", pattern=_PAIR, looks="be a pair like (0.9, 0.98)")
    adam_eps: float = _learnt(1e-9, "Adam's epsilon", 0, 1)
    warmup_init_lr: float = _learnt(1e-7, "learning rate of the first update", 0, 1)
    learning_rate: float = _learnt(5e-4, "highest learning rate, at the end of the warm-up", 0, 1, above_least=True)
    label_smoothing: float = _learnt(0.1, "label smoothing", 0, 1)
    warmup_updates: int = _learnt(4000, "number of warm-up updates", 0)
    tokens_per_update: int = _learnt(25000, "tokens of the longer side in an update, over all devices", 1)
    max_updates: int = _setting(100000, "maximum number of updates; 0: no limit", 0)
    max_epochs: int = _setting(0, "maximum number of epochs; 0: no limit", 0)

    tokens_per_device: int = _setting(4096, "maximum tokens in a batch of one device", 1)
    precision: str = _setting("auto", "number format of the training; auto: the best in hardware", choices=_PRECISIONS)
    save_every_updates: int = _setting(1250, "updates between checkpoints; 0: one checkpoint an epoch", 0)

    average_checkpoints: int = _setting(5, "number of last checkpoints to average", 1)
    beam: int = _setting(4, "beam size", 1)
    length_penalty: float = _setting(0.6, "length penalty: a score is divided by its length to this power")
    max_len_b: int = _setting(50, "maximum output length, in tokens more than the source", 0)
    export_quantization: str = _setting(
        "int8", "number format of the model that stage 11 writes", choices=QUANTIZATIONS
    )
    export_shortlist: bool = _setting(False, "whether stage 11 builds a shortlist, for which it needs eflomal")
    user_dir: str = _setting("", "folder with your own encodings, for fairseq's --user-dir; empty: only the plugin's")
    fairseq_train_flags: str = _learnt("", "more flags for fairseq-train")
    fairseq_generate_flags: str = _setting("", "more flags for fairseq-generate")
    disk_gb: float = _setting(0.0, "disk space of the whole work folder, in GB", 0)
    memory_gb: float = _setting(0.0, "memory that the machine must have, in GB", 0)

    def templates(self, name: str) -> list[list[str]]:
        """The corpora of the set *name*: FILE or ARCHIVE:MEMBER, with {lang} and {side}.

        Those of the test set are followed by their further references.
        """
        corpora = shlex.split(getattr(self, f"{name}_files"))
        return [corpus.split(",") if name == "test" else [corpus] for corpus in corpora]

    @property
    def references(self) -> int:
        """The number of references of the test set; 0 without a test set."""
        return len(next(iter(self.templates("test")), []))


# Flags that the recipe sets itself, because they name files, sets, languages and processes, or limit the training. -a,
# -s and -t are short for others.
_BOTH = ("--source-lang", "--target-lang", "-s", "-t", "--user-dir")
OWN_FLAGS = {
    "train": (
        *("--arch", "-a", "--seed", "--save-dir", "--distributed-world-size", "--distributed-port", *_BOTH),
        *("--max-epoch", "--max-update", "--restore-file"),
    ),
    "generate": ("--path", "--gen-subset", "--results-path", *_BOTH),
}
INSTEAD = {
    "--user-dir": "set user_dir=DIR instead",
    "--max-epoch": "set max_epochs=N instead",
    "--max-update": "set max_updates=N instead",
    # A training with this flag begins with FILE each time that it starts, and so never resumes.
    "--restore-file": "set start_checkpoint=FILE and start_data=DIR instead",
}
FIELDS = {setting.name: setting for setting in fields(Settings)}
LEARNT_FROM = tuple(name for name, setting in FIELDS.items() if setting.metadata.get("learnt_from"))
# Settings that change the model. With other values than the recipe's own, its folder has another name.
NAMES_MODEL = tuple(name for name, setting in FIELDS.items() if {"learnt_from", "names_model"} & {*setting.metadata})


# -- reading -----------------------------------------------------------------------------------------


def read_settings(path: Path, overrides: Iterable[str] = ()) -> Settings:
    """The settings in *path*, with *overrides* of the form KEY=VALUE. Raises a SettingsError for a wrong type.

    The value of an override is read as YAML, unless the setting is a text. An integer is accepted as a float.
    """
    values = _read(path)
    for name in values:
        if name not in FIELDS:
            raise SettingsError(f"settings.yaml has {name}, which no recipe has; the nearest is {_near(name)}")
    for name, setting in FIELDS.items():
        if name not in values and setting.default is MISSING:
            raise SettingsError(f"settings.yaml has no {name}, which every recipe has")
    for name in values:
        values[name] = _as_float(FIELDS[name], values[name])
        if type(values[name]) is not FIELDS[name].type:
            raise SettingsError(f"{name} is {values[name]!r}, and must be of type {_type_name(FIELDS[name])}")
    own = Settings(**values)
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals:
            raise SettingsError(f"--set {override}: must have the form KEY=VALUE")
        if name not in FIELDS:
            raise SettingsError(f"--set {override}: {path} has no {name}; the nearest it has is {_near(name)}")
        values[name] = _overriding(FIELDS[name], text, getattr(own, name))
    return Settings(**values)


def _read(path: Path) -> dict[str, Any]:
    """The names and values in the YAML file *path*. Raises a SettingsError if it contains anything else."""
    settings = read_yaml_file(path, str(path))
    if not isinstance(settings, dict) or not settings:
        empty = settings is None or settings == {}
        problem = "is empty" if empty else "has no names of settings"
        raise SettingsError(f"{path}: {problem}, and must have lines of the form NAME: VALUE")
    return settings


def _near(name: object) -> str:
    return difflib.get_close_matches(str(name), FIELDS, n=1, cutoff=0.0)[0]


def _type_name(setting: Field[Any]) -> str:
    return getattr(setting.type, "__name__", str(setting.type))


def _as_float(setting: Field[Any], value: Any) -> Any:
    return float(value) if setting.type is float and type(value) is int else value


def _overriding(setting: Field[Any], text: str, own: Any) -> Any:
    """The value that *text* means for *setting*, whose value in the recipe is *own*."""
    if setting.type is str:
        return text
    value = text
    with contextlib.suppress(SettingsError):
        value = _as_float(setting, read_yaml(text, ""))
    if type(value) is not setting.type:
        wanted = f"must be of type {_type_name(setting)}, like the recipe's own {own!r}"
        raise SettingsError(f"--set {setting.name}={text}: {wanted}")
    return value


# -- what is allowed ---------------------------------------------------------------------------------


def check_values(settings: Settings) -> None:
    """Raise a SettingsError for a value that would make a later stage fail."""
    for name, setting in FIELDS.items():
        value = getattr(settings, name)
        if not _is_allowed(setting, value):
            raise SettingsError(f"--set {name}={value}: must {_allowed(setting)}")
    if settings.source_lang == settings.target_lang:
        raise SettingsError(f"--set target_lang={settings.target_lang}: must differ from source_lang")
    if settings.holdout_every == 1:
        raise SettingsError("--set holdout_every=1: must be 0 or above 1; nothing would be left to train on")
    if settings.segment_tokens > 1 and not settings.segment_share:
        unknown = "a model without segments in training does not know the separator"
        instead = "set segment_tokens=1 for single sentences of documents"
        raise SettingsError(f"--set segment_share=0 segment_tokens={settings.segment_tokens}: {unknown}; {instead}")
    if bool(settings.start_checkpoint) != bool(settings.start_data):
        both = f"start_checkpoint={settings.start_checkpoint} start_data={settings.start_data}"
        raise SettingsError(f"--set {both}: both must be given, or neither")
    _check_translated(settings)
    for name in (
        "train_files",
        "valid_files",
        "test_files",
        "back_translation_files",
        "translate_flags",
        "fairseq_train_flags",
        "fairseq_generate_flags",
    ):
        text = getattr(settings, name)
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise SettingsError(f"--set {name}={text}: {str(error).lower()}") from None
        held_out = name == "valid_files" and settings.holdout_every
        if name in ("train_files", "valid_files") and bool(words) == bool(held_out):
            instead = ", or holdout_every must be above 0, but not both" if name == "valid_files" else ""
            raise SettingsError(f"--set {name}={text}: must name files{instead}")
    corpora = settings.templates("test")
    if len({len(corpus) for corpus in corpora}) > 1 or not all(part for corpus in corpora for part in corpus):
        must = "must name as many references for each file, separated by commas"
        raise SettingsError(f"--set test_files={settings.test_files}: {must}")
    _refuse_own_flags(settings)
    _refuse_lost_checkpoints(settings)
    _check_translate_flags(settings.translate_flags)
    _check_training(settings)


def _refuse_own_flags(settings: Settings) -> None:
    """Raise a SettingsError if the flags for fairseq contain one that the recipe sets itself."""
    for program, own in OWN_FLAGS.items():
        for word in shlex.split(getattr(settings, f"fairseq_{program}_flags")):
            if word.partition("=")[0] in own or re.match(r"-[ast](?!-)", word) and word[:2] in own:
                instead = INSTEAD.get(word.partition("=")[0], "use the recipe's own flags and settings instead")
                raise SettingsError(f"{word} among the flags for fairseq-{program}: {instead}")


def _refuse_lost_checkpoints(settings: Settings) -> None:
    """Raise a SettingsError if a flag for fairseq-train leaves out some of the checkpoints that are averaged."""
    count, every = settings.average_checkpoints, settings.save_every_updates

    def keeps_fewer(value: str) -> bool:
        return value in map(str, range(1, count))  # fairseq keeps all with 0 and less

    def is_not(harmless: str | None) -> Callable[[str], bool]:
        return lambda value: value != harmless

    loses = dict.fromkeys(("--no-save", "--no-last-checkpoints"), is_not(None)) | {"--checkpoint-suffix": is_not("")}
    if every:
        loses |= {"--save-interval-updates": is_not(str(every)), "--keep-interval-updates": keeps_fewer}
    else:
        loses |= {"--save-interval": is_not("1"), "--keep-last-epochs": keeps_fewer}
        loses |= {"--no-epoch-checkpoints": is_not(None)}
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in loses:
        parser.add_argument(flag, nargs="?", const="", dest=flag)
    given = vars(parser.parse_known_args(shlex.split(settings.fairseq_train_flags))[0])
    for flag, is_lost in loses.items():
        value = given[flag]
        if value is not None and is_lost(value):
            given_as, needed = f"{flag} {value}".rstrip(), f"stage 8 averages the last {count} checkpoints"
            instead = "use average_checkpoints and save_every_updates"
            raise SettingsError(f"{given_as} among the flags for fairseq-train: {needed}; {instead}")


class _TranslateFlags(argparse.ArgumentParser):
    """Reads the flags of ``fairseq-rope translate`` that do not change the translations."""

    NAMES = ("--jobs", "--threads", "--device", "--launcher", "--slurm-partition", "--slurm")

    def __init__(self) -> None:
        super().__init__(add_help=False, allow_abbrev=False)
        for name in self.NAMES[:2]:
            self.add_argument(name, type=int, default=1)
        self.add_argument(self.NAMES[2], choices=("cpu", "cuda", "auto"))
        launcher_flags.add_flags(self, "shard")

    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def _check_translate_flags(text: str) -> None:
    """Raise a SettingsError if a flag for the translations is unknown, or does not only say where they run."""
    try:
        args = _TranslateFlags().parse_args(shlex.split(text))
        launcher_flags.refuse_contradictions(args)
        if min(args.jobs, args.threads) < 1:
            raise InputError("--jobs and --threads must be 1 or more")
    except InputError as error:
        may_be = f"it may contain {', '.join(_TranslateFlags.NAMES)}"
        raise SettingsError(f"--set {shlex.quote(f'translate_flags={text}')}: {error}; {may_be}") from None


def _check_translated(settings: Settings) -> None:
    """Raise a SettingsError if the settings of back-translation and distillation do not fit together."""
    files, model, distilled = (
        settings.back_translation_files,
        settings.back_translation_model,
        settings.distillation_model,
    )
    if bool(files) != bool(model):
        both = f"back_translation_files={files} back_translation_model={model}"
        raise SettingsError(f"--set {both}: both must be given, or neither")
    if model and not settings.back_translation_share:
        raise SettingsError("--set back_translation_share=0.0: must be above 0 with back_translation_model")
    if model and distilled:
        raise SettingsError(f"--set back_translation_model={model} distillation_model={distilled}: give one of them")
    if settings.back_translation_tag in _SYMBOLS:
        must = "must not be a symbol of fairseq's dictionaries"
        raise SettingsError(f"--set back_translation_tag={settings.back_translation_tag}: {must}")
    name = "back_translation_model" if model else "distillation_model"
    if (model or distilled) and settings.segment_tokens:
        raise SettingsError(f"--set segment_tokens={settings.segment_tokens}: must be 0 with {name}")
    if model and settings.start_data and settings.back_translation_tag:
        why = "must be empty with start_data, whose dictionary may lack it"
        raise SettingsError(f"--set back_translation_tag={settings.back_translation_tag}: {why}")
    if (model or distilled) and settings.holdout_every:
        why = "sentences that are held out could be among the translated ones; name valid_files"
        raise SettingsError(f"--set holdout_every={settings.holdout_every}: must be 0 with {name}; {why}")


def _is_allowed(setting: Field[Any], value: Any) -> bool:
    limits = setting.metadata
    if setting.type is str:
        return value in limits.get("choices", [value]) and bool(re.fullmatch(limits.get("pattern", "(?s:.*)"), value))
    return limits["least"] <= value <= limits["most"] and not (limits.get("above_least") and value == limits["least"])


def _allowed(setting: Field[Any]) -> str:
    """What a value of *setting* must be, as the rest of a sentence; empty if any text is allowed."""
    limits = setting.metadata
    if setting.type is str:
        return f"be one of {', '.join(limits['choices'])}" if "choices" in limits else limits.get("looks", "")
    if setting.type is bool:
        return "be true or false"
    if limits["least"] == -math.inf:
        return "be a number"
    if limits.get("above_least"):
        return f"be above {limits['least']}, up to {limits['most']}"
    return f"be {limits['least']} " + ("or more" if limits["most"] == math.inf else f"to {limits['most']}")


def describe_settings() -> str:
    """One line for each setting: name, type, allowed values, default and description."""
    lines = []
    for name, setting in FIELDS.items():
        kinds = [_type_name(setting), *filter(None, [_allowed(setting).removeprefix("be ")])]
        default = "required" if setting.default is MISSING else f"default: {_as_written(setting.default)}"
        lines.append(f"  {name} ({', '.join(kinds)}; {default}): {setting.metadata['description']}")
    return "\n".join(lines)


def _as_written(default: Any) -> str:
    """*default* as a settings.yaml has it."""
    if isinstance(default, bool):
        return str(default).lower()
    return '""' if default == "" else str(default)


def _check_training(settings: Settings) -> None:
    """Raise a SettingsError if training never ends, or ends before there are enough checkpoints to average."""
    updates, epochs, every = settings.max_updates, settings.max_epochs, settings.save_every_updates
    if not (updates or epochs):
        raise SettingsError("--set max_updates=0 max_epochs=0: one of them must be above 0, to end the training")
    limit = updates if every else epochs
    if not limit:
        need = "checkpoints by updates need max_updates, those by epochs (save_every_updates=0) need max_epochs"
        raise SettingsError(f"--set save_every_updates={every}: {need}, to give enough of them to average")
    if not settings.warmup_updates and "--lr-scheduler" not in settings.fairseq_train_flags:
        raise SettingsError("--set warmup_updates=0: must be 1 or more, because the schedule divides by it")
    checkpoints = limit // (every or 1)
    if checkpoints < settings.average_checkpoints:
        only = f"{checkpoints} with max_updates={updates}, max_epochs={epochs}, save_every_updates={every}"
        raise SettingsError(f"--set average_checkpoints={settings.average_checkpoints}: training writes only {only}")
