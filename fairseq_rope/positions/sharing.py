"""Results that the layers of one side share in a forward pass."""

from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Callable, Dict, Iterator, Optional, Tuple

import torch

# The results that the layers of one side share in one forward pass, by their inputs. Each thread has its own value.
_forward_pass: ContextVar[Optional[Dict[Any, Any]]] = ContextVar("fairseq_rope_forward_pass", default=None)


@contextmanager
def forward_pass() -> Iterator[None]:
    """Let the layers that are called in this context share the results of :func:`once_per_forward_pass`."""
    token = _forward_pass.set({})
    try:
        yield
    finally:
        _forward_pass.reset(token)


def once_per_forward_pass(key: Tuple[Any, ...], compute: Callable[..., Any], *args: Any) -> Any:
    """Return ``compute(*args)``, or what it returned earlier in this forward pass for the same *key*.

    Tensors and modules in *key* are compared by identity. Outside :func:`forward_pass`, for example when activation
    checkpointing computes a layer again, it is computed anew.
    """
    shared = _forward_pass.get()
    if shared is None or is_compiling():
        return compute(*args)
    key = (*key, torch.is_grad_enabled())
    if key not in shared:
        shared[key] = compute(*args)
    return shared[key]


def is_compiling() -> bool:
    """Return whether ``torch.compile`` is compiling the code that runs."""
    return hasattr(torch, "compiler") and getattr(torch.compiler, "is_compiling", bool)()
