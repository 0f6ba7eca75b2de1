"""Refuse `parameter.data = tensor` for a parameter that is a view into flat memory.

The assignment gives the parameter memory of its own; `torch.nn.utils.vector_to_parameters` makes one for
every parameter of a model. The ranks go on updating and sending the flat tensor, so the parameter would keep
its new values for good and never be trained again. Addresses show it, at the price of one comparison of
lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

DataAddress = tuple[int, tuple[int, ...]]


def addresses(tensors: Sequence[Tensor]) -> list[DataAddress]:
    """Where each tensor begins in memory, and its strides."""
    return [(tensor.data_ptr(), tensor.stride()) for tensor in tensors]


def refuse_reassigned(
    parameters: Sequence[Tensor], expected: list[DataAddress], name_of: Callable[[int], str]
) -> None:
    """ValueError where a parameter is not at its `expected` address; `name_of` gives an index's name."""
    found = addresses(parameters)
    if found == expected:
        return
    index = next(i for i, (now, before) in enumerate(zip(found, expected, strict=True)) if now != before)
    raise ValueError(
        f"the parameter {name_of(index)} was given other memory, as `parameter.data = tensor` and "
        "module.to(dtype) do, and has to stay in the flat memory of the ranks; write into it instead: "
        "`with torch.no_grad(): parameter.copy_(tensor)`"
    )
