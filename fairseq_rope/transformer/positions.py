"""The position encodings of a model's layers: built from its options, and fitted to checkpoints of other encodings."""

import contextlib
import logging
import re
from typing import Any, Dict, Iterator, Optional

import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import PositionalEmbedding
from torch import Tensor, nn

from ..positions import ENCODINGS, PositionEncoding
from .config import encoding_name

logger = logging.getLogger(__name__)
# What some versions of fairseq write for sinusoids, which have no parameters; all versions can read it.
SINUSOIDS = ("embed_positions._float_tensor", "embed_positions.weights")


@contextlib.contextmanager
def own_random_numbers() -> Iterator[None]:
    """Draw random numbers from a generator that other parameters do not use.

    All other parameters of a model then start with the same numbers, with any position encoding.
    """
    # on the CPU also if the model is built on another device, such as "meta"
    seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_(generator=_copy_of_default_generator()))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _copy_of_default_generator() -> torch.Generator:
    generator = torch.Generator("cpu")
    generator.set_state(torch.default_generator.get_state())
    return generator


class SidePositions:
    """Builds the position encodings of one side, "encoder" or "decoder", as *cfg* describes them.

    Raises:
        ValueError: an option of the encoding has a value that is not allowed
    """

    def __init__(self, cfg: TransformerConfig, side: str) -> None:
        self.cfg, self.side = cfg, side
        self.name = encoding_name(cfg, side)
        self.encoding = ENCODINGS[self.name]
        self._shared: Optional[PositionEncoding] = None

    def of_layer(self) -> PositionEncoding:
        """Return the encoding for the next layer; the same object each time if layers share it."""
        if self._shared is not None:
            return self._shared
        sizes = getattr(self.cfg, self.side)
        options = {name: getattr(self.cfg, name) for name in self.encoding.options}
        with own_random_numbers():
            position = self.encoding.build(self.side, sizes.embed_dim, sizes.attention_heads, **options)
        if self.encoding.shared:
            self._shared = position
        return position

    def embedding(self, positions: int, dim: int, padding_idx: int) -> Optional[nn.Module]:
        """Return fairseq's embedding of absolute positions, or None if the encoding has none."""
        if not self.encoding.absolute:
            return None
        with own_random_numbers():
            return PositionalEmbedding(positions, dim, padding_idx, learned=self.encoding.absolute == "learned")


def fit_positions(module: nn.Module, positions: SidePositions, state_dict: Dict[str, Tensor], name: str) -> None:
    """Change the parameters of positions in *state_dict*, from a checkpoint, in place so that *module* can load them.

    Parameters that *module* does not have are dropped. If the checkpoint has no parameter of the module's encoding,
    these keep their initial values. Both are logged as warnings.

    Args:
        module: the encoder or decoder
        positions: those of its side
        state_dict: the checkpoint's parameters
        name: the name of *module* in *state_dict*
    """
    own = {f"{name}.{key}": value for key, value in module.state_dict().items() if is_of_positions(key)}
    loaded = {key for key in state_dict if key.startswith(f"{name}.") and is_of_positions(key[len(name) + 1 :])}
    sinusoids = {f"{name}.{key}" for key in SINUSOIDS}
    if positions.encoding.absolute == "sinusoidal":
        loaded -= sinusoids
    of_model = f"this model's {positions.side} has the position encoding {positions.name}"
    if loaded - own.keys():
        logger.warning(f"dropped {_in_words(loaded - own.keys())} from the checkpoint: {of_model}")
        for key in loaded - own.keys():
            del state_dict[key]
    learned = {key: value for key, value in own.items() if key not in sinusoids}
    if learned and not learned.keys() & state_dict.keys():
        logger.warning(f"the checkpoint has no {_in_words(learned)}, which starts with new values: {of_model}")
        state_dict.update({key: value.detach().clone() for key, value in learned.items()})


def is_of_positions(key: str) -> bool:
    """Return whether *key*, relative to an encoder or decoder, names a parameter of its positions."""
    return key.startswith("embed_positions.") or ".self_attn.position." in key


def _in_words(keys: Any) -> str:
    return ", ".join(sorted({re.sub(r"\.layers\.\d+\.", ".layers.*.", key) for key in keys}))
