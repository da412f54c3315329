"""The table of the trained models in a work folder, ``models.md``."""

import contextlib
import json
from pathlib import Path

from fairseq_rope.files import write_whole
from recipes.report.history import lowest_loss, progress_of
from recipes.work import Work, flat


def table(work: Work) -> str:
    """Return the table of all models in *work*: settings that differ, lowest loss, scores, state, folder."""
    records = work.records("train")
    if not records:
        return "No model has been trained.\n"
    settings = {name: flat(record["settings"] | {"data": record["inputs"]["data"]}) for name, record in records.items()}
    names = list(dict.fromkeys(name for values in settings.values() for name in values))
    different = [name for name in names if len({str(values.get(name)) for values in settings.values()}) > 1]
    different = [name for name in names if name in different or name == "arch"]
    scores = scores_of(work)
    tests = list(dict.fromkeys(test for found in scores.values() for test in found))
    head = [*different, "epochs", "lowest loss", *(f"sacreBLEU {test}" for test in tests), "state", "folder"]
    rows = []
    for name in sorted(records, key=lambda name: [str(settings[name].get(one)) for one in different]):
        loss = lowest_loss(work.path / name)
        row = [str(settings[name].get(one, "")) for one in different]
        row += [str(progress_of(work.path / name)[0]), "" if loss is None else f"{loss:.3f}"]
        row += [f"{scores[name][test]:.2f}" if test in scores.get(name, {}) else "" for test in tests]
        rows.append([*row, state(work, name), name])
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |\n" for line in lines)


def write(work: Work) -> None:
    """Write the table into the work folder."""
    with contextlib.suppress(OSError):  # a full disk must not end a training
        write_whole(work.path / "models.md", table(work))


def state(work: Work, name: str) -> str:
    """Return whether the training in the folder *name* runs, has finished, failed or was interrupted."""
    folder = work.path / name
    if work.is_locked(name):
        return "running"
    if (folder / "failed").exists():
        return f"failed: {' '.join((folder / 'failed').read_text().split())}"
    return "finished" if (folder / "ended.json").exists() else "interrupted"


def scores_of(work: Work) -> dict[str, dict[str, float]]:
    """Return the newest sacreBLEU of each model on each test set, by the folder of the training."""
    inputs = {kind: work.records(kind) for kind in ("average", "translate", "score")}
    texts = work.records("text")
    scores: dict[str, dict[str, float]] = {}
    for name in sorted(inputs["score"], key=lambda name: (work.path / name / "settings.yaml").stat().st_mtime):
        translation = inputs["translate"].get(inputs["score"][name]["inputs"]["translations"])
        average = translation and inputs["average"].get(translation["inputs"]["model"])
        if average:
            test = texts[inputs["score"][name]["inputs"]["text"]]["label"]
            scores.setdefault(average["inputs"]["training"], {})[test] = bleu(work.path / name / "score.json")
    return scores


def bleu(path: Path) -> float:
    """Return the sacreBLEU in score.json."""
    return float(json.loads(path.read_text())["systems"][0]["metrics"][0]["score"])
