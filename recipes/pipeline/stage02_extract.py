"""Stage 2: extract the sentences of both languages, and check them (``recipes.text.extract``)."""

import filecmp
from collections.abc import Sequence
from pathlib import Path

from fairseq_rope.errors import InputError
from fairseq_rope.lines import lines_of, read_lines
from fairseq_rope.text.plain import check_plain
from recipes.pipeline.experiment import LEARNT, MONOLINGUAL, TEST, Experiment, file_of
from recipes.pipeline.stage02_monolingual import refuse_held_out
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.shell import Shell, named, quoted, say


class Extract(TranslationStage):
    number = 2
    title = "extract and check"
    settings: tuple[str, ...] = ("train_files", "valid_files", "source_lang", "target_lang")
    depends_on_documents = True
    sets = LEARNT

    def inputs(self, experiment: Experiment) -> list[Path]:
        places = [place for name in self.sets for corpus in experiment.corpora(name) for place in corpus]
        return [experiment.fetched(file) for file in dict.fromkeys(map(file_of, places))]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return experiment.texts("raw", experiment.given(self.sets))

    def run(self, experiment: Experiment, shell: Shell) -> None:
        for name in experiment.given(self.sets):
            self._extract(experiment, shell, name, [first for first, *_ in experiment.settings.templates(name)])
        self.check_documents(experiment, experiment.given(["valid"]))

    def _extract(
        self, experiment: Experiment, shell: Shell, name: str, templates: Sequence[str], references: Sequence[str] = ()
    ) -> None:
        """Write the set *name*, with *references* in place of the targets of *templates*."""
        places = [_places(experiment, template) for template in templates]
        sources, targets = ([pair[side] for pair in places] for side in (0, 1))
        if references:
            targets = [_places(experiment, reference)[1] for reference in references]
        further = "".join(f" --reference {quoted(target)}" for target in targets) if targets != sources else ""
        shell.tool(
            f"python -m recipes.text.extract {experiment.languages}{experiment.unit.flag} "
            f"--output {quoted(experiment.work / 'raw' / name)} {quoted(*sources)}{further}",
            makes=experiment.texts("raw", [name]),
        )
        source, target = experiment.texts("raw", [name])
        if not experiment.dry_run and filecmp.cmp(source, target, shallow=False):
            setting = f"{name.partition('.')[0]}_files"
            value = getattr(experiment.settings, setting)
            raise self.error(f"{setting}={value}: {source.name} and {target.name} are equal")

    def check_documents(self, experiment: Experiment, sets: Sequence[str]) -> None:
        """Raise a StageError if the text has documents, and a line of one of *sets* is blank on one side only."""
        for name in sets if experiment.unit.has_documents and not experiment.dry_run else ():
            paths = experiment.texts("raw", [name])
            for number, pair in enumerate(zip(*map(lines_of, map(str, paths)), strict=True), 1):
                if any(pair) and not all(pair):
                    blank, other = paths if pair[1] else reversed(paths)
                    separates = "a blank line separates documents, and must be blank on both sides"
                    raise self.error(
                        f"{blank}, line {number}: is blank, and the same line of {other} is not; {separates}"
                    )


class ExtractTest(Extract):
    """It also writes the test set once more for each further reference: ``raw/test.2``, ``test.3``, …"""

    title = "extract and check the test set"
    label = ".test"
    settings = ("test_files", "source_lang", "target_lang")
    sets = TEST
    of_test_set = True

    def inputs(self, experiment: Experiment) -> list[Path]:
        monolingual = [experiment.text("raw", MONOLINGUAL, experiment.target)]
        return [*super().inputs(experiment), *monolingual * bool(experiment.settings.back_translation_model)]

    def outputs(self, experiment: Experiment) -> list[Path]:
        test_set = experiment.test_source, *experiment.test_references, *experiment.reference_documents
        return [*experiment.texts("raw", experiment.with_references), *experiment.unit.of_documents(*test_set)]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        corpora = experiment.settings.templates("test")
        for number, name in enumerate(experiment.with_references):
            references = [corpus[number] for corpus in corpora] if number else []
            self._extract(experiment, shell, name, [corpus[0] for corpus in corpora], references)
        self.check_documents(experiment, experiment.with_references)
        if experiment.unit.has_documents:
            self._write_sentences_and_documents(experiment, shell)
        if not experiment.dry_run:
            self.check_test_set(experiment)

    def _write_sentences_and_documents(self, experiment: Experiment, shell: Shell) -> None:
        """Write the test set without blank lines, and the documents of the references, one a line."""
        source, target = experiment.texts("raw", ["test"])
        further = [experiment.text("raw", name, experiment.target) for name in experiment.with_references[1:]]
        plain = experiment.test_source, *experiment.test_references
        for path, sentences in zip((source, target, *further), plain, strict=True):
            shell.write(f"sed '/^$/d' {quoted(path)}", sentences)
        for sentences, documents in zip(experiment.test_references, experiment.reference_documents, strict=True):
            files = f"--input {quoted(sentences)} --output {quoted(documents)}"
            shell.tool(f"python -m recipes.text.segments documents --boundaries {quoted(target)} {files}")

    def check_test_set(self, experiment: Experiment) -> None:
        """Raise a StageError for a test set that stage 10 would refuse after the training."""
        try:
            for path in (experiment.test_source, *experiment.test_references):
                for warning in check_plain(str(path), read_lines(str(path)), path != experiment.test_source):
                    say(f"warning: {warning}")
        except InputError as error:
            raise self.error(str(error)) from None
        for path in experiment.test_references if experiment.settings.back_translation_model else ():
            refuse_held_out(self, experiment.text("raw", MONOLINGUAL, experiment.target), path)


def _places(experiment: Experiment, template: str) -> tuple[str, str]:
    """*template* in the folders in which stage 1 has found or downloaded the files of the source and of the target.

    If this is one folder, both are the same template.
    """
    file = file_of(template)
    colon, member = template[len(file) : len(file) + 1], template[len(file) + 1 :]
    source, target = (experiment.fetched(name) for name in experiment.sides(file))
    if source.parent == target.parent:
        both = f"{named(source.with_name(Path(file).name))}{colon}{member}"
        return both, both
    members = experiment.sides(member)
    return f"{named(source)}{colon}{members[0]}", f"{named(target)}{colon}{members[1]}"
