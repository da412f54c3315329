"""Encodings that do not change self-attention: none, and vectors of absolute positions added to the embeddings.

The vectors are fairseq's own (``fairseq/modules/positional_embedding.py``), so these models equal fairseq's
``transformer`` with ``--no-token-positional-embeddings``, without flags, and with ``--encoder-learned-pos
--decoder-learned-pos``.
"""

from .interface import PositionEncoding


class NoPositions(PositionEncoding):
    """No positions. A causal decoder can count its keys; an encoder cannot know the order of its words."""


class Sinusoidal(PositionEncoding):
    """Sinusoids of absolute positions: Vaswani et al. 2017, arXiv:1706.03762, section 3.5, in fairseq's order.

    fairseq puts all sines before all cosines, and its exponent runs over d/2 - 1
    (``fairseq/modules/sinusoidal_positional_embedding.py``).
    """

    absolute = "sinusoidal"
    relative = False


class Learned(PositionEncoding):
    """Learned vectors of absolute positions (``fairseq/modules/learned_positional_embedding.py``).

    A sentence that is longer than ``--max-source-positions`` or ``--max-target-positions`` has no vectors.
    """

    absolute = "learned"
    relative = False
