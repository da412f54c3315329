"""Stage 2: extract the sentences of both languages, and check them (``recipes.text.extract``)."""

import filecmp
from pathlib import Path

from fairseq_rope.errors import InputError
from fairseq_rope.lines import lines_of, read_lines
from fairseq_rope.text.plain import check_plain
from recipes.pipeline.commands import Shell, named, quoted, say
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.stage import Stage


class Extract(Stage):
    number = 2
    title = "extract and check"
    settings = ("train_files", "valid_files", "test_files", "source_lang", "target_lang")
    depends_on_documents = True

    def inputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.fetched(file) for file in experiment.files()]

    def outputs(self, experiment: Experiment) -> list[Path]:
        test_set = experiment.test_source, experiment.test_reference, experiment.reference_documents
        return [*experiment.texts("raw", experiment.raw_sets), *experiment.unit.of_documents(*test_set)]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        for name in experiment.raw_sets:
            where = []
            for template in experiment.settings.templates(name):
                file, colon, member = template.partition(":")
                folder = experiment.fetched(experiment.sides(file)[0]).parent
                where.append(f"{named(folder / file)}{colon}{member}")
            shell.tool(
                f"python -m recipes.text.extract {experiment.languages}{experiment.unit.flag} "
                f"--output {quoted(experiment.work / 'raw' / name, *where)}",
                makes=experiment.texts("raw", [name]),
            )
            self._refuse_equal_sides(experiment, name)
        if experiment.unit.has_documents:
            self._write_sentences_and_documents(experiment, shell)
        if not experiment.dry_run:
            self.check_test_set(experiment)

    def _refuse_equal_sides(self, experiment: Experiment, name: str) -> None:
        source, target = experiment.texts("raw", [name])
        if not experiment.dry_run and filecmp.cmp(source, target, shallow=False):
            template = getattr(experiment.settings, f"{name}_files")
            raise self.error(f"{name}_files={template}: {source.name} and {target.name} are equal")

    def _write_sentences_and_documents(self, experiment: Experiment, shell: Shell) -> None:
        """Write the test set without blank lines, and the documents of the reference, one a line."""
        if not experiment.dry_run:
            self.check_documents(experiment)
        raw = experiment.texts("raw", ["test"])
        for path, sentences in zip(raw, (experiment.test_source, experiment.test_reference), strict=True):
            shell.write(f"sed '/^$/d' {quoted(path)}", sentences)
        shell.tool(
            f"python -m recipes.text.segments documents --boundaries {quoted(raw[1])} "
            f"--input {quoted(experiment.test_reference)} --output {quoted(experiment.reference_documents)}"
        )

    def check_documents(self, experiment: Experiment) -> None:
        """Raise a StageError if a line of the validation or test set is blank on one side only."""
        for name in (name for name in experiment.raw_sets if name != "train"):
            paths = experiment.texts("raw", [name])
            for number, pair in enumerate(zip(*map(lines_of, map(str, paths)), strict=True), 1):
                if any(pair) and not all(pair):
                    blank, other = paths if pair[1] else reversed(paths)
                    separates = "a blank line separates documents, and must be blank on both sides"
                    raise self.error(
                        f"{blank}, line {number}: is blank, and the same line of {other} is not; {separates}"
                    )

    def check_test_set(self, experiment: Experiment) -> None:
        """Raise a StageError for a test set that stage 10 would refuse after the training."""
        try:
            for path in (experiment.test_source, experiment.test_reference):
                for warning in check_plain(str(path), read_lines(str(path)), path == experiment.test_reference):
                    say(f"warning: {warning}")
        except InputError as error:
            raise self.error(str(error)) from None
