"""The rehearsal: silent faults are named in the first step, and what is right trains as without it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import minidist as md
from minidist.checkpoint import saving
from minidist.parallel.engine import one_process, rehearsal
from minidist.parallel.engine.whole_state import whole_batch
from minidist.parallel.tensor_parallel import gather_sequence
from minidist.parallel.training.comparable_steps import RandomOff
from tests.conftest import Clusters
from tests.helpers.clocks import HANG
from tests.helpers.models import Calls, Chain
from tests.helpers.on_ranks import on_ranks
from tests.helpers.refusals import refused_on_ranks

PARSE = md.Layout.parse
SGD = partial(torch.optim.SGD, lr=0.1)
ADAMW = partial(torch.optim.AdamW, lr=0.01)
DOUBLE = {"dtype": torch.float64}


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8)).double()


def normed() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)).double()


def batches(steps: int, *shape: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randn(2, *(shape or (8, 8)), **DOUBLE, generator=generator).unbind() for _ in range(steps)]


def train(engine: md.Engine, given: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    """Take steps with this rank's rows, every n-th."""
    own = slice(engine.data_rank, None, engine.data_ranks)
    return [engine.step(x[own], y[own]) for x, y in given]


# Faults that no error shows. Each trains another model.


class Global(torch.optim.SGD):
    """Divides all gradients by the norm of all that it has."""

    def step(self, closure: Any = None) -> Any:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in parameters]).norm()
        for p in parameters:
            p.grad.div_(norm)
        return super().step(closure)


class Codebook(nn.Module):
    """Writes a buffer from the rows that it sees."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.map = nn.Linear(8, 8).double()
        self.register_buffer("mean", torch.zeros(8, **DOUBLE))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.map(x)
        if self.training and torch.is_grad_enabled():
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y


def recurrent() -> nn.Module:
    """Takes (time, rows, features), as nn.LSTM does unless it is told otherwise."""
    torch.manual_seed(0)
    return Calls(nn.LSTM(8, 8).double(), lambda lstm, x: lstm(x)[0])


SYNCHRONIZED = {"model": normed, "batch_norm": "synchronized"}


def valid_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over the numbers that count, which does not say how many they are."""
    count = targets > -0.5
    return ((outputs - targets).square() * count).sum() / count.sum()


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum()


GLOBAL = partial(Global, lr=0.1)
MSE: dict[str, Any] = {"model": net, "optimizer": SGD, "loss": functional.mse_loss}
FAULTS: dict[str, tuple[str, dict[str, Any], str]] = {
    # layout, what is given otherwise than in MSE, and what is told
    "a global optimizer": ("dp=2,zero=1", {"optimizer": GLOBAL}, "looks at several parameters"),
    "a buffer of rows": ("dp=2", {"model": Codebook}, "mean is written in the model's forward pass"),
    "time first": ("micro_batches=2", {"model": recurrent}, "first dimension of a batch's tensors"),
    "a sum": ("dp=2", {"loss": summed}, "is no mean over rows"),
    "a sum after a BatchNorm": ("dp=2", {"model": normed, "loss": summed}, "is no mean over rows"),
    "a sum after a synchronized one": ("dp=2", {**SYNCHRONIZED, "loss": summed}, "is no mean over rows"),
    "an unknown weight": ("dp=2,zero=3", {"loss": valid_mean}, r"or \(mean, weight\)"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_silent_fault_is_named(cluster_of: Clusters, fault: str) -> None:
    layout, changes, told = FAULTS[fault]
    given = {**MSE, **changes}

    # The remedy comes before the numbers.
    says = rf"in step 1 the layout {layout} trains otherwise than one process .*{told}.*What differs: "

    def first_step() -> None:
        own = {**given, "model": given["model"]()}
        assert train(md.prepare(layout=PARSE(layout), rehearse=False, **own), batches(1))[0] > 0  # not a word
        engine = md.prepare(layout=PARSE(layout), rehearse=True, **{**given, "model": given["model"]()})
        before = engine.full_state_dict()
        with pytest.raises(ValueError, match=says):
            train(engine, batches(1))
        after = engine.full_state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)

    cluster_of(PARSE(layout).ranks).run(first_step)


@on_ranks(2)
def test_a_fault_that_begins_later_is_found_at_the_next_step_that_is_rehearsed() -> None:
    engine = md.prepare(net(), SGD, md.Layout(dp=2), valid_mean, rehearse=True)
    *before, found = [(x, y.clamp(min=-0.4) if step < 5 else y) for step, (x, y) in enumerate(batches(10), 1)]
    train(engine, before)
    with pytest.raises(ValueError, match="trains otherwise"):
        train(engine, [found])


def rehearsed(engine: md.Engine, steps: Iterable[Callable[[], Any]]) -> list[int]:
    """The numbers of the steps that are rehearsed."""
    assert engine.rehearsal is not None
    take, found = engine.rehearsal.step, list[int]()

    def counted(*given: Any) -> Any:
        found.append(done + 1)
        return take(*given)

    engine.rehearsal.step = counted  # type: ignore[method-assign]
    for done, step in enumerate(steps):  # noqa: B007 (`counted` uses it)
        step()
    return found


def test_some_steps_are_rehearsed_and_others_are_not(cluster_of: Clusters) -> None:
    def steps(when: Any) -> list[int]:
        engine = md.prepare(net(), SGD, md.Layout(dp=2), functional.mse_loss, rehearse=when)

        def step(number: int, batch: tuple[Tensor, Tensor]) -> None:
            engine.model[0].weight.requires_grad_(number not in (8, 11, 12))  # in turns, as of a GAN
            train(engine, [batch])

        return rehearsed(engine, (partial(step, *each) for each in enumerate(batches(13), 1)))

    assert cluster_of(2).run(steps, True)[0] == [1, 3, 8, 10]
    assert max(b / a for a, b in pairwise(rehearsal.STEPS)) <= 3.4
    for first in (0, 1):
        later = [step + first - 1 for step in rehearsal.STEPS[1:]]
        assert all(any(number % each == 0 for number in later) for each in (3, 5, 10, 100))
    assert cluster_of(2).run(steps, "first")[0] == [1]


# What was wrong without a word, and is right now.


class Block(nn.Module):
    """With a parameter that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.never = nn.Linear(8, 8), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))


def shared() -> nn.Module:
    """A block that two stages share."""
    torch.manual_seed(0)
    block = Block()
    return Chain(block, nn.Linear(8, 8), block).double()


@on_ranks(2)
def test_a_parameter_of_the_loss_is_refused_everywhere() -> None:
    scale, told = nn.Parameter(torch.zeros((), **DOUBLE)), []
    for layout in ("dp=2", "dp=2,zero=1", "dp=2,zero=3", "pp=2"):
        model: nn.Module = shared() if "pp" in layout else net()
        with pytest.raises(ValueError, match="holds model and loss") as caught:
            md.prepare(model, lambda ps: SGD([*ps, scale]), PARSE(layout), functional.mse_loss)
        told.append(str(caught.value))
    assert len(set(told)) == 1


# What is right stays as it is.


class Noisy(nn.Module):
    """Drops, adds noise, and counts its calls in a buffer, an attribute and a list."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(8, 12).double(), nn.Linear(12, 8).double()
        self.register_buffer("calls", torch.zeros((), **DOUBLE))
        for kind in (torch.bool, torch.int64, torch.float16, torch.complex64):
            self.register_buffer(f"of_{kind}".replace(".", "_"), torch.ones(3, dtype=kind))
        self.times, self.history = 0, list[int]()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.times += 1
        self.history.append(self.times)
        x = functional.dropout(self.first(x), 0.3, self.training)
        return self.second(x + 0.1 * torch.randn_like(x))


def halves() -> nn.Module:
    """Writes to its rows."""
    return Calls(net(), lambda inner, x: inner(functional.dropout(x.div_(2), 0.3, inner.training)))


def penalized(model: nn.Module) -> Any:
    """A loss that reads the model around it."""

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        squares = sum(p.square().sum() for p in model.parameters())
        return functional.mse_loss(outputs, targets) + 0.1 * squares

    return loss


def a_group_each(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """It is asked for groups once, before the loop freezes what it forms groups by."""
    return ADAMW([{"params": [p]} for p in parameters if p.requires_grad])


UNCHANGED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    # layout, model, and options of `prepare`
    "plain": ("dp=2", net, {}),
    "clipped": ("dp=2,zero=2", net, {"clip_norm": 0.1}),
    "random numbers": ("dp=2,zero=3", Noisy, {}),
    "random numbers, shares of the state": ("dp=2,zero=1", Noisy, {}),
    "recomputed": ("dp=2,recompute=true", shared, {}),
    "cut": ("tp=2", net, {"plan": {"0": "column", "2": "row"}}),
    "stages": ("pp=2", shared, {"clip_norm": 0.1}),
    "own statistics": ("dp=2", normed, {}),
    "synchronized statistics": ("dp=2", normed, {"batch_norm": "synchronized"}),
    "a penalty": ("dp=2", net, {"loss": penalized}),
    "writes": ("dp=2", halves, {}),
    "groups": ("dp=2", net, {"optimizer": a_group_each}),
    "groups of shares": ("dp=2,zero=1", net, {"optimizer": a_group_each}),
}


@pytest.mark.parametrize("case", UNCHANGED)
def test_a_rehearsed_training_is_the_same_to_the_bit(
    cluster_of: Clusters, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    layout, make, options = UNCHANGED[case]

    def trained(rehearse: bool) -> tuple[Any, ...]:
        torch.manual_seed(md.rank())
        model = make()
        given = {"optimizer": ADAMW, "loss": functional.mse_loss, **options}
        if "loss" in options:
            given["loss"] = penalized(model)
        engine = md.prepare(model, layout=PARSE(layout), rehearse=rehearse, **given)
        with md.comm.ledger() as ledger:
            losses = train(engine, batches(1))
            if "groups" in case:
                engine.model[0].requires_grad_(False)
            losses += train(engine, batches(4))
        calls = [(call.name, call.shape, call.bytes_sent) for call in ledger.calls]
        noisy = (model.times, model.history, float(model.calls)) if isinstance(model, Noisy) else ()
        return losses, calls, noisy, engine.grad_norm, torch.get_rng_state(), engine.full_state_dict()

    for a, b in zip(cluster_of(2).run(trained, True), cluster_of(2).run(trained, False), strict=True):
        assert a[:4] == b[:4]
        assert torch.equal(a[4], b[4])
        assert all(torch.equal(a[5][name], b[5][name]) for name in b[5])
    assert "was not compared" not in capfd.readouterr().err


class Scaled(nn.Linear):
    """A layer with a buffer that a state_dict has, and one that it may not have."""

    def __init__(self, persistent: bool) -> None:
        super().__init__(8, 8)
        self.register_buffer("scale", torch.empty(8))
        self.register_buffer("shift", torch.empty(8), persistent)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "scale"):
            torch.nn.init.constant_(self.scale, 0.5)
            torch.nn.init.constant_(self.shift, 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale + self.shift


@pytest.mark.parametrize("layout", ["dp=2,zero=3", "pp=2"])
def test_a_model_made_on_the_meta_device_is_rehearsed(
    cluster_of: Clusters, capfd: pytest.CaptureFixture[str], layout: str
) -> None:
    def losses(loss: Any, rehearse: bool) -> list[float]:
        with torch.device("meta"):
            persistent = "pp" in layout  # rank 0 has no other buffers of other stages
            model = Chain(Scaled(persistent), nn.Tanh(), Scaled(persistent)).double()
        options = {"example": torch.zeros(2, 8, **DOUBLE)} if "pp" in layout else {}
        return train(md.prepare(model, SGD, PARSE(layout), loss, rehearse=rehearse, **options), batches(3))

    assert all(loss > 0 for loss in cluster_of(2).run(losses, functional.mse_loss, True)[0])
    assert "was not compared" not in capfd.readouterr().err


def test_a_rank_is_not_alone_while_it_saves(cluster_of: Clusters, tmp_path: Path) -> None:
    """The save's thread talks to the other ranks. A failed save tells `wait`, and not the step."""

    def found(fails: bool) -> tuple[list[float], list[bool], str]:
        engine = md.prepare(net(), SGD, md.Layout(dp=2), functional.mse_loss, rehearse=True)
        awaited, done = threading.Event(), list[bool]()
        write, join, step = saving.write, saving.Saving.join, one_process.OneProcess.step

        def slow(*given: Any) -> None:
            awaited.wait(HANG)
            write(*given)
            if fails:
                raise OSError("full")

        def joined(own: saving.Saving) -> None:
            awaited.set()
            join(own)

        def alone(*given: Any) -> Any:
            done.append(engine.saving.done)
            return step(*given)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saving, "write", slow)
            patch.setattr(saving.Saving, "join", joined)
            patch.setattr(one_process.OneProcess, "step", alone)
            under_way = md.save(engine, tmp_path / "state", asynchronous=True)
            losses = train(engine, batches(3))
            try:
                under_way.wait()
            except OSError as error:
                return losses, done, str(error)
            return losses, done, ""

    for fails in (False, True):
        ranks = cluster_of(2).run(found, fails)
        assert ranks[0][1] == [True, True]
        assert [told for *_, told in ranks] == ["full" if fails else ""] * 2


class Elsewhere:
    """A loss that has the model in an attribute."""

    def __init__(self, model: nn.Module) -> None:
        self.model = [model]

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs, targets) + self.model[0][0].weight.square().sum()


# Where it does not run, a line says so.


def calls_torch(outputs: Tensor, targets: Tensor) -> Tensor:
    dist.all_reduce(torch.ones(1))
    return functional.mse_loss(outputs, targets)


def uncopied() -> nn.Module:
    model = Calls(net(), lambda inner, x: inner(x))
    model.rows = (each for each in "abc")
    return model


def draws() -> nn.Module:
    half = partial(torch.full_like, fill_value=0.5)
    return Calls(net(), lambda inner, x: inner(x) + torch.binomial(8 * half(x), half(x)))


@pytest.mark.parametrize(
    ("model", "loss", "told"),
    [
        (net, calls_torch, "it calls torch.distributed itself"),
        (uncopied, functional.mse_loss, "the model cannot be copied: cannot pickle 'generator' object"),
        (draws, functional.mse_loss, "cannot be switched off: torch's binomial"),
        (net, Elsewhere, "the loss reads the parameters of the engine's model"),
    ],
)
def test_a_line_says_why_it_did_not_run(
    cluster_of: Clusters, capfd: pytest.CaptureFixture[str], model: Any, loss: Any, told: str
) -> None:
    def losses(rehearse: bool) -> list[float]:
        torch.manual_seed(md.rank())
        made = model()
        given = loss(made) if loss is Elsewhere else loss
        engine = md.prepare(made, SGD, md.Layout(dp=2), given, rehearse=rehearse)
        torch.manual_seed(md.rank())
        return train(engine, batches(3))

    found = cluster_of(2).run(losses, True)
    lines = [line for line in capfd.readouterr().err.splitlines() if "was not compared" in line]
    assert lines
    assert all(told in line for line in lines)
    assert found == cluster_of(2).run(losses, False)


def test_it_runs_by_default_where_memory_allows(
    cluster_of: Clusters, capfd: pytest.CaptureFixture[str]
) -> None:
    def told(free: int) -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MINIDIST_REHEARSE", "1")
            patch.setattr(rehearsal, "available_memory", lambda: free)
            engine = md.prepare(net(), SGD, md.Layout(dp=2), summed)
            try:
                train(engine, batches(1))
            except ValueError as error:
                return str(error)
            return ""

    assert "is no mean over rows" in cluster_of(2).run(told, 10**9)[0]
    assert cluster_of(2).run(told, 1000) == ["", ""]
    assert "one process needs 2.04e-05 GB on rank 0, and 1e-06 GB are free" in capfd.readouterr().err


def test_constants_replace_random_numbers() -> None:
    state = torch.get_rng_state()
    x = torch.full((3, 4), 0.25)
    with RandomOff() as off:
        assert torch.equal(functional.dropout(x, 0.5), 2 * x)
        assert torch.equal(torch.rand(3), torch.full((3,), 0.5))
        assert torch.equal(torch.randn(2, **DOUBLE), torch.zeros(2, **DOUBLE))
        assert torch.equal(torch.normal(x, 2.0), x)
        assert torch.equal(torch.normal(1.0, x), torch.ones_like(x))
        assert torch.equal(torch.randint(2, 9, (3,)), torch.full((3,), 2))
        assert torch.equal(torch.randint(9, (3,)), torch.zeros(3, dtype=torch.int64))
        assert torch.equal(torch.randperm(4), torch.arange(4))
        assert torch.equal(torch.empty(3).uniform_(1, 3), torch.full((3,), 2.0))
        assert torch.equal(torch.bernoulli(x), torch.ones_like(x))
        assert torch.multinomial(torch.tensor([0.1, 0.7, 0.2]), 1).item() == 1
        q = torch.ones(1, 1, 4, 8)
        attended = functional.scaled_dot_product_attention(q, q, q, dropout_p=0.9)
        assert attended.shape == q.shape
    assert off.used
    assert not off.cannot
    assert torch.equal(torch.get_rng_state(), state)
    with RandomOff() as off:
        functional.scaled_dot_product_attention(q, q, q)
    assert not off.used


# What a step alone must leave as it was, wherever the user's functions keep it.

CALLS, NUMBERS = 0, iter([0])


def counts_in_a_global(outputs: Tensor, targets: Tensor) -> Tensor:
    global CALLS
    CALLS += 1
    return functional.mse_loss(outputs, targets) * (1 + CALLS % 3)


def counts_by_an_iterator(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.mse_loss(outputs, targets) * (1 + next(NUMBERS) % 3)


def counts_in_an_argument(outputs: Tensor, targets: Tensor, *, state: dict[str, int]) -> Tensor:
    state["calls"] = state.get("calls", 0) + 1
    return functional.mse_loss(outputs, targets) * (1 + state["calls"] % 3)


def counts_in_a_first_argument(state: dict[str, int], outputs: Tensor, targets: Tensor) -> Tensor:
    return counts_in_an_argument(outputs, targets, state=state)


class Counting(nn.Module):
    """Keeps a list of what it has seen, and a global."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.seen, self.results = net(), [], []
        self.parts = [*self.inner]  # a list of its own modules

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        self.seen.append(CALLS)
        for part in self.parts:
            x = part(x)
        self.results.append(x)
        return x * (1 + len(self.seen) % 3) * (1 + CALLS % 2)


@pytest.mark.parametrize("which", ["global", "iterator", "argument", "first argument", "model"])
def test_what_functions_count_is_left_alone(cluster_of: Clusters, which: str) -> None:
    losses = {
        "global": counts_in_a_global,
        "iterator": counts_by_an_iterator,
        "argument": partial(counts_in_an_argument, state={}),
        "first argument": partial(counts_in_a_first_argument, {}),
        "model": functional.mse_loss,
    }

    def run() -> list[float]:
        model, ranks = Counting() if which == "model" else net(), md.size()
        counts_by_an_iterator.__globals__["NUMBERS"] = count()  # newer Pythons send none to a rank
        engine = md.prepare(model, SGD, md.Layout(dp=ranks), losses[which], rehearse=ranks > 1)
        return train(engine, batches(6))

    [expected] = cluster_of(1).run(run)
    for found in cluster_of(2).run(run):
        assert found == pytest.approx(expected, rel=1e-12)


def test_objects_that_differ_between_ranks_are_no_false_alarm(cluster_of: Clusters) -> None:
    class Graph:
        def __init__(self, edges: Tensor) -> None:
            self.edges = edges

    def passing(inner: nn.Module, x: Tensor, graph: Graph) -> Tensor:
        y = inner(x)
        return y + y[graph.edges]

    def run() -> float:
        generator = torch.Generator().manual_seed(md.rank())
        graph = Graph(torch.randperm(4, generator=generator))
        engine = md.prepare(Calls(net(), passing), SGD, md.Layout(dp=2), functional.mse_loss, rehearse=True)
        x, y = torch.randn(2, 4, 8, dtype=torch.float64, generator=generator)
        return engine.step((x, graph), y)

    assert all(0 < loss < 100 for loss in cluster_of(2).run(run))


def of_tokens(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over all tokens but padding."""
    counts = targets[..., 0] != 0
    return ((outputs - targets).square().mean(-1) * counts).sum() / counts.sum()


def of_rows(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean over rows, of the mean over each row's tokens."""
    counts = targets[..., 0] != 0
    rows = ((outputs - targets).square().mean(-1) * counts).sum(-1) / counts.sum(-1)
    return rows.mean()


@pytest.mark.parametrize("at_start", [False, True])
def test_rows_are_padded_to_the_longest_of_all_ranks(cluster_of: Clusters, at_start: bool) -> None:
    """Each rank pads its own rows: the mean over all of a rank's tokens is no mean over rows."""

    def run(loss: Any) -> float:
        lengths = [3, 1] if md.rank() else [5, 2]
        generator = torch.Generator().manual_seed(md.rank())
        x, y = torch.randn(2, 2, max(lengths), 8, **DOUBLE, generator=generator)
        for row, length in enumerate(lengths):
            padding = slice(0, max(lengths) - length) if at_start else slice(length, None)
            x[row, padding], y[row, padding] = 0, 0
        return md.prepare(net(), SGD, md.Layout(dp=2), loss, rehearse=True).step(x, y)

    assert all(loss > 0 for loss in cluster_of(2).run(run, of_rows))
    refused_on_ranks(cluster_of(2), ValueError, "no mean over rows", run, of_tokens)


@on_ranks(2)
def test_zero_3_refuses_a_forward_pass_that_writes_to_parameters() -> None:
    class Clamped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.calls = net(), 0
            self.weight = nn.Parameter(torch.eye(8, **DOUBLE))

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls % 3 == 0:
                with torch.no_grad():
                    self.weight.clamp_(-0.1, 0.1)
            return self.inner(x) @ self.weight

    engine = md.prepare(Clamped(), SGD, md.Layout(dp=2, zero=3), functional.mse_loss)
    with pytest.raises(RuntimeError, match=r"writes to its own parameters in its forward pass.*summon\(\)"):
        train(engine, batches(5))


# What ranks pad, cut and keep of a batch.


@pytest.mark.parametrize(
    ("layout", "of_model"),
    [
        *((layout, of) for layout in ("dp=2", "dp=2,zero=3", "dp=2,micro_batches=2") for of in (False, True)),
        ("dp=2,pp=2,micro_batches=2", False),
    ],
)
def test_rows_without_a_label_do_not_make_weights_nan(
    cluster_of: Clusters, layout: str, of_model: bool
) -> None:
    def masked(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        valid = (targets[..., 0] != 0).to(outputs.dtype)
        return ((outputs - targets).square().mean(-1) * valid).sum() / valid.sum(), valid.sum()

    def calls(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        return masked(model(batch[0]), batch[1])

    shape = PARSE(layout)

    def run(shape: md.Layout | None) -> list[float]:
        given = batches(3)
        given[1][1][[0, 2, 4, 6]] = 0  # rank 0's
        chain: dict[str, Any] = (
            {} if shape is None or shape.pp == 1 else {"layers": "0", "example": given[0][0]}
        )
        engine = md.prepare(nn.Sequential(net()), SGD, shape, calls if of_model else masked, **chain)
        return train(engine, given)

    expected = cluster_of(1).run(run, None)[0]
    for found in cluster_of(shape.ranks).run(run, shape):
        assert found == pytest.approx(expected, rel=1e-12)


def texts() -> nn.Module:
    """Takes vectors and a caption for each, of which it reads the length."""
    return Calls(
        net(), lambda inner, x, captions: inner(x) * torch.tensor([[len(each)] for each in captions])
    )


@pytest.mark.parametrize("kind", [list, tuple])
@pytest.mark.parametrize("layout", ["dp=2,micro_batches=2", "dp=2,zero=3,micro_batches=3", "micro_batches=2"])
def test_a_list_with_an_item_for_each_row_is_cut_with_the_rows(
    cluster_of: Clusters, capfd: pytest.CaptureFixture[str], layout: str, kind: Any
) -> None:
    shape = PARSE(layout)

    def losses(shape: md.Layout | None) -> list[float]:
        engine = md.prepare(texts(), SGD, shape, functional.mse_loss, rehearse=shape is not None)
        own = slice(engine.data_rank, None, engine.data_ranks)
        captions = ["a", "bcd", "ef", "ghijk", "", "l", "mno", "p"]
        return [engine.step((x[own], kind(captions[own])), y[own]) for x, y in batches(3)]

    expected = cluster_of(1).run(losses, None)[0]
    for found in cluster_of(shape.ranks).run(losses, shape):
        assert found == pytest.approx(expected, rel=1e-12)
    assert not capfd.readouterr().err


def padded(lengths: list[int], to: int, at_start: bool) -> dict[str, Tensor]:
    """Rows as a tokenizer gives them: the last token is 2, and a prompt of two may have no labels."""
    tokens, mask, labels = (torch.full((len(lengths), to), fill) for fill in (0, 0, -100))
    for row, length in enumerate(lengths):
        own = slice(to - length, None) if at_start else slice(length)
        tokens[row, own] = torch.tensor([*range(3 + row, 2 + row + length), 2])
        mask[row, own], labels[row, own] = 1, tokens[row, own]
        labels[row, own][: 0 if at_start else 2] = -100
    return {"tokens": tokens, "mask": mask, "labels": labels}


@pytest.mark.parametrize("at_start", [False, True])
def test_the_padding_of_ranks_shows_how_one_process_pads(at_start: bool) -> None:
    first, second, third = [6, 3, 4], [4, 4, 3], [9, 5]
    pieces = [(padded(each, max(each), at_start),) for each in (first, second, third)]
    (((found,),), is_known) = whole_batch(pieces)
    assert is_known
    expected = [padded(each, 9, at_start) for each in (first, second, third)]
    for name in found:
        assert torch.equal(found[name], torch.cat([each[name] for each in expected]))
    unknown = [(padded(each, 5, at_start),) for each in ([5, 5], [5])] + [(padded([7, 7], 7, at_start),)]
    assert whole_batch(unknown) == (unknown, False)


class Pairs(nn.Module):
    """Features of images, and of texts of which 0 is padding: the mean over the others' embeddings."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = nn.Linear(8, 6).double(), nn.Embedding(9, 6).double()

    def forward(self, images: Tensor, texts: Tensor) -> tuple[Tensor, Tensor]:
        counts = (texts != 0).unsqueeze(-1)
        return self.image(images), (self.text(texts) * counts).sum(1) / counts.sum(1)


@pytest.mark.parametrize("lengths", [((5, 2, 3), (3, 1, 2)), ((4, 4, 4), (2, 2, 2))])
def test_a_contrastive_loss_of_texts_of_other_lengths_is_no_false_alarm(
    cluster_of: Clusters, capfd: pytest.CaptureFixture[str], lengths: tuple[tuple[int, ...], ...]
) -> None:
    """Where no padding shows, a line says what is not known."""

    def loss(gathers: bool) -> float:
        group: Any = None

        def contrastive(outputs: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
            images, texts = (gather_sequence(x, 0, group=group) if gathers else x for x in outputs)
            return functional.cross_entropy(images @ texts.T, torch.arange(len(images)))

        engine = md.prepare(Pairs(), SGD, md.Layout(dp=2), contrastive, rehearse=True)
        group = engine.data_group
        generator = torch.Generator().manual_seed(md.rank())
        texts = torch.zeros(3, max(lengths[md.rank()]), dtype=torch.int64)
        for row, length in enumerate(lengths[md.rank()]):
            texts[row, :length] = torch.randint(1, 9, (length,), generator=generator)
        images = torch.randn(3, 8, **DOUBLE, generator=generator)
        return engine.step((images, texts), torch.zeros(3))

    assert all(found > 0 for found in cluster_of(2).run(loss, True))
    line = capfd.readouterr().err
    if len({*lengths[0]}) == 1:
        assert "in part, since the ranks' rows have different lengths, and no padding shows" in line
        assert "Rank by rank, the loss is" in line
        return
    assert not line
    told = "no mean over rows.*has to gather those of all ranks"
    refused_on_ranks(cluster_of(2), ValueError, told, loss, False)
