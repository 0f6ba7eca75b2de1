"""Train a rung of the training ladder on this rank, as it is or with a planted mistake."""

from __future__ import annotations

import importlib
import inspect
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.plain.gpt import Batch, MakeOptimizer, gpt

ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)
STEPS = 4
ROWS = 11  # 2 ranks, 3 workers, 4 ranks, and 4 or 8 micro-batches do not divide the rows
T = 12  # tokens in a row
LAYERS = 2
EXACT: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}  # sums in another order differ by less

Parameters = dict[str, Tensor]


def small(seed: int = 0) -> nn.Sequential:
    return gpt(LAYERS, seed=seed).double()


def draw_batches(steps: int = STEPS, rows: int = ROWS, length: int = T) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(64, (rows, length + 1), generator=generator) for _ in range(steps)]
    return [(t[:, :-1], t[:, 1:]) for t in tokens]


def module_of(rung: str, old: str = "", new: str = "") -> types.ModuleType:
    """A rung; with `old`, a copy in which it is replaced by `new`."""
    module = importlib.import_module(f"minidist.plain.{rung}")
    if not old:
        return module
    source, copy = inspect.getsource(module), types.ModuleType(rung)
    assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {rung}"
    exec(source.replace(old, new), copy.__dict__)
    return copy


def parameters_of(model: nn.Module) -> Parameters:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@dataclass
class Trained:
    """A rank's losses and parameters after training, and the bytes that it sent."""

    losses: list[float]
    parameters: Parameters
    optimized: int  # elements of the parameters that the optimizer got
    calls: list[tuple[str, int]]  # name and bytes of each call; the last collects the losses
    sent: int  # bytes of the steps, from the first batch to the end of the last one's


def train(
    rung: str,
    options: dict[str, Any],
    batches: list[Batch],
    make: MakeOptimizer = ADAMW,
    mistake: tuple[str, str] = ("", ""),
    model: nn.Sequential | None = None,
) -> Trained:
    """Train on this rank. Ranks start from different seeds, so missing weights of rank 0 show."""
    model = model or small(comm.rank())
    optimized = 0

    def counted(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        nonlocal optimized
        parameters = list(parameters)
        optimized = sum(p.numel() for p in parameters)
        return make(parameters)

    sent = 0

    class Counted(list[Batch]):
        def __iter__(self) -> Iterator[Batch]:
            nonlocal sent
            before = ledger.bytes_sent
            yield from batches
            sent = ledger.bytes_sent - before

    with comm.ledger() as ledger:
        losses = module_of(rung, *mistake).train(model, Counted(list.copy(batches)), counted, **options)
    calls = [(call.name, call.bytes_sent) for call in ledger.calls]
    return Trained(losses, parameters_of(model), optimized, calls, sent)


def assert_equal(found: Trained, losses: list[float], parameters: Parameters) -> None:
    """Fail where losses or any of `parameters` differ by more than sums in another order may."""
    torch.testing.assert_close(found.losses, losses, **EXACT)
    for name, expected in parameters.items():
        torch.testing.assert_close(found.parameters[name], expected, **EXACT)
