"""Stage 10: sacreBLEU of the translations, cased and detokenised, with its signature."""

import json
from pathlib import Path

from recipes.pipeline import stage09_translate
from recipes.pipeline.experiment import Experiment

NUMBER = 10
TITLE = "score"
PER_MODEL = True
SETTINGS = ("source_lang", "target_lang")


def inputs(x: Experiment) -> list[Path]:
    return [
        stage09_translate.outputs(x)[1],
        *(x.work / "raw" / f"test.{lang}" for lang in (x.source, x.target)),
    ]


def outputs(x: Experiment) -> list[Path]:
    return [x.model / "score.json"]


def run(x: Experiment) -> None:
    hypotheses, _, reference = inputs(x)
    score = x.model / "score.json"
    part = score.with_name(score.name + ".tmp")
    x.command(
        f"sacrebleu {x.shell(reference)} --input {x.shell(hypotheses)} --language-pair {x.source}-{x.target} "
        f"--metrics bleu --width 2 --format json > {x.shell(part)} && mv {x.shell(part)} {x.shell(score)}"
    )


def report(x: Experiment) -> None:
    """Print five translations, where all is kept, and the score as the last line."""
    hypotheses, source, reference = inputs(x)
    columns = [path.read_text(encoding="utf-8").split("\n") for path in (source, hypotheses, reference)]
    total = len(columns[0]) - 1
    print("\nfive translations of the test set:")
    for number in range(0, total, max(1, total // 5))[:5]:
        for label, lines in zip(("source", "model", "reference"), columns, strict=True):
            print(f"  {label:>9}  {lines[number]}")
        print()
    result = json.loads((x.model / "score.json").read_text())
    print(f"commands and logs: {x.work}/commands, {x.model}/commands, {x.model}/logs")
    print(f"model:             {x.model}/averaged.pt")
    print(f"signature:         {result['signature']}")
    print(f"sacreBLEU {result['score']:.2f}", flush=True)
