"""`KeptState`: an engine's state as it was, to put it back after steps that were trials."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from minidist.parallel.contract.kept_attributes import OF_MODULES, KeptAttributes
from minidist.parallel.contract.strategy import TensorBox
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.flat.ranges import narrowed


class KeptState:
    """A copy of an engine's state, of what its model and loss keep in attributes, and of random states.

    It does not keep what gradient compression holds: that is dropped, and PowerSGD's factors stay.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine, self.settings, self.norm = engine, engine.settings(), engine.grad_norm
        self.random = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
        self.on_gpu = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self.of_strategy = copy.deepcopy(engine.strategy.settings())
        self.chunks: dict[str, list[TensorBox]] = defaultdict(list)
        for chunk in engine.strategy.chunks():
            self.chunks[chunk.name].append(chunk._replace(tensor=chunk.tensor.clone()))
        self.attributes = KeptAttributes(engine.model, engine.loss)

    def draws_elsewhere(self) -> str:
        """The generator other than torch's that has drawn since, if any."""
        if random.getstate() != self.random[0]:
            return "Python's"
        now = np.random.get_state()  # noqa: NPY002
        same = all(np.array_equal(a, b) for a, b in zip(now, self.random[1], strict=True))
        return "" if same else "NumPy's"

    def restore(self) -> None:
        """Restore the engine, as loading a checkpoint would; an unused optimizer has no state."""
        strategy = self.engine.strategy
        state: dict[str, dict[str, Any]] = defaultdict(dict)
        for full, (chunk, *_) in self.chunks.items():
            kind, _, name = full.partition(".")
            if kind == "optimizer":
                name, _, key = name.rpartition(".")
                state[name][key] = chunk.shape, chunk.tensor.dtype
        strategy.load_settings(copy.deepcopy(self.of_strategy), state)
        strategy.drop()
        for chunk in strategy.chunks():
            for kept in self.chunks[chunk.name]:
                _copy_common(kept, chunk)
        strategy.loaded()
        self.engine.load_settings(self.settings)
        self.engine.grad_norm = self.norm
        self.attributes.restore()
        random.setstate(self.random[0])
        np.random.set_state(self.random[1])  # noqa: NPY002
        torch.set_rng_state(self.random[2])
        if self.on_gpu is not None:
            torch.cuda.set_rng_state(self.on_gpu)


def _copy_common(source: TensorBox, target: TensorBox) -> None:
    """Copy the elements that two boxes have in common: the first step may have moved the boxes."""
    first = [max(each) for each in zip(source.offsets, target.offsets, strict=True)]
    ends = ((o + n for o, n in zip(c.offsets, c.tensor.shape, strict=True)) for c in (source, target))
    sizes = [min(each) - start for start, *each in zip(first, *ends, strict=True)]
    if all(size > 0 for size in sizes):
        there, here = (
            narrowed(chunk.tensor, [a - b for a, b in zip(first, chunk.offsets, strict=True)], sizes)
            for chunk in (target, source)
        )
        there.copy_(here)


def plain_attributes(model: nn.Module) -> dict[tuple[str, str], Any]:
    """Copies of tensors, numbers, None, lists and dicts among modules' attributes, by module and name."""
    return {
        (name, attribute): value.detach().clone() if isinstance(value, Tensor) else copy.copy(value)
        for name, part in model.named_modules()
        for store in (part._buffers, part.__dict__)
        for attribute, value in store.items()
        if isinstance(value, Tensor | int | float | None)
        or (type(value) in (list, dict) and attribute not in OF_MODULES)
        if attribute != "training"
    }
