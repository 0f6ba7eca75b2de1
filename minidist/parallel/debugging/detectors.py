"""Detectors: what people look at to find out whether a parallel training is right, whatever library it uses.

>>> found = detect(train, alone)              # 2 ranks against one process
>>> print({name: one.sentence for name, one in found.items() if one.sentence})

Both are functions that train: from a function that makes an optimizer, and a number of steps, to the losses
and all parameters by name, whole. They begin with the same weights and take the same global batches. A
detector sees runs alone, and returns a sentence if something is wrong. In float64, sums in another order
differ by less than EXACT. `minidist.plain.mistakes` has mistakes to try them on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from minidist.comm.errors import RankError
from minidist.comm.launching.cluster import Cluster

EXACT, LONG, SHORT = 1e-10, 100, 4
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Train = Callable[[MakeOptimizer, int], tuple[list[float], dict[str, Tensor]]]
"""From a function that makes an optimizer, and a number of steps, to losses and parameters."""
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, foreach=True)
SGD = partial(torch.optim.SGD, lr=1.0)
RUNS: dict[str, dict[str, Any]] = {
    "long": {"steps": LONG},
    "short": {"steps": SHORT, "counted": True},
    "step": {"steps": 1, "make": SGD},  # what parameters lose is the gradient
    "start": {"steps": 1, "make": partial(SGD, lr=0.0)},
}
"""The trainings that detectors look at."""


class Call(NamedTuple):
    """A rank's call of a collective."""

    name: str
    shape: tuple[int, ...]
    sent: int  # bytes; of what another library passes, not of what it sends

    def __str__(self) -> str:
        """The call in words."""
        return f"{self.name} of {[*self.shape]}"


@dataclass
class Run:
    """What can be seen of a training."""

    losses: list[float]
    parameters: list[dict[str, Tensor]]  # of every rank, by name
    calls: list[list[Call]]
    work: list[int]  # of every rank: multiplications in products of matrices
    held: list[int]  # of every rank, bytes: `kept`, and the most of parameters and activations in a step
    unread: int = 0  # messages that nobody received
    failed: str = ""
    kept: list[int] = field(default_factory=list)  # bytes of parameters, gradients and state after a step


class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts a rank's work, the bytes that it holds, and its calls of torch.distributed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = self.most = self.now = self.kept = self.values = 0
        self.calls: list[Call] = []
        self.owned: list[Tensor] = []  # parameters, of the optimizer and of the model

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count the multiplications of a product, or a collective."""
        result, name = func(*args, **(kwargs or {})), func.overloadpacket.__name__
        if name in ("mm", "bmm", "addmm"):
            self.work += _local(result).numel() * _local(args[name == "addmm"]).shape[-1]
            self.values = _bytes(self.owned)
            self.most = max(self.most, self.now + self.values)
        elif "scaled_dot_product" in name:  # two products forward, five backward
            q = _local(args["backward" in name])
            self.work += (5 if "backward" in name else 2) * q.numel() * q.shape[-2]
        elif "c10d" in func.namespace and "wait" not in name:
            flat = [x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else [arg])]
            tensors = [x for x in flat if isinstance(x, Tensor)]
            self.calls += [Call(name, tuple(x.shape), x.nbytes) for x in tensors[:1]]
        return result

    def optimizer(
        self, make: MakeOptimizer, model: nn.Module | None, parameters: Iterable[nn.Parameter]
    ) -> torch.optim.Optimizer:
        """Make an optimizer that notes what lies in memory after its steps."""
        optimizer = make(parameters)
        self.owned = [p for group in optimizer.param_groups for p in group["params"]]
        self.owned += model.parameters() if model is not None else []

        def look(*_: Any) -> None:
            state = [x for each in optimizer.state.values() for x in each.values() if x.dim()]  # no counts
            self.kept = _bytes([*self.owned, *state, *(p.grad for p in self.owned if p.grad is not None)])

        optimizer.register_step_post_hook(look)
        return optimizer

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what this thread does inside."""
        counter = self

        class Kept:  # for the backward pass
            def __init__(self, x: Tensor) -> None:
                self.x, self.bytes = x.detach(), x.nbytes
                counter.now += self.bytes
                counter.most = max(counter.most, counter.now + counter.values)

            def __del__(self) -> None:
                counter.now -= self.bytes

        with self, saved_tensors_hooks(Kept, lambda kept: kept.x):
            yield


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' memory, each counted once."""
    storages = (_local(x).untyped_storage() for x in tensors)
    return sum({each._cdata: each.nbytes() for each in storages}.values())


def _local(x: Any) -> Any:
    """Return this rank's part of a DTensor; another tensor as it is."""
    return getattr(x, "_local_tensor", x)


class Subject(NamedTuple):
    """What detectors are given: runs by the names of RUNS, each made when a detector asks for it first."""

    found: Any  # on n ranks
    whole: Any  # what it has to equal, on one
    right: Any | None  # a right training on n ranks: its bytes, its work, its memory


def loss(it: Subject) -> str:
    """The loss is within 1 % after 100 steps: what most people look at."""
    found, right = (sum(each["long"].losses[-10:]) / 10 for each in (it.found, it.whole))
    wrong = not abs(found - right) <= 0.01 * abs(right)
    return f"the loss is {found:.4g} and not {right:.4g} in the last of {LONG} steps" if wrong else ""


def first_loss(it: Subject) -> str:
    """The loss of the first step is equal."""
    found, right = (each["short"].losses[0] for each in (it.found, it.whole))
    return "" if abs(found - right) <= EXACT else f"the first loss is {found:.12g} and not {right:.12g}"


def parameters(it: Subject) -> str:
    """All parameters are equal on every rank after four steps, in float64."""
    right = it.whole["short"].parameters[0]
    return _differences(it.found["short"], right, right, "{} differs by {:.2g} of its size on rank {}")


def gradients(it: Subject) -> str:
    """Every parameter's gradient in the first step is equal: what it loses in a step of plain SGD."""
    start, right = (it.whole[name].parameters[0] for name in ("start", "step"))
    size = {name: start[name] - p for name, p in right.items()}
    return _differences(
        it.found["step"], right, size, "the gradient of {} differs by {:.2g} of its size on rank {}"
    )


def _differences(found: Run, right: dict[str, Tensor], size: dict[str, Tensor], sentence: str) -> str:
    for rank, values in enumerate(found.parameters):
        for name, value in right.items():
            same = name in values and values[name].shape == value.shape
            by = float((values[name] - value).abs().max()) if same else math.inf
            if not by <= EXACT:
                return sentence.format(name, by / float(size[name].abs().max() or 1), rank)
    return ""


def norm(it: Subject) -> str:
    """The norm of the gradient is equal on every rank, as it is after clipping."""
    start = it.whole["start"].parameters[0]
    right, *found = (
        math.sqrt(sum(float((start[name] - p).square().sum()) for name, p in values.items()))
        for values in (it.whole["step"].parameters[0], *it.found["step"].parameters)
    )
    wrong = [rank for rank, each in enumerate(found) if not abs(each - right) <= EXACT * max(1, right)]
    return f"the norm is {found[wrong[0]]:.6g} on rank {wrong[0]} and not {right:.6g}" if wrong else ""


def sent(it: Subject) -> str:
    """Every rank sends the bytes that a right training sends."""
    return _unequal(
        it, lambda run: [sum(call.sent for call in calls) for calls in run.calls], "sends {:,} bytes"
    )


def order(it: Subject) -> str:
    """All ranks make their calls in one order, and every message is received."""
    run = it.found["short"]
    if run.failed or run.unread:
        stopped = run.failed.partition("Stuck: ")[2] or (run.failed and f"the training stops: {run.failed}")
        return stopped or f"nobody receives {run.unread} of the messages"
    made = [[call.name for call in calls if call.name not in ("send", "recv")] for calls in run.calls]
    for rank, calls in enumerate(made):
        for own, first in zip_longest(calls, made[0], fillvalue="nothing"):
            if own != first:
                return f"rank {rank} calls {own} where rank 0 calls {first}"
    return ""


def work(it: Subject) -> str:
    """Every rank multiplies as much as it has to; all together as much as one process."""
    ranks, one = sum(it.found["short"].work), sum(it.whole["short"].work)
    if it.right is None and ranks > one:
        return f"all ranks together do {ranks:,} multiplications, where one process does {one:,}"
    return _unequal(it, lambda run: run.work, "does {:,} multiplications")


def memory(it: Subject) -> str:
    """Every rank holds as much as it has to: after a step, and parameters and activations at their most."""
    return _unequal(it, lambda run: run.held, "holds {:,} bytes, after a step and at most in it,")


def _unequal(it: Subject, count: Callable[[Run], list[int]], does: str) -> str:
    if it.right is None:
        return ""
    for rank, (found, right) in enumerate(
        zip(count(it.found["short"]), count(it.right["short"]), strict=True)
    ):
        if found != right:
            return f"rank {rank} {does.format(found)} and not {right:,}"
    return ""


Detector = Callable[[Subject], str]
DETECTORS: dict[str, Detector] = {
    "loss": loss,
    "first loss": first_loss,
    "parameters": parameters,
    "gradients": gradients,
    "norm": norm,
    "bytes": sent,
    "order": order,
    "work": work,
    "memory": memory,
}


class Found(NamedTuple):
    """What a detector finds."""

    sentence: str  # empty if nothing
    seconds: float  # of the processor: for trainings that nobody had asked for, and for looking at them


def ask(
    it: Subject, detectors: Mapping[str, Detector], alone: Sequence[str] = ("order",)
) -> dict[str, Found]:
    """Ask detectors. All find a training that stopped or hung; those in `alone` look at what it did first."""
    found, whole = {}, it._replace(found=_Whole(it.found, "the training"))
    if it.right is not None:
        whole = whole._replace(right=_Whole(it.right, "the right training"))
    for name, detector in detectors.items():
        begun = time.process_time()
        try:
            if name not in alone:
                whole.found["step"]
            sentence = detector(it if name in alone else whole)
        except _StoppedError as stopped:
            sentence = str(stopped)
        found[name] = Found(sentence, time.process_time() - begun)
    return found


class _StoppedError(Exception):
    """A training stopped, and a detector asked for what it left."""


class _Whole:
    """Trainings that went to their end; one that stopped is an error."""

    def __init__(self, runs: Any, name: str) -> None:
        self.runs, self.name = runs, name

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runs, name)

    def __getitem__(self, name: str, /) -> Run:
        run: Run = self.runs[name]
        if run.failed:
            raise _StoppedError(f"{self.name} stops: {run.failed}")
        return run


class _Library:
    """The trainings of a function, on ranks or here."""

    def __init__(self, train: Train, cluster: Cluster | None = None) -> None:
        self.train, self.cluster, self.runs = train, cluster, dict[str, Run]()

    def __getitem__(self, name: str, /) -> Run:
        if name not in self.runs:
            given = partial(_observed, self.train, **RUNS[name])
            try:
                ranks = self.cluster.run(given) if self.cluster else [given()]
            except RankError as error:
                self.runs[name] = Run([], [], [], [], [], failed=error.summary)
                return self.runs[name]
            losses, values, calls, works, held = (list(each) for each in zip(*ranks, strict=True))
            self.runs[name] = Run(losses[0], values, calls, works, held)
        return self.runs[name]


def _observed(
    train: Train, steps: int, make: MakeOptimizer = ADAMW, counted: bool = False
) -> tuple[list[float], dict[str, Tensor], list[Call], int, int]:
    counter = Counter()
    with counter.counting() if counted else torch.enable_grad():
        losses, values = train(partial(counter.optimizer, make, None) if counted else make, steps)
    found = {name: value.detach().clone() for name, value in values.items()}
    return losses, found, counter.calls, counter.work, counter.kept + counter.most


def detect(
    train: Train,
    alone: Train,
    ranks: int = 2,
    *,
    right: Train | None = None,
    detectors: Mapping[str, Detector] = DETECTORS,
    cluster: Cluster | None = None,
) -> dict[str, Found]:
    """Ask detectors about a training of any library.

    Args:
        train: trains on this rank of a world that torch.distributed and minidist share.
        alone: the same in one process.
        ranks: how many there are.
        right: a training on ranks with the bytes, work and memory that `train` has to have; None for any.
        detectors: by name, such as some of DETECTORS; "loss" alone takes 100 steps.
        cluster: ranks that are there already.
    """
    if cluster is None:
        with Cluster(ranks) as own:
            return detect(train, alone, ranks, right=right, detectors=detectors, cluster=own)
    beside = None if right is None else _Library(right, cluster)
    return ask(Subject(_Library(train, cluster), _Library(alone), beside), detectors)
