"""The rotary transformer: configuration, layers, encoder, decoder, models and named architectures."""

from .. import patches  # noqa: F401  isort: skip
from . import architectures  # noqa: F401  importing it registers the models
from .decoder import Decoder
from .encoder import Encoder
from .language_model import TransformerRopeLanguageModel
from .models import TransformerRopeModel
from .roberta import RobertaRopeModel

__all__ = ["Decoder", "Encoder", "RobertaRopeModel", "TransformerRopeLanguageModel", "TransformerRopeModel"]
