"""Stage 3: normalise and tokenise as Moses does (``recipes.text.tokenise``)."""

from pathlib import Path

from fairseq_rope.launch import available_cores
from fairseq_rope.text.languages import language
from recipes.pipeline.experiment import TEST, Experiment
from recipes.pipeline.translation_stage import TranslationStage
from recipes.run.shell import Shell, quoted


class Tokenise(TranslationStage):
    number = 3
    title = "normalise and tokenise"
    settings = ("normalise_punctuation", "source_lang", "target_lang")
    depends_on_bpe = True

    def inputs(self, experiment: Experiment) -> list[Path]:
        return experiment.texts("raw", self.sets(experiment))

    def outputs(self, experiment: Experiment) -> list[Path]:
        return experiment.texts("tokenised", self.sets(experiment))

    def sets(self, experiment: Experiment) -> list[str]:
        return experiment.learnt_from

    def run(self, experiment: Experiment, shell: Shell) -> None:
        sides = experiment.settings.normalise_punctuation
        shell.command(f"mkdir -p {quoted(experiment.work / 'tokenised')}")
        for raw, out in zip(self.inputs(experiment), self.outputs(experiment), strict=True):
            lang = out.suffix[1:]
            side = "source" if lang == experiment.source else "target"
            flags = "--normalise-punctuation " if sides in ("both", side) else ""
            flags += "--no-tokeniser " if experiment.bpe == "sentencepiece" else ""
            files = f"--input {quoted(raw)} --output {quoted(out)}"
            flags += f"--workers {available_cores()}"
            shell.tool(f"python -m recipes.text.tokenise --lang {language(lang)} {files} {flags}", makes=[out])


class TokeniseTest(Tokenise):
    title = "normalise and tokenise the test set"
    label = ".test"
    of_test_set = True

    def sets(self, experiment: Experiment) -> list[str]:
        return experiment.given(TEST)
