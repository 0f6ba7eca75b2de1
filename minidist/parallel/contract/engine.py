"""An engine's arguments that are functions; and calls of a model that leave no trace in it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Loss = Callable[..., Any]
"""From outputs and targets to a scalar, their mean over rows, or to a pair (mean, weight). Or one from the
model and a batch to either, whose first argument is called `model`."""
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
"""From parameters to a torch optimizer, such as `partial(torch.optim.AdamW, lr=3e-4)`."""
MakeFromNamed = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
"""From (name, parameter) pairs to a torch optimizer; its first argument is called `named_parameters`."""


def first_argument(function: Any) -> str:
    """The name of a function's first argument; "" if it does not say."""
    try:
        return next(iter(inspect.signature(function).parameters), "")
    except (TypeError, ValueError):
        return ""


def requires_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer's step evaluates the loss itself, perhaps several times: as LBFGS and SAM do."""
    kind: Any = type(getattr(optimizer, "inner", optimizer))  # of a ZeroOptimizer or MasterWeights
    closure = inspect.signature(kind.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def by_parameters(optimizer: Any, model: nn.Module, first: Mapping[str, str]) -> MakeOptimizer:
    """`optimizer` as a function of parameters; one that takes pairs gets their names in `model`.

    first: the first name of each parameter, where the model is a part of one that ties some.
    """
    takes_names = first_argument(optimizer) == "named_parameters"

    def make(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        given: list[Any] = [*parameters]
        known = set(map(id, given))
        if takes_names:
            names = [first.get(name, name) for name, _ in model.named_parameters()]
            # Masters and shards' stand-ins come in the order of the model's parameters.
            given = [*zip(names, given, strict=True)]
        made: torch.optim.Optimizer = optimizer(given)
        for group in getattr(made, "param_groups", ()):
            group.pop("param_names", None)  # shards replace the parameters, and checkpoints have the names
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise ValueError(
                        f"optimizer has a parameter of shape {tuple(parameter.shape)} that is none of those "
                        "that the function is given, so ranks would not share it. If it is the loss's, train "
                        "a module that holds model and loss and returns the loss, with loss=lambda outputs, "
                        "targets: outputs"
                    )
        return made

    return make


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, all parts of these modules are in evaluation mode without gradients; then each as it was."""
    modes = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for module in modules:
            module.eval()  # which a module may have overridden
        with torch.no_grad():
            yield
    finally:
        for part, training in modes:
            part.training = training


State = list[tuple[dict[str, Any], str, Any]]
"""Each tensor, number and None with the dict that has it, and its name there."""


def state_of(*owners: Any) -> State:
    """The buffers and plain attributes of modules and their parts, and the attributes of other objects.

    Only tensors, numbers and None count: a forward pass may change them. A method or a partial stands for its
    object.
    """
    return [
        (store, name, value)
        for store in stores_of(owners)
        for name, value in store.items()
        if isinstance(value, Tensor | int | float | None)
    ]


def computed(model: nn.Module) -> dict[int, Any]:
    """What copy.deepcopy shall take for attributes that it refuses, such as pruned weights."""
    tensors = (x for _, _, x in state_of(model) if isinstance(x, Tensor) and x.grad_fn is not None)
    return {id(x): x.detach() for x in tensors}


def stores_of(owners: Iterable[Any]) -> list[dict[str, Any]]:
    """The dicts of attributes and buffers of modules and their parts, and of attributes of other objects."""
    objects = [getattr(getattr(each, "func", each), "__self__", each) for each in owners]
    parts = [part for each in objects for part in (each.modules() if isinstance(each, nn.Module) else [each])]
    found = [getattr(part, name, None) for part in parts for name in ("__dict__", "_buffers")]
    return [store for store in found if isinstance(store, dict)]


def differs(value: Any, old: Any) -> bool:
    """Whether a tensor has other values than before, a list or dict other items; or it is another object."""
    if type(value) is type(old) is list:
        return len(value) != len(old) or any(x is not y for x, y in zip(value, old, strict=True))
    if type(value) is type(old) is dict:
        return value.keys() != old.keys() or any(value[key] is not old[key] for key in value)
    if not isinstance(value, Tensor) or not isinstance(old, Tensor):
        return value is not old
    try:
        return not torch.equal(value, old)
    except RuntimeError:  # a dry run has no values, and sparse tensors are not compared
        return False
