"""Loops that do more than take steps: they edit weights, thaw layers, and train several models in turn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from tests.conftest import Clusters
from tests.helpers.contract import of_outputs, plain_steps
from tests.helpers.models import Chain, seeded
from tests.helpers.on_ranks import on_ranks
from tests.parallel.sharding.cases import to_update

PARSE = md.Layout.parse
ADAMW = partial(torch.optim.AdamW, lr=0.02)
SGD = partial(torch.optim.SGD, lr=0.1)
LAYOUTS = ["dp=2", "dp=2,zero=1", "dp=2,zero=2", "dp=2,zero=3"]


def deep(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.deep)


DEEP = [deep(each) for each in ("dp=2,tp=2,zero=1", "dp=4,zero=3,shard=2")]
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh())


PLAN = {"layers.*.up": "column", "layers.*.down": "row"}


def net(seed: int = 0) -> Chain:
    return seeded(lambda: Chain(Block(), Block(), Block()))(seed)


def batches(steps: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    drawn = torch.randn(steps, 2, 8, 6, dtype=torch.float64, generator=generator)
    return [(x, y) for x, y in drawn]


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.mse_loss(outputs, targets)


def rows(engine: md.Engine, *whole: Tensor) -> tuple[Tensor, ...]:
    """This rank's rows of tensors."""
    return tuple(x[engine.data_rank :: engine.data_ranks] for x in whole)


def plain_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
    plain_steps(model, optimizer, [(x, y)], of_outputs(mse))


def same(found: Mapping[str, Tensor], expected: nn.Module) -> None:
    torch.testing.assert_close(dict(found), dict(expected.state_dict()), **CLOSE)


# Weights that are edited between steps.


@torch.no_grad()
def edit(weights: Mapping[str, Tensor]) -> None:
    """What needs a whole matrix, or two parameters: a spectral norm, clipping, a moving average."""
    weights["layers.0.up.weight"].div_(torch.linalg.matrix_norm(weights["layers.0.up.weight"], 2))
    weights["layers.1.down.bias"].clamp_(-0.05, 0.05)
    weights["layers.2.up.weight"].lerp_(weights["layers.0.up.weight"], 0.1)


@pytest.mark.parametrize("layout", [*LAYOUTS, "tp=2", "pp=2", *DEEP])
def test_weights_are_summoned_and_taken_back(cluster_of: Clusters, layout: str) -> None:
    def train() -> dict[str, Tensor]:
        plan = PLAN if "tp" in layout else None
        engine = md.prepare(net(md.rank()), ADAMW, PARSE(layout), mse, plan=plan)
        for x, y in batches(3):
            engine.step(*rows(engine, x, y))
            with engine.summon() as weights:
                edit(weights)
        with suppress(ArithmeticError), engine.summon() as weights:
            weights["layers.0.up.weight"].zero_()
            raise ArithmeticError  # and the engine is as it was
        return engine.full_state_dict()

    model = net()
    optimizer = ADAMW(model.parameters())
    for x, y in batches(3):
        plain_step(model, optimizer, x, y)
        edit(dict(model.named_parameters()))
    for state in cluster_of(PARSE(layout).ranks).run(train):
        same(state, model)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_masters_and_ties_survive_a_summons(cluster_of: Clusters, zero: int) -> None:
    """What stays keeps the digits of its master; tied parameters are one tensor."""

    def train() -> tuple[float, bool, float]:
        model = net().float()
        model.layers[2].up = model.layers[0].up
        layout = md.Layout(dp=2, zero=zero, precision="bf16")
        engine = md.prepare(model, partial(torch.optim.SGD, lr=1e-4), layout, loss=mse)
        for x, y in batches(3):
            engine.step(*rows(engine, x.float(), y.float()))
        before = {box.name: box.tensor.clone() for box in engine.state_boxes()}
        with engine.summon() as weights:
            weights["layers.1.up.bias"].fill_(0.5)
            tied = weights["layers.0.up.bias"] is weights["layers.2.up.bias"]
        after = {box.name: box.tensor for box in engine.state_boxes()}
        moved = {name for name in before if not torch.equal(before[name], after[name])}
        assert moved <= {"model.layers.1.up.bias"}
        state = engine.full_state_dict()
        return float(state["layers.1.up.bias"].float().mean()), tied, float(len(moved))

    found = cluster_of(2).run(train)
    assert all(mean == 0.5 and tied for mean, tied, _ in found)
    assert any(moved for *_, moved in found)


# Parameters that are frozen, and thawed.


ADAGRAD = partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.3)
THAWING = [(layout, ADAMW) for layout in LAYOUTS] + [("dp=2,zero=3", ADAGRAD), ("dp=2,zero=3", md.Muon)]
MORE = [("dp=2,zero=1", ADAGRAD), ("dp=4,zero=3,shard=2", ADAMW)]


def change(model: nn.Module, step: int) -> None:
    """Freeze or thaw a whole layer, or one parameter of a layer."""
    layers: Any = model.layers
    if step in (0, 3):
        layers[1].requires_grad_(step == 3)
        layers[2].up.bias.requires_grad_(step == 3)
    if step in (1, 4):
        layers[0].down.requires_grad_(step == 4)


@pytest.mark.parametrize(("layout", "optimizer"), [*THAWING, *(deep(*each) for each in MORE)])
def test_layers_are_frozen_and_thawed(cluster_of: Clusters, layout: str, optimizer: Any) -> None:
    def train() -> dict[str, Tensor]:
        model = net(md.rank())
        change(model, 0)
        engine = md.prepare(model, optimizer, PARSE(f"{layout},micro_batches=2"), mse)
        for step, (x, y) in enumerate(batches(6)):
            change(engine.model, step)
            engine.step(*rows(engine, x, y))
        return engine.full_state_dict()

    model = net()
    change(model, 0)
    plain = optimizer(model.parameters())
    for step, (x, y) in enumerate(batches(6)):
        change(model, step)
        plain_step(model, plain, x, y)
    for state in cluster_of(PARSE(layout).ranks).run(train):
        same(state, model)


@pytest.mark.parametrize("layout", [*LAYOUTS, "dp=1"])
@pytest.mark.parametrize("saved_by", ["dp=2,zero=1", deep("dp=2,zero=3")])
def test_the_state_of_a_frozen_parameter_is_saved_and_loaded(
    cluster_of: Clusters, tmp_path: Path, layout: str, saved_by: str
) -> None:
    """It goes on with its moments once it is thawed, in an engine that has never trained it, too."""

    def run(parsed: md.Layout, steps: range, load: bool) -> dict[str, Tensor]:
        model = net(md.rank())
        if load:
            model.layers[1].requires_grad_(False)
        engine = md.prepare(model, ADAMW, parsed, mse)
        if load:
            md.load(engine, tmp_path / "0")
        for step in steps:
            engine.model.layers[1].requires_grad_(step not in (2, 3))  # type: ignore[union-attr]
            engine.step(*rows(engine, *batches(6)[step]))
        md.save(engine, tmp_path / str(int(load)))
        return engine.full_state_dict()

    model = net()
    plain = ADAMW(model.parameters())
    for step, (x, y) in enumerate(batches(6)):
        model.layers[1].requires_grad_(step not in (2, 3))
        plain_step(model, plain, x, y)
    cluster_of(2).run(run, PARSE(saved_by), range(3), False)
    for state in cluster_of(PARSE(layout).ranks).run(run, PARSE(layout), range(3, 6), True):
        same(state, model)


@pytest.mark.parametrize("zero", [0, 3])
def test_a_growing_net_needs_another_engine(zero: int) -> None:
    engine = md.prepare(net(), SGD, md.Layout(zero=zero), mse)
    refused = "takes no further parameters.* call load_state_dict.engine.full_state_dict.., strict=False"
    with pytest.raises(RuntimeError, match=refused):
        engine.optimizer.add_param_group({"params": Block().parameters()})


# Optimizers that evaluate the loss themselves.


class PerParameter(torch.optim.Optimizer):
    """SAM that goes up the gradient of each parameter by itself, and down from there."""

    def __init__(self, params: Any, lr: float = 0.1, rho: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "rho": rho})

    def direction(self, grad: Tensor) -> Tensor:
        return grad / (grad.norm() + 1e-12)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> Tensor:  # type: ignore[override]
        closure = torch.enable_grad()(closure)
        loss = closure()
        moved = []
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    moved.append((p, group["rho"] * self.direction(p.grad)))
                    p.add_(moved[-1][1])
        closure()
        for p, way in moved:
            p.sub_(way)
        for p, state, lr in to_update(self):
            momentum = state.setdefault("momentum", torch.zeros_like(p))
            p.sub_(momentum.mul_(0.9).add_(p.grad), alpha=lr)
        return loss


class Elementwise(PerParameter):
    elementwise = True

    def direction(self, grad: Tensor) -> Tensor:
        return grad.sign()


class Ascending(PerParameter):
    """SAM itself: it looks at the norm of all gradients."""

    def direction(self, grad: Tensor) -> Tensor:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        return grad / torch.stack([g.norm() for g in grads]).norm()


ALL_AT_ONCE = "LBFGS, which cannot be shared by parts.*all parameters at once; use dp alone"
LBFGS = partial(torch.optim.LBFGS, lr=0.1, max_iter=3, history_size=3, line_search_fn="strong_wolfe")


def evaluate_and_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, clip: float | None) -> float:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = mse(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        return loss

    loss: Tensor = optimizer.step(closure)
    return float(loss.detach())


CLOSURES = [
    *((PerParameter, layout) for layout in ("dp=2", "dp=2,zero=2", "pp=2")),
    *((Elementwise, layout) for layout in ("dp=2,zero=1", "dp=2,zero=3", "tp=2")),
    (LBFGS, "dp=2"),
    *(deep(PerParameter, layout) for layout in ("dp=1", "dp=2,zero=1")),
    *(deep(*each) for each in ((Elementwise, "dp=2,zero=2"), (LBFGS, "dp=1"), (Ascending, "dp=2"))),
]


@pytest.mark.parametrize(("optimizer", "layout"), CLOSURES)
def test_an_optimizer_evaluates_the_loss_itself(
    cluster_of: Clusters, tmp_path: Path, optimizer: Any, layout: str
) -> None:
    """With rows that do not divide, micro-batches, and a checkpoint in between."""
    given, clip = batches(4), None if optimizer is LBFGS else 0.3

    def train(parsed: md.Layout, steps: range, rehearse: bool) -> tuple[list[float], dict[str, Tensor]]:
        plan = PLAN if parsed.tp > 1 else None
        options: Any = {"plan": plan, "clip_norm": clip, "rehearse": rehearse}
        engine = md.prepare(net(md.rank()), optimizer, parsed, mse, **options)
        if steps.start:
            md.load(engine, tmp_path / "half")
        losses = [engine.step(*rows(engine, *(each[:7] for each in given[step]))) for step in steps]
        if not steps.start:
            md.save(engine, tmp_path / "half")
        return losses, engine.full_state_dict()

    model = net()
    plain, wanted = optimizer(model.parameters()), []
    for x, y in given:
        wanted.append(evaluate_and_step(model, plain, x[:7], y[:7], clip))
    parsed = PARSE(f"{layout},micro_batches=2")
    first = cluster_of(parsed.ranks).run(train, parsed, range(2), True)
    for (before, _), (after, state) in zip(
        first, cluster_of(parsed.ranks).run(train, parsed, range(2, 4), False), strict=True
    ):
        torch.testing.assert_close([*before, *after], wanted, **CLOSE)
        same(state, model)


@pytest.mark.parametrize("layout", [*LAYOUTS, "tp=2"])
def test_an_evaluation_sends_what_a_step_sends(cluster_of: Clusters, layout: str) -> None:
    def sent(optimizer: Any) -> int:
        engine = md.prepare(net(), optimizer, PARSE(layout), mse, plan=PLAN if "tp" in layout else None)
        for x, y in batches(3):
            with comm.ledger() as ledger:
                engine.step(*rows(engine, x, y))
        return ledger.bytes_sent

    for once, twice in zip(*(cluster_of(2).run(sent, each) for each in (SGD, Elementwise)), strict=True):
        assert twice == 2 * once > 0


IN_PARTS = [
    (Ascending, "dp=2,zero=1", "looks at several parameters at once"),
    *((LBFGS, layout, ALL_AT_ONCE) for layout in ("dp=2,zero=1", "dp=2,zero=3", "tp=2", "pp=2")),
    (PerParameter, "dp=2,precision=bf16", "precision is 'bf16', and the optimizer's step evaluates"),
]


@on_ranks(2, row=IN_PARTS)
def test_what_ranks_cannot_evaluate_is_refused(row: tuple[Any, str, str]) -> None:
    optimizer, layout, told = row
    plan = PLAN if "tp" in layout else None

    def train() -> None:
        engine = md.prepare(net().float(), optimizer, PARSE(layout), mse, plan=plan, rehearse=True)
        engine.step(*(x.float() for x in rows(engine, *batches(1)[0])))

    with pytest.raises(ValueError, match=told):
        train()
