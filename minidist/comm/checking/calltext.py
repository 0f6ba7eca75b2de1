"""What the text of a program says about a call: the variable that it passes, and the choices that led there.

A choice is an `if` around the call, or a conditional expression that picked the variable. It is known by the
text of its test, so that a test which decides twice is one choice.
"""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

Choice = tuple[str, int]
"""The text of a test, and which of its branches was taken."""


@dataclass(frozen=True)
class Passed:
    """What a call passes, as its text says it."""

    label: str = ""
    plain: bool = False  # whether the label is a name that means one variable, and not an expression
    choices: tuple[Choice, ...] = ()


_calls: dict[tuple[str, CodeType, int, str], tuple[_File, ast.Call] | None] = {}
_files: dict[str, _File] = {}


def passed(frame: FrameType, name: str, tensor: object) -> Passed:
    """What a function's current line passes to the door's function `name`; nothing where there is no text."""
    path = frame.f_code.co_filename  # which the equality of code objects leaves out
    key = path, frame.f_code, frame.f_lasti, name
    if key not in _calls:
        if path not in _files:
            _files[path] = _File(path, frame.f_globals)
        found = _files[path].call(frame, name)
        _calls[key] = None if found is None else (_files[path], found)
    known = _calls[key]
    return Passed() if known is None else known[0].describe(known[1], name, tensor, frame)


def forget(paths: Iterable[str]) -> None:
    """Read these files anew when they are needed: a notebook's cell may have been run again."""
    for path in paths:
        _files.pop(path, None)
    for key in [key for key in _calls if key[0] not in _files]:
        del _calls[key]


@dataclass
class _File:
    """A parsed file: its calls, and which node holds which."""

    path: str
    module: dict[str, Any] = field(repr=False)
    calls: list[ast.Call] = field(default_factory=list)
    parents: dict[ast.AST, ast.AST] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            tree = ast.parse("".join(linecache.getlines(self.path, self.module)))
        except (SyntaxError, ValueError):  # no Python that this version reads
            return
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                self.calls.append(node)
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node

    def call(self, frame: FrameType, name: str) -> ast.Call | None:
        """The call that a frame is in; None where the text leaves it open."""
        found = []
        if hasattr(frame.f_code, "co_positions"):  # Python 3.11 and later know the columns
            here = list(frame.f_code.co_positions())[frame.f_lasti // 2]
            found = [
                call
                for call in self.calls
                if (call.lineno, call.end_lineno, call.col_offset, call.end_col_offset) == here
            ]
        if not found:
            found = [
                call
                for call in self.calls
                if call.lineno <= frame.f_lineno <= (call.end_lineno or call.lineno)
                and getattr(call.func, "attr", getattr(call.func, "id", "")) == name
            ]
        return found[0] if len(found) == 1 else None

    def describe(self, call: ast.Call, name: str, tensor: object, frame: FrameType) -> Passed:
        """The tensor's name in a call, and the choices that the call and the name depend on."""
        keyword, position = ("out", 1) if name == "scatter" else ("x", 0)
        value = next((one.value for one in call.keywords if one.arg == keyword), None)
        given = call.args[: position + 1]
        if value is None and len(given) > position and not any(isinstance(one, ast.Starred) for one in given):
            value = given[position]
        if value is None:
            return Passed(choices=self.around(call))
        picked = self.picked(value, tensor, frame)
        if picked is not None:
            label, choice = picked
            return Passed(label, True, (*self.around(call), choice))
        return Passed(ast.unparse(value), _is_plain(value), self.around(call))

    def around(self, node: ast.AST) -> tuple[Choice, ...]:
        """The choices that a node stands in, from the inside out."""
        choices = []
        while (parent := self.parents.get(node)) is not None:
            if isinstance(parent, (ast.If, ast.IfExp)) and node is not parent.test:
                body = parent.body if isinstance(parent, ast.If) else [parent.body]
                choices.append((ast.unparse(parent.test), 0 if node in body else 1))
            elif isinstance(parent, ast.Match) and node is not parent.subject:
                case = next(i for i, case in enumerate(parent.cases) if case is node)
                choices.append((ast.unparse(parent.subject), case))
            node = parent
        return tuple(choices)

    def picked(self, value: ast.expr, tensor: object, frame: FrameType) -> tuple[str, Choice] | None:
        """The variable that a conditional expression picked, in the call or where its argument was assigned.

        Understood are `f(a if t else b)`, `x = a if t else b`, `x, y = (a, b) if t else (b, a)`, and
        `for x in order` after `order = [a, b] if t else [b, a]`, each the only assignment in its function.
        """
        if isinstance(value, ast.IfExp):
            return _pick(value, [value.body, value.orelse], tensor, frame)
        if not isinstance(value, ast.Name):
            return None
        target = self.only_assignment(value, value.id)
        holder = None if target is None else self.parents.get(target)
        if isinstance(holder, ast.Assign) and isinstance(holder.value, ast.IfExp):
            return _pick(holder.value, [holder.value.body, holder.value.orelse], tensor, frame)
        if isinstance(holder, ast.For) and isinstance(holder.iter, ast.Name):
            target = self.only_assignment(value, holder.iter.id)
            order = None if target is None else self.parents.get(target)
            if isinstance(order, ast.Assign) and isinstance(order.value, ast.IfExp):
                return _pick_order(order.value, frame.f_locals.get(holder.iter.id), tensor, frame)
        if isinstance(holder, ast.Tuple):
            above, place = self.parents.get(holder), holder.elts.index(target)  # type: ignore[arg-type]
            if isinstance(above, ast.Assign) and isinstance(above.value, ast.IfExp):
                sides = [above.value.body, above.value.orelse]
                if all(isinstance(side, (ast.Tuple, ast.List)) and len(side.elts) > place for side in sides):
                    options = [side.elts[place] for side in sides]  # type: ignore[attr-defined]
                    return _pick(above.value, options, tensor, frame)
        return None

    def only_assignment(self, node: ast.AST, name: str) -> ast.Name | None:
        """Where the function around a node binds a name, if it does so in one place."""
        while not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)):
            node = self.parents[node]
        bound = [
            one
            for one in ast.walk(node)
            if isinstance(one, ast.Name) and one.id == name and isinstance(one.ctx, ast.Store)
        ]
        return bound[0] if len(bound) == 1 else None


def _pick(
    chooser: ast.IfExp, options: list[ast.expr], tensor: object, frame: FrameType
) -> tuple[str, Choice] | None:
    """The one option that is bound to the tensor."""
    held = [isinstance(one, ast.Name) and _value(one.id, frame) is tensor for one in options]
    if held.count(True) != 1:
        return None
    which = held.index(True)
    return ast.unparse(options[which]), (ast.unparse(chooser.test), which)


def _pick_order(
    chooser: ast.IfExp, order: object, tensor: object, frame: FrameType
) -> tuple[str, Choice] | None:
    """The one name for the tensor in the one list of names whose values are those of `order`."""
    found = []
    for which, side in enumerate((chooser.body, chooser.orelse)):
        if not isinstance(side, (ast.Tuple, ast.List)) or not isinstance(order, (tuple, list)):
            return None
        names = [one.id for one in side.elts if isinstance(one, ast.Name)]
        values = [_value(name, frame) for name in names]
        if len(names) == len(side.elts) == len(order) and all(map(_same, values, order)):
            found += [(name, which) for name, value in zip(names, values, strict=True) if value is tensor]
    if len(found) != 1:
        return None
    return found[0][0], (ast.unparse(chooser.test), found[0][1])


def _value(name: str, frame: FrameType) -> object:
    return frame.f_locals.get(name, frame.f_globals.get(name))


def _same(one: object, other: object) -> bool:
    return one is other


def _is_plain(value: ast.AST) -> bool:
    if isinstance(value, ast.Attribute):
        return _is_plain(value.value)
    if isinstance(value, ast.Subscript):
        return _is_plain(value.value) and isinstance(value.slice, ast.Constant)
    return isinstance(value, ast.Name)
