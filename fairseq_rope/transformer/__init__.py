"""The rotary transformer: configuration, layers, encoder, decoder, models and named architectures."""

from .config import TransformerRopeConfig
from .decoder import RotaryDecoder
from .encoder import RotaryEncoder
from .layers import RotaryDecoderLayer, RotaryEncoderLayer
from .models import TransformerRopeModel

__all__ = [
    "RotaryDecoder",
    "RotaryDecoderLayer",
    "RotaryEncoder",
    "RotaryEncoderLayer",
    "TransformerRopeConfig",
    "TransformerRopeModel",
]
