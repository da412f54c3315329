"""Stage 9: translate the test set (fairseq-generate) and put it back into order and plain text."""

from pathlib import Path

from tqdm import tqdm

from recipes.pipeline import stage06_binarise, stage08_average
from recipes.pipeline.experiment import Experiment, StageError
from recipes.text.lines import count_lines

NUMBER = 9
TITLE = "translate the test set"
PER_MODEL = True
SETTINGS = ("beam", "length_penalty", "max_len_b", "source_lang", "target_lang", "fairseq_generate_flags")


def inputs(x: Experiment) -> list[Path]:
    source = x.work / "raw" / f"test.{x.source}"
    return [*stage08_average.outputs(x), *stage06_binarise.outputs(x), source]


def outputs(x: Experiment) -> list[Path]:
    return [x.model / "generate.txt", x.model / f"hypotheses.{x.target}"]


def run(x: Experiment) -> None:
    source = inputs(x)[-1]
    translate(x, x.work / "data-bin", "test", source, *outputs(x))


def command(x: Experiment, data: Path, subset: str) -> str:
    """The fairseq-generate command that translates *subset* of the binary data in *data*."""
    q = x.quoted
    return (
        f"fairseq-generate {x.shell(data)} --source-lang {x.source} --target-lang {x.target} "
        f"--user-dir fairseq_rope --path {x.shell(x.model / 'averaged.pt')} --gen-subset {subset} "
        f"--beam {q('beam')} --lenpen {q('length_penalty')} --max-len-a 1 --max-len-b {q('max_len_b')} "
        f"{x.text_flags} --max-tokens 8000 --no-progress-bar "
        f"{'--cpu ' if x.gpus == 0 else ''}{x.flags('fairseq_generate_flags')}"
    )


def translate(
    x: Experiment, data: Path, subset: str, source: Path, generated: Path, hypotheses: Path
) -> None:
    """Translate a set of binary data by the averaged model, as the settings say.

    Args:
        data, subset: the folder that fairseq-preprocess wrote, and the name of the set in it
        source: a text of as many lines as there are sentences
        generated: where to put the output of fairseq-generate
        hypotheses: where to put the translations, plain text in the order of *source*

    Raises:
        StageError: a command failed, or a sentence has no translation
    """
    part = generated.with_name(generated.name + ".tmp")
    sentences = 0 if x.dry_run else count_lines(str(source))
    with tqdm(total=sentences, unit=" sentences", desc="  translated", delay=0.1, disable=x.dry_run) as bar:
        x.command(
            f"{command(x, data, subset)} | tee {x.shell(part)} && mv {x.shell(part)} {x.shell(generated)}",
            on_line=lambda line: bar.update() if line.startswith("D-") else None,
        )
    # Generated in order of length; D-<number> <tab> score <tab> detokenised text.
    part = hypotheses.with_name(hypotheses.name + ".tmp")
    x.command(
        f"grep '^D-' {x.shell(generated)} | LC_ALL=C sort -t- -k2,2n | cut -f3- > {x.shell(part)} "
        f"&& mv {x.shell(part)} {x.shell(hypotheses)}"
    )
    written = sentences if x.dry_run else count_lines(str(hypotheses))
    if written != sentences:
        raise StageError(f"{hypotheses} has {written} lines, and {source} {sentences}")
