"""Stage 2: extract the sentences of both languages, and check them (``recipes.text.extract``)."""

from pathlib import Path

from fairseq_rope.errors import InputError
from fairseq_rope.tools.score import check_plain, read_lines
from recipes.pipeline.commands import Shell, named, quoted
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.stage import Stage


class Extract(Stage):
    number = 2
    title = "extract and check"
    settings = ("train_files", "valid_files", "test_files", "source_lang", "target_lang")

    def inputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.fetched(file) for file in experiment.files()]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return experiment.texts("raw", experiment.raw_sets)

    def run(self, experiment: Experiment, shell: Shell) -> None:
        for name in experiment.raw_sets:
            where = []
            for template in experiment.settings.templates(name):
                file, colon, member = template.partition(":")
                folder = experiment.fetched(experiment.sides(file)[0]).parent
                where.append(f"{named(folder / file)}{colon}{member}")
            shell.tool(
                f"python -m recipes.text.extract --source-lang {experiment.source} "
                f"--target-lang {experiment.target} "
                f"--output {quoted(experiment.work / 'raw' / name, *where)}",
                makes=experiment.texts("raw", [name]),
            )
        if not experiment.dry_run:
            self.check_test_set(experiment)

    def check_test_set(self, experiment: Experiment) -> None:
        """Raise a StageError for a test set that stage 10 would refuse after the training."""
        try:
            for path in (experiment.test_source, experiment.test_reference):
                is_reference = path == experiment.test_reference
                check_plain(str(path), read_lines(str(path)), is_reference)
        except InputError as error:
            raise self.error(str(error)) from None
