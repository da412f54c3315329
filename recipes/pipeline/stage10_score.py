"""Stage 10: score the translations (``fairseq-rope score``) with sacreBLEU and other metrics."""

import json
from pathlib import Path

from fairseq_rope.tools.score import language
from recipes.pipeline.commands import Shell, quoted
from recipes.pipeline.experiment import Experiment, StageError
from recipes.pipeline.stage import Stage


class Score(Stage):
    number = 10
    title = "score"
    per_model = True
    settings = ("source_lang", "target_lang")

    def inputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.hypotheses, experiment.test_source, experiment.test_reference]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.score]

    def also(self, experiment: Experiment) -> dict[str, str]:
        return {"--tokenize": experiment.tokenize}

    def run(self, experiment: Experiment, shell: Shell) -> None:
        part = experiment.score.with_name(experiment.score.name + ".tmp")
        shell.command(
            f"python -m fairseq_rope score --sys {quoted(experiment.hypotheses)} "
            f"--ref {quoted(experiment.test_reference)} --src {quoted(experiment.test_source)} "
            f"--target-lang {language(experiment.target)} --tokenize {experiment.tokenize} --json "
            f"> {quoted(part)} && mv {quoted(part, experiment.score)}"
        )


def check_tokenize(experiment: Experiment) -> None:
    """Raise a StageError if sacreBLEU's tokeniser cannot be loaded. Loading downloads those of flores."""
    from sacrebleu.metrics import BLEU

    try:
        BLEU(tokenize=experiment.tokenize)
    except Exception as error:
        raise StageError(f"--tokenize {experiment.tokenize}: {' '.join(str(error).split())}") from None


def report(experiment: Experiment) -> None:
    """Print five translations, the paths of the files, the scores, and sacreBLEU as the last line."""
    files = (experiment.test_source, experiment.hypotheses, experiment.test_reference)
    columns = [path.read_text(encoding="utf-8").split("\n") for path in files]
    total = len(columns[0]) - 1
    print("\nfive translations of the test set:")
    for number in range(0, total, max(1, total // 5))[:5]:
        for label, lines in zip(("source", "model", "reference"), columns, strict=True):
            print(f"  {label:>9}  {lines[number]}")
        print()
    metrics = json.loads(experiment.score.read_text())["systems"][0]["metrics"]
    model = experiment.model
    print(f"commands and logs: {experiment.work}/commands, {model}/commands, {model}/logs")
    print(f"model:             {experiment.averaged}")
    for metric in metrics[1:]:
        print(f"{metric['name'] + ':':32} {metric['score']:.2f}")
    print(f"signature:         {metrics[0]['signature']}")
    print(f"sacreBLEU {metrics[0]['score']:.2f}", flush=True)
