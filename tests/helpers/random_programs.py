"""Random programs: from a seed a model, a layout, an optimizer, and what a user does with them.

A program is played twice: by the ranks of its layout, and by one process in plain torch, written here and not
with the project's own engine. Both note what a user sees: losses, norms, outputs, averages, the whole state.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import minidist as md
from minidist.model import GPT, config
from minidist.model.blocks import attend
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.schedule_kinds import SCHEDULES
from tests.helpers.models import Chain

VOCABULARY, WIDTH, LENGTH, DECAY = 7, 8, 4, 0.7
IGNORED = -100
Notes = list[tuple[str, Any]]
"""What was seen, and after which action."""


class Action(NamedTuple):
    """Something that a user does."""

    kind: str  # a method of the players
    seed: int = 0  # of its rows
    sizes: tuple[tuple[int, ...], ...] = ()  # for each rank of the batch, the rows of each of its batches
    names: tuple[str, ...] = ()  # of parameters
    number: float = 0.0
    layout: md.Layout | None = None


@dataclass(frozen=True)
class Program:
    """What is trained, how, and the user's actions."""

    seed: int
    blocks: tuple[str, ...]  # of the model, between the embedding and the head
    tied: bool  # the embedding and the head, and two blocks of the same kind
    sparse: bool  # the embedding's gradients
    optimizer: str
    options: dict[str, Any]  # of the optimizer
    groups: str  # all parameters, matrices and others in groups of their own, or some
    loss: str
    layout: md.Layout
    more: dict[str, Any]  # of `prepare`
    actions: tuple[Action, ...]

    def __str__(self) -> str:
        head = [f"{f.name}={getattr(self, f.name)!s}" for f in fields(self) if f.name != "actions"]
        return "\n  ".join(["; ".join(head), *map(str, self.actions)])


# Models: a chain of layers from tokens (B, T) to logits (B, T, V).


class Residual(nn.Module):
    """x + f(norm(x))."""

    def __init__(self, inner: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Feed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(x)))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.head_size, self.attend = 2, attend

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            each(x).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for each in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.o_proj(self.attend(q, k, v, 0.0).transpose(1, 2).flatten(2))


class Experts(nn.Module):
    """Each token goes to one of four; an expert without tokens gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 4), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in "1234")

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        found, (gates, chosen) = torch.zeros_like(flat), self.gate(flat).softmax(-1).max(-1)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                found = found.index_add(0, rows, gates[rows, None] * expert(flat[rows]))
        return found.view_as(x)


class Convolution(nn.Module):
    """Over the tokens; with a BatchNorm, without a bias, whose gradient would be 0 but for rounding."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, bias=not norm)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=0.3) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.conv(x.transpose(1, 2)))).transpose(1, 2)


class Adapted(nn.Module):
    """A frozen layer and one beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.adapter = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.adapter(x)


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, 3, dtype=torch.complex128) / 3)
        self.back = nn.Parameter(torch.randn(3, WIDTH, dtype=torch.complex128) / 3)

    def forward(self, x: Tensor) -> Tensor:
        return (torch.tanh(x.to(self.weight.dtype) @ self.weight) @ self.back).real


class Scaled(nn.Module):
    """Buffers of two kinds, and parameters of no dimension and of no element."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.none = nn.Parameter(torch.rand(())), nn.Parameter(torch.rand(0, 3))
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("shift", torch.linspace(0, 1, WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.gain * self.scale + self.shift + self.none.sum())


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()),
    "feed": Feed,
    "attention": Attention,
    "experts": Experts,
    "convolution": partial(Convolution, False),
    "batch norm": partial(Convolution, True),
    "adapted": Adapted,
    "complex": Complex,
    "scaled": Scaled,
}
SHAREABLE = {"linear", "feed", "experts", "scaled"}


def chain(program: Program, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    made: dict[str, nn.Module] = {}
    layers: list[nn.Module] = [nn.Embedding(VOCABULARY, WIDTH, sparse=program.sparse)]
    for kind in program.blocks:
        inner = BLOCKS[kind]()
        if program.tied and kind in SHAREABLE:
            inner = made.setdefault(kind, inner)
        layers.append(Residual(inner, nn.LayerNorm(WIDTH)))
    layers.append(nn.Linear(WIDTH, VOCABULARY, bias=False))
    if program.tied:
        layers[-1].weight = layers[0].weight
    return Chain(*layers).double()


def model_of(program: Program, seed: int) -> nn.Module:
    if program.blocks[0] != "gpt":
        return chain(program, seed)
    shape = config(
        "byte-tiny",
        vocabulary=VOCABULARY,
        context=LENGTH,
        layers=len(program.blocks),
        heads=4,
        width=WIDTH,
        tied=program.tied,
    )
    return GPT(shape, seed=seed, dtype=torch.float64)


# The loss, the optimizer, the rows.


def counted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A mean over the tokens that are not ignored, and their number."""
    mean = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    return mean, (targets != IGNORED).sum()


def of_model(model: Any, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return counted(model(batch[0]), batch[1])


def first_logit(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[..., 0] * (targets != 1)).mean()


LOSSES: dict[str, Any] = {"none": None, "rows": cross_entropy, "tokens": counted, "model": of_model}


def optimizer_of(program: Program) -> Callable[..., torch.optim.Optimizer]:
    def make(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        named = [*named_parameters]
        if program.groups == "some":
            named = [(name, p) for name, p in named if name.count(".") < 4 or sum(map(ord, name)) % 3]
        groups: list[Any] = [p for _, p in named]
        if program.groups == "two":
            of = [[p for _, p in named if (p.dim() > 1) == matrix] for matrix in (True, False)]
            groups = [{"params": of[0]}, {"params": of[1], "lr": program.options["lr"] / 3}]
        kind: Any = getattr(torch.optim, program.optimizer)
        made: torch.optim.Optimizer = kind(groups, **program.options)
        return made

    return make


def rows(program: Program, action: Action, rank: int, index: int) -> tuple[Tensor, Tensor]:
    """A batch of a rank. In some steps few tokens occur, so that experts are left without any."""
    generator = torch.Generator().manual_seed(1000 * action.seed + 10 * rank + index)
    count = action.sizes[rank][index]
    x = torch.randint(1 + action.seed % VOCABULARY, (count, LENGTH), generator=generator)
    y = torch.randint(VOCABULARY, (count, LENGTH), generator=generator)
    if program.loss in ("tokens", "model"):
        y[torch.rand(y.shape, generator=generator) < action.number] = IGNORED
    return x, y


# Two players.


class OneProcess:
    """Plays a program in plain torch."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program, self.notes = program, Notes()
        self.model = model_of(program, 0)
        self.optimizer = optimizer_of(program)(self.model.named_parameters())
        self.averages: dict[str, Tensor] | None = None

    def _loss(self, x: Tensor, y: Tensor) -> tuple[Tensor, float]:
        result = (LOSSES[self.program.loss] or cross_entropy)(
            *((self.model, (x, y)) if self.program.loss == "model" else (self.model(x), y))
        )
        return (result[0], float(result[1])) if isinstance(result, tuple) else (result, float(len(x)))

    def _passes(self, action: Action) -> Iterator[tuple[Tensor, Tensor]]:
        """The rows of all ranks' first batches, those of their second, and so on."""
        for index in range(max(map(len, action.sizes))):
            having = [rank for rank, sizes in enumerate(action.sizes) if index < len(sizes)]
            found = [rows(self.program, action, rank, index) for rank in having]
            yield torch.cat([x for x, _ in found]), torch.cat([y for _, y in found])

    def _step(self, passes: Iterable[tuple[Tensor, Tensor]]) -> None:
        self.optimizer.zero_grad()
        self.model.zero_grad()
        losses = [self._loss(x, y) for x, y in passes]
        total = sum(weight for _, weight in losses)
        if not total:
            self.notes.append(("loss", math.nan))
            return
        loss = sum((mean * (weight / total) for mean, weight in losses if weight), torch.zeros(()).double())
        loss.backward()  # type: ignore[no-untyped-call]
        self.notes.append(("loss", float(loss.detach())))
        if (limit := self.program.more.get("clip_norm")) is not None:
            grads = [p.grad for p in self.model.parameters() if p.grad is not None]
            dense = [g.to_dense() if g.is_sparse else g for g in grads]
            norm = math.sqrt(sum(float(g.abs().square().sum()) for g in dense))
            self.notes.append(("norm", norm))
            for grad in grads:
                grad.mul_(min(1.0, limit / (norm + 1e-6)))
        self.optimizer.step()
        if self.averages is not None:
            for name, p in self.model.named_parameters():
                self.averages[name] = DECAY * self.averages[name] + (1 - DECAY) * p.detach()

    def train(self, action: Action) -> None:
        self._step([next(self._passes(action))])

    def accumulate(self, action: Action) -> None:
        self._step(self._passes(action))

    def loaders(self, action: Action) -> None:
        for each in self._passes(action):
            self._step([each])

    def _parameters(self, names: Iterable[str]) -> list[nn.Parameter]:
        return [p for name, p in self.model.named_parameters(remove_duplicate=False) if name in names]

    def freeze(self, action: Action) -> None:
        for parameter in self._parameters(action.names):
            parameter.requires_grad_(action.number > 0)

    @torch.no_grad()
    def edit(self, action: Action) -> None:
        for parameter in {id(p): p for p in self._parameters(action.names)}.values():
            parameter.mul_(action.number)

    def rate(self, action: Action) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] *= action.number

    def average(self, action: Action) -> None:
        self.averages = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    def averaged(self, action: Action) -> None:
        kept = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        self._fill(self.averages or kept)
        self.state(action)
        self._fill(kept)

    @torch.no_grad()
    def _fill(self, values: dict[str, Tensor]) -> None:
        for name, value in values.items():
            self.model.get_parameter(name).copy_(value)

    @torch.no_grad()
    def evaluate(self, action: Action) -> None:
        self.model.eval()
        passes = [(len(x), *self._loss(x, y), first_logit(self.model(x), y)) for x, y in self._passes(action)]
        weight, count = sum(w for _, _, w, _ in passes), sum(n for n, *_ in passes)
        loss = sum(float(mean) * w for _, mean, w, _ in passes if w) / weight if weight else math.nan
        self.notes.append(("means", [loss, sum(float(mean) * n for n, _, _, mean in passes) / count]))
        self.model.train()

    @torch.no_grad()
    def predict(self, action: Action) -> None:
        self.model.eval()
        self.notes.append(("outputs", self.model(next(self._passes(action))[0])))
        self.model.train()

    def state(self, action: Action) -> None:
        self.notes.append(("state", {k: v.detach().clone() for k, v in self.model.state_dict().items()}))

    def load(self, action: Action) -> None:
        self.averages = None


class OnRanks:
    """Plays a program by this project's engine, on each rank."""

    def __init__(self, program: Program, folder: Path) -> None:
        self.program, self.notes, self.folder = program, Notes(), folder
        self.trained = {name: p.requires_grad for name, p in model_of(program, 0).named_parameters()}
        self._prepare(program.layout, md.rank())

    def _prepare(self, layout: md.Layout, seed: int) -> None:
        program, more = self.program, {**self.program.more}
        more.pop("data_parallel" if layout.zero == 3 else "fully_shard", None)
        model, self.average_of = model_of(program, seed), None
        self.tied = {
            name: first
            for first, p in model.named_parameters()
            for name, other in model.named_parameters(remove_duplicate=False)
            if other is p
        }
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(self.trained[name])
        self.engine = md.prepare(model, optimizer_of(program), layout, LOSSES[program.loss], **more)

    def _own(self, action: Action) -> list[tuple[Tensor, Tensor]]:
        rank = self.engine.data_rank
        return [rows(self.program, action, rank, index) for index in range(len(action.sizes[rank]))]

    def _step(self, *batch: Any) -> None:
        self.notes.append(("loss", self.engine.step(*batch)))
        if self.program.more.get("clip_norm") is not None and not math.isnan(self.notes[-1][1]):
            self.notes.append(("norm", self.engine.grad_norm))
        if self.average_of is not None and not math.isnan(self.notes[-1][1]):
            self.average_of.update()

    def train(self, action: Action) -> None:
        self._step(*self._own(action)[0])

    def accumulate(self, action: Action) -> None:
        self._step(self._own(action))

    def loaders(self, action: Action) -> None:
        for batch in self.engine.batches(self._own(action)):
            self._step(batch)

    def _parameters(self, names: Iterable[str]) -> list[nn.Parameter]:
        chosen = {self.tied[name] for name in names}
        named = self.engine.model.named_parameters(remove_duplicate=False)
        return [p for name, p in named if self.tied[name] in chosen]

    rate = OneProcess.rate

    def freeze(self, action: Action) -> None:
        OneProcess.freeze(self, action)  # type: ignore[arg-type]
        self.trained |= dict.fromkeys(action.names, action.number > 0)

    def edit(self, action: Action) -> None:
        if action.number > 1 and not self.engine.strategy.gathers:
            OneProcess.edit(self, action)  # type: ignore[arg-type]
            return
        with self.engine.summon() as weights:
            for name in {self.tied[name] for name in action.names}:
                weights[name].mul_(action.number)

    @property
    def model(self) -> nn.Module:
        return self.engine.model

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer

    def average(self, action: Action) -> None:
        self.average_of = md.EMA(self.engine, DECAY)

    def averaged(self, action: Action) -> None:
        if self.average_of is None:
            self.state(action)
            return
        with self.average_of.applied():
            self.state(action)

    def evaluate(self, action: Action) -> None:
        metrics, own = {"loss": None, "first": first_logit}, self._own(action)
        found = self.engine.evaluate(iter(own) if action.seed % 2 else own, metrics=metrics)
        self.notes.append(("means", [*found.values()]))

    def predict(self, action: Action) -> None:
        self.notes.append(("outputs", self.engine.predict(self._own(action)[0][0])))

    def state(self, action: Action) -> None:
        self.notes.append(("state", self.engine.full_state_dict()))

    def load(self, action: Action) -> None:
        path = self.folder / f"{self.program.seed}-{action.seed}"
        md.save(self.engine, path, asynchronous=action.number > 0.5).wait()
        self._prepare(action.layout or self.program.layout, 50 + md.rank())
        md.load(self.engine, path)


def play(player: type[OneProcess | OnRanks], program: Program, folder: Path) -> Notes:
    """What is seen when a program is played."""
    playing = player(program, folder)
    for number, action in enumerate(program.actions):
        before = len(playing.notes)
        getattr(playing, action.kind)(action)
        playing.notes[before:] = [(f"{number} {action.kind}: {k}", v) for k, v in playing.notes[before:]]
    return playing.notes


# Drawing programs.

EPS = {"eps": 1e-3}  # gradients that are 0 but for rounding then change nothing
OPTIMIZERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"lr": 0.2, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    ("SGD", {"lr": 0.2, "momentum": 0.9, "dampening": 0.3}),
    ("Adam", {"lr": 0.02, "weight_decay": 0.1, **EPS}),
    ("AdamW", {"lr": 0.02, "amsgrad": True, **EPS}),
    ("NAdam", {"lr": 0.02, "weight_decay": 0.1, **EPS}),
    ("RAdam", {"lr": 0.02, "weight_decay": 0.1, "decoupled_weight_decay": True, **EPS}),
    ("RMSprop", {"lr": 0.01, "momentum": 0.5, **EPS}),
    ("Adadelta", {"lr": 0.5, "weight_decay": 0.1, **EPS}),
    ("Adamax", {"lr": 0.02, **EPS}),
    ("ASGD", {"lr": 0.1, "weight_decay": 0.1, "t0": 2}),
    ("Adafactor", {"lr": 0.05, "weight_decay": 0.1, "eps": (1e-3, 1e-3)}),
)
FOR_SPARSE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("SGD", {"lr": 0.3}),
    ("Adagrad", {"lr": 0.05, "lr_decay": 0.1, **EPS}),
)
MESHES: dict[int, tuple[dict[str, int], ...]] = {
    2: (*({"dp": 2, "zero": zero} for zero in (0, 1, 2, 3)), {"tp": 2}, {"pp": 2}, {"cp": 2}),
    4: (
        *({"dp": 4, "zero": zero} for zero in (0, 1, 2, 3)),
        *({"dp": 4, "zero": zero, "shard": 2} for zero in (1, 2, 3)),
        *({"dp": 2, "tp": 2, "zero": zero} for zero in (0, 1, 2, 3)),
        *({"dp": 2, "cp": 2, "zero": zero} for zero in (0, 1, 2, 3)),
        *({"dp": 2, "pp": 2, "zero": zero} for zero in (0, 1)),
        *({"tp": 2, "pp": 2}, {"tp": 2, "cp": 2}, {"pp": 2, "cp": 2}, {"pp": 4}),
    ),
}


def draw(seed: int) -> Program:
    """The program of a seed."""
    rng = random.Random(seed)
    ranks = 4 if rng.random() < 0.3 else 2
    meshes = [rng.choice(MESHES[ranks]) for _ in "123"[: rng.choice((1, 2, 3))]]

    # A model that all of these can cut.
    axes = {axis for mesh in meshes for axis, size in mesh.items() if axis in ("tp", "pp", "cp") and size > 1}
    kinds = {*BLOCKS}
    kinds -= {"convolution", "batch norm"} if "cp" in axes else {"batch norm"} if "pp" in axes else set()
    blocks = [rng.choice(sorted(kinds)) for _ in range(rng.choice((1, 2, 2, 3, 3)))]
    if axes & {"tp", "cp"}:
        blocks.insert(rng.randrange(len(blocks)), "attention")
    if "batch norm" not in blocks and rng.random() < 0.15:
        blocks = ["gpt"] * min(2, len(blocks))
    tied = rng.random() < 0.35
    if blocks.count("experts") > 1 and any(mesh.get("zero") == 3 for mesh in meshes):
        tied = False  # ZeRO 3 refuses a unit that some ranks alone call twice
    sparse = not tied and blocks[0] != "gpt" and rng.random() < 0.2
    flat = bool(axes) or bool({"complex", "scaled"} & {*blocks})
    # Adafactor needs whole parameters, real and not empty.
    optimizers = OPTIMIZERS[:-1] if flat else OPTIMIZERS
    optimizer, options = rng.choice(FOR_SPARSE if sparse or rng.random() < 0.1 else optimizers)
    if optimizer == "Adagrad" and "adapted" in blocks:
        # It begins with state, which no checkpoint of ZeRO has of parameters that were never trained.
        optimizer, options = FOR_SPARSE[0]
    blocks += blocks[-1:] * (max(mesh.get("pp", 1) for mesh in meshes) - len(blocks) - 2)
    layers = len(blocks) + 2
    layouts = [_layout(rng, mesh, layers, blocks) for mesh in meshes]
    more: dict[str, Any] = {"batch_norm": "synchronized"} if "batch norm" in blocks else {}
    if rng.random() < 0.4:
        more["clip_norm"] = rng.choice((0.3, 1.0, 3.0))
    if rng.random() < 0.4:
        more["data_parallel"] = {"bucket_mb": rng.choice((0, 0.0005)), "overlap": rng.random() < 0.7}
    if rng.random() < 0.4:
        more["fully_shard"] = {"prefetch": rng.random() < 0.5, "offload": rng.choice((False, "cpu"))}
    loss = rng.choice([name for name in LOSSES if name != "model" or "pp" not in axes])
    groups = rng.choice(("all", "all", "two", "some"))
    program = Program(
        seed, tuple(blocks), tied, sparse, optimizer, dict(options), groups, loss, layouts[0], more, ()
    )
    return replace(program, actions=tuple(_actions(rng, program, layouts)))


def _layout(rng: random.Random, mesh: dict[str, int], layers: int, blocks: list[str]) -> md.Layout:
    more: dict[str, Any] = {"recompute": rng.random() < 0.25}
    if "batch norm" not in blocks:
        more["micro_batches"] = rng.choice((1, 1, 2, 3))
    if (pp := mesh.get("pp", 1)) > 1:
        known = [name for name, kind in SCHEDULES.items() if not kind.chunked or 2 * pp <= layers]
        more["schedule"] = rng.choice(known)
        more["chunks"] = SCHEDULES[more["schedule"]].least_chunks
        more["recompute"] &= SCHEDULES[more["schedule"]].allows_recompute
    if mesh.get("tp", 1) > mesh.get("cp", 1) and blocks[0] == "gpt":
        more["sequence_parallel"] = rng.random() < 0.5
    return md.Layout(**mesh, **more)


def _actions(rng: random.Random, program: Program, layouts: list[md.Layout]) -> Iterator[Action]:
    """What a user does: mostly training."""
    names = [name for name, p in model_of(program, 0).named_parameters() if p.requires_grad]
    frozen = [n for n, p in model_of(program, 0).named_parameters() if not p.requires_grad]
    layout, others, changed = layouts[0], layouts[1:], Action("")
    kinds = ["train"] * 4 + ["accumulate"] * 3 + ["loaders", "evaluate", "predict", "state", "average"]
    kinds += ["averaged", "rate", "edit", "freeze", "freeze", "load", "load"]
    for number in range(rng.randint(4, 10)):
        kind, action = rng.choice(kinds), Action("train", 100 * program.seed + number, number=0.3)
        many, sizes = range(layout.dp), list[list[int]]()
        if kind == "train":
            sizes = [[rng.randint(1, 5)] for _ in many]
            if program.loss in ("tokens", "model") and rng.random() < 0.15:
                action = action._replace(number=1.0)  # no label counts, and the step is skipped
        elif kind in ("evaluate", "predict"):
            sizes = [[rng.randint(0, 4)] for _ in many]
            sizes[rng.choice(many)] = [2]
        elif kind in ("accumulate", "loaders"):  # at least one batch on each rank, or on one
            sizes = [[rng.randint(1, 4) for _ in range(rng.randint(kind == "accumulate", 3))] for _ in many]
            sizes[rng.choice(many)] = [3]
        action = action._replace(kind=kind, sizes=tuple(map(tuple, sizes)))
        if kind == "edit":
            action = action._replace(names=tuple(rng.sample(names, 2)), number=rng.choice((0.9, 1.1)))
        elif kind == "rate":
            action = action._replace(number=rng.choice((0.5, 1.5)))
        elif kind == "freeze" and not changed.names:
            some = rng.sample(names[:-1], len(names) // 3)
            thaws = bool(frozen) and rng.random() < 0.5
            action = changed = action._replace(names=tuple(frozen if thaws else some), number=float(thaws))
        elif kind == "freeze":
            action, changed = changed._replace(number=1 - changed.number), Action("")
        elif kind == "load":
            layout = others.pop() if others else layout
            action = action._replace(layout=layout, number=rng.random())
        yield action
    yield from (Action("state"), Action("averaged"))
