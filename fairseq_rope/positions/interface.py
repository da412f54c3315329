"""What a position encoding can do. Each encoding is a class in a file of this folder, and a row of ``ENCODINGS``.

An encoding can change self-attention in three places, and declares what it needs. Cross-attention has no positions. An
encoding of absolute positions adds vectors to the embeddings instead, and does not change attention.

Shapes: B batch, H heads, T queries, S keys, D head dimension, C = H * D. Keys and values have G heads: H, or fewer with
``--encoder-kv-heads`` and ``--decoder-kv-heads``. In self-attention the queries are the last T
of the S positions: T = S if all is computed at once, and T = 1 in a step of a search.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

SIDES = ("encoder", "decoder")


class Option(NamedTuple):
    """A flag of an encoding: ``max_relative_positions`` is ``--max-relative-positions``. Its type is the default's.

    ``choices``, if given, are the values that are allowed. ``read``, if given, takes a value and the flag, and returns
    the number or text that is used and saved. It raises a ValueError that names the flag.
    """

    default: Any
    help: str
    choices: Sequence[Any] = ()
    read: Callable[[Any, str], Any] | None = None


class PositionEncoding(nn.Module):
    """The position encoding of self-attention; this base class encodes no positions.

    A subclass overrides the methods that it needs, and ``build`` if it has parameters or options.

    Class attributes:
        options: the flags of the encoding, by the name of the option
        absolute: "sinusoidal" or "learned" if fairseq's embeddings of absolute positions are added to the tokens'
        sides: where the encoding can be used
        shared: whether one object serves all layers of a side
        has_limit: whether there is a largest position; ``build`` then also gets ``positions``, their number
        shared_parameters: the names of parameters that all layers of a side share, if ``shared`` is false
        bias_reads: "queries", or "keys" for both, if the bias depends on their values; "" if it depends on their shapes
            alone. If layers share the encoding, such a bias is computed once per forward pass, and must not be random.
            With "keys", models use fairseq's search, not the fast one
    """

    options: dict[str, Option] = {}
    absolute = ""
    sides: tuple[str, ...] = SIDES
    shared = True
    has_limit = False
    shared_parameters: tuple[str, ...] = ()
    bias_reads = "queries"

    @classmethod
    def options_of(cls, side: str) -> dict[str, Option]:
        """Return those of ``options`` that change something on *side*, "encoder" or "decoder": not the other side's."""
        others = tuple(f"{other}_" for other in SIDES if other != side)
        return {name: option for name, option in cls.options.items() if not name.startswith(others)}

    @classmethod
    def overrides(cls, *methods: str) -> bool:
        """Return whether the encoding has one of *methods*, such as "bias", of its own."""
        return any(getattr(cls, method) is not getattr(PositionEncoding, method) for method in methods)

    def shares_bias(self) -> bool:
        """Return whether all layers have the same bias, which then is computed once per forward pass."""
        return self.shared and not (self.overrides("bias") and self.bias_reads)

    @classmethod
    def build(cls, side: str, embed_dim: int, heads: int, **options: Any) -> "PositionEncoding":
        """Return the encoding for the self-attention of one side, "encoder" or "decoder".

        Args:
            side: the encoder's attention sees both directions, the decoder's sees the past
            embed_dim: C; C / H is the number of dimensions of a head that the encoding can change
            heads: H
            options: a value for each of ``options_of`` the side; with ``has_limit`` also ``positions``

        Raises:
            ValueError: an option has a value that is not allowed; the message names the flag
        """
        return cls()

    def reset_parameters(self) -> None:
        """Give the parameters new random values."""

    def queries_and_keys(self, q: Tensor, k: Tensor, offset: int) -> tuple[Tensor, Tensor]:
        """Return the changed queries *q* (B, H, T, D) and keys *k* (B, G, T, D) of positions *offset*, *offset* + 1, …

        The search stores the returned keys, so they must not depend on later positions.
        """
        return q, k

    def bias(self, q: Tensor, k: Tensor, padding: Tensor | None) -> Tensor | None:
        """Return what is added to the scores after their division by sqrt(D), in the type of *q*, or None.

        Args:
            q: queries (B, H, T, D), without positions
            k: keys (B, G, S, D), as ``queries_and_keys`` returns them, with those of earlier steps of a search; only
                their shape can be used if ``bias_reads`` is not "keys" (the fast search gives a tensor on "meta")
            padding: nonzero where a key is padding (B, S); None: nowhere. Differences of positions do not depend on it

        Returns:
            a tensor of four dimensions that broadcasts to (B, H, T, S)
        """
        return None

    def values(self, weights: Tensor) -> Tensor | None:
        """Return what is added to the output of attention (B, H, T, D), or None.

        *weights* are those of attention (B, H, T, S), after softmax and dropout.
        """
        return None


def distances(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the differences j - i that occur between *queries* i and *keys* j: 1 - S … T - 1, of shape (S + T - 1)."""
    return torch.arange(1 - keys, queries, device=device)


def by_distance(numbers: Tensor, queries: int) -> Tensor:
    """Return *numbers* (…, S + T - 1), one for each of :func:`distances`, arranged as scores (…, T, S)."""
    keys = numbers.size(-1) - queries + 1
    return numbers.unfold(-1, keys, 1).flip(-2)


def for_each_head(x: Tensor, heads: int) -> Tensor:
    """Return *x* (B, G, S, D), repeated for the *heads* H that share its G heads: (B, H, S, D)."""
    return x if x.size(1) == heads else x.repeat_interleave(heads // x.size(1), dim=1)


class DistanceBias(PositionEncoding):
    """An encoding that adds a bias to the scores, which depends on the head and on the distance alone.

    A subclass overrides ``by_distance``. ``fairseq-rope export`` can export such an encoding.
    """

    bias_reads = ""

    def by_distance(self, distance: Tensor) -> Tensor:
        """Return the bias of each head at *distance* = j - i (L), integers: (H, L)."""
        raise NotImplementedError

    def bias(self, q: Tensor, k: Tensor, padding: Tensor | None) -> Tensor | None:
        numbers = self.by_distance(distances(q.size(2), k.size(2), q.device))  # (H, S + T - 1)
        # The gradient of a number is a sum over pairs, which 16 bits cannot hold. torch needs the last stride 1.
        wide = numbers if numbers.dtype == torch.float64 else numbers.float()
        return by_distance(wide.contiguous(), q.size(2)).unsqueeze(0).to(q.dtype)  # (1, H, T, S)
