"""Checks whether a module computes exactly what its class computes.

The fast search and the fused criterion compute the results of other modules without calling them. They do this only if
the class of a module is exactly the one that they know, and the module has neither hooks nor methods of its own.
"""

from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules import module as nn_module

from ..patches.linear import Linear


def hooked(module: nn.Module) -> bool:
    """Return whether a hook runs when *module* is called, or when a gradient passes through it."""
    of_module = module._forward_pre_hooks or module._forward_hooks
    of_module = of_module or module._backward_pre_hooks or module._backward_hooks
    of_all = nn_module._global_forward_pre_hooks or nn_module._global_forward_hooks
    return bool(of_module or of_all or nn_module._global_backward_pre_hooks or nn_module._global_backward_hooks)


def is_exactly(module: object, *classes: type[nn.Module]) -> bool:
    """Return whether *module* is one of *classes* (not a subclass), without hooks and without methods of its own."""
    cls = type(module)
    if cls not in classes or hooked(cast(nn.Module, module)):
        return False
    return not any(callable(value) and hasattr(cls, name) for name, value in vars(module).items())


def is_plain_linear(module: Any) -> bool:
    """Return whether *module* only multiplies by a plain tensor and adds a bias, without quantisation or noise."""
    return is_exactly(module, nn.Linear, Linear) and type(module.weight) in (Tensor, nn.Parameter)
