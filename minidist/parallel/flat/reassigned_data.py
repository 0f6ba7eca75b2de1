"""`parameter.data = tensor`, where the parameter is a view into flat memory.

It gives a parameter other memory, as `torch.nn.utils.vector_to_parameters` does for a whole model. What is
updated, or sent, lies in the flat tensor all the same, so that the parameter would stay where it is for good;
hence addresses are compared before, and the values taken over.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def reassigned(parameters: Sequence[Tensor], views: Sequence[Tensor]) -> dict[int, Tensor]:
    """Copies of the values of those parameters that are not their views any more, by their numbers.

    Raises:
        ValueError: one has another shape, dtype or device now.
    """
    found = {}
    for number, (parameter, view) in enumerate(zip(parameters, views, strict=True)):
        if parameter.data_ptr() == view.data_ptr() and parameter.stride() == view.stride():
            continue
        now, before = ((tuple(x.shape), x.dtype, x.device) for x in (parameter, view))
        if now != before:
            raise ValueError(
                f"a parameter of {_text(*before)} was given data of {_text(*now)} while it was trained; give "
                "it data of its own shape, dtype and device"
            )
        found[number] = parameter.detach().clone()
    return found


def _text(shape: object, dtype: object, device: object) -> str:
    return f"shape {shape} in {dtype} on {device}"
