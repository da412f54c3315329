"""Reading fairseq's options: as Python only literals and arithmetic, so that none can run code, and allowed numbers."""

import ast
import math
import operator
from argparse import ArgumentParser
from collections.abc import Callable, Collection
from typing import Any

from fairseq.models import ARCH_MODEL_NAME_REGISTRY, MODEL_REGISTRY

from ..errors import InputError, flag_of

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Pow: operator.pow,
}
SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
LARGEST_POWER = 64  # the largest exponent, and the most bits of the base
LEAST = {"beam": 1, "num_workers": 0, "required_batch_size_multiple": 1, "update_freq": 1}
LONGEST = 100_000  # the most entries in a list, tuple or string that is repeated or joined


def literal(x: str, *_: Any) -> Any:
    """Return the value of *x*, a literal or + - * / // ** on literals.

    fairseq's modules call this function as ``eval``. It looks up no names, calls no functions, and limits the
    size of powers and repetitions.

    Raises a TypeError if *x* is not a string, as ``eval`` does, and a ValueError if it is another expression.
    """
    if not isinstance(x, str):
        raise TypeError(f"{x!r} is not a string")
    try:
        return _value(ast.parse(x.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ValueError(f"{x!r}: must be a literal, or + - * / // ** on literals ({error})") from None


def _value(node: ast.AST) -> Any:
    """Return the value of an expression; raise a ValueError if it is not allowed or too large."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)](map(_value, node.elts))
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_value(key): _value(value) for key, value in zip(node.keys, node.values)}  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        left, right = _value(node.left), _value(node.right)
        _refuse_large(node.op, left, right)
        return OPERATORS[type(node.op)](left, right)
    raise ValueError(f"it has a {type(node).__name__}")


def _refuse_large(operation: ast.operator, left: Any, right: Any) -> None:
    """Raise a ValueError if the result would be a large power or a long list, tuple or string."""
    if isinstance(operation, ast.Pow):
        bits = left.bit_length() if isinstance(left, int) else 0
        if abs(right) > LARGEST_POWER or bits > LARGEST_POWER:
            raise ValueError(f"the power is too large, with an exponent above {LARGEST_POWER}")
    if hasattr(left, "__len__") or hasattr(right, "__len__"):
        lengths = [len(side) if hasattr(side, "__len__") else side for side in (left, right)]
        length = lengths[0] * lengths[1] if isinstance(operation, ast.Mult) else lengths[0] + lengths[1]
        if length > LONGEST:
            raise ValueError(f"it would have more than {LONGEST} entries")


def refuse_numbers(options: Any, flags: Collection[str]) -> None:
    """Raise an InputError if one of *options* is a number with which fairseq or torch would end in another error.

    The options that a user dir adds are not checked: a user's ``word_dropout`` may be a percentage.

    Args:
        flags: the names of the options of fairseq's program, without those that tasks, models and others add
    """
    least_and_most = {name: (least, math.inf) for name, least in LEAST.items() if name in flags}
    if "update_freq" in flags:  # fairseq-train; fairseq-generate has an --arch too, wav2vec2 by default, and ignores it
        least_and_most |= dict.fromkeys(_dropouts(getattr(options, "arch", None)), (0, 1))
    for name, (least, most) in least_and_most.items():
        value = getattr(options, name, None)
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(number, (int, float)) and not (least <= number <= most) for number in numbers):
            allowed = f"from 0 to {most}" if most == 1 else f"{least} or more"
            raise InputError(f"{flag_of(name)} {value}: must be {allowed}")
    betas = getattr(options, "adam_betas", None)
    if not isinstance(betas, str) or getattr(options, "optimizer", None) not in ("adam", "cpu_adam"):
        return
    try:
        is_pair = len(literal(betas)) == 2
    except (ValueError, TypeError):
        is_pair = False
    if not is_pair:
        raise InputError(f"--adam-betas {betas}: must be two numbers, like '(0.9, 0.98)'")


def _dropouts(arch: str | None) -> list[str]:
    """Return the rates of dropout among the options of *arch* that fairseq's and this package's classes declare."""
    model = MODEL_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY.get(arch, arch))
    bases = [cls for cls in getattr(model, "__mro__", ()) if hasattr(cls, "add_args")]
    declared = [cls for cls in bases if cls.__module__.split(".")[0] in ("fairseq", "fairseq_rope")]
    parser = ArgumentParser(add_help=False, conflict_handler="resolve")
    for base in declared[:1]:  # the nearest one has the options of the others
        base.add_args(parser)
    return [action.dest for action in parser._actions if action.dest.endswith("dropout")]
