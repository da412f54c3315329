"""Stage 21: join 2, 4 and 8 consecutive sentences of the test set to longer inputs."""

from pathlib import Path

from fairseq_rope.lines import count_lines, decode, split
from recipes.pipeline.commands import Shell, quoted
from recipes.pipeline.experiment import Experiment, StageError
from recipes.pipeline.lengths import LONGEST, has_room
from recipes.pipeline.stage import Stage

TIMES = (2, 4, 8)


def texts(experiment: Experiment, times: int) -> list[Path]:
    """The plain source and reference with *times* sentences a line."""
    return [experiment.work / "joined" / f"{times}.{lang}" for lang in (experiment.source, experiment.target)]


def data(experiment: Experiment) -> Path:
    """The folder of the binary data. :func:`subset` names its sets."""
    return experiment.work / "joined" / "data-bin"


def subset(times: int) -> str:
    """fairseq's name of the set with *times* sentences a line: test, test1 or test2."""
    number = TIMES.index(times)
    return f"test{number or ''}"


def lines(path: Path) -> list[str]:
    """The lines of the text in *path*. Only a newline ends a line."""
    return split(decode(path.read_bytes(), str(path)))


def check(experiment: Experiment) -> None:
    """Raise a StageError if the test set has too few lines, or if joined lines are too long to translate."""
    most, where = max(TIMES), "stage 21 (join sentences of the test set): the test set"
    for path in experiment.texts("bpe", ["test"]):
        words = [len(line.split()) for line in lines(path)]
        if len(words) < most:
            raise StageError(f"{where} has {len(words)} lines, and at least {most} are needed")
        longest = max(sum(words[n : n + most]) + 1 for n in range(0, len(words) - most + 1, most))
        if longest > LONGEST and not has_room(experiment):
            raise StageError(
                f"{where} has {most} lines of {longest} tokens ({path}), more than the {LONGEST} that "
                "fairseq takes: set --max-source-positions and --max-target-positions in "
                "fairseq_train_flags and fairseq_generate_flags"
            )


class Join(Stage):
    number = 21
    title = "join sentences of the test set"
    settings = ("source_lang", "target_lang")
    depends_on_bpe = True

    def inputs(self, experiment: Experiment) -> list[Path]:
        return [*experiment.texts("raw", ["test"]), *experiment.texts("bpe", ["test"]), *experiment.binary_data]

    def outputs(self, experiment: Experiment) -> list[Path]:
        pair = f"{experiment.source}-{experiment.target}"
        ends = [f"{pair}.{lang}.{end}" for lang in (experiment.source, experiment.target) for end in ("bin", "idx")]
        binary = [data(experiment) / f"{subset(times)}.{end}" for times in TIMES for end in ends]
        return [*(path for times in TIMES for path in texts(experiment, times)), *binary]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        if not experiment.dry_run:
            check(experiment)
        folder = experiment.work / "joined"
        shell.command(f"mkdir -p {quoted(folder)}")
        for name, kind in (("raw", ""), ("bpe", "bpe.")):
            for path in experiment.texts(name, ["test"]):
                sentences = count_lines(str(path)) if path.exists() else 0  # in a dry run, it may not exist yet
                for times in TIMES:
                    out = folder / f"{times}.{kind}{path.suffix[1:]}"
                    # The last line is dropped if it would have fewer sentences.
                    count = sentences // times * times or "LINES"
                    shell.command(
                        f"head -n {count} {quoted(path)} | paste -d ' ' {'- ' * times}"
                        f"> {quoted(out)}.tmp && mv {quoted(out)}.tmp {quoted(out)}"
                    )
        final, part = data(experiment), folder / "data-bin.tmp"
        prefixes = ",".join(quoted(folder / f"{times}.bpe") for times in TIMES)
        dictionaries = " ".join(
            f"--{flag} {quoted(experiment.work / 'data-bin' / f'dict.{lang}.txt')}"
            for flag, lang in (("srcdict", experiment.source), ("tgtdict", experiment.target))
        )
        shell.command(f"rm -rf {quoted(part)}")
        shell.command(
            f"fairseq-preprocess --source-lang {experiment.source} --target-lang {experiment.target} "
            f"--testpref {prefixes} {dictionaries} --destdir {quoted(part)}"
        )
        shell.command(f"rm -rf {quoted(final)} && mv {quoted(part)} {quoted(final)}")
