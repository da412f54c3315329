"""Checks whether a module still computes what its class computes.

The fast search and the fused criterion compute the results of other modules without calling them. This is correct only
if no subclass, hook, or method of one instance changes these modules. The criterion, which supports users' own models,
also compares methods of their classes with those that it has stored when it was imported.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as nn_module


def methods_of(cls: type, *names: str) -> dict[str, Any]:
    """Return the methods *names* that *cls* has now, for :func:`has_methods`."""
    return {name: getattr(cls, name) for name in names}


def has_methods(module: nn.Module, methods: dict[str, Any]) -> bool:
    """Return whether *module* has *methods*, and neither a subclass nor an assignment has replaced one."""
    return all(
        name not in vars(module) and getattr(type(module), name, None) is method for name, method in methods.items()
    )


def hooked(module: nn.Module) -> bool:
    """Return whether a hook runs when *module* is called, or when a gradient passes through it."""
    kinds = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
    return any(getattr(module, f"_{kind}") or getattr(nn_module, f"_global_{kind}") for kind in kinds)


def is_plain(module: object, cls: type[nn.Module], methods: dict[str, Any]) -> bool:
    """Return whether *module* is a *cls* (not a subclass) with *methods* and without hooks."""
    return type(module) is cls and has_methods(module, methods) and not hooked(module)


def is_exactly(module: object, cls: type[nn.Module]) -> bool:
    """Return whether *module* is a *cls* (not a subclass), without hooks and without methods of its own."""
    if type(module) is not cls or hooked(module):
        return False
    return not any(callable(value) and hasattr(cls, name) for name, value in vars(module).items())


CALL = ("__call__", "_call_impl", "forward")  # the methods that run when a module is called
LINEAR = methods_of(nn.Linear, *CALL)


def is_plain_linear(module: Any) -> bool:
    """Return whether *module* only multiplies by a plain tensor and adds a bias, without quantisation or noise."""
    return is_plain(module, nn.Linear, LINEAR) and type(module.weight) in (Tensor, nn.Parameter)
