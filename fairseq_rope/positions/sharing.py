"""What the layers of one side share in a forward pass: masks, biases, rotations, and the length of the source.

A context variable holds it, because no argument can: fairseq's ``forward_scriptable`` and
``extract_features_scriptable`` call the layers, and fairseq's layers call their attention, each with fixed arguments.
Each thread has its own value of a context variable.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class ForwardPass:
    """What the layers of one side share in a forward pass.

    Args:
        source_length: number of positions of the longest source of the batch; None if there is no source
    """

    def __init__(self, source_length: int | None = None) -> None:
        self.source_length = source_length
        self._results: dict[tuple[Hashable, ...], Any] = {}

    def shared(self, key: tuple[Hashable, ...], compute: Callable[[], Result]) -> Result:
        """Return ``compute()``, or what it returned earlier for the same *key*: a name, and all that it reads.

        A tensor is the same if it is the same object. Nothing is shared while torch compiles.
        """
        if torch.compiler.is_compiling():
            return compute()
        key = (*key, torch.is_grad_enabled())
        if key not in self._results:
            self._results[key] = compute()
        result: Result = self._results[key]
        return result


_current: ContextVar[ForwardPass | None] = ContextVar("fairseq_rope_forward_pass", default=None)


@contextmanager
def forward_pass(source_length: int | None = None) -> Iterator[None]:
    """Let the layers that are called in this context share a :class:`ForwardPass`."""
    token = _current.set(ForwardPass(source_length))
    try:
        yield
    finally:
        _current.reset(token)


def current_pass() -> ForwardPass:
    """Return the forward pass that is being computed.

    It is a new one, which shares nothing, outside :func:`forward_pass`, for example when activation checkpointing
    computes a layer again.
    """
    current = None if torch.compiler.is_compiling() else _current.get()  # torch cannot compile context variables
    return ForwardPass() if current is None else current
