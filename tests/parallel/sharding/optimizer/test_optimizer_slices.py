"""How an optimizer updates its slices; that the results are right is the contract's matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.optim import adam

from minidist.parallel.sharding.optimizer.optimizer_slices import MANY, SMALL, OptimizerSlices


@pytest.mark.parametrize(
    ("count", "size", "options", "at_once"),
    [
        (MANY, 5, {}, True),
        (MANY - 1, 5, {}, False),
        (MANY, SMALL + 1, {}, False),
        (MANY, 5, {"foreach": False}, False),
        (MANY, 5, {"fused": True}, False),
    ],
)
def test_many_small_tensors_are_updated_in_one_call(
    monkeypatch: pytest.MonkeyPatch, count: int, size: int, options: dict[str, bool], at_once: bool
) -> None:
    calls, multi = list[int](), adam._multi_tensor_adam
    own = [torch.randn(size, requires_grad=True) for _ in range(count)]
    plain = [each.detach().clone().requires_grad_() for each in own]
    slices, expected = (
        OptimizerSlices(torch.optim.AdamW(each, lr=0.1, **options), None) for each in (own, plain)
    )

    def counted(parameters: list[torch.Tensor], *given: Any, **more: Any) -> None:
        calls.append(len(parameters))
        multi(parameters, *given, **more)

    monkeypatch.setattr(adam, "_multi_tensor_adam", counted)
    for _ in range(3):
        for x, y in zip(own, plain, strict=True):
            x.grad = torch.randn(size)
            y.grad = x.grad.clone()
        slices.step()
        assert calls == [count] * at_once
        expected.optimizer.step()
        calls.clear()
    assert all(map(torch.equal, own, plain))  # to the last bit
    assert slices.optimizer.param_groups[0]["foreach"] == options.get("foreach")  # as a checkpoint has it
