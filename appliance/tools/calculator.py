"""Tool: arithmetic. The expression is parsed and walked; nothing in it is ever run."""

import ast
import math
import operator
from collections.abc import Callable
from typing import Any

from appliance.errors import RequestError
from appliance.tools.desk import Desk

LONGEST = 300  # characters
GREATEST = 1e300
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"sqrt": math.sqrt, "abs": abs, "round": round, "min": min, "max": max}
_FIX = "use numbers, + - * / // % **, brackets, sqrt, abs, round, min, max"


def calculator(desk: Desk, expression: str) -> float:
    """Work out an arithmetic expression.

    Args:
        expression: for example (3 + 4) * 2.5; sqrt, abs, round, min and max are known.
    """
    if len(expression) > LONGEST:
        raise RequestError(f"the expression is over {LONGEST} characters", "split it", param="expression")
    try:
        return float(_value(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise RequestError(f"{expression!r} is no arithmetic", _FIX, param="expression") from None
    except (ZeroDivisionError, OverflowError) as failure:
        raise RequestError(f"{expression!r} has no value: {failure}", _FIX, param="expression") from None


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            left = float(left)  # whole numbers would grow without bound
        return _bounded(_BINARY[type(node.op)](left, right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and not node.keywords:
        return _bounded(_FUNCTIONS[node.func.id](*(_value(argument) for argument in node.args)))
    raise ValueError


def _bounded(value: Any) -> Any:
    if isinstance(value, complex) or not abs(value) <= GREATEST:
        raise OverflowError("too large, or not a real number")
    return value
