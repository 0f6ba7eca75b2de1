"""Checks of lesson 14: what a rank keeps in each stage of ZeRO, and how little of it is there at a time."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from checks.ranks import Run, says
from checks.settings import driven, zero
from checks.support.exercises import Answer, Lesson
from checks.support.live_bytes import Live as Live  # the lesson imports it from here
from checks.support.verdicts import Right, Tally, compare, not_none, wrong
from checks.support.words import described, plural

lesson = Lesson(14, "zero")
check, hint, or_solution = lesson.check, lesson.hint, lesson.or_solution

RANKS = (2, 3, 4, 1)
PARTS = ("parameters", "gradients", "optimizer")


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
    master, gradient = (torch.from_numpy(draw.uniform(*ends, 3)) for ends in ((0.5, 1), (200, 400)))
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
    large = torch.tensor([6e4, 6e4]).half()  # finite, and their sum is not
    _one_scaled(answer, torch.ones(2), large, scale=2.0**17, lr=0.1, bad=None)
    _many_scaled(answer, draw)
    return Right(tried + 3)


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
        for run in driven(answer, zero.three_steps, zero.step_cases(draw, ranks)):
            flat, _, kind = run.case.args[0]
            mean = sum(args[1] for args in run.case.args) / ranks
            right = flat.clone()
            optimizer = zero.OPTIMIZERS[kind]([right])
            for step, gradient in enumerate(mean):
                right.grad = gradient
                optimizer.step()
                for rank, (flats, _) in enumerate(run.results):
                    where = f"On {says(run.case)}, after step {step + 1}, rank {rank}'s flat"
                    compare(flats[step], right, where, rtol=1e-9, atol=1e-12)
            for rank, (_, state) in enumerate(run.results):
                par = 3 * 2 * (ranks - 1) * right.nbytes // ranks
                idea = "each rank needs its own part of the gradient only, which is a reduce-scatter"
                tally.add("Bytes sent by a rank in 3 steps", run.sent(rank), par, idea)
                whole = sum(x.nbytes for x in optimizer.state[right].values() if x.dim())
                tally.add("Bytes of optimizer state on a rank", state, whole // ranks)
            tried += 1
    return Right(tried, tally.scores)


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
        for run in driven(answer, zero.one_by_one, zero.bucket_cases(draw, ranks)):
            right, longest = zero.right_buckets(run), max(map(len, run.case.args[0][0]), default=0)
            for rank, (parts, _) in enumerate(run.results):
                _same_parts(run, rank, parts, [flat.view(ranks, -1)[rank] for flat in right])
                total = sum(flat.nbytes for flat in right)
                idea = "a reduce-scatter sends each rank its own part alone"
                tally.add("Bytes sent by a rank", run.sent(rank), (ranks - 1) * total // ranks, idea)
                if longest >= zero.BIG and ranks > 1:
                    largest = max(flat.nbytes for flat in right)
                    par = total // ranks + (2 * ranks + 1) * largest // ranks + 4 * longest
                    idea = (
                        "reduce a bucket as soon as the next gradient does not fit, and keep no name or list "
                        "that holds its gradients"
                    )
                    tally.add("Bytes live at a time", run.results[rank][1], par, idea)
            tried += 1
    return Right(tried, tally.scores)


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
        for run in driven(answer, zero.through_layers, zero.layer_cases(draw, ranks)):
            _judge_pass(run, ranks, tally)
            tried += 1
    return Right(tried, tally.scores)


def _one_scaled(
    answer: Answer, master: torch.Tensor, gradient: torch.Tensor, scale: float, lr: float, bad: float | None
) -> None:
    mine, weight = master.clone(), master.half()
    right = master if bad is not None else master - lr * gradient.float() / scale
    got = answer(weight, mine, gradient.clone(), scale, lr)
    among = ", whose sum is more than a float16 holds," if gradient.sum().isinf() else ""
    among = f", one of them {bad}," if bad is not None else among
    where = f"With a gradient of {plural(len(gradient), 'element')}{among} and scale {scale:.0f}, "
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


def _same_parts(run: Run, rank: int, got: Any, right: list[torch.Tensor]) -> None:
    where = f"On {says(run.case)}, rank {rank}"
    not_none(got, f"{where}'s result")
    if not isinstance(got, list | tuple):
        wrong(f"{where}'s result is a {type(got).__name__}, and should be a list of parts.")
    if len(got) != len(right):
        found = plural(len(got), "part")
        wrong(f"{where} returns {found}, and should return {len(right)}, one for each bucket.")
    for index, (mine, part) in enumerate(zip(got, right, strict=True)):
        compare(mine, part, f"{where}'s part {index}")


def _judge_pass(run: Run, ranks: int, tally: Tally) -> None:
    right, wide = zero.right_gradients(run), zero.WIDE
    total = sum(each.nbytes for each in right)
    for rank, (own, live) in enumerate(run.results):
        where = f"On {says(run.case)}, rank {rank}"
        not_none(own, f"{where}'s result")
        if not isinstance(own, list | tuple) or len(own) != len(right):
            given = f"a list of {len(own)}" if isinstance(own, list | tuple) else f"a {type(own).__name__}"
            wrong(f"{where} returns {given}, and should return a list of {len(right)}, one for each layer.")
        for index, whole in enumerate(right):
            part = whole.view(ranks, -1)[rank]
            compare(own[index], part, f"{where}'s gradient for layer {index}", rtol=1e-6, atol=1e-8)
        idea = "a layer is gathered once forward and once backward, and its gradient reduce-scattered once"
        tally.add("Bytes sent by a rank", run.sent(rank), 3 * (ranks - 1) * total // ranks, idea)
        if run.case.args[0][0][0] == wide and ranks > 1:
            idea = "del weights, and the whole gradient, before the next layer is gathered"
            tally.add("Tensors as large as a layer, at a time", live // (8 * wide * wide), 2, idea)
