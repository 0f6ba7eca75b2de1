"""What goes through an engine's layers in a few steps, and by how much rounding may move it.

A layout adds the same numbers in another order, so that two layouts never agree to the last bit, and how far
they part depends on the model: a sum that cancels magnifies what went into it. So it is measured. The same
engine takes the same steps again while every module's results, forward and backward, are moved by their last
bit, at random: what that changes is what rounding explains.

Source: Parker 1997, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic", section 2.
"""

from __future__ import annotations

import copy
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist.parallel.contract.engine import Engine
from minidist.parallel.contract.strategy import TensorBox
from minidist.parallel.debugging.assembling import RankCopies, assemble, distance, distinct
from minidist.parallel.engine.training_step import HybridEngine
from minidist.parallel.flat.ranges import narrowed

REPEATS = 2
"""Times that the steps are taken again with moved results."""


@dataclass(frozen=True, eq=False)
class Recording:
    """What `record` saw, the same on all ranks. Tensors are whole, as one process would have them, on CPUs.

    Each step's tensors go by "output NAME" and "gradient NAME", of a layer's output, and "update NAME", of a
    parameter: in this order they are computed, but that gradients and updates run from the last layer back.
    """

    layout: str
    layers: list[str]  # their names, first to last
    start: dict[str, Tensor]  # the parameters before the first step
    losses: list[float]
    steps: list[dict[str, RankCopies]]
    rounding: list[dict[str, float]]  # for each, the largest change of an element when results were moved


def record(engine: Engine, batches: Iterable[tuple[Tensor, Tensor]], repeats: int = REPEATS) -> Recording:
    """Train `engine` on global batches and record its layers; then put it back as it was.

    All ranks call it, with the same batches. It takes the steps `repeats` + 1 times, and gathers every output
    and gradient of a layer on every rank: for small models and a few steps. Not put back is what compression
    of gradients keeps: what it left out is dropped, and PowerSGD's factors stay.

    Args:
        engine: of `prepare`; its model has a chain of layers, `model.layers`, or its children are taken.
            Where they run in another order, or its `forward` does more than call them, which
            `chain.require_chain` tells, a difference is found all the same, but a later layer may be named.
        batches: inputs and targets of whole global batches.
        repeats: how often to measure what rounding moves.

    Raises:
        TypeError: the engine is not one of `prepare`, or batches are no pairs of tensors.
        ValueError: no batches, repeats below 0, or a model with dropout, whose masks depend on the layout.
    """
    if not isinstance(engine, HybridEngine):
        raise TypeError(f"engine is a {type(engine).__name__}; give one that md.prepare returned")
    given = pairs_of(batches)
    if isinstance(repeats, bool) or not isinstance(repeats, int):
        raise TypeError(f"repeats is {repeats!r}; give a whole number")
    if repeats < 0:
        raise ValueError(f"repeats is {repeats}; give how often to take the steps again, or 0 for not at all")
    for name, module in engine.model.named_modules():
        dropout = getattr(module, "dropout", getattr(module, "p", 0.0))
        if isinstance(dropout, float) and dropout > 0:
            raise ValueError(
                f"{name or 'the model'} has dropout {dropout}, and what it drops depends on the layout; "
                "compare layouts with dropout 0"
            )
    kept = _KeptTensors(engine)
    start = _parameters(engine)
    losses, steps = _run(engine, given, None)
    kept.restore()
    rounding: list[dict[str, float]] = [defaultdict(float) for _ in steps]
    for repeat in range(repeats):
        _, moved = _run(engine, given, repeat)
        kept.restore()
        for most, plain, other in zip(rounding, steps, moved, strict=True):
            for name in plain.keys() & other.keys():
                most[name] = max(most[name], distance(plain[name], other[name]))
    layers = [name for name, _ in layers_of(engine.model)]
    return Recording(str(engine.layout), layers, start, losses, steps, [dict(most) for most in rounding])


def pairs_of(batches: Iterable[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """The batches as a list, or an error that says what is wrong with them."""
    remedy = "give a list of pairs, [(inputs, targets), ...], of tensors"
    if isinstance(batches, Tensor) or not isinstance(batches, Iterable):
        raise TypeError(f"batches is a {type(batches).__name__}; {remedy}")
    given = [*batches]
    if not given:
        raise ValueError("batches are none; give at least one pair of inputs and targets")
    for place, pair in enumerate(given):
        if (
            not isinstance(pair, tuple | list)
            or len(pair) != 2
            or not all(isinstance(x, Tensor) for x in pair)
        ):
            raise TypeError(f"batch {place} is a {type(pair).__name__} that is no pair of tensors; {remedy}")
    return given


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The chain of layers, by name."""
    chain = getattr(model, "layers", None)
    if isinstance(chain, nn.ModuleList | nn.Sequential):
        return [(f"layers.{name}", layer) for name, layer in chain.named_children()]
    return [*model.named_children()]


def _run(
    engine: HybridEngine, batches: Sequence[tuple[Tensor, Tensor]], repeat: int | None
) -> tuple[list[float], list[dict[str, RankCopies]]]:
    """Take the steps, with results moved where `repeat` is not None; losses and whole tensors."""
    losses, steps = [], []
    before = _parameters(engine)
    for inputs, targets in batches:
        rows = slice(*(len(inputs) * (engine.data_rank + i) // engine.data_ranks for i in (0, 1)))
        with _moved(engine.model, repeat), _watched(engine.model) as pieces:
            scale = engine.loss_scale
            losses.append(engine.step(inputs[rows], targets[rows]))
        own = {
            name: torch.cat([of_call[call] for call in sorted(of_call)]) for name, of_call in pieces.items()
        }
        found = assemble(own, engine.layout, inputs.shape[1] if inputs.dim() > 1 else 1)
        for name, copies in found.items():
            if name.startswith("gradient"):
                found[name] = [each / scale for each in copies]
        after = _parameters(engine)
        found.update(distinct({f"update {name}": after[name] - before[name] for name in after}))
        steps.append(found)
        before = after
    return losses, steps


def _parameters(engine: HybridEngine) -> dict[str, Tensor]:
    """All parameters in full: this rank's own copies, of those that it has a whole copy of."""
    own = engine.strategy.full_state_dict()
    return {
        name: (own[name] if name in own and own[name].shape == value.shape else value).cpu()
        for name, value in engine.full_state_dict().items()
        if value.is_floating_point()
    }


@contextmanager
def _watched(model: nn.Module) -> Iterator[dict[str, dict[int, Tensor]]]:
    """What the layers give, and its gradients: by name, and by call, of which micro-batches make several."""
    pieces: dict[str, dict[int, Tensor]] = defaultdict(dict)

    def keep(name: str, call: int, value: Tensor) -> None:
        pieces[name][call] = value.detach().cpu().clone()

    def after(name: str, layer: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            call = len(pieces[f"output {name}"])
            keep(f"output {name}", call, output)
            if output.requires_grad:
                output.register_hook(partial(keep, f"gradient {name}", call))  # type: ignore[no-untyped-call]

    handles = [layer.register_forward_hook(partial(after, name)) for name, layer in layers_of(model)]
    try:
        yield pieces
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _moved(model: nn.Module, repeat: int | None) -> Iterator[None]:
    """Move the results of all modules without children by their last bit, forward and backward."""

    def move(name: str, x: Tensor) -> Tensor:
        # The same in every call: what is computed again for the backward pass has to be the same, and so
        # have the copies of ranks that hold the same.
        seed = zlib.crc32(f"{name} {repeat}".encode())
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(x.shape, generator=generator, dtype=torch.float64).mul_(2).sub_(1)
        return torch.addcmul(x, x, noise.mul_(torch.finfo(x.dtype).eps).to(x))

    def after(name: str, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        result = move(name, output)
        if result.requires_grad:
            result.register_hook(partial(move, f"{name} backward"))  # type: ignore[no-untyped-call]
        return result

    leaves = [(name, part) for name, part in model.named_modules() if not any(True for _ in part.children())]
    handles = [part.register_forward_hook(partial(after, name)) for name, part in leaves]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _KeptTensors:
    """An engine's state, to be put back: what a checkpoint has of it, copied, and the random numbers."""

    def __init__(self, engine: HybridEngine) -> None:
        self.engine, self.settings, self.norm = engine, engine.settings(), engine.grad_norm
        self.random = torch.get_rng_state()
        self.of_strategy = copy.deepcopy(engine.strategy.settings())
        self.chunks: dict[str, list[TensorBox]] = defaultdict(list)
        for chunk in engine.strategy.chunks():
            self.chunks[chunk.name].append(replace(chunk, tensor=chunk.tensor.clone()))

    def restore(self) -> None:
        """As a checkpoint is loaded: the optimizer has the state that it had, none before its first step."""
        strategy = self.engine.strategy
        state: dict[str, dict[str, Any]] = defaultdict(dict)
        for full, (chunk, *_) in self.chunks.items():
            kind, _, name = full.partition(".")
            if kind == "optimizer":
                name, _, key = name.rpartition(".")
                state[name][key] = chunk.shape, chunk.tensor.dtype
        strategy.load_settings(copy.deepcopy(self.of_strategy), state)
        strategy.drop()  # gradients, and what compression kept back of them
        for chunk in strategy.chunks():
            for kept in self.chunks[chunk.name]:
                _copy_common(kept, chunk)
        strategy.loaded()
        self.engine.load_settings(self.settings)
        self.engine.grad_norm = self.norm
        torch.set_rng_state(self.random)


def _copy_common(source: TensorBox, target: TensorBox) -> None:
    """Copy what is in both boxes of a tensor: a first step may have dealt it out in others."""
    first = [max(each) for each in zip(source.offsets, target.offsets, strict=True)]
    ends = ((o + n for o, n in zip(c.offsets, c.tensor.shape, strict=True)) for c in (source, target))
    sizes = [min(each) - start for start, *each in zip(first, *ends, strict=True)]
    if all(size > 0 for size in sizes):
        there, here = (
            narrowed(chunk.tensor, [a - b for a, b in zip(first, chunk.offsets, strict=True)], sizes)
            for chunk in (target, source)
        )
        there.copy_(here)
