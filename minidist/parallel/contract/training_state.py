"""A torch optimizer's state under the parameters' names.

torch numbers parameters in the order in which the optimizer got them. That order depends on the layout, so a
state that another layout can load has to use names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.contract.tensor_boxes import TensorBox

EXTRA_STATE = "_extra_state"
"""The last part of such names in a state_dict."""


def names_of(model: nn.Module) -> dict[Tensor, str]:
    """The first name of each parameter."""
    return {parameter: name for name, parameter in reversed([*model.named_parameters()])}


def parameter_like(parameter: nn.Parameter, values: Tensor) -> nn.Parameter:
    """A parameter with other values, and the attributes that somebody has set on this one, such as
    `_no_weight_decay`, which optimizers form groups by."""
    new = nn.Parameter(values.detach(), parameter.requires_grad)
    new.__dict__.update(parameter.__dict__)
    return new


def model_tensors(model: nn.Module) -> dict[str, Any]:
    """The tensors of a model's state_dict, not copies; its other entries are in `extra_state`."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def loadable_tensors(model: nn.Module) -> dict[str, Any]:
    """Like `model_tensors`, but rejects tensors that cannot be restored.

    Raises:
        ValueError: a state_dict hook of the model added a tensor of its own. A load would write to that one.
    """
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    state = model_tensors(model)
    for name, value in state.items():
        if value.untyped_storage().data_ptr() not in own and not name.endswith(EXTRA_STATE):
            raise ValueError(
                f"the model's state_dict has {name}, which is no parameter and no buffer of the model, so a "
                "checkpoint of it could not be loaded; let the state_dict hook that makes it only rename"
            )
    return state


def extra_state(model: nn.Module) -> dict[str, Any]:
    """The entries of a model's state_dict that are not tensors, from its modules' `get_extra_state`."""
    state = model.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if not isinstance(value, Tensor)}


def load_extra_state(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Give each module its part of what `extra_state` returned."""
    for name, module in model.named_modules():
        key = f"{name}.{EXTRA_STATE}".lstrip(".")
        if key in saved:
            module.set_extra_state(saved[key])


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]
) -> Iterator[tuple[str, str, Tensor]]:
    """Parameter name, key and tensor of all tensors in an optimizer's state, in the order of its groups.

    A tensor in a list, such as those of LBFGS, has its index in the key: "old_dirs[0]".
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    yield names[parameter], key, value
                for i, each in enumerate(value if isinstance(value, list) else ()):
                    if isinstance(each, Tensor):
                        yield names[parameter], f"{key}[{i}]", each


def state_kinds(tensors: Iterable[tuple[str, Any, torch.dtype]]) -> dict[str, dict[str, tuple[Any, Any]]]:
    """Shape and dtype of an optimizer's state by parameter and key, from those of "optimizer.NAME.KEY"."""
    found: dict[str, dict[str, tuple[Any, Any]]] = {}
    for full, *kind in tensors:
        kind_of, _, rest = full.partition(".")
        if kind_of == "optimizer":
            name, _, key = rest.rpartition(".")
            found.setdefault(name, {})[key] = kind[0], kind[1]
    return found


def put_in_lists(state: dict[str, Any]) -> dict[str, Any]:
    """Move tensors with keys such as "old_dirs[0]" into the lists of a parameter's state."""
    for key in [key for key in state if key.endswith("]")]:
        name, _, index = key[:-1].rpartition("[")
        state[name][int(index)] = state.pop(key)
    return state


def whole_chunks(
    model: nn.Module, optimizer: torch.optim.Optimizer, masters: Mapping[Tensor, Tensor] | None = None
) -> Iterator[TensorBox]:
    """The boxes of a model and an optimizer that this rank has whole. `masters` stand for parameters."""
    masters = masters or {}
    values = loadable_tensors(model)
    named = [("model." + name, masters.get(value, value)) for name, value in values.items()]
    names = names_of(model)
    state = optimizer_tensors(optimizer, {masters.get(p, p): name for p, name in names.items()})
    for name, tensor in (*named, *((f"optimizer.{name}.{key}", value) for name, key, value in state)):
        yield TensorBox(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor.detach())


def optimizer_settings(optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]) -> dict[str, Any]:
    """The optimizer's groups, with names for parameters, and the values in its state that are not tensors.

    A list has None in the place of a tensor.
    """
    groups = [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]
    state = {
        names[parameter]: {
            k: [None if isinstance(x, Tensor) else x for x in v] if isinstance(v, list) else v
            for k, v in values.items()
            if not isinstance(v, Tensor)
        }
        for parameter, values in optimizer.state.items()
    }
    return {"groups": groups, "state": {name: values for name, values in state.items() if values}}


def require_same_groups(have: Sequence[Sequence[str]], settings: Mapping[str, Any]) -> None:
    """ValueError if an optimizer's groups have other parameters than the saved groups."""
    saved = [group["params"] for group in settings["groups"]]
    if [*map(list, have)] != [*map(list, saved)]:
        raise ValueError(
            f"the optimizer has {len(have)} groups of {[len(group) for group in have]} parameters, and the "
            f"saved one {len(saved)} of {[len(group) for group in saved]}; prepare it as when it was saved"
        )


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    names: Mapping[Tensor, str],
    settings: Mapping[str, Any],
    state: Mapping[str, Mapping[str, Any]],
) -> None:
    """Restore an optimizer's groups, and allocate tensors for the state that is to be loaded.

    Args:
        names: of the optimizer's parameters.
        settings: as `optimizer_settings` returned them; ValueError if their groups differ from the
            optimizer's.
        state: for each name the keys of its optimizer state, each with shape and dtype.
    """
    have = [[names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
    require_same_groups(have, settings)
    for group, values in zip(optimizer.param_groups, settings["groups"], strict=True):
        group.update({key: value for key, value in values.items() if key != "params"})
    optimizer.state.clear()
    for parameter, name in names.items():
        values = {
            key: torch.zeros(shape, dtype=dtype, device=parameter.device if shape else "cpu")
            for key, (shape, dtype) in state.get(name, {}).items()
        }
        values |= deepcopy(settings["state"].get(name, {}))
        if values:
            optimizer.state[parameter] = put_in_lists(values)
