"""A torch optimizer's state under the parameters' names.

torch numbers parameters in the order in which the optimizer got them. That order depends on the layout, so a
state that another layout can load has to use names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

T = TypeVar("T")
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


def by_name_and_key(named: Iterable[tuple[str, T]]) -> dict[str, dict[str, T]]:
    """Sort what is given for "optimizer.NAME.KEY", such as a tensor or its kind, by parameter and key."""
    found: dict[str, dict[str, T]] = {}
    for full, given in named:
        kind, _, rest = full.partition(".")
        if kind == "optimizer":
            name, _, key = rest.rpartition(".")
            found.setdefault(name, {})[key] = given
    return found


def put_in_lists(state: dict[str, Any]) -> dict[str, Any]:
    """Move tensors with keys such as "old_dirs[0]" into the lists of a parameter's state."""
    for key in [key for key in state if key.endswith("]")]:
        name, _, index = key[:-1].rpartition("[")
        state[name][int(index)] = state.pop(key)
    return state


def copy_options(source: Iterable[Mapping[str, Any]], target: Iterable[dict[str, Any]]) -> None:
    """Give groups the options of others, such as the learning rate; each keeps its own parameters."""
    for given, group in zip(source, target, strict=True):
        group.update({key: value for key, value in given.items() if key != "params"})


def load_groups(
    groups: Sequence[dict[str, Any]], have: Sequence[Sequence[str]], saved: Sequence[Mapping[str, Any]]
) -> None:
    """Give an optimizer's groups the options of saved ones; ValueError if those are of other parameters.

    have: the names of the parameters in each of `groups`.
    """
    if [*map(list, have)] != [list(group["params"]) for group in saved]:
        raise ValueError(
            f"the optimizer has {len(have)} groups of {[len(group) for group in have]} parameters, and the "
            f"saved one {len(saved)} of {[len(group['params']) for group in saved]}; prepare it as when it "
            "was saved"
        )
    copy_options(saved, groups)
