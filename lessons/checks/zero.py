"""Checks of lesson 14: what a rank keeps in each stage of ZeRO, and how little of it is there at a time."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

import minidist as md
from checks.exercises import Answer, Lesson
from checks.ranks import Case, Run, says
from checks.settings import driven
from checks.verdicts import Right, Tally, compare, described, number, wrong

lesson = Lesson(14, "zero")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

RANKS = (2, 3, 4, 1)
PARTS = ("parameters", "gradients", "optimizer")


class Live(TorchDispatchMode):
    """Inside its `with`, counts the bytes of the tensors that are made there and not yet freed.

    A view is no new tensor, and memory that ranks share counts for none of them.

    Args:
        least: bytes; smaller tensors are not counted.

    Attributes:
        now, peak: bytes that are there, and the most that were.
    """

    def __init__(self, least: int = 0) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._least, self._counted = least, set[int]()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for each operation of torch's."""
        made = function(*args, **(kwargs or {}))
        if all(result.alias_info is None for result in function._schema.returns):
            for tensor in tree_iter(made):
                if isinstance(tensor, torch.Tensor):
                    self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._counted or size < max(self._least, 1):
            return
        _renew_copies_of_variables()
        self._counted.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, key, size).atexit = False

    def _freed(self, key: int, size: int) -> None:
        self._counted.discard(key)
        self.now -= size


def _renew_copies_of_variables() -> None:
    """Before Python 3.13 whoever asks for a function's variables, as check=True does, leaves a copy of them.

    A tensor would live on in it until somebody asks again.
    """
    frame = sys._getframe(1)
    while frame is not None:
        frame.f_locals  # noqa: B018
        frame = frame.f_back


def whole_numbers(draw: np.random.Generator, *shape: int) -> torch.Tensor:
    """Small whole numbers, none of them 0."""
    return torch.from_numpy(draw.integers(1, 100, shape).astype(np.float32))


@lesson.exercise(
    "14.1",
    hints=(
        "Without ZeRO the three numbers are the parameters times 2, 2 and 12, or times 4, 4 and 8. Which of "
        "them does stage 1 divide by the ranks, which stage 2, which stage 3?",
        "The optimizer's is divided from stage 1 on, the gradients' from stage 2 on, the parameters' in "
        "stage 3: each stage adds one.",
        "p, g, o = (2, 2, 12) if mixed else (4, 4, 8), then return (parameters * p / (ranks if stage >= 3 "
        "else 1), parameters * g / (ranks if stage >= 2 else 1), parameters * o / (ranks if stage >= 1 else "
        "1)).",
    ),
)
def state_bytes(answer: Answer, draw: np.random.Generator) -> Right:
    """The bytes of parameters, gradients and optimizer on one rank."""
    tried = 0
    for parameters, ranks in ((1000, 1), (1000, 4), (int(draw.integers(10, 10**6)) * 64, 64)):
        for stage in range(4):
            for mixed in (False, True):
                each = (2, 2, 12) if mixed else (4, 4, 8)
                right = [parameters * b / (ranks if stage > 2 - i else 1) for i, b in enumerate(each)]
                call = f"state_bytes({parameters}, ranks={ranks}, stage={stage}, mixed={mixed})"
                got = answer(parameters, ranks, stage, mixed)
                if not isinstance(got, tuple | list) or len(got) != 3:
                    wrong(
                        f"{call} is {described(got)}, and should be three numbers: of parameters, gradients, "
                        "optimizer."
                    )
                for name, mine, expected in zip(PARTS, got, right, strict=True):
                    compare(mine, expected, f"{call}: bytes of {name}: that", rtol=1e-9)
                tried += 1
    return Right(tried)


@lesson.exercise(
    "14.2",
    hints=(
        "gradient.isfinite().all() says whether the step counts. The true gradient is gradient / scale; in "
        "which dtype do you divide?",
        "float16 cannot hold a small quotient, so make the gradient float32 first. It is the master that is "
        "moved; the weight only ever gets a copy of it.",
        "if not gradient.isfinite().all(): return scale / 2. Then master -= lr * gradient.float() / scale, "
        "weight.copy_(master), which rounds, and return scale.",
    ),
)
def scaled_step(answer: Answer, draw: np.random.Generator) -> Right:
    """A step in float16 with a master copy, or none where the gradient overflowed."""
    # The first step is large enough for a float16: who forgets to give weight its new values is told at once.
    master, gradient = (torch.from_numpy(draw.uniform(*ends, 1)) for ends in ((0.5, 1), (200, 400)))
    _one_scaled(answer, master.float(), gradient.half(), scale=4096.0, lr=0.1, bad=None)
    tried = 1
    for size in (1, 1, 1, 5, 5, int(draw.integers(6, 40)), 0):
        for bad in (None, np.inf, np.nan, -np.inf):
            if bad is not None and not size:
                continue
            scale = float(2 ** draw.integers(12, 18))
            lr = float(draw.choice([1e-4, 3e-3, 0.1]))
            master = torch.from_numpy(draw.normal(0, 1, size).astype(np.float32))
            gradient = torch.from_numpy(draw.normal(0, 100, size)).half()
            if bad is not None:
                gradient[int(draw.integers(size))] = bad
            _one_scaled(answer, master, gradient, scale, lr, bad)
            tried += 1
    tiny = torch.tensor([2e-3]).half()  # divided by the scale it is too small for a float16
    _one_scaled(answer, torch.ones(1), tiny, scale=2.0**17, lr=1e4, bad=None)
    _many_scaled(answer, draw)
    return Right(tried + 2)


def _one_scaled(
    answer: Answer, master: torch.Tensor, gradient: torch.Tensor, scale: float, lr: float, bad: float | None
) -> None:
    mine, weight = master.clone(), master.half()
    right = master if bad is not None else master - lr * gradient.float() / scale
    got = answer(weight, mine, gradient.clone(), scale, lr)
    of = f"{len(gradient)} element{'s' * (len(gradient) != 1)}"
    where = f"With a gradient of {of}" + (f", one of them {bad}," if bad is not None else "")
    where += f" and scale {scale:.0f}, "
    compare(got, scale if bad is None else scale / 2, f"{where}what it returns")
    compare(mine, right, f"{where}master", rtol=1e-6, atol=1e-9)
    compare(weight, right.half(), f"{where}weight", rtol=1e-3)


def _many_scaled(answer: Answer, draw: np.random.Generator) -> None:
    """Steps each of which is too small for a float16, and which add up."""
    lr, scale, steps = 1e-4, 1024.0, 60
    gradient = torch.from_numpy(draw.uniform(1, 2, 3)).half()
    master = torch.ones(3)
    weight = master.half()
    for _ in range(steps):
        scale = answer(weight, master, (gradient.float() * scale).half(), scale, lr)
    right = 1 - steps * lr * gradient.float()
    compare(weight, right.half(), f"After {steps} small steps weight", rtol=1.5e-3)


@lesson.exercise(
    "14.3",
    hints=(
        "Three things in this order: this rank's part of the mean gradient, a step of the optimizer, "
        "everybody's parts.",
        "The optimizer reads own.grad, which has to be as long as own: just what "
        'comm.reduce_scatter(gradient, "mean") returns. own is a view of flat, so after the step flat has '
        "this rank's new part.",
        'own.grad = comm.reduce_scatter(gradient, "mean"); optimizer.step(); comm.all_gather(own, out=flat).',
    ),
)
def zero_1_step(answer: Answer, draw: np.random.Generator) -> Right:
    """Each rank updates its part with the mean gradient, and all get all parts."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        cases = []
        # Adam's steps are as long for any multiple of a gradient, and hide a sum for a mean: SGD is first.
        for size, kind in ((ranks, "sgd"), (3 * ranks, "adam"), (int(draw.integers(5, 20)) * ranks, "sgd")):
            flat = torch.from_numpy(draw.normal(size=size))
            steps = [torch.from_numpy(draw.normal(size=(3, size))) for _ in range(ranks)]
            args = [(flat, steps[rank], kind) for rank in range(ranks)]
            says_it = f"{ranks} rank{'s' * (ranks > 1)} with {size} parameters and {kind}"
            cases.append(Case(args, says_it))
        for run in driven(answer, _three_steps, cases):
            flat, _, kind = run.case.args[0]
            mean = sum(args[1] for args in run.case.args) / ranks
            right = flat.clone()
            optimizer = OPTIMIZERS[kind]([right])
            for step, gradient in enumerate(mean):
                right.grad = gradient
                optimizer.step()
                for rank, (flats, _) in enumerate(run.results):
                    where = f"On {says(run.case)}, after step {step + 1}, rank {rank}'s flat"
                    compare(flats[step], right, where, rtol=1e-9, atol=1e-12)
            for rank, (_, state) in enumerate(run.results):
                par = 3 * 2 * (ranks - 1) * right.nbytes // ranks
                tally.add(
                    "Bytes sent by a rank in 3 steps",
                    run.sent(rank),
                    par,
                    "each rank needs its own part of the gradient only, which is a reduce-scatter",
                )
                whole = sum(x.nbytes for x in optimizer.state[right].values() if x.dim())
                tally.add("Bytes of optimizer state on a rank", state, whole // ranks)
            tried += 1
    return Right(tried, tally.scores)


def _sgd(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _adam(parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1)


OPTIMIZERS = {"sgd": _sgd, "adam": _adam}


def _three_steps(
    function: Callable[..., Any], flat: torch.Tensor, gradients: torch.Tensor, kind: str
) -> tuple[list[torch.Tensor], int]:
    flat = flat.clone()
    own = flat.view(md.size(), -1)[md.rank()]
    optimizer, seen = OPTIMIZERS[kind]([own]), []
    for gradient in gradients:
        function(flat, own, optimizer, gradient.clone())
        seen.append(flat.clone())
    state = optimizer.state.get(own, {})
    return seen, sum(x.nbytes for x in state.values() if isinstance(x, torch.Tensor) and x.dim())


@lesson.exercise(
    "14.4",
    hints=(
        "Keep a list of the gradients that wait, and how many elements they have. When the next one does not "
        "fit any more, reduce the list and begin a new one.",
        "To reduce: flat = torch.zeros(-(-count // n) * n), fill its first count elements from the list, and "
        'append comm.reduce_scatter(flat, "mean") to the parts. Never put all gradients into one list.',
        "In a function reduce(waiting, count): flat = torch.zeros(-(-count // n) * n); torch.cat(waiting, "
        'out=flat[:count]); return comm.reduce_scatter(flat, "mean"). In the loop: if waiting and count + '
        "len(gradient) > bucket: parts.append(reduce(waiting, count)), then waiting, count = [], 0. Then "
        "always waiting.append(gradient), count += len(gradient). After the loop once more if waiting is not "
        "empty.",
    ),
)
def reduce_in_buckets(answer: Answer, draw: np.random.Generator) -> Right:
    """Gradients that come one by one are reduced a bucket at a time, and let go."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        cases = []
        for lengths, bucket in _lengths(draw):
            args = [([whole_numbers(draw, size) for size in lengths], bucket) for _ in range(ranks)]
            says_it = (
                f"{ranks} rank{'s' * (ranks > 1)} with gradients of lengths {lengths} and bucket={bucket}"
            )
            cases.append(Case(args, says_it))
        for run in driven(answer, _one_by_one, cases):
            lengths, bucket = [len(each) for each in run.case.args[0][0]], run.case.args[0][1]
            mean = [
                sum(of_rank) / ranks for of_rank in zip(*(args[0] for args in run.case.args), strict=True)
            ]
            right = [_padded(torch.cat(mean[a:b]), ranks) for a, b in _packed(lengths, bucket)]
            for rank, (parts, _) in enumerate(run.results):
                _same_parts(run, rank, parts, [flat.view(ranks, -1)[rank] for flat in right])
                total = sum(flat.nbytes for flat in right)
                tally.add("Bytes sent by a rank", run.sent(rank), (ranks - 1) * total // ranks)
                if max(lengths, default=0) >= BIG and ranks > 1:
                    largest = max(flat.nbytes for flat in right)
                    tally.add(
                        "Bytes live at a time",
                        run.results[rank][1],
                        total // ranks + (2 * ranks + 1) * largest // ranks + 4 * max(lengths),
                        "reduce a bucket as soon as the next gradient does not fit, and keep no name or list "
                        "that holds its gradients",
                    )
            tried += 1
    return Right(tried, tally.scores)


BIG = 1000
"""Elements of a gradient from which on live bytes are compared."""


def _lengths(draw: np.random.Generator) -> list[tuple[list[int], int]]:
    """Lengths of gradients and of a bucket, the smallest first."""
    ragged = draw.integers(1, 9, 7).tolist()
    return [
        ([2, 2, 1], 4),
        ([3, 3, 1], 4),
        ([1, 3, 2, 1, 1, 2], 4),
        ([3], 3),
        ([1, 4], 2),
        ([], 5),
        (ragged, int(draw.integers(2, 12))),
        (ragged, 1000),
        ([*draw.integers(BIG // 2, BIG + 1, 48).tolist(), BIG], 2 * BIG),
    ]


def _packed(lengths: list[int], bucket: int) -> Iterator[tuple[int, int]]:
    """Of each bucket, its first gradient and the one after its last."""
    first = count = 0
    for index, length in enumerate(lengths):
        if index > first and count + length > bucket:
            yield first, index
            first, count = index, 0
        count += length
    if first < len(lengths):
        yield first, len(lengths)


def _padded(flat: torch.Tensor, ranks: int) -> torch.Tensor:
    return torch.nn.functional.pad(flat, (0, -len(flat) % ranks))


def _one_by_one(function: Callable[..., Any], gradients: list[torch.Tensor], bucket: int) -> tuple[Any, int]:
    with Live(least=4 * BIG // 8) as live:  # smaller ones are the ranks' own business
        parts = function((each.clone() for each in gradients), bucket)
    return parts, live.peak


def _same_parts(run: Run, rank: int, got: Any, right: list[torch.Tensor]) -> None:
    where = f"On {says(run.case)}, rank {rank}"
    if got is None:
        wrong(f"{where}'s result is None: does the function end with return?")
    if not isinstance(got, list | tuple):
        wrong(f"{where}'s result is a {type(got).__name__}, and should be a list of parts.")
    if len(got) != len(right):
        count = f"{len(got)} part{'s' * (len(got) != 1)}"
        wrong(f"{where} returns {count}, and should return {len(right)}, one for each bucket.")
    for index, (mine, part) in enumerate(zip(got, right, strict=True)):
        compare(mine, part, f"{where}'s part {index}")


@lesson.exercise(
    "14.5",
    hints=(
        "Forward: for each layer gather, keep x in inputs, compute, free. Backward: the same from the last "
        "layer to the first, and what comes out goes into a reduce-scatter.",
        "layer.backward(weights, x, gradient) wants the x that went into this layer: inputs.pop() gives it "
        "in the right order. It returns two gradients: the first goes on to the layer before, the second is "
        "that of the whole weights, of which you keep your part of the mean.",
        "for layer, part in zip(layers, parts): weights = comm.all_gather(part); inputs.append(x); x = "
        "layer.forward(weights, x); del weights. Then gradient = x - target, and for layer, part in "
        "zip(layers[::-1], parts[::-1]): weights = comm.all_gather(part); gradient, whole = "
        'layer.backward(weights, inputs.pop(), gradient); own.insert(0, comm.reduce_scatter(whole, "mean")); '
        "del weights, whole.",
    ),
)
def zero_3_pass(answer: Answer, draw: np.random.Generator) -> Right:
    """Forward and backward through layers of which each rank keeps a part."""
    tally, tried = Tally(), 0
    for ranks in RANKS:
        cases = []
        for widths in ([2, 2], [3, 2, 4], draw.integers(2, 7, 4).tolist(), [WIDE] * 6):
            weights = [
                _padded(torch.from_numpy(draw.normal(0, 0.5, a * b)), ranks) for a, b in pairwise(widths)
            ]
            args = []
            for rank in range(ranks):
                x, target = (
                    torch.from_numpy(draw.normal(size=(2, width))) for width in (widths[0], widths[-1])
                )
                parts = [each.view(ranks, -1)[rank].clone() for each in weights]
                args.append((widths, parts, x, target))
            layers = f"{len(weights)} layer{'s' * (len(weights) > 1)}"
            cases.append(Case(args, f"{ranks} rank{'s' * (ranks > 1)} with {layers} of widths {widths}"))
        for run in driven(answer, _through_layers, cases):
            _judge_pass(run, ranks, tally)
            tried += 1
    return Right(tried, tally.scores)


WIDE = 24


class Squared:
    """The check's own layer: y = (x @ w) ** 2, with w as a flat tensor, perhaps padded."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.shape, self.size = (inputs, outputs), inputs * outputs

    def forward(self, weights: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """Of x (rows, inputs)."""
        return (x @ self._matrix(weights)) ** 2

    def backward(
        self, weights: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """From the gradient of y: that of x, and that of weights."""
        matrix = self._matrix(weights)
        inner = gradient * 2 * (x @ matrix)
        whole = torch.zeros_like(weights)
        torch.mm(x.T, inner, out=whole[: self.size].view(self.shape))
        return inner @ matrix.T, whole

    def _matrix(self, weights: torch.Tensor) -> torch.Tensor:
        if weights.dim() != 1 or len(weights) < self.size:
            raise ValueError(
                f"this layer has {self.size} weights, and was given {number(weights.numel())} of shape "
                f"{tuple(weights.shape)}: gather the parts of all ranks first"
            )
        return weights[: self.size].view(self.shape)


def _through_layers(
    function: Callable[..., Any],
    widths: list[int],
    parts: list[torch.Tensor],
    x: torch.Tensor,
    target: torch.Tensor,
) -> tuple[Any, int]:
    layers = [Squared(a, b) for a, b in pairwise(widths)]
    parts = [part.clone() for part in parts]
    with Live(least=8 * WIDE * WIDE) as live:
        own = function(layers, parts, x.clone(), target)
    return own, live.peak


def _judge_pass(run: Run, ranks: int, tally: Tally) -> None:
    widths = run.case.args[0][0]
    layers = [Squared(a, b) for a, b in pairwise(widths)]
    weights = [torch.cat([args[1][i] for args in run.case.args]).requires_grad_() for i in range(len(layers))]
    loss = torch.zeros((), dtype=torch.float64)
    for _, _, x, target in run.case.args:
        for layer, each in zip(layers, weights, strict=True):
            x = layer.forward(each, x)
        loss = loss + 0.5 * ((x - target) ** 2).sum() / ranks
    right = torch.autograd.grad(loss, weights)
    total = sum(each.nbytes for each in weights)
    for rank, (own, live) in enumerate(run.results):
        where = f"On {says(run.case)}, rank {rank}"
        if own is None:
            wrong(f"{where}'s result is None: does the function end with return?")
        if not isinstance(own, list | tuple) or len(own) != len(layers):
            given = f"a list of {len(own)}" if isinstance(own, list | tuple) else f"a {type(own).__name__}"
            wrong(f"{where} returns {given}, and should return a list of {len(layers)}, one for each layer.")
        for index, whole in enumerate(right):
            part = whole.view(ranks, -1)[rank]
            compare(own[index], part, f"{where}'s gradient for layer {index}", rtol=1e-6, atol=1e-8)
        tally.add(
            "Bytes sent by a rank",
            run.sent(rank),
            3 * (ranks - 1) * total // ranks,
            "a layer is gathered once forward and once backward, and its gradient reduce-scattered once",
        )
        if widths[0] == WIDE and ranks > 1:
            tally.add(
                "Tensors as large as a layer, at a time",
                live // (8 * WIDE * WIDE),
                2,
                "del weights, and the whole gradient, before the next layer is gathered",
            )
