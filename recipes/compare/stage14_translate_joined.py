"""Stage 14: translate the sets of stage 13 (fairseq-generate), as stage 9 translates the test set."""

from pathlib import Path

from recipes.compare import stage13_join
from recipes.pipeline.experiment import Experiment
from recipes.pipeline.stage09_translate import SEARCH_SETTINGS, Translated, test_segments, translate, translated
from recipes.pipeline.stage10_score import join_documents
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.shell import Shell, quoted, say


def files(experiment: Experiment, length: int) -> Translated:
    """The files of the translated set of *length*."""
    names = f"{length}.generate.txt", f"{length}.{experiment.target}", f"{length}.separators.json"
    return Translated(*(experiment.model / "joined" / name for name in names))


def documents(experiment: Experiment, length: int) -> Path:
    """The file of the translated documents, one a line."""
    return experiment.model / "joined" / f"{length}.documents.{experiment.target}"


class TranslateJoined(TranslationStage):
    number = 14
    title = "translate joined sentences"
    per_model = True
    of_test_set = True
    settings = SEARCH_SETTINGS

    def inputs(self, experiment: Experiment) -> list[Path]:
        own = [experiment.averaged, *stage13_join.Join().outputs(experiment)]
        if not experiment.unit.has_documents:
            return own
        boundaries = experiment.text("raw", "test", experiment.target)
        return [*own, experiment.test_source, boundaries, test_segments(experiment), *translated(experiment)[1:]]

    def outputs(self, experiment: Experiment) -> list[Path]:
        lengths = stage13_join.lengths(experiment)
        if not experiment.unit.has_documents:
            return [files(experiment, length).hypotheses for length in lengths]
        return [path for n in lengths for path in (*files(experiment, n)[1:], documents(experiment, n))]

    def run(self, experiment: Experiment, shell: Shell) -> None:
        shell.command(f"mkdir -p {quoted(experiment.model / 'joined')}")
        data = stage13_join.data(experiment)
        translations = {test_segments(experiment): translated(experiment)}  # by the file of their segments
        for length in stage13_join.lengths(experiment):
            source = stage13_join.texts(experiment, length)[0]
            segments = stage13_join.in_subwords(experiment, length)[0]
            outputs = files(experiment, length)
            copied = None  # earlier translations of the same segments
            if experiment.unit.has_documents and not experiment.dry_run:
                text = segments.read_bytes()
                copied = next((files for path, files in translations.items() if path.read_bytes() == text), None)
            if copied is None:
                subset = stage13_join.subset(experiment, length)
                translate(experiment, shell, data, subset, source, segments, outputs)
            else:
                say(f"segments of up to {length} subwords: the same as in {copied.hypotheses.name}, which is copied")
                for old, new in zip(copied[1:], outputs[1:], strict=True):
                    shell.write(f"cat {quoted(old)}", new)
            translations[segments] = outputs
            if experiment.unit.has_documents:
                join_documents(experiment, shell, outputs.hypotheses, documents(experiment, length))
