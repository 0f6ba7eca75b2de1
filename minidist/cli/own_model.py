"""A model of your own on the command line: functions that options name as my.module:function.

    minidist plan --model my.module:make --data my.module:rows --ranks 8 --memory 16GB

`make` takes no arguments and returns the module. `rows` returns inputs and targets, two tensors with an entry
for each row. `--loss my.module:loss` is from outputs and targets to their mean; the default is cross entropy.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from minidist.scale.dryrun.own_model import OwnModel


def is_own(name: str | None) -> bool:
    """Whether a model's name says where a function is."""
    return name is not None and ":" in name


def function(option: str, text: str) -> Callable[..., Any]:
    """Return the function that an option names. ValueError if there is none."""
    module_name, _, attribute = text.partition(":")
    if not module_name or not attribute:
        raise ValueError(f"{option} is {text!r}; give a module and a function in it, such as my.module:make")
    here = os.getcwd()
    if here not in sys.path:  # as with `python -m`
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module is there, and imports one that is not
        raise ValueError(
            f"{option} is {text!r}, and there is no module {error.name} in {here} or installed; give "
            "one that Python can import"
        ) from None
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise ValueError(
            f"{option} is {text!r}, and {module_name} has no function {attribute}; give its name"
        )
    made: Callable[..., Any] = found
    return made


def require_data(model: str, data: str | None) -> str:
    """The name of the function with the data. ValueError if it is missing."""
    if not data or not is_own(data):
        given = f"is {data!r}" if data else "is missing"
        raise ValueError(
            f"--model is {model}, and --data {given}; give a function that returns inputs and targets, two "
            "tensors with an entry for each row, such as --data my.module:rows"
        )
    return data


def model_or_name(model: str, data: str | None, loss: str | None) -> OwnModel | str:
    """Return a model of your own, or the name of one of this package's. ValueError for needless options."""
    if is_own(model):
        from minidist.model.loss import cross_entropy
        from minidist.scale.dryrun.own_model import OwnModel

        make, rows = function("--model", model), function("--data", require_data(model, data))
        return OwnModel(model, make, rows, cross_entropy if loss is None else function("--loss", loss))
    for option, value in (("--data", data), ("--loss", loss)):
        if value is not None:
            raise ValueError(
                f"{option} is {value} and --model is {model}, which needs none; leave it out, or "
                "give a model of your own, such as --model my.module:make"
            )
    return model
