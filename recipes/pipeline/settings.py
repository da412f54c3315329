"""The settings of a recipe: one YAML file that reads like a methods section, and --set KEY=VALUE."""

import difflib
import math
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml


class SettingsError(ValueError):
    """A setting is unknown or has an unusable value; the message names it and what is allowed."""


def read_settings(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """The settings in *path*, replaced by *overrides* of the form KEY=VALUE.

    A value is read as YAML and must be of the type of the one it replaces (an integer will do for a
    float).

    Raises:
        SettingsError: a key that *path* does not have, or a value of another type
    """
    own: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
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
    "max_length_ratio": (0, math.inf),
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
    "max_len_b": (0, math.inf),
}


def check_values(settings: dict[str, Any]) -> None:
    """Raise a SettingsError for values that would fail in a late stage, after the work of the early ones."""
    missing = sorted({*RANGES, "source_lang", "target_lang", "valid_files"} - set(settings))
    if missing:
        raise SettingsError(f"settings.yaml has no {', '.join(missing)}, which every recipe has")
    for name, (least, greatest) in RANGES.items():
        if not least <= settings[name] <= greatest:
            up_to = "or more" if greatest == math.inf else f"to {greatest}"
            raise SettingsError(f"--set {name}={settings[name]}: must be {least} {up_to}")
    for name in ("source_lang", "target_lang"):
        if not (isinstance(settings[name], str) and re.fullmatch("[a-z]{2,3}", settings[name])):
            raise SettingsError(f"--set {name}={settings[name]}: must be a language's code, like en (quoted)")
    for name in ("train_files", "valid_files", "test_files"):
        try:
            shlex.split(settings[name])
        except ValueError as error:
            raise SettingsError(f"--set {name}={settings[name]}: {error}".lower()) from None
    if settings["holdout_every"] and settings["valid_files"]:
        raise SettingsError(
            f"--set holdout_every={settings['holdout_every']}: valid_files must be empty then "
            "(--set valid_files=)"
        )
    updates, epochs, average = (settings[n] for n in ("max_updates", "max_epochs", "average_checkpoints"))
    every = settings["save_every_updates"]
    if not (updates or epochs):
        raise SettingsError("--set max_updates=0 max_epochs=0: one of them must say when training ends")
    there = updates // every if every and updates else epochs if not every and epochs else average
    if there < average:
        raise SettingsError(
            f"--set average_checkpoints={average}: training keeps {there} by max_updates={updates}, "
            f"max_epochs={epochs}, save_every_updates={every}"
        )


def _like(old: Any, text: str, override: str) -> Any:
    if isinstance(old, str):
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        value = text
    if isinstance(old, float) and not isinstance(value, bool):
        try:
            return float(value)  # YAML 1.1 reads 5e-4 as text
        except (TypeError, ValueError):
            pass
    if type(value) is not type(old):
        raise SettingsError(
            f"--set {override}: must be of type {type(old).__name__}, like the recipe's own {old!r}"
        )
    return value
