"""Stage 9: translate the test set (fairseq-generate), and write the translations in order as plain text.

If the text has documents, its lines are segments, whose translations are divided into sentences
(``recipes.text.segments``).
"""

import shlex
from pathlib import Path
from typing import NamedTuple

from tqdm import tqdm

from fairseq_rope.lines import count_lines
from recipes.pipeline.experiment import TEST, Experiment
from recipes.pipeline.lengths import SEARCH_TOKENS, check_lengths
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.shell import Shell, part_of, quoted

SEARCH_SETTINGS = ("beam", "length_penalty", "max_len_b", "source_lang", "target_lang", "fairseq_generate_flags")


class Translated(NamedTuple):
    """The files of a translated set."""

    generated: Path  # the output of fairseq-generate
    hypotheses: Path  # plain text, in the order of the source
    separators: Path  # of segments, how many translations have other separators than their source


class Translate(TranslationStage):
    number = 9
    title = "translate the test set"
    per_model = True
    of_test_set = True
    settings = SEARCH_SETTINGS

    def inputs(self, experiment: Experiment) -> list[Path]:
        segments = experiment.unit.of_documents(test_segments(experiment))
        data = [*experiment.binary_data, *experiment.binary_sets(TEST)]
        return [experiment.averaged, *data, experiment.test_source, *segments]

    def outputs(self, experiment: Experiment) -> list[Path]:
        generated, hypotheses, separators = translated(experiment)
        return [generated, hypotheses, *experiment.unit.of_documents(separators)]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        if not experiment.dry_run:
            check_lengths(experiment, 0, TEST, self.description)
        source, segments = experiment.test_source, test_segments(experiment)
        translate(experiment, shell, experiment.data_bin, "test", source, segments, translated(experiment))


def test_segments(experiment: Experiment) -> Path:
    """The segments of the source of the test set, of a text with documents."""
    return experiment.text("segments", "test", experiment.source)


def translated(experiment: Experiment) -> Translated:
    """The files that stage 9 writes."""
    return Translated(experiment.generated, experiment.hypotheses, experiment.separators)


def command(experiment: Experiment, data: Path, subset: str) -> str:
    """The fairseq-generate command that translates *subset* of the binary data in *data*."""
    settings = experiment.settings
    subwords = quoted(experiment.data_bin / experiment.subwords)
    if experiment.bpe == "sentencepiece":
        text_flags = f"--bpe sentencepiece --sentencepiece-model {subwords}"
    else:
        text_flags = f"--tokenizer moses --moses-no-dash-splits --bpe subword_nmt --bpe-codes {subwords}"
    return (
        f"fairseq-generate {quoted(data)} {experiment.languages} "
        f"{experiment.user_dir} --path {quoted(experiment.averaged)} --gen-subset {subset} "
        f"--beam {settings.beam} --lenpen {settings.length_penalty} --max-len-a 1 --max-len-b {settings.max_len_b} "
        f"{text_flags} --max-tokens {SEARCH_TOKENS} --no-progress-bar "
        f"{'--cpu ' if experiment.gpus == 0 else ''}{quoted(*shlex.split(settings.fairseq_generate_flags))}"
    )


def translate(
    experiment: Experiment, shell: Shell, data: Path, subset: str, source: Path, segments: Path, files: Translated
) -> None:
    """Translate a set with the averaged model. The command that orders the translations fails if one is missing.

    Args:
        data, subset: the folder that fairseq-preprocess wrote, and the name of the set in it
        source: the text of the set
        segments: if the text has documents, the lines of the set; they contain the lines of *source*
    """
    generated, hypotheses, separators = files
    in_subwords = segments if experiment.unit.has_documents else source
    lines = 0 if experiment.dry_run else count_lines(str(in_subwords))
    bar = tqdm(total=lines, unit=f" {experiment.unit.lines}", desc="  translated", delay=0.1, disable=not lines)
    with bar, part_of(generated) as part:
        shell.command(
            f"{command(experiment, data, subset)} | tee {quoted(part)} && mv {quoted(part, generated)}",
            on_line=lambda line: bar.update() if line.startswith("D-") else None,
            makes=[generated],
        )
    if experiment.unit.has_documents:
        moses = "" if experiment.bpe == "sentencepiece" else f" --moses {experiment.source} {experiment.target}"
        shell.tool(
            f"python -m recipes.text.segments divide --segments {quoted(in_subwords)} --generated {quoted(generated)} "
            f"--output {quoted(hypotheses)} --counts {quoted(separators)} "
            f"--subwords {quoted(experiment.data_bin / experiment.subwords)}{moses}"
        )
    else:
        inputs = f"--generated {quoted(generated)} --source {quoted(source)}"
        shell.tool(f"python -m recipes.text.translations {inputs} --output {quoted(hypotheses)}")
