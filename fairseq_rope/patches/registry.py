"""How a patch stands beside its reason: ``@replaces`` marks what takes the place of a function or class of fairseq.

fairseq is archived, so its defects are fixed here, for every model in the process. A command or call that works with
fairseq alone does the same with the patches, except where it would lose data, give wrong results or run code from a
file. A patch never patches another patch.
"""

import builtins
import fnmatch
import functools
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable
from types import FunctionType, ModuleType
from typing import Any, NamedTuple, TypeVar

Replacement = TypeVar("Replacement")
COPIED = [name for name in functools.WRAPPER_ASSIGNMENTS if name != "__doc__"]


class Patch(NamedTuple):
    """What takes the place of an object of fairseq, and why."""

    target: str  # dotted name of what is replaced; "fairseq.*.NAME" is a global of each loaded module that has it
    replacement: Any  # the object that takes its place
    prevents: str  # "code execution", "lost data", "wrong results", "an unreadable error" or "lost time"
    reason: str  # what the replacement does, and what happens without it
    until: str  # when the patch can go


def replaces(*targets: str, prevents: str, until: str, wraps: Any = None) -> Callable[[Replacement], Replacement]:
    """Return a decorator for a function, class or object that takes the place of *targets*.

    The reason is its docstring, up to ``Args:``.

    Args:
        targets, prevents, until: see :class:`Patch`
        wraps: the function of fairseq that it calls, whose name and place it gets, as with ``functools.wraps``
    """

    def register(replacement: Replacement) -> Replacement:
        described = replacement if isinstance(replacement, (FunctionType, type)) else type(replacement)
        reason = inspect.cleandoc(described.__doc__ or "").partition("\n\nArgs:")[0]
        if wraps is not None:
            functools.update_wrapper(replacement, wraps, COPIED)  # type: ignore[arg-type]
        patches = [Patch(target, replacement, prevents, reason, until) for target in targets]
        replacement.__patches__ = patches  # type: ignore[attr-defined]
        return replacement

    return register


def patches_of(*modules: ModuleType) -> list[Patch]:
    """Return the patches that the files of *modules* define, in their order."""
    values = [value for module in modules for value in vars(module).values()]
    patches = [patch for value in values for patch in getattr(value, "__dict__", {}).get("__patches__", ())]
    return list({patch.target: patch for patch in patches}.values())


def apply(patches: Iterable[Patch]) -> None:
    """Put every replacement in its place. A second call changes nothing."""
    for patch in patches:
        for owner, name in owners(patch.target):
            setattr(owner, name, patch.replacement)


def owners(target: str) -> list[Any]:
    """Return (module or class, attribute) for each place that *target* of a ``Patch`` names."""
    path, _, name = target.rpartition(".")
    if "*" in path:
        modules = {module: sys.modules[module] for module in list(sys.modules) if fnmatch.fnmatch(module, path)}
        having = {module: it for module, it in modules.items() if name in vars(it) or hasattr(builtins, name)}
        return [(it, name) for module, it in having.items() if not module.startswith("fairseq.examples.")]
    return [(pkgutil.resolve_name(path), name)]
