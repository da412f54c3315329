"""Stage 10: score the translations (``fairseq-rope score``): sacreBLEU with its signature, and others."""

import json
from pathlib import Path

from fairseq_rope.tools.score import language
from recipes.pipeline import stage09_translate
from recipes.pipeline.experiment import Experiment, StageError

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


def also(x: Experiment) -> dict[str, str]:
    return {} if x.tokenize == "13a" else {"--tokenize": x.tokenize}


def check_tokenize(x: Experiment) -> None:
    """Raise a StageError if sacreBLEU's tokeniser cannot be loaded; those of flores are downloaded now."""
    from sacrebleu.metrics import BLEU

    try:
        BLEU(tokenize=x.tokenize)
    except Exception as error:
        raise StageError(f"--tokenize {x.tokenize}: {' '.join(str(error).split())}") from None


def run(x: Experiment) -> None:
    hypotheses, source, reference = inputs(x)
    score = x.model / "score.json"
    part = score.with_name(score.name + ".tmp")
    tokenize = "" if x.tokenize == "13a" else f"--tokenize {x.tokenize} "
    x.command(
        f"python -m fairseq_rope score --sys {x.shell(hypotheses)} --ref {x.shell(reference)} "
        f"--src {x.shell(source)} --target-lang {language(x.target)} {tokenize}--json > {x.shell(part)} "
        f"&& mv {x.shell(part)} {x.shell(score)}"
    )


def report(x: Experiment) -> None:
    """Print five translations, where all is kept, the scores, and sacreBLEU as the last line."""
    hypotheses, source, reference = inputs(x)
    columns = [path.read_text(encoding="utf-8").split("\n") for path in (source, hypotheses, reference)]
    total = len(columns[0]) - 1
    print("\nfive translations of the test set:")
    for number in range(0, total, max(1, total // 5))[:5]:
        for label, lines in zip(("source", "model", "reference"), columns, strict=True):
            print(f"  {label:>9}  {lines[number]}")
        print()
    metrics = json.loads((x.model / "score.json").read_text())["systems"][0]["metrics"]
    print(f"commands and logs: {x.work}/commands, {x.model}/commands, {x.model}/logs")
    print(f"model:             {x.model}/averaged.pt")
    for metric in metrics[1:]:
        print(f"{metric['name'] + ':':32} {metric['score']:.2f}")
    print(f"signature:         {metrics[0]['signature']}")
    print(f"sacreBLEU {metrics[0]['score']:.2f}", flush=True)
