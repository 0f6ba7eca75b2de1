"""A backward pass in two parts: the same gradients, and no arithmetic done twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.flop_counter import FlopCounterMode

from minidist.model import config, gpt_layers
from minidist.parallel.pipeline.split_backward import SplitBackward
from minidist.parallel.training.recompute import recompute, recomputes
from tests.helpers.models import Calls

EXACT = {"rtol": 1e-12, "atol": 1e-14}


class Shared(nn.Module):
    """Uses one weight twice, and one through an operation of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.scaled = nn.Linear(8, 8), nn.Parameter(torch.randn(8, 8))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.twice(x).tanh())
        return self.twice(x + x @ (self.scaled / self.scaled.norm()))


class Squares(torch.autograd.Function):
    """Python's own operation, of two inputs."""

    @staticmethod
    def forward(ctx, x, weight):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        return x * weight**2

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        return gradient * weight**2, (gradient * x * 2 * weight).sum(0)


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.weight = nn.Linear(8, 8), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return Squares.apply(self.linear(x), self.weight)


def block() -> nn.Module:
    shape = config("byte-tiny", context=6, layers=2, heads=2, width=8)
    return nn.Sequential(*gpt_layers(shape, 1, 3))


def recomputed() -> nn.Module:
    return Calls(recompute(block()), lambda inner, x: inner(x))


class Hooked(nn.Module):
    """With hooks that change the gradients of activations, of one that has two uses and of a module's."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(8, 8), nn.Linear(4, 8), nn.LayerNorm(8)
        self.second.register_full_backward_hook(lambda _, of, __: tuple(2 * each for each in of))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x.register_hook(lambda gradient: 3 * gradient)
        normed = self.norm(x)
        normed.register_hook(lambda gradient: gradient - 5)
        one, two = normed.chunk(2, -1)
        two.register_hook(torch.neg)
        out: Tensor = self.second(one * two) + x
        out.register_hook(lambda gradient: gradient + 1)
        return out


MODULES = {"hooked": Hooked, "blocks": block, "shared": Shared, "python's": Own, "recomputed": recomputed}


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("needs_input", [True, False])
def test_both_parts_make_the_whole(name: str, needs_input: bool) -> None:
    torch.manual_seed(0)
    module = MODULES[name]().double()
    inputs = torch.randn(3, 6, 8, dtype=torch.float64)
    gradient = torch.randn(3, 6, 8, dtype=torch.float64)
    whole = inputs.clone().requires_grad_()
    module(whole).backward(gradient)
    expected = [p.grad for p in module.parameters()]
    module.zero_grad()

    x = inputs.clone().requires_grad_() if needs_input else None
    xs = [] if x is None else [x]
    split = SplitBackward([get_gradient_edge(module(inputs if x is None else x))], xs, recomputes(module))
    found = split.input_gradients([gradient])
    assert all(p.grad is None for p in module.parameters())
    split.weight_gradients()
    if needs_input:
        torch.testing.assert_close(found, [whole.grad], **EXACT)
        assert x is not None
        assert x.grad is None
    else:
        assert found == []
    torch.testing.assert_close([p.grad for p in module.parameters()], expected, **EXACT)


def test_no_product_is_computed_twice() -> None:
    module = block()
    x = torch.randn(3, 6, 8, requires_grad=True)
    outputs = module(x)
    counts = []
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(outputs.sum(), [x, *module.parameters()], retain_graph=True)
    counts.append(counter.get_total_flops())
    split = SplitBackward([get_gradient_edge(outputs)], [x])
    for part in (lambda: split.input_gradients([torch.ones_like(outputs)]), split.weight_gradients):
        with FlopCounterMode(display=False) as counter:
            part()
        counts.append(counter.get_total_flops())
    whole, first, second = counts
    assert first + second == whole
    # Of each linear map one product for its input and one as large for its weight; attention has no weight.
    weights = sum(p.numel() for p in module.parameters() if p.dim() == 2)
    assert second == 2 * 3 * 6 * weights
