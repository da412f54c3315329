"""Whether a module still computes what its class computed when this package was imported.

The fast search and the fused criterion do the work of other modules without calling them. They may do so only while
nobody has changed those: by a subclass, by another function in the place of a method (of a class or of one instance),
or by a hook. So they keep the methods that they replace, from their import on, and compare before they begin.
"""

from typing import Any, Dict, Type

from torch import Tensor, nn
from torch.nn.modules import module as nn_module


def methods_of(cls: type, *names: str) -> Dict[str, Any]:
    """The methods *names* of *cls* as they are now, for :func:`has_methods`."""
    return {name: getattr(cls, name) for name in names}


def has_methods(module: nn.Module, methods: Dict[str, Any]) -> bool:
    """Whether *module* has *methods*: no subclass, no instance and nobody at run time has replaced one."""
    return all(
        name not in vars(module) and getattr(type(module), name, None) is method for name, method in methods.items()
    )


def hooked(module: nn.Module) -> bool:
    """Whether a hook runs when *module* is called, or when a gradient passes through it."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_pre_hooks
        or module._backward_hooks
        or nn_module._global_forward_pre_hooks
        or nn_module._global_forward_hooks
        or nn_module._global_backward_pre_hooks
        or nn_module._global_backward_hooks
    )


def is_plain(module: object, cls: Type[nn.Module], methods: Dict[str, Any]) -> bool:
    """Whether *module* is a *cls* (no subclass of it) with *methods* and without hooks."""
    return type(module) is cls and has_methods(module, methods) and not hooked(module)


CALL = ("__call__", "_call_impl", "forward")  # the methods that run when a module is called
LINEAR = methods_of(nn.Linear, *CALL)


def is_plain_linear(module: Any) -> bool:
    """Whether *module* only multiplies by a plain tensor and adds its bias: no quantisation, no noise."""
    return is_plain(module, nn.Linear, LINEAR) and type(module.weight) in (Tensor, nn.Parameter)
