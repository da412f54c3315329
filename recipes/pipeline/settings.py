"""The settings of a recipe: one YAML file that reads like a methods section, and --set KEY=VALUE."""

import difflib
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
