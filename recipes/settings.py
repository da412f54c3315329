"""The settings of a recipe. Each stands here once: default, explanation and check.

``read`` merges the defaults, a recipe's ``settings.yaml``, the settings of a system, and KEY=VALUE of the command line.
"""

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from fairseq_rope.errors import InputError, nearest
from fairseq_rope.serving.exported_folder import QUANTIZATIONS


def _setting(default: Any, text: str, least: float = -math.inf, most: float = math.inf, **more: Any) -> Any:
    """A field with its explanation, its range, and in *more* its choices, or its pattern and an example of it."""
    return field(default=default, metadata={"help": text, "least": least, "most": most, **more})


_LANGUAGE: Any = {"pattern": r"[a-z]{2,3}([-_][A-Za-z0-9]{2,8})*", "example": "en or pt-BR"}
_PAIR: Any = {"pattern": r"\( *0?\.\d+ *, *0?\.\d+ *\)", "example": "(0.9, 0.98)"}


@dataclass
class Settings:
    """A recipe must set the languages and the training set.

    The defaults are those of RoFormer's translation model, where the paper states them, and else of transformer-base.
    """

    source_lang: str = _setting(MISSING, "code of the source language", **_LANGUAGE)
    target_lang: str = _setting(MISSING, "code of the target language", **_LANGUAGE)
    train_files: str = _setting(
        MISSING, "training set: FILE or ARCHIVE:MEMBER; {lang} is the language, {side} is src or ref; more are joined"
    )
    valid_files: str = _setting("", "validation set, written like train_files; empty with holdout_every")
    test_files: dict[str, str] = field(
        default_factory=dict,
        metadata={"help": "test sets by name, written like train_files; further references after commas"},
    )
    holdout_every: int = _setting(0, "n: validate on every n-th training pair, instead of valid_files", 0)

    lower_case: bool = _setting(False, "whether all texts are in lower case, those of the test sets too")
    normalise_punctuation: str = _setting(
        "none", "sides whose punctuation is normalised", choices=("none", "source", "target", "both")
    )
    max_words: int = _setting(250, "remove training pairs with a longer side, in words", 1)
    max_length_ratio: float = _setting(9.0, "remove training pairs with a greater ratio of lengths", 1)
    bpe: str = _setting(
        "auto", "program for subwords; auto: by the languages", choices=("auto", "subword-nmt", "sentencepiece")
    )
    vocab_size: int = _setting(37000, "size of the subword vocabulary of both languages together", 1)

    arch: str = _setting("transformer_rope", "fairseq's --arch", pattern=r"[\w.-]+", example="transformer")
    layers: int = _setting(6, "number of encoder layers, and of decoder layers", 1)
    width: int = _setting(512, "size of embeddings and layers", 1)
    ffn_width: int = _setting(2048, "size inside the feed-forward networks", 1)
    heads: int = _setting(8, "number of attention heads", 1)
    dropout: float = _setting(0.1, "probability of dropout", 0, 1)
    user_dir: str = _setting("", "folder with encodings of your own, for --user-dir; it imports fairseq_rope.plugin")

    adam_betas: str = _setting("(0.9, 0.98)", "Adam's betas", **_PAIR)
    adam_eps: float = _setting(1e-9, "Adam's epsilon", 0, 1)
    warmup_init_lr: float = _setting(1e-7, "learning rate of the first update", 0, 1)
    learning_rate: float = _setting(5e-4, "highest learning rate, at the end of the warm-up", 0, 1)
    label_smoothing: float = _setting(0.1, "label smoothing", 0, 1)
    warmup_updates: int = _setting(4000, "number of warm-up updates", 0)
    tokens_per_update: int = _setting(25000, "tokens of the longer side in an update, over all devices", 1)
    train_flags: str = _setting("", "more flags for fairseq-train")
    precision: str = _setting(
        "auto", "number format of the training; auto: the best in hardware", choices=("auto", "fp32", "fp16", "bf16")
    )

    max_updates: int = _setting(100000, "largest number of updates; 0: no limit", 0)
    max_epochs: int = _setting(0, "largest number of epochs; 0: no limit", 0)
    patience: int = _setting(0, "end after so many validations without a lower loss; 0: never", 0)
    save_every_updates: int = _setting(1250, "updates between checkpoints; 0: one checkpoint an epoch", 0)
    average_checkpoints: int = _setting(5, "number of last checkpoints to average", 1)

    beam: int = _setting(4, "beam size", 1)
    length_penalty: float = _setting(0.6, "length penalty: a score is divided by its length to this power")
    max_len_b: int = _setting(50, "largest output length, in tokens more than the source", 0)
    generate_flags: str = _setting("", "more flags for fairseq-generate")
    score_flags: str = _setting("", "more flags for fairseq-rope score, such as --scorer")
    tokenize: str = _setting("", "sacreBLEU's tokeniser; empty: that of the target language")
    export_quantization: str = _setting("int8", "number format of the exported model", choices=tuple(QUANTIZATIONS))
    export_shortlist: bool = _setting(False, "whether the exported model has a shortlist, which needs eflomal")

    gpus: int = _setting(-1, "GPUs of one training; 0: the CPU; -1: all of this machine", -1)
    tokens_per_device: str = _setting(
        "auto",
        "largest batch of one device, in tokens; auto: as many as the memory of a GPU allows; 4096 on a CPU",
        pattern=r"auto|[1-9]\d*",
        example="auto or 4096",
    )
    disk_gb: float = _setting(0.0, "disk space of the whole work folder, in GB", 0)


FIELDS = {setting.name: setting for setting in fields(Settings)}
# Flags that the recipe sets itself, and what to set instead.
_OWN = {
    "train_flags": {
        **{"--arch": "arch=ARCH", "-a": "arch=ARCH", "--seed": "seeds=FIRST-LAST", "--user-dir": "user_dir=DIR"},
        **{"--max-epoch": "max_epochs=N", "--max-update": "max_updates=N", "--patience": "patience=N"},
        **{f"--{flag}": "precision=NAME" for flag in ("fp16", "bf16", "amp")},
        **{f"--memory-efficient-{name}": f"precision={name}" for name in ("fp16", "bf16")},
        **dict.fromkeys(("--save-dir", "--source-lang", "--target-lang", "-s", "-t", "--restore-file"), "nothing"),
    },
    "generate_flags": {
        "--user-dir": "user_dir=DIR",
        **dict.fromkeys(("--path", "--gen-subset", "--results-path", "--source-lang", "--target-lang"), "nothing"),
    },
}


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the mapping in a YAML file, whose values are texts. Raises an InputError if it contains something else."""
    try:
        contents = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise InputError(f"{path}: {' '.join(str(error).split())}") from None
    if not isinstance(contents, dict):
        raise InputError(f"{path}: must have lines of the form NAME: VALUE")
    return contents


def read_words(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of KEY=VALUE *words*. A key like ``test_files.news`` is one entry of a mapping."""
    values: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        if not equals:
            raise InputError(f"{word}: must have the form KEY=VALUE")
        name, _, entry = key.partition(".")
        _refuse_unknown(name, word)
        value = yaml.load(text, yaml.BaseLoader) if text.startswith("[") else text
        if entry:
            before = values.get(name, {})
            values[name] = {**(before if isinstance(before, dict) else {"test": before}), entry: value}
        else:
            values[name] = value
    return values


def _refuse_unknown(name: str, place: str) -> None:
    if name not in FIELDS:
        raise InputError(f"{place}: there is no setting {name}{nearest(name, FIELDS)}")


def merged(*layers: Mapping[str, Any]) -> Settings:
    """Return the settings of *layers*, of which later ones win. Raises an InputError for an unknown or wrong value.

    A mapping adds its entries to those of earlier layers; a text for ``test_files`` is the only test set, ``test``.
    """
    config = OmegaConf.structured(Settings)
    for layer in layers:
        for name, value in layer.items():
            _refuse_unknown(name, f"{name}={value}")
            if name == "test_files" and not isinstance(value, Mapping):
                config.test_files = {"test": value} if value else {}
                continue
            try:
                OmegaConf.update(config, name, value, merge=True)
            except OmegaConfBaseException:
                kind = getattr(FIELDS[name].type, "__name__", "dict")
                raise InputError(f"{name}={value}: must be of type {kind}") from None
    for name in FIELDS:
        if OmegaConf.is_missing(config, name):
            raise InputError(f"{name}: is not set, and every recipe needs it")
    settings: Settings = OmegaConf.to_object(config)  # type: ignore[assignment]
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    """Raise an InputError for a value with which a step would fail, or do something else than the name says."""
    for name, value in asdict(settings).items():
        limits = FIELDS[name].metadata
        must = ""
        if limits.get("choices") and value not in limits["choices"]:
            must = f"be one of {', '.join(limits['choices'])}"
        elif limits.get("pattern") and not re.fullmatch(limits["pattern"], value):
            must = f"look like {limits['example']}"
        elif isinstance(value, int | float) and not limits["least"] <= value <= limits["most"]:
            must = f"be at least {limits['least']:g}" + (
                f" and at most {limits['most']:g}" if limits["most"] < math.inf else ""
            )
        if must:
            raise InputError(f"{name}={value}: must {must}")
    s = settings
    if s.source_lang == s.target_lang:
        raise InputError(f"target_lang={s.target_lang}: must differ from source_lang")
    if bool(s.valid_files.split()) == bool(s.holdout_every):
        raise InputError("valid_files: must name files, or holdout_every must be above 1, but not both")
    if not (s.max_epochs or s.max_updates or s.patience):
        raise InputError("max_epochs=0 max_updates=0 patience=0: one of them must limit the training")
    if s.max_epochs and not s.save_every_updates and s.max_epochs < s.average_checkpoints:
        raise InputError(f"average_checkpoints={s.average_checkpoints}: max_epochs={s.max_epochs} gives fewer")
    for name, template in s.test_files.items():
        if not re.fullmatch(r"[\w.-]+", name) or name in ("train", "valid"):
            raise InputError(f"test_files.{name}: must be a name of letters, digits, points and hyphens")
        counts = {len(corpus) for corpus in corpora(template, f"test_files.{name}")}
        if len(counts) != 1:
            raise InputError(f"test_files.{name}={template}: each file must have the same number of references")
    for name, own in _OWN.items():
        for word in flags(getattr(s, name), name):
            if (flag := word.partition("=")[0]) in own:
                instead = "which the recipe sets" if own[flag] == "nothing" else f"set {own[flag]} instead"
                raise InputError(f"{name}: has {flag}, {instead}")


def corpora(template: str, name: str) -> list[list[str]]:
    """Return the FILE or ARCHIVE:MEMBER of each corpus in the setting *name*, followed by its further references."""
    return [corpus.split(",") for corpus in flags(template, name)]


def flags(text: str, name: str) -> list[str]:
    """Return the words of the setting *name*, which are quoted as for a shell."""
    try:
        return shlex.split(text)
    except ValueError as error:
        raise InputError(f"{name}={text}: {str(error).lower()}") from None


def described(own: Mapping[str, Any]) -> str:
    """Return a line for each setting, with its default in the recipe, whose settings.yaml has *own* values."""
    lines = []
    for name, setting in FIELDS.items():
        default = own.get(name, "" if setting.default is MISSING else setting.default)
        value = default if isinstance(default, Mapping | str | bool | int | float) else {}
        choices = f" ({', '.join(setting.metadata['choices'])})" if "choices" in setting.metadata else ""
        shown = "" if value in ("", {}) else f" [{value}]"
        lines.append(f"  {name:22} {setting.metadata['help']}{choices}{shown}")
    return "\n".join(lines)
