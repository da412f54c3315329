"""Reading fairseq's options: as Python only literals and arithmetic, so that none can run code."""

import ast
import operator
from collections.abc import Callable
from typing import Any

from .registry import replaces

OPERATORS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
SIGNS: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


@replaces("fairseq.*.eval", prevents="code execution", until="fairseq reads literals")
def literal(x: str, *_: Any) -> Any:
    """Return the value of *x*, a literal or + - * / on literals.

    fairseq evaluates options such as --adaptive-softmax-cutoff as Python, also those in a checkpoint, which can then
    run code. Here options are literals and arithmetic on literals. (A script that imports * from a module of fairseq
    gets this eval too.)

    Raises a TypeError if *x* is not a string, as ``eval`` does, and a ValueError if it is another expression.
    """
    if not isinstance(x, str):
        raise TypeError(f"{x!r} is not a string")
    try:
        return _value(ast.parse(x.strip(), mode="eval").body)
    except (ValueError, TypeError, SyntaxError, ArithmeticError, MemoryError, RecursionError) as error:
        raise ValueError(f"{x!r}: must be a literal, or + - * / on literals ({error})") from None


def _value(node: ast.AST) -> Any:
    """Return the value of an expression; raise a ValueError if it is not allowed."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return {ast.Tuple: tuple, ast.List: list, ast.Set: set}[type(node)](map(_value, node.elts))
    if isinstance(node, ast.Dict) and None not in node.keys:
        return {_value(key): _value(value) for key, value in zip(node.keys, node.values)}  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and type(node.op) in SIGNS:
        return SIGNS[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
    raise ValueError(f"it has a {type(node).__name__}")
