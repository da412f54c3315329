"""The rotary transformer: configuration, layers, encoder, decoder, models and named architectures."""

from .decoder import Decoder
from .encoder import Encoder
from .models import TransformerRopeModel

__all__ = ["Decoder", "Encoder", "TransformerRopeModel"]
