"""The position encodings of a model's layers: built from its options, and fitted to checkpoints of other encodings."""

import contextlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from fairseq.models.transformer import TransformerConfig
from fairseq.modules import PositionalEmbedding
from torch import Tensor, nn

from ..checkpoints import current_reading, is_resumed
from ..modules.shifted_sinusoids import ShiftedSinusoidalEmbedding
from ..positions import PositionEncoding
from .options import SideOptions, is_pruned

logger = logging.getLogger(__name__)
# What some versions of fairseq write for sinusoids, which have no parameters; all versions can read it.
SINUSOIDS = ("embed_positions._float_tensor", "embed_positions.weights")


@contextlib.contextmanager
def own_random_numbers(stream: int = 0) -> Iterator[None]:
    """Draw random numbers from a generator of their own, so that all other parameters start with the same numbers.

    Streams of different numbers are independent: positions use 0, and the block 1.
    """
    with torch.random.fork_rng(devices=[]):
        # on the CPU also if the model is built on another device, such as "meta"
        seed = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        torch.default_generator.manual_seed(seed + stream)
        yield


class SidePositions:
    """Builds the position encodings of one side, whose *options* these are, of the model with *cfg*."""

    def __init__(self, options: SideOptions, cfg: TransformerConfig) -> None:
        self.options, self.cfg = options, cfg
        self.encoding = options.encoding_class
        self._first: PositionEncoding | None = None  # that of the first layer
        self._new: PositionEncoding | None = None  # the encoding whose parameters have no initial values yet

    def of_layer(self) -> PositionEncoding:
        """Return the encoding for the next layer; the same object each time if layers share it.

        Raises:
            ValueError: an option of the encoding has a value that is not allowed
        """
        side = self.options
        if self._first is not None and self.encoding.shared:
            return self._first
        with own_random_numbers():
            try:
                # favor's features are rotated, and not the dimensions of the head
                width = side.features * side.heads
                position = self.encoding.build(side.side, width, side.heads, **side.position, **self._limit())
            except ValueError as error:
                if side.features == side.head_dim:
                    raise
                raise ValueError(f"--feature-map favor, with {side.features} features: {error}") from None
        self._first = self._first or position
        for name in self.encoding.shared_parameters:
            setattr(position, name, getattr(self._first, name))
        self._new = position
        return position

    def _limit(self) -> dict[str, int]:
        """Return the number of positions, for an encoding that has a limit."""
        if not self.encoding.has_limit:
            return {}
        name = "max_source_positions" if self.options.side == "encoder" else "max_target_positions"
        return {"positions": int(getattr(self.cfg, name))}

    def initialise(self) -> None:
        """Draw the initial values of the encoding of the layer that has just been built.

        They are drawn after the layer's other parameters, because the seed depends on the numbers drawn before.
        """
        if self._new is not None:
            with own_random_numbers():
                self._new.reset_parameters()
            self._new = None

    def embedding(self, positions: int, dim: int, padding_idx: int) -> nn.Module | None:
        """Return fairseq's embedding of absolute positions, or None if the encoding has none."""
        if not self.encoding.absolute:
            return None
        with own_random_numbers():
            if "shape_max_shift" in self.options.position:
                return ShiftedSinusoidalEmbedding(positions, dim, padding_idx, self.options.position["shape_max_shift"])
            return PositionalEmbedding(positions, dim, padding_idx, learned=self.encoding.absolute == "learned")


def fit_positions(module: nn.Module, positions: SidePositions, state_dict: dict[str, Tensor], name: str) -> None:
    """Change the parameters of positions in *state_dict*, from a checkpoint, in place so that *module* can load them.

    Parameters of another encoding are dropped. If a training starts from a checkpoint that lacks parameters of its
    encoding, these keep their initial values. Both are logged as warnings. Layers that *module* does not
    have are kept: ``--encoder-layers-to-keep`` renumbers them later. *name* is that of *module* in *state_dict*.
    """
    prefix, side = f"{name}.", positions.options
    numbers = _kept_layers(side, state_dict, name)
    own = {key: value for key, value in _trained_names(module, numbers).items() if key not in SINUSOIDS}
    keys = (key.removeprefix(prefix) for key in state_dict if key.startswith(prefix))
    loaded = [key for key in keys if is_of_positions(key)]
    if positions.encoding.absolute == "sinusoidal":
        loaded = [key for key in loaded if key not in SINUSOIDS]
    own_kinds = {_kind(key) for key in own}
    dropped = [key for key in loaded if _kind(key) not in own_kinds]
    new = [key for key in own if key not in loaded]
    of_model = f"this model's {side.side} has the position encoding {side.encoding}"
    if dropped:
        logger.warning(f"dropped {_kinds(prefix, dropped)} from the checkpoint: {of_model}")
        for key in dropped:
            del state_dict[prefix + key]
    # Outside a training, a checkpoint that has some of the parameters is damaged.
    is_start = current_reading() is not None or len(dropped) == len(loaded)
    if new and is_start and not is_resumed():
        logger.warning(f"the checkpoint has no {_kinds(prefix, new)}, which starts with new values: {of_model}")
        state_dict.update({prefix + key: own[key].detach().clone() for key in new})


def layers_in(state_dict: Mapping[str, Tensor], name: str) -> int:
    """Return how many layers the part *name* of a model, such as its encoder, has in *state_dict*."""
    parameters = re.compile(rf"{re.escape(name)}\.(?:.*\.)?layers\.(\d+)\.")
    return len({match[1] for match in map(parameters.match, state_dict) if match})


def _kept_layers(side: SideOptions, state_dict: Mapping[str, Tensor], name: str) -> list[int]:
    """Return the numbers that the layers of the side *name* have in *state_dict*."""
    if side.layers_to_keep and is_pruned(layers_in(state_dict, name), side.layers_to_keep):
        return list(range(len(side.kept_layers)))
    return side.kept_layers


def _trained_names(module: nn.Module, kept: Sequence[int]) -> dict[str, Tensor]:
    """Return the parameters of the positions of *module*, whose layers have the numbers *kept* in a checkpoint."""
    own = {key: value for key, value in module.state_dict().items() if is_of_positions(key)}
    numbers = {str(number): str(in_checkpoint) for number, in_checkpoint in enumerate(kept)}  # more with --base-layers
    return {re.sub(r"(?<=^layers\.)\d+", lambda it: numbers.get(it[0], it[0]), key): own[key] for key in own}


def is_of_positions(key: str) -> bool:
    """Return whether *key*, relative to an encoder or decoder, names a parameter of its positions."""
    return key.startswith("embed_positions.") or ".self_attn.position." in key


def _kind(key: str) -> str:
    """Return *key* without the number of its layer."""
    return re.sub(r"^layers\.\d+\.", "layers.*.", key)  # an encoding can have layers of its own


def _kinds(prefix: str, keys: Iterable[str]) -> str:
    return ", ".join(sorted({prefix + _kind(key) for key in keys}))
