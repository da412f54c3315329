"""What the layers of one side share in a forward pass: masks, biases, tables, and the length of the source.

A context variable holds it, because no argument can: fairseq's ``forward_scriptable`` and
``extract_features_scriptable`` call the layers, and fairseq's layers call their attention, each with fixed arguments.
Each thread has its own value of a context variable.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")

FUTURE_MASK = "future mask"  # the name under which a decoder shares fairseq's mask of later positions


class ForwardPass:
    """The results that the layers of one side share, by name and by what they were made from.

    Objects are compared by identity, and tensors also by the number of writes to them: a hook of a layer can write
    into its mask. torch does not count writes through ``.data`` or NumPy.

    Args:
        source_length: number of positions of the longest source of the batch; None if there is no source
    """

    def __init__(self, source_length: int | None = None) -> None:
        self.source_length = source_length
        self._results: dict[tuple[Any, ...], Any] = {}

    def shared(self, name: str, made_from: tuple[Any, ...], compute: Callable[[], Result]) -> Result:
        """Return ``compute()``, or what it returned earlier under the same *name* if it was *made_from* the same.

        Tensors that were made in inference mode count no writes, so nothing that is made from them is shared. Nothing
        is shared while torch compiles. When activation checkpointing computes a layer again, it takes no result with a
        gradient from another layer.
        """
        tensors = [part for part in made_from if isinstance(part, Tensor)]
        if torch.compiler.is_compiling() or any(tensor.is_inference() for tensor in tensors):
            return compute()
        key = (name, *made_from, *(tensor._version for tensor in tensors), torch.is_grad_enabled())
        if key not in self._results:
            self._results[key] = compute()
            return self._results[key]
        result = self._results[key]
        if isinstance(result, Tensor) and result.requires_grad and saved_tensors_are_hooked():
            return compute()
        return result

    def has(self, name: str, made_from: tuple[Any, ...], result: Tensor) -> bool:
        """Return whether *result* is what is shared for *name* and *made_from*, without writes to it."""
        if result.is_inference() or result._version != 0:
            return False
        return self._results.get((name, *made_from, torch.is_grad_enabled())) is result


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
    current = _current.get()
    return ForwardPass() if current is None else current


def saved_tensors_are_hooked() -> bool:
    """Return whether hooks receive the tensors that autograd saves, as in ``checkpoint(…, use_reentrant=False)``."""
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("there are hooks"):  # raises an error if there are
            return False
    except RuntimeError:
        return True
