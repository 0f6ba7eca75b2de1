"""What the tests of sharding train: a model for each thing that a strategy may get wrong, and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import minidist as md
from minidist import comm
from minidist.kernels import CPU_LADDER
from minidist.model import GPT, MLP, config
from minidist.model.matmul import Linear
from tests.helpers import contract
from tests.helpers.models import gpt, mlp, seeded, tokens, vectors

OPTIM = torch.optim


def mlp_on_rung(seed: int) -> nn.Module:
    return MLP((6, 5, 3), seed=seed, dtype=torch.float64, linear=partial(Linear, rung=CPU_LADDER[3]))


def untied(seed: int) -> nn.Module:
    shape = config("byte-tiny", vocabulary=11, context=8, layers=3, heads=2, width=8, tied=False)
    return GPT(shape, seed=seed, dtype=torch.float64)


def frozen(seed: int) -> nn.Module:
    model = mlp(seed)
    for parameter in list(model.parameters())[:2]:
        parameter.requires_grad_(False)
    return model


class Tied(nn.Module):
    """Two layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


class Choosing(nn.Module):
    """A layer that only rows with a positive first number go through, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes, self.never = (nn.Linear(6, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Any:
        chosen = x[:, 0] > 0
        out: Tensor = self.always(x)
        if chosen.any():
            out = out.index_add(0, chosen.nonzero()[:, 0], self.sometimes(x[chosen]))
        return out


class Counting(nn.Module):
    """A model with a buffer, which starts differently on every rank and takes no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, seed = nn.Linear(6, 3), torch.initial_seed()
        self.register_buffer("scale", torch.full((3,), 1.0 + seed))
        self.register_buffer("mask", torch.tensor([True, seed == 0, True]))

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * self.scale * self.mask


class Skipping(nn.Module):
    """Layers in a list: one is called twice, one adds what an early one gave, one has a layer of its own."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 6))
        self.layers = nn.ModuleList([nn.Linear(6, 6), inner, nn.Linear(6, 6)])
        self.scale = nn.Parameter(torch.rand(6))
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        first, inner, twice = self.layers
        early = torch.tanh(first(x))
        x = twice(inner(torch.relu(twice(early)))) * self.scale + early
        return self.last(x)


class Experts(nn.Module):
    """Each row goes to one of four experts, which a gate chooses that is listed after them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)) for _ in range(4))
        self.gate = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        gates, chosen = self.gate(x).softmax(-1).max(-1)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):  # a rank calls the experts of its own rows alone
                x = x.index_add(0, rows, gates[rows, None] * torch.tanh(expert(x[rows])))
        return x


def mixture() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), Experts(), Experts(), nn.Linear(6, 3))


class Odd(nn.Module):
    """Parameters of no elements and of no dimension, and a frozen block between two that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.nothing, self.factor = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.rand(()))
        self.layers = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
        self.layers[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.layers(x) * self.factor + self.nothing.sum()


class InTurn(nn.Module):
    """Two units that take turns, one of them frozen, and a call that no gradient follows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)])
        self.layers[1].requires_grad_(False)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Any:
        first, frozen, learns = self.layers
        x = first(x)
        for _ in range(3):
            x = frozen(torch.tanh(learns(x)))
            with torch.no_grad():
                shift = torch.tanh(learns(x))
            x = x + shift
        return self.last(learns(learns(x)))


class Matrices(nn.Module):
    """No biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 5, bias=False), nn.Linear(5, 3, bias=False)

    def forward(self, x: Tensor) -> Any:
        return self.second(torch.tanh(self.first(x)))


class Mixed(nn.Module):
    """Parameters of two dtypes, of no elements and of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(6, 4), nn.Linear(4, 3).double()
        self.scale, self.empty = nn.Parameter(torch.tensor(1.5).double()), nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Any:
        return self.wide(torch.tanh(self.narrow(x.float())).double()) * self.scale + self.empty.sum()


def in_groups(parameters: Any) -> torch.optim.Optimizer:
    """Decay for matrices alone, and a rate of its own for the rest, as people write it."""
    each = list(parameters)
    matrices = [p for p in each if p.dim() > 1]
    others = [p for p in each if p.dim() <= 1]
    return OPTIM.AdamW([{"params": matrices, "weight_decay": 0.3}, {"params": others, "lr": 0.003}], lr=0.01)


def to_update(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, dict[str, Any], float]]:
    """What an optimizer of one's own updates: each parameter with a gradient, its state and its rate."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                yield parameter, optimizer.state[parameter], group["lr"]


class Normed(torch.optim.Optimizer):
    """An optimizer of one's own that looks at whole parameters, and makes its state at once."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"steps": 0, "sum": torch.zeros_like(parameter)}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter, state, lr in to_update(self):
            state["steps"] += 1
            state["sum"] += parameter.grad / (1 + parameter.grad.norm())
            parameter.sub_(state["sum"], alpha=lr / state["steps"])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(OPTIM.SGD, lr=0.1),
    "SGD, nesterov": partial(OPTIM.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam, amsgrad": partial(OPTIM.Adam, lr=0.01, amsgrad=True),
    "Adamax": partial(OPTIM.Adamax, lr=0.01),
    "NAdam": partial(OPTIM.NAdam, lr=0.01),
    "RAdam": partial(OPTIM.RAdam, lr=0.01),
    "Adagrad": partial(OPTIM.Adagrad, lr=0.1, initial_accumulator_value=0.1),
    "Adadelta": partial(OPTIM.Adadelta, lr=0.1),
    "RMSprop": partial(OPTIM.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "ASGD": partial(OPTIM.ASGD, lr=0.1),
    "Rprop": partial(OPTIM.Rprop, lr=0.01),
    "Adafactor": partial(OPTIM.Adafactor, lr=0.1),
    "Muon": partial(OPTIM.Muon, lr=0.01),
    "one's own": Normed,
    "groups": in_groups,
}


CASES = {
    "mlp": contract.Case(mlp, vectors),
    "mlp on our matmul": contract.Case(mlp_on_rung, vectors),
    "gpt": contract.Case(gpt, tokens),
    "sgd": contract.Case(mlp, vectors, partial(OPTIM.SGD, lr=0.1, momentum=0.9)),
    "adafactor": contract.Case(mlp, vectors, partial(OPTIM.Adafactor, lr=0.1)),
    "frozen": contract.Case(frozen, vectors),
    "tied": contract.Case(seeded(Tied), vectors),
    "unused": contract.Case(seeded(Choosing), vectors),
    "buffers": contract.Case(seeded(Counting), vectors),
    "squares": contract.Case(mlp, vectors, loss=lambda y, t: (y - t[:, None]).square().mean()),
}
UNITS = {
    "untied": contract.Case(untied, tokens),
    "skipping": contract.Case(seeded(Skipping), vectors),
    "experts": contract.Case(seeded(mixture), vectors),
    "in turn": contract.Case(seeded(InTurn), vectors),
    "odd": contract.Case(seeded(Odd), vectors),
}
"""What may go wrong with units alone, of which stage 3 gathers and frees the parameters."""

ALL = CASES | UNITS


def sizes_of(model: nn.Module) -> tuple[int, int]:
    """Elements, and parameters."""
    return sum(p.numel() for p in model.parameters()), len(list(model.parameters()))


def storage_bytes(tensors: Iterable[Tensor]) -> int:
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


SMALL = {"bucket_mb": 0.0003}  # several buckets for each model


class Averaged:
    """The optimizer of a DataParallel's loop, which averages the gradients before it steps."""

    def __init__(self, model: md.DataParallel, optimizer: OPTIM.Optimizer) -> None:
        self.model, self.optimizer, self.zero_grad = model, optimizer, optimizer.zero_grad

    def step(self) -> None:
        self.model.synchronize()
        self.optimizer.step()


def in_a_loop(zero: int, model: nn.Module, make: Any, **options: Any) -> tuple[Any, Any, Callable[[], Any]]:
    """A row of the table in a loop of one's own: what is called, what steps, and what gives the weights."""
    if zero == 3:
        sharded = md.FullyShard(model, make, **options)
        return sharded, sharded, sharded.state_dict
    if zero:
        return model, md.ZeroOptimizer(model.parameters(), make, zero, **options), model.state_dict
    wrapped = md.DataParallel(model, **options)
    return wrapped, Averaged(wrapped, make(wrapped.parameters())), model.state_dict


def own_loop(
    zero: int, case: contract.Case, passes: int = 1, keep: list[Any] | None = None, **options: Any
) -> contract.Trained:
    """What a loop of one's own trains on this rank's rows, in `passes` backward passes a step.

    keep: gets the optimizer.
    """
    model, optimizer, state = in_a_loop(zero, case.model(md.rank()), case.optimizer, **options)
    if keep is not None:
        keep.append(optimizer)
    losses = []
    for inputs, targets in case.global_batches():
        share = slice(*(len(inputs) * (md.rank() + i) // md.size() for i in (0, 1)))
        optimizer.zero_grad()
        total = torch.zeros((), dtype=torch.float64)
        for x, y in zip(inputs[share].chunk(passes), targets[share].chunk(passes), strict=True):
            loss = case.loss(model(x), y) * len(x) * md.size() / len(inputs)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        optimizer.step()
        losses.append(float(comm.all_reduce(total, "mean")))
    return contract.Trained(losses, {name: value.detach().clone() for name, value in state().items()})


SGD = partial(OPTIM.SGD, lr=0.1)


def check_loop(
    cluster: md.Cluster,
    build: Callable[[int], nn.Module],
    loop: Callable[[Any, Any, int, int], list[float]],
    make: Any = SGD,
    zero: int = 3,
    **options: Any,
) -> None:
    """Fail where `loop(model, optimizer, rank, ranks)` gives or leaves anything else than in one process."""

    def train() -> contract.Trained:
        model, optimizer, state = in_a_loop(zero, build(md.rank()), make, **options)
        return contract.Trained(loop(model, optimizer, md.rank(), md.size()), state())

    model = build(0)
    expected = contract.Trained(loop(model, make(model.parameters()), 0, 1), model.state_dict())
    for trained in cluster.run(train):
        contract.compare(trained, expected)
