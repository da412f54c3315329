"""Stage 1: check the files of a corpus, and download those that are missing (``recipes.text.fetch``)."""

from pathlib import Path

from recipes.pipeline.experiment import LEARNT, SETS, TEST, Experiment, file_of
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.run import StageError
from recipes.run.shell import Shell, quoted


class Fetch(TranslationStage):
    number = 1
    title = "fetch"
    settings: tuple[str, ...] = ("train_files", "valid_files", "source_lang", "target_lang")
    sets = LEARNT

    def inputs(self, experiment: Experiment) -> list[Path]:
        folder = experiment.data_dir
        own = [] if folder is None else [folder / file for file in experiment.files(self.sets)]
        return [*filter(None, [experiment.manifest]), *(path for path in own if path.exists())]

    def outputs(self, experiment: Experiment) -> list[Path]:
        return [experiment.fetched(file) for file in experiment.files(self.sets)]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        check_files(experiment)
        data_dir = [] if experiment.data_dir is None else ["--data-dir", experiment.data_dir]
        words = [experiment.manifest or "none", "--output", experiment.work / "downloads", *data_dir]
        files = experiment.files(self.sets)
        if files:  # else all are files of the user
            shell.tool(f"python -m recipes.text.fetch --manifest {quoted(*words, *files)}")


class FetchTest(Fetch):
    title = "fetch the test set"
    label = ".test"
    settings = ("test_files", "source_lang", "target_lang")
    sets = TEST
    of_test_set = True


def check_files(experiment: Experiment) -> None:
    """Raise a StageError if a file of the user does not exist, or if the data folder has only one side of a corpus."""
    for corpus in (corpus for name in SETS for corpus in experiment.corpora(name)):
        files = [Path(file_of(place)) for place in corpus]
        for file in files:
            if file.is_absolute() and not file.exists() and not experiment.dry_run:
                raise StageError(f"stage 1 (fetch): {file} does not exist")
        if experiment.data_dir is not None:
            paths = [experiment.data_dir / file for file in files if not file.is_absolute()]
            here, missing = ([path for path in paths if path.exists() is there] for there in (True, False))
            if here and missing:
                has = f"has {here[0].name} but not {missing[0].name}; give both or neither"
                raise StageError(f"--data-dir {experiment.data_dir}: {has}")
