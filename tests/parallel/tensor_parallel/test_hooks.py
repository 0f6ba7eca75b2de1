"""What a cut layer would lose is refused: hooks, parametrizations, a forward of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn

from minidist.parallel.tensor_parallel.replace_layers import parallelize


def double(*given: Any) -> None:
    """A hook."""


def with_a_forward_of_its_own(layer: nn.Linear) -> None:
    def forward(x: Tensor) -> Tensor:
        return 2 * nn.functional.linear(x, layer.weight, layer.bias)

    layer.forward = forward  # type: ignore[method-assign]


LOST: dict[str, tuple[Callable[[nn.Linear], Any], str]] = {
    "forward": (lambda x: x.register_forward_hook(double), "a forward hook, double"),
    "forward pre": (lambda x: x.register_forward_pre_hook(double), "a forward pre hook, double"),
    "backward": (lambda x: x.register_full_backward_hook(double), "a backward hook, double"),
    "backward pre": (lambda x: x.register_full_backward_pre_hook(double), "a backward pre hook, double"),
    "gradient": (lambda x: x.weight.register_hook(double), "a gradient hook on its weight, double"),
    "accumulated": (
        lambda x: x.bias.register_post_accumulate_grad_hook(double),
        "a gradient hook on its bias, double",
    ),
    "weight_norm": (
        nn.utils.parametrizations.weight_norm,
        "a parametrization of its weight, WeightNorm",
    ),
    "spectral_norm": (
        nn.utils.parametrizations.spectral_norm,
        "a parametrization of its weight, SpectralNorm",
    ),
    "old weight_norm": (nn.utils.weight_norm, "a forward pre hook, WeightNorm"),
    "old spectral_norm": (nn.utils.spectral_norm, "a forward pre hook, SpectralNorm"),
    "forward method": (with_a_forward_of_its_own, "a forward method of its own"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize("name", LOST)
def test_what_a_cut_layer_would_lose_is_refused(name: str) -> None:
    add, lost = LOST[name]
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    add(model[1])  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=f"1 has {lost}, and the cut layer that replaces it would not; remove"
    ):
        parallelize(model, {"0": "column", "1": "row"})
    assert isinstance(model[0], nn.Linear)  # nothing is cut
