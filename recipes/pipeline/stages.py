"""The stages of a recipe, in the order in which they run."""

from collections.abc import Iterable

from recipes.pipeline.experiment import Experiment
from recipes.pipeline.stage01_fetch import Fetch, FetchTest
from recipes.pipeline.stage02_extract import Extract, ExtractTest
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

TRAIN, AVERAGE, TRANSLATE, SCORE = Train(), Average(), Translate(), Score()
# What a model learns from and the test set have stages apart, so that another test set changes no model.
OF_DATA = (
    *(Fetch(), FetchTest(), Extract(), TranslateTexts(), ExtractTest(), Tokenise(), TokeniseTest(), Clean(), Bpe()),
    *(BpeTest(), Binarise(), BinariseTest()),
)
# The stages that run by default.
TO_SCORE = (*OF_DATA, TRAIN, AVERAGE, TRANSLATE, SCORE)
STAGES = (*TO_SCORE, Export())


def needed(stages: Iterable[TranslationStage], experiment: Experiment) -> list[TranslationStage]:
    """*stages* without those of the test set and of translated texts, if *experiment* has none."""
    has = experiment.settings.test_files, experiment.translator
    return [stage for stage in stages if not (stage.of_test_set and not has[0] or stage.of_translated and not has[1])]
