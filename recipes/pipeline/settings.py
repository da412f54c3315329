"""The settings of a recipe: one YAML file that reads like a methods section, and --set KEY=VALUE."""

import difflib
import math
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

MODEL = Path(__file__).parents[1] / "wmt14_en_de" / "settings.yaml"  # whose settings every recipe has
# What a recipe that writes its corpus itself has as well.
CORPUS = {"corpus_generator": str, "corpus_pairs": int, "corpus_heldout": int, "corpus_seed": int}


class SettingsError(ValueError):
    """A setting is unknown or has an unusable value; the message names it and what is allowed."""


class _Loader(yaml.SafeLoader):
    """Reads YAML as its version 1.2 does: ``no`` (also Norwegian) is text, and ``2e-3`` is a number."""

    yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith(":bool")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile("(true|false)$", re.I), "tTfF")
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    "-+.0123456789",
)


def _read(path: Path) -> dict[str, Any]:
    """The settings in the YAML file *path*.

    Raises:
        SettingsError: it is empty, no YAML, or something else than names and values
    """
    try:
        settings = yaml.load(path.read_text(encoding="utf-8"), _Loader)
    except UnicodeDecodeError as error:
        raise SettingsError(f"{path}: is not UTF-8 at byte {error.start}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or getattr(error, "reason", None) or str(error)
        raise SettingsError(f"{path}{line}: is not YAML: {problem}") from None
    if not isinstance(settings, dict):
        found = "is empty" if settings is None else "has no names of settings"
        raise SettingsError(f"{path}: {found}, and must have lines of the form NAME: VALUE")
    return settings


def read_settings(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The settings in *path*, replaced by *overrides* of the form KEY=VALUE.

    A value is read as YAML and must be of the type of the one it replaces (an integer will do for a
    float).

    Raises:
        SettingsError: *path* cannot be read, an override names a key that it does not have, or a value is
            of another type
    """
    usual = _read(MODEL)
    own = {
        name: float(value) if type(value) is int and type(usual.get(name)) is float else value
        for name, value in _read(path).items()
    }
    settings = dict(own)
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals:
            raise SettingsError(f"--set {override}: must have the form KEY=VALUE")
        if key not in own:
            near = difflib.get_close_matches(key, own, n=1, cutoff=0.0)[0]
            raise SettingsError(f"--set {override}: {path} has no {key}; the nearest it has is {near}")
        settings[key] = _like(own[key], text, override)
    return settings


# The least and the greatest value of a setting.
RANGES = {
    "max_words": (1, math.inf),
    "max_length_ratio": (1, math.inf),
    "holdout_every": (0, math.inf),
    "vocab_size": (1, math.inf),
    "layers": (1, math.inf),
    "width": (1, math.inf),
    "ffn_width": (1, math.inf),
    "heads": (1, math.inf),
    "dropout": (0, 1),
    "adam_eps": (0, 1),
    "warmup_init_lr": (0, 1),
    "learning_rate": (0, 1),
    "label_smoothing": (0, 1),
    "warmup_updates": (0, math.inf),
    "tokens_per_update": (1, math.inf),
    "tokens_per_device": (1, math.inf),
    "max_updates": (0, math.inf),
    "max_epochs": (0, math.inf),
    "save_every_updates": (0, math.inf),
    "average_checkpoints": (1, math.inf),
    "beam": (1, math.inf),
    "length_penalty": (-math.inf, math.inf),
    "max_len_b": (0, math.inf),
}


CHOICES = {
    "normalise_punctuation": ("none", "source", "target", "both"),
    "precision": ("auto", "fp32", "fp16", "bf16"),
    "export_quantization": ("float32", "int8", "int8_float32", "int16", "float16", "bfloat16"),
}


def check_values(settings: dict[str, Any]) -> None:
    """Refuse values that would fail in a late stage, after the work of the early ones.

    Raises:
        SettingsError: the message names the setting, its value and what is allowed
    """
    types = {name: type(value) for name, value in _read(MODEL).items()}
    if settings.get("corpus_generator"):
        types.update(CORPUS)
    for name, wanted in types.items():
        if name not in settings:
            needed_by = "a recipe with corpus_generator needs" if name in CORPUS else "every recipe has"
            raise SettingsError(f"settings.yaml has no {name}, which {needed_by}")
        if type(settings[name]) is not wanted:
            raise SettingsError(f"{name} is {settings[name]!r}, and must be of type {wanted.__name__}")
    for name in settings:
        if name not in types and name not in CORPUS:
            near = difflib.get_close_matches(str(name), [*types, *CORPUS], n=1, cutoff=0.0)[0]
            raise SettingsError(f"settings.yaml has {name}, which no recipe has; the nearest is {near}")
    for name, (least, greatest) in RANGES.items():
        if not least <= settings[name] <= greatest:
            up_to = "or more" if greatest == math.inf else f"to {greatest}"
            raise SettingsError(f"--set {name}={settings[name]}: must be {least} {up_to}")
    for name, allowed in CHOICES.items():
        if settings[name] not in allowed:
            raise SettingsError(f"--set {name}={settings[name]}: must be one of {', '.join(allowed)}")
    for name in ("source_lang", "target_lang"):
        if not re.fullmatch("[a-z]{2,3}([-_][A-Za-z0-9]{2,8})*", settings[name]):
            raise SettingsError(f"--set {name}={settings[name]}: must be a language's code, like en or pt-BR")
    if settings["source_lang"] == settings["target_lang"]:
        raise SettingsError(f"--set target_lang={settings['target_lang']}: must not be source_lang too")
    if settings["holdout_every"] == 1:
        raise SettingsError("--set holdout_every=1: must be 0 or above 1; nothing would be left to train on")
    if not re.fullmatch(r"\( *0?\.\d+ *, *0?\.\d+ *\)", settings["adam_betas"]):
        raise SettingsError(f"--set adam_betas={settings['adam_betas']}: must look like (0.9, 0.98)")
    for name in ("fairseq_train_flags", "fairseq_generate_flags"):
        _words(name, settings[name])
    for name in ("train_files", "valid_files", "test_files"):
        files = _words(name, settings[name])
        held_out = name == "valid_files" and settings["holdout_every"]
        if bool(files) == bool(held_out):
            instead = " or holdout_every be above 0, and not both" if name == "valid_files" else ""
            raise SettingsError(f"--set {name}={settings[name]}: must name files{instead}")
    _check_training(
        **{n: settings[n] for n in ("max_updates", "max_epochs", "save_every_updates", "average_checkpoints")}
    )


def _words(name: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise SettingsError(f"--set {name}={text}: {str(error).lower()}") from None


def _check_training(
    max_updates: int, max_epochs: int, save_every_updates: int, average_checkpoints: int
) -> None:
    """Refuse a training without end, and one that ends before there is enough to average."""
    if not (max_updates or max_epochs):
        raise SettingsError("--set max_updates=0 max_epochs=0: one of them must say when training ends")
    limit, every = (max_updates, save_every_updates) if save_every_updates else (max_epochs, 1)
    if not limit:
        raise SettingsError(
            f"--set save_every_updates={save_every_updates}: checkpoints of updates need max_updates, and "
            "those of epochs (save_every_updates=0) max_epochs, so that there are as many as are averaged"
        )
    if limit // every < average_checkpoints:
        raise SettingsError(
            f"--set average_checkpoints={average_checkpoints}: training keeps {limit // every} by "
            f"max_updates={max_updates}, max_epochs={max_epochs}, save_every_updates={save_every_updates}"
        )


def _like(old: Any, text: str, override: str) -> Any:
    if isinstance(old, str):
        return text
    try:
        value = yaml.load(text, _Loader)
    except yaml.YAMLError:
        value = text
    if isinstance(old, float) and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    if type(value) is not type(old):
        raise SettingsError(
            f"--set {override}: must be of type {type(old).__name__}, like the recipe's own {old!r}"
        )
    return value
