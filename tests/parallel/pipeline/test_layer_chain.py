"""A pipeline runs a model's layers alone: what its forward does beside them is found, and refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from minidist.model import GPT, MLP, config
from minidist.parallel.pipeline.layer_chain import require_chain


class Net(nn.Module):
    """Three layers, called by a function of the test's."""

    def __init__(self, forward: Callable[[Any, Any], Any], layers: Any = None) -> None:
        super().__init__()
        made = [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)]
        self.layers = nn.ModuleList(made) if layers is None else layers
        self.calls = forward

    def forward(self, x: Tensor) -> Any:
        return self.calls(self.layers, x)


def in_order(layers: Any, x: Any) -> Any:
    for layer in layers:
        x = layer(x)
    return x


def with_relu(layers: Any, x: Any) -> Any:
    for layer in layers:
        x = torch.relu(layer(x))
    return x


def residual(layers: Any, x: Any) -> Any:
    for layer in layers:
        x = x + layer(x)
    return x


BROKEN: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "between": (with_relu, r"it computes with what layers\.0 gave itself \(TypeError: "),
    "residual": (residual, r"it computes with what layers\.0 gave itself \(TypeError: "),
    "before": (lambda n, x: in_order(n, x.flatten(1)), "with the model's input itself .AttributeError: "),
    "after": (lambda n, x: in_order(n, x).squeeze(), r"with what layers\.2 gave itself \(AttributeError"),
    "order": (lambda n, x: n[2](n[0](n[1](x))), r"layers\.1 is called where"),
    "twice": (lambda n, x: n[2](n[1](n[1](n[0](x)))), r"layers\.1 is called where layers\.2 is next"),
    "again": (lambda n, x: n[0](in_order(n, x)), r"layers\.0 is called after the last one"),
    "left out": (lambda n, x: n[1](n[0](x)), r"layers\.2 is not called"),
    "not at all": (lambda n, x: x, r"layers\.0 is not called"),
    "side by side": (lambda n, x: (n[0](x), n[1](x), n[2](x))[2], "called with the model's input and should"),
    "more": (lambda n, x: n[2](n[1](n[0](x), None)), r"layers\.1 is called with 2 arguments and should get"),
    "pair": (lambda n, x: (in_order(n, x), 0), r"it returns a tuple and not what layers\.2 gave"),
    "early": (lambda n, x: early(n, x), r"it returns what layers\.0 gave and not what layers\.2"),
}


def early(layers: Any, x: Any) -> Any:
    first = layers[0](x)
    layers[2](layers[1](first))
    return first


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_chain_is_refused(name: str) -> None:
    forward, message = BROKEN[name]
    with pytest.raises(ValueError, match=message) as caught:
        require_chain(Net(forward))
    assert str(caught.value).startswith("a Net's forward is not the chain of its `layers`, which is all that")
    assert str(caught.value).endswith(
        "put what happens before, between or after layers into a layer of its own"
    )


def test_chains_are_taken() -> None:
    require_chain(GPT(config("byte-tiny")))
    require_chain(MLP((3, 4, 5)))
    require_chain(Net(in_order))
    require_chain(Net(lambda n, x: n(x), nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
    require_chain(Net(lambda n, x: n(x), nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.ReLU()))))
    require_chain(Net(lambda n, x: nn.Sequential(*n)(x)))
    bare = nn.Module()
    bare.layers = nn.ModuleList([nn.Linear(4, 4)])  # without a forward: there is nothing else that it does
    require_chain(bare)
    shared = nn.Linear(4, 4)
    require_chain(Net(in_order, nn.ModuleList([shared, nn.ReLU(), shared])))
    with pytest.raises(ValueError, match="a Linear has no `layers`"):
        require_chain(nn.Linear(2, 2))
