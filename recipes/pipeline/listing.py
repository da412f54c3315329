"""The table of ``--list``: every model folder of a work folder, with its scores and changed settings."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from recipes.pipeline.settings import Settings

# The scores in the table, and their names in score.json. Texts without blanks between words have chrF2.
METRICS = {"sacreBLEU": ("sacreBLEU",), "chrF": ("chrF2++", "chrF2")}
NOT_SHOWN = ("disk_gb", "memory_gb")  # what the machine needs says nothing about a model


def model_table(work: Path, own: Settings) -> str:
    """The table of the model folders in *work*, with the settings that differ from the recipe's *own*."""
    folders = sorted(path.parent for path in work.glob("*.seed*/settings.yaml"))
    if not folders:
        return f"{work}: has no model yet"
    rows = [("model folder", *METRICS, "changed settings"), *(_row(folder, asdict(own)) for folder in folders)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    form = "{:{}}  {:>{}}  {:>{}}  {:{}}"
    lines = (form.format(*(part for pair in zip(row, widths, strict=True) for part in pair)).rstrip() for row in rows)
    return "\n".join([f"models in {work}:", *lines])


def _row(folder: Path, own: dict[str, Any]) -> tuple[str, ...]:
    """The name, scores and changed settings of the model in *folder*; "-" for a score that does not exist yet."""
    settings = yaml.safe_load((folder / "settings.yaml").read_text(encoding="utf-8"))
    changed = [name for name, value in settings.items() if own.get(name) != value and name not in NOT_SHOWN]
    scores: dict[str, float] = {}
    if (folder / "score.json").exists():
        (system,) = json.loads((folder / "score.json").read_text(encoding="utf-8"))["systems"]
        scores = {metric["name"]: metric["score"] for metric in system["metrics"]}
    of_each = ([f"{scores[name]:.2f}" for name in names if name in scores] for names in METRICS.values())
    shown = (score[0] if score else "-" for score in of_each)
    return folder.name, *shown, ", ".join(f"{name}={settings[name]}" for name in changed)
