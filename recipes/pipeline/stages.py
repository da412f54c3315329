"""The stages of a recipe, in the order in which they run."""

from collections.abc import Iterable

from recipes.pipeline.experiment import Experiment
from recipes.pipeline.stage01_fetch import Fetch, FetchTest
from recipes.pipeline.stage02_extract import Extract, ExtractTest
from recipes.pipeline.stage02_monolingual import Monolingual
from recipes.pipeline.stage02_translate_texts import TranslateTexts
from recipes.pipeline.stage03_tokenise import Tokenise, TokeniseTest
from recipes.pipeline.stage04_clean import Clean
from recipes.pipeline.stage05_bpe import Bpe, BpeTest
from recipes.pipeline.stage06_binarise import Binarise, BinariseTest
from recipes.pipeline.stage07_train import Train
from recipes.pipeline.stage08_average import Average
from recipes.pipeline.stage09_translate import Translate
from recipes.pipeline.stage10_score import Score
from recipes.pipeline.stage11_export import Export
from recipes.pipeline.translation_stage import TranslationStage

TRAIN, AVERAGE, TRANSLATE, SCORE, EXPORT = Train(), Average(), Translate(), Score(), Export()
# What a model learns from and the test set have stages apart, so that another test set changes no model. The test set
# is extracted before texts are translated, because monolingual text with its lines is refused.
OF_DATA = (
    *(Fetch(), FetchTest(), Extract(), Monolingual(), ExtractTest(), TranslateTexts(), Tokenise(), TokeniseTest()),
    *(Clean(), Bpe(), BpeTest(), Binarise(), BinariseTest()),
)
# The stages that run by default.
TO_SCORE = (*OF_DATA, TRAIN, AVERAGE, TRANSLATE, SCORE)
STAGES = (*TO_SCORE, EXPORT)


def needed(stages: Iterable[TranslationStage], experiment: Experiment) -> list[TranslationStage]:
    """*stages* without those of the test set, of translated and of monolingual texts, if *experiment* has none."""
    settings, chosen = experiment.settings, list(stages)
    if not settings.test_files:
        chosen = [stage for stage in chosen if not stage.of_test_set]
    if not experiment.translator:
        chosen = [stage for stage in chosen if not stage.of_translated]
    if not settings.back_translation_model:
        chosen = [stage for stage in chosen if not stage.of_monolingual]
    return chosen
