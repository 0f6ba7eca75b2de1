"""The contract that every strategy is held to: the weights that one process would have reached.

A case is a model, an optimizer and the sizes of its global batches. The ranks train on it through
`md.prepare`; one process trains on the same global batches in a plain torch loop, written here and not with
the project's own engine. All in float64, and the ranks start from different seeds, so that a missing
broadcast shows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.batch import rows, rows_of
from minidist.parallel.contract.user_functions import by_parameters
from minidist.parallel.experts.load_balance import balance_experts, balanced_routers
from tests.conftest import Clusters

Fault = Callable[[pytest.MonkeyPatch], None]
TOLERANCE = 1e-10
"""Float64 holds 16 digits; sums in another order, over a few steps, cost fewer than 6 of them."""


ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    """What is trained. `model(seed)` builds it in float64; `rows(generator, count)` draws a global batch."""

    model: Callable[[int], nn.Module]
    rows: Callable[[torch.Generator, int], tuple[Tensor, Tensor]]
    optimizer: Callable[..., torch.optim.Optimizer] = ADAMW
    batches: tuple[int, ...] = (12, 13, 7)  # sizes that 2, 3 and 4 ranks do not divide, too
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    clip_norm: float | None = None
    evaluates: bool = False  # each batch, after its step; that gives a loss more

    def global_batches(self) -> list[tuple[Tensor, Tensor]]:
        """The same on every rank and in one process."""
        generator = torch.Generator().manual_seed(7)
        return [self.rows(generator, count) for count in self.batches]


@dataclass(frozen=True)
class Trained:
    """How a training ended."""

    losses: list[float]
    state: dict[str, Tensor]


@lru_cache(maxsize=64)  # many layouts train the same case
def train_in_one_process(case: Case) -> Trained:
    """The reference: a plain loop, from rank 0's weights. Do not write to what it returns."""
    model = case.model(0)
    optimizer = by_parameters(case.optimizer, model, {})(model.parameters())
    start = {name: value.detach().clone() for name, value in model.state_dict().items()}
    loss, batches = of_outputs(case.loss), case.global_batches()
    trained = plain_steps(model, optimizer, batches, loss, case.clip_norm, case.evaluates)
    assert any(not torch.equal(start[name], trained.state[name]) for name in start), "nothing was learned"
    return trained


def plain_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Any],
    loss: Callable[[nn.Module, Any], Tensor],
    clip_norm: float | None = None,
    evaluates: bool = False,
) -> Trained:
    """A step of plain torch for each batch. loss: from the model and a batch to its loss."""
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        found = loss(model, batch)
        found.backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        if routers := balanced_routers(model):
            balance_experts(routers)
        losses.append(float(found.detach()))
        if evaluates:
            losses.append(float(loss(model.eval(), batch).detach()))
            model.train()
    return Trained(losses, {name: value.detach().clone() for name, value in model.state_dict().items()})


def of_outputs(loss: Callable[[Any, Any], Tensor]) -> Callable[[nn.Module, Any], Tensor]:
    """A loss of outputs and targets, as one of the model and a pair of inputs and targets."""
    return lambda model, batch: loss(model(batch[0]), batch[1])


def train_on_this_rank(case: Case, layout: md.Layout, options: dict[str, Any] | None = None) -> Trained:
    """The same by the project's engine, on this rank's shares. options: of `md.prepare`."""
    model = case.model(md.rank())
    given = {"clip_norm": case.clip_norm, **(options or {})}
    engine = md.prepare(model, case.optimizer, layout, loss=case.loss, **given)
    return steps(engine, case.global_batches(), case.evaluates)


def steps(engine: md.Engine, batches: Iterable[Any], evaluates: bool = False) -> Trained:
    """A step of the engine for each global batch, of which each rank passes its rows."""
    calls = (engine.step, engine.evaluate) if evaluates else (engine.step,)
    losses = [call(own_rows(engine, batch)) for batch in batches for call in calls]
    return Trained(losses, engine.full_state_dict())


def own_rows(engine: md.Engine, batch: Any) -> Any:
    """This rank's rows of a global batch; where ranks do not divide them, some have a row more."""
    count = rows_of(batch)
    return rows(batch, slice(*(count * (engine.data_rank + i) // engine.data_ranks for i in (0, 1))))


def check(cluster_of: Clusters, case: Case, layout: md.Layout | str, **options: Any) -> None:
    """Fail where any rank's losses or weights differ from one process's. options: of `md.prepare`."""
    layout, expected = parsed(layout), train_in_one_process(case)
    for trained in cluster_of(layout.ranks).run(train_on_this_rank, case, layout, options):
        compare(trained, expected)


def check_catches(
    cluster_of: Clusters, fault: Fault, case: Case, layout: md.Layout | str, **options: Any
) -> None:
    """Fail unless a planted fault shows on the first rank of a layout."""
    layout, expected = parsed(layout), train_in_one_process(case)
    first, *_ = cluster_of(layout.ranks).run(with_fault, fault, train_on_this_rank, case, layout, options)
    with pytest.raises(AssertionError, match=r"not close|not equal"):
        compare(first, expected)


def check_continues(cluster_of: Clusters, folder: Path, case: Case, *layouts: str, **options: Any) -> None:
    """Fail where a training that changes its layout after each step, by a checkpoint, is not one process's.

    The last layout takes all steps that are left. options: of `md.prepare`; a plan only goes with tp.
    """

    def go_on(layout: md.Layout, steps_before: int) -> Trained:
        own = {key: value for key, value in options.items() if key != "plan" or layout.tp > 1}
        model = case.model(md.rank() + 10 * steps_before)
        engine = md.prepare(model, case.optimizer, layout, loss=case.loss, clip_norm=case.clip_norm, **own)
        if steps_before:
            md.load(engine, folder, latest=True)
        last = None if steps_before + 1 == len(layouts) else steps_before + 1
        trained = steps(engine, case.global_batches()[steps_before:last])
        md.save(engine, folder, step=steps_before + 1)
        return trained

    expected = train_in_one_process(case)
    for number, layout in enumerate(map(parsed, layouts)):
        found = cluster_of(layout.ranks).run(go_on, layout, number)
        for trained in found:
            left = expected.losses[number:][: len(trained.losses)]
            torch.testing.assert_close(trained.losses, left, rtol=TOLERANCE, atol=TOLERANCE)
    for trained in found:
        compare(trained, Trained(expected.losses[len(layouts) - 1 :], expected.state))


def parsed(layout: md.Layout | str) -> md.Layout:
    return md.Layout.parse(layout) if isinstance(layout, str) else layout


def with_fault(fault: Fault, function: Callable[..., Any], *given: Any) -> Any:
    """What a function gives on a rank while a fault is planted there."""
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        return function(*given)


def patched(owner: Any, name: str, value: Any, **options: Any) -> Fault:
    """A fault that is one attribute of a module or class. options: of `setattr`."""
    return lambda patch: patch.setattr(owner, name, value, **options)


def instead_of(owner: Any, name: str, **options: Any) -> Callable[[Callable[..., Any]], Fault]:
    """Make a fault of a function that is called for an attribute, and gets first what that was."""

    def decorate(wrong: Callable[..., Any]) -> Fault:
        def fault(patch: pytest.MonkeyPatch) -> None:
            right = getattr(owner, name)
            patch.setattr(owner, name, lambda *given, **more: wrong(right, *given, **more), **options)

        return fault

    return decorate


def nothing(*_: Any, **__: Any) -> None:
    """What a patched function does that does not do its work."""


def compare(actual: Trained, expected: Trained) -> None:
    """Fail where losses or weights differ by more than rounding, or are NaN."""
    options: dict[str, Any] = {"rtol": TOLERANCE, "atol": TOLERANCE}
    torch.testing.assert_close(actual.losses, expected.losses, **options)
    assert actual.state.keys() == expected.state.keys()
    for name, wanted in expected.state.items():
        torch.testing.assert_close(actual.state[name], wanted, **options, msg=lambda m, n=name: f"{n}: {m}")
