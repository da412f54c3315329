"""The position encodings: a file for each family, written in torch alone, and a row of ``ENCODINGS`` for each."""

from .absolute import Learned, NoPositions, Shape, Sinusoidal
from .alibi import ALiBi
from .deberta import DeBERTa
from .interface import DistanceBias, Option, PositionEncoding
from .kerple import Kerple
from .rotary import RotaryEmbedding
from .shaw import Nezha, Shaw
from .t5 import T5Bias
from .transformer_xl import TransformerXL
from .tupe import Tupe
from .xpos import XPos

__all__ = ["DEFAULT", "ENCODINGS", "DistanceBias", "Option", "PositionEncoding"]

DEFAULT = "rope"
# by their names in --position-encoding
ENCODINGS: dict[str, type[PositionEncoding]] = {
    "none": NoPositions,
    "sinusoidal": Sinusoidal,
    "shape": Shape,
    "learned": Learned,
    "rope": RotaryEmbedding,
    "alibi": ALiBi,
    "t5": T5Bias,
    "shaw": Shaw,
    "nezha": Nezha,
    "transformer-xl": TransformerXL,
    "tupe": Tupe,
    "deberta": DeBERTa,
    "kerple": Kerple,
    "xpos": XPos,
}
