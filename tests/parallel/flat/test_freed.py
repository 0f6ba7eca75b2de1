"""A freed parameter of ZeRO stage 3 says so when it is read, and answers what it is."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel

import minidist as md

SGD = partial(torch.optim.SGD, lr=0.1)
X, Y = torch.linspace(-1, 1, 20).view(5, 4), torch.tensor([0, 1, 2, 1, 0])


def engine_of(loss: Callable[[Tensor, Tensor], Tensor] = md.cross_entropy) -> Any:
    """An engine in a world of one: it frees and gathers as any other does."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3)))
    return md.prepare(model, SGD, md.Layout(zero=3), loss=loss)


@pytest.mark.parametrize(
    "read",
    [
        AveragedModel,
        copy.deepcopy,
        lambda model: sum(p.pow(2).sum() for p in model.parameters()),
        lambda model: torch._foreach_norm([*model.parameters()]),
        lambda model: torch.save(model.state_dict(), io.BytesIO()),
        lambda model: next(model.parameters()).data + 1,
        lambda model: next(model.parameters()).T,
        lambda model: nn.init.zeros_(next(model.parameters())),
    ],
)
def test_reading_a_freed_parameter_names_it_and_the_remedy(read: Callable[[nn.Module], object]) -> None:
    engine = engine_of()
    engine.step(X, Y)
    with pytest.raises(RuntimeError, match=r"0\.weight has no values now.*full_state_dict.*md\.EMA"):
        read(engine.model)
    assert engine.step(X, Y) < 2  # and nothing is lost


def test_a_penalty_on_the_weights_in_the_loss_is_an_error_in_the_first_step() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets) + sum(p.norm() for p in engine.model.parameters())

    engine = engine_of(loss)
    with pytest.raises(RuntimeError, match=r"has no values now.*weight_decay"):
        engine.step(X, Y)


def test_a_freed_parameter_says_what_it_is() -> None:
    engine = engine_of()
    engine.step(X, Y)
    first, *others = engine.model.parameters()
    assert (first.shape, first.dtype, first.requires_grad) == ((8, 4), X.dtype, True)
    assert (first.numel(), len(first), first in {first: 1}) == (32, 8, True)
    assert repr(first) == "FreedParameter(0.weight, (8, 4), torch.float32)"
    assert isinstance(first, nn.Parameter)
    torch.optim.AdamW([first, *others]).zero_grad()
    nn.utils.clip_grad_norm_([first, *others], 1.0)
    state = engine.full_state_dict()
    assert {n: v.shape for n, v in engine.model.state_dict().items()} == {
        n: v.shape for n, v in state.items()
    }
