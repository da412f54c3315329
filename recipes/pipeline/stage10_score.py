"""Stage 10: score the translations (``fairseq-rope score``) with sacreBLEU and other metrics.

If the text has documents, it also scores them with sacreBLEU: one document a line, its sentences joined by blanks.
"""

import json
from pathlib import Path
from typing import Any

from fairseq_rope.lines import lines_of
from fairseq_rope.text.languages import language
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.shell import Shell, quoted, say
from recipes.text.segments import Divided


class Score(TranslationStage):
    number = 10
    title = "score"
    per_model = True
    of_test_set = True
    settings = ("source_lang", "target_lang")

    def inputs(self, experiment: Experiment) -> list[Path]:
        own = [experiment.hypotheses, experiment.test_source, *experiment.test_references]
        raw = experiment.text("raw", "test", experiment.target)
        return [*own, *experiment.unit.of_documents(raw, *experiment.reference_documents)]

    def outputs(self, experiment: Experiment) -> list[Path]:
        of_documents = experiment.unit.of_documents(experiment.document_hypotheses, experiment.document_score)
        return [experiment.score, *of_documents]

    def depends_on(self, experiment: Experiment) -> dict[str, Any]:
        return {**super().depends_on(experiment), "--tokenize": experiment.tokenize}

    def run(self, experiment: Experiment, shell: Shell) -> None:
        if not experiment.dry_run and not any(map(str.strip, lines_of(str(experiment.hypotheses)))):
            say("all translations are empty, which BLEU scores 0")
        shell.write(command(experiment), experiment.score)
        if experiment.unit.has_documents:
            join_documents(experiment, shell, experiment.hypotheses, experiment.document_hypotheses)
            # sacrebleu's TER, among the other metrics, takes minutes for a document.
            texts = f"{quoted(*experiment.reference_documents)} --input {quoted(experiment.document_hypotheses)}"
            flags = f"--metrics bleu --tokenize {experiment.tokenize} --force --format json --width 6"
            shell.write(f"python -m sacrebleu {texts} {flags}", experiment.document_score)


def command(experiment: Experiment) -> str:
    """The command that scores the sentences of the test set."""
    return (
        f"python -m fairseq_rope score --sys {quoted(experiment.hypotheses)} "
        f"--ref {quoted(*experiment.test_references)} --src {quoted(experiment.test_source)} "
        f"--target-lang {language(experiment.target)} --tokenize {experiment.tokenize} --json"
    )


def join_documents(experiment: Experiment, shell: Shell, hypotheses: Path, output: Path) -> None:
    """Write the translated documents of the test set to *output*, one a line."""
    boundaries = experiment.text("raw", "test", experiment.target)
    files = f"--boundaries {quoted(boundaries)} --input {quoted(hypotheses)} --output {quoted(output)}"
    shell.tool(f"python -m recipes.text.segments documents {files}")


def print_report(experiment: Experiment) -> None:
    """Print five translations, the paths of the files, the scores, and sacreBLEU as the last line."""
    files = (experiment.test_source, experiment.hypotheses, experiment.test_references[0])
    columns = [list(lines_of(str(path))) for path in files]
    total = len(columns[0])
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
    if experiment.unit.has_documents:
        print(f"{'document BLEU:':32} {json.loads(experiment.document_score.read_text())['score']:.2f}")
        print(Divided(**json.loads(experiment.separators.read_text())))
    print(f"signature:         {metrics[0]['signature']}")
    print(f"sacreBLEU {metrics[0]['score']:.2f}", flush=True)
