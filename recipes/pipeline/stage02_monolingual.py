"""Stage 2, part 2: join the monolingual texts for back-translation (``recipes.text.monolingual``)."""

import shlex
import unicodedata
from pathlib import Path

import regex

from fairseq_rope.lines import lines_of
from recipes.pipeline.experiment import MONOLINGUAL, Experiment
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.shell import Shell, quoted
from recipes.text.lines import NOT_PRINTING


class Monolingual(TranslationStage):
    number = 2
    title = "join and check monolingual texts"
    label = ".monolingual"
    settings = ("back_translation_files", "target_lang")
    of_monolingual = True

    def inputs(self, experiment: Experiment) -> list[Path]:
        held_out = [experiment.text("raw", "valid", experiment.target)] * bool(experiment.given(["valid"]))
        return [*(Path(file) for file in shlex.split(experiment.settings.back_translation_files)), *held_out]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.text("raw", MONOLINGUAL, experiment.target)]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        (output,) = self.outputs(experiment)
        files = shlex.split(experiment.settings.back_translation_files)
        shell.tool(f"python -m recipes.text.monolingual --output {quoted(output, *map(Path, files))}", makes=[output])
        if not experiment.dry_run:
            refuse_held_out(self, output, experiment.text("raw", "valid", experiment.target))


def refuse_held_out(stage: TranslationStage, text: Path, held_out: Path) -> None:
    """Raise a StageError if lines of *held_out*, with which a model is validated or tested, are in *text*.

    Lines are equal if they differ only in white space, in characters that do not print, or in the Unicode form of their
    characters (NFKC).
    """
    known = {key for line in lines_of(str(held_out)) if (key := _key(line))}
    numbers = [number for number, line in enumerate(lines_of(str(text)), 1) if _key(line) in known]
    if numbers:
        count = f"lines that are also in {held_out}: {len(numbers)}, the first is line {numbers[0]}"
        raise stage.error(f"back_translation_files: {text} has {count}: remove them from the monolingual texts")


def _key(line: str) -> str:
    visible = regex.sub(r"\p{Cf}", "", unicodedata.normalize("NFKC", line))  # soft hyphens and byte order marks
    return " ".join(NOT_PRINTING.sub(" ", visible).split())
