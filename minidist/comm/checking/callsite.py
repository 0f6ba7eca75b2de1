"""Where a call through the door was made, and what the caller calls the tensor that it passed.

For `check=True` alone: the stack is read, so that the door itself carries nothing for it. A site is the line
of the first frame outside minidist and torch. A tensor is known by the parameter that it is, or whose
gradient it is, in a module that a function on the stack holds; else by the variable that stands in the call.
The choices that led to the call are noted too: they tell a legal difference between ranks from a swap.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from minidist.comm.checking.calltext import Choice, passed

_COMM = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_OWN = os.path.dirname(os.path.dirname(_COMM)) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_DEEPEST = 40
"""Frames in which a module is looked for."""

PARAMETER = "parameter"
"""The scope of the names of a model's parameters and their gradients."""


@dataclass(frozen=True)
class Callsite:
    """A call as the stack shows it."""

    arguments: dict[str, Any]  # of the door's function, by the names of its parameters
    place: str  # "train.py:12", of the first frame outside minidist and torch
    label: str = ""  # what the caller calls the tensor: "model.weight", "loss"
    scope: str = ""  # in which the label means one tensor: a function, or PARAMETER; "" where that is open
    choices: tuple[Choice, ...] = ()


def find(name: str) -> Callsite | None:
    """The call of the door's function `name` on this thread's stack; None where the door calls itself."""
    frames = list(_stack(sys._getframe(1)))
    doors = [
        place
        for place, frame in enumerate(frames)
        if frame.f_code.co_name == name and frame.f_code.co_filename.startswith(_COMM)
    ]
    if not doors or doors[-1] + 1 == len(frames):
        return None
    door, callers = frames[doors[-1]], frames[doors[-1] + 1 :]
    caller = callers[0]
    if caller.f_code.co_filename.startswith(_COMM):
        return None
    arguments = dict(door.f_locals)
    tensor = arguments.get("out" if name == "scatter" else "x")
    parameter = _parameter(tensor, callers)
    if parameter:
        return Callsite(arguments, place(callers), parameter, PARAMETER)
    text = passed(caller, name, tensor)
    scope = f"{caller.f_code.co_filename}:{caller.f_code.co_firstlineno}" if text.plain else ""
    return Callsite(arguments, place(callers), text.label or _variable(tensor, caller), scope, text.choices)


def place(frames: list[FrameType]) -> str:
    """ "file:line" of the first frame that is neither minidist's, torch's nor Python's own."""
    user = [frame for frame in frames if not _is_library(frame.f_code.co_filename)]
    # In one of autograd's own threads there is none: the hook that minidist registered is the best there is.
    outside = [frame for frame in frames if not frame.f_code.co_filename.startswith(_COMM)]
    frame = (user or outside or frames)[0]
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def place_of_thread(ident: int) -> str:
    """Where another thread of this process is, as `place` says it; "" where it is gone."""
    frame = sys._current_frames().get(ident)
    return "" if frame is None else place(list(_stack(frame)))


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_library(path: str) -> bool:
    if path.startswith((_OWN, _TORCH, "<frozen", "<string>")):
        return True
    return path.startswith(_STANDARD) and "-packages" not in path


def _parameter(tensor: object, callers: list[FrameType]) -> str:
    """The name of the parameter that a tensor is, or is the gradient of, in a module that a caller holds."""
    if not isinstance(tensor, torch.Tensor) or not tensor.numel():
        return ""
    seen: dict[int, Any] = {}
    for frame in callers[:_DEEPEST]:
        if frame.f_code.co_filename.startswith((_COMM, _TORCH)):
            continue
        # A function's globals are many: only those that it names.
        named = [frame.f_globals.get(name) for name in frame.f_code.co_names]
        for value in [*frame.f_locals.values(), *named]:
            for each in (value, _fields(value).get("model")):  # the second: an engine's
                # Its type, and not isinstance: a proxy's __class__ is its owner's code, and may raise.
                if issubclass(type(each), nn.Module):
                    seen[id(each)] = each
    tables = [dict(_parameters(module, "", set())) for module in seen.values()]
    # The largest module first: the same on all ranks, whichever of its parts a function holds as well.
    for table in sorted(tables, key=len, reverse=True):
        for name, parameter in table.items():
            for held, suffix in ((parameter, ""), (parameter.grad, ".grad")):
                if _same(held, tensor):
                    return name + suffix
    return ""


def _fields(value: object) -> dict[str, Any]:
    """An object's attributes, without any code of its class; none where it keeps them elsewhere."""
    try:
        fields = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return fields if isinstance(fields, dict) else {}


def _parameters(module: nn.Module, prefix: str, seen: set[int]) -> Iterator[tuple[str, nn.Parameter]]:
    """As `named_parameters` of a plain module, which a class may have replaced, and which a module that is
    being made cannot answer yet."""
    seen.add(id(module))
    fields = _fields(module)
    for name, parameter in fields.get("_parameters", {}).items():
        if parameter is not None and id(parameter) not in seen:
            seen.add(id(parameter))
            yield prefix + name, parameter
    for name, child in fields.get("_modules", {}).items():
        if child is not None and id(child) not in seen:
            yield from _parameters(child, f"{prefix}{name}.", seen)


def _same(held: Tensor | None, tensor: Tensor) -> bool:
    """Whether a parameter, or its gradient, is the tensor, or shares all of its memory."""
    if held is None or held is tensor:
        return held is tensor
    if is_lazy(held) or held.layout != torch.strided:
        return False
    alike = held.numel() == tensor.numel() and held.dtype == tensor.dtype
    return alike and held.data_ptr() == tensor.data_ptr() != 0


def _variable(tensor: object, frame: FrameType) -> str:
    """The one variable of a function that is bound to a tensor; "" where none or several are."""
    names = [name for name, value in frame.f_locals.items() if value is tensor]
    return names[0] if tensor is not None and len(names) == 1 else ""
