"""Is a stub still a stub? Seen without calling it: `...` stands in its text, or it only returns None."""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

NOTHING = {"RESUME", "NOP", "CACHE", "COPY_FREE_VARS", "RETURN_GENERATOR", "POP_TOP"}


def functions_of(answer: Any) -> Iterator[FunctionType]:
    """The Python functions of an answer: of a function, of one that a compiler wraps, or of a class."""
    for name in ("py_func", "__wrapped__", "function", "python"):  # Numba's, functools', and our own kernels'
        inner = inspect.getattr_static(answer, name, None) if not inspect.isclass(answer) else None
        inner = getattr(answer, name, None) if inner is not None else None
        if callable(inner):
            yield from functions_of(inner)
            return
    if isinstance(answer, FunctionType):
        yield answer
    elif inspect.isclass(answer):
        for value in vars(answer).values():
            value = getattr(value, "__func__", value)
            if isinstance(value, FunctionType) and value.__module__ in (answer.__module__, None):
                yield value


def is_unanswered(answer: Any) -> bool:
    """True where some function of it is as the lesson left it."""
    return any(_is_stub(function) for function in functions_of(answer))


def _is_stub(function: FunctionType) -> bool:
    if _has_dots(function):
        return True
    code = [step for step in dis.get_instructions(function) if step.opname not in NOTHING]
    names = [step.opname for step in code]
    only_none = names in (["LOAD_CONST", "RETURN_VALUE"], ["RETURN_CONST"]) and code[0].argval is None
    return only_none and not _has_pass(function)


def _tree(function: FunctionType) -> ast.AST | None:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return None


def _has_dots(function: FunctionType) -> bool:
    """`...` as a statement or a value; x[..., 0] is an index and no gap."""
    tree = _tree(function)
    if tree is None:
        return False
    indices = {
        id(node)
        for subscript in ast.walk(tree)
        if isinstance(subscript, ast.Subscript)
        for node in ast.walk(subscript.slice)
    }
    return any(
        isinstance(node, ast.Constant) and node.value is Ellipsis and id(node) not in indices
        for node in ast.walk(tree)
    )


def _has_pass(function: FunctionType) -> bool:
    """Somebody wrote `pass` or `return`, and means it."""
    tree = _tree(function)
    return tree is not None and any(isinstance(node, (ast.Pass, ast.Return)) for node in ast.walk(tree))
