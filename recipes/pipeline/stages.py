"""The stages of a recipe, in the order in which they run."""

from recipes.pipeline.stage01_fetch import Fetch
from recipes.pipeline.stage02_extract import Extract
from recipes.pipeline.stage03_tokenise import Tokenise
from recipes.pipeline.stage04_clean import Clean
from recipes.pipeline.stage05_bpe import Bpe
from recipes.pipeline.stage06_binarise import Binarise
from recipes.pipeline.stage07_train import Train
from recipes.pipeline.stage08_average import Average
from recipes.pipeline.stage09_translate import Translate
from recipes.pipeline.stage10_score import Score
from recipes.pipeline.stage11_export import Export

TRAIN, AVERAGE, TRANSLATE, SCORE = Train(), Average(), Translate(), Score()
# The stages that run by default.
TO_SCORE = (Fetch(), Extract(), Tokenise(), Clean(), Bpe(), Binarise(), TRAIN, AVERAGE, TRANSLATE, SCORE)
STAGES = (*TO_SCORE, Export())
