"""The rotary transformer: configuration, layers, encoder, decoder, models and named architectures."""

from .decoder import RotaryDecoder
from .encoder import RotaryEncoder
from .models import TransformerRopeModel

__all__ = ["RotaryDecoder", "RotaryEncoder", "TransformerRopeModel"]
