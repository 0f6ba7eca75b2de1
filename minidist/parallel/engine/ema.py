"""`EMA`: an exponential moving average of the weights, in every layout.

Averaged weights often generalize better than the last ones, which the noise of the last batches has moved.
After each step average = decay average + (1 - decay) weights. The sum is over steps and not over ranks, so
each rank averages the boxes of weights that it keeps between steps anyway, and sends nothing: a layer of a
pipeline, a part of a matrix, a share of ZeRO-3. In half precision these are the master weights.

Source: Polyak and Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging"; the exponential
form: Tarvainen and Valpola 2017, "Mean teachers are better role models", section 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from minidist._arguments import is_number
from minidist.parallel.contract.tensor_boxes import common_part
from minidist.parallel.engine.training_step import Engine, check_engine
from minidist.parallel.flat.ranges import narrowed
from minidist.parallel.sharding import state_by_name

Box = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A box of a parameter: its name, where it begins in the whole parameter, its sizes."""


class EMA:
    """An exponential moving average of an engine's weights; it begins with the weights that they have now.

    >>> ema = md.EMA(engine, decay=0.999)
    >>> for inputs, targets in batches:
    ...     engine.step(inputs, targets)
    ...     ema.update()
    >>> with ema.applied():
    ...     engine.evaluate(inputs, targets)
    ...     md.export(engine, "averaged.safetensors")

    It equals `torch.optim.swa_utils.AveragedModel` with `get_ema_multi_avg_fn(decay)`, updated once at the
    beginning. Buffers are not averaged: inside `applied`, BatchNorms have the training's statistics.

    To continue a training, save the averages as a checkpoint of their own, inside `applied`. Load that one
    first, make the EMA, and then load the training's.

    Args:
        engine: what `md.prepare` returned.
        decay: the average's part in its next value, from 0 to below 1; the average is then over some
            1 / (1 - decay) steps.

    Attributes:
        averages: this rank's, by the boxes of the parameters that it keeps.

    Raises:
        TypeError, ValueError: an argument is wrong.
    """

    def __init__(self, engine: Engine, decay: float = 0.999) -> None:
        check_engine(engine)
        if not is_number(decay) or not 0 <= decay < 1:
            raise ValueError(f"decay is {decay!r}; give a number from 0 to below 1, such as 0.999")
        self.engine, self.decay = engine, decay
        self._applied = False
        self.averages = {box: weights.clone() for box, weights in self._weights().items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the weights, after a step. Sends nothing.

        Raises:
            RuntimeError: inside `applied`, or other parameters lie on this rank than before.
        """
        if self._applied:
            raise RuntimeError("the engine has the averaged weights now; update after `with ema.applied():`")
        weights = self._weights()
        averages = self.averages = self._in_boxes_of(weights)
        # In the order of the weights, which changes as parameters are thawed.
        torch._foreach_lerp_([averages[box] for box in weights], [*weights.values()], 1 - self.decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Give the engine the averaged weights inside, for `evaluate`, `full_state_dict`, `export` or `save`.

        A collective; with sharded optimizer state in half precision it sends a step's all-gather, at the
        beginning and at the end. Do not train inside.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        weights = self._weights()
        self.averages = self._in_boxes_of(weights)
        for box, average in self.averages.items():
            kept = weights[box].clone()
            weights[box].copy_(average)
            average.copy_(kept)
        state_by_name.loaded(self.engine.strategy)
        self._applied = not self._applied

    def _weights(self) -> dict[Box, Tensor]:
        """The boxes of parameters that this rank keeps; a tied parameter once."""
        names = {f"model.{name}" for name in self.engine.tensor_map.first}
        found: dict[int, tuple[Box, Tensor]] = {}
        for box in self.engine.state_boxes():
            floats = box.tensor.is_floating_point() or box.tensor.is_complex()
            if box.name in names and floats and box.tensor.numel():
                key = box.name, tuple(box.offsets), tuple(box.tensor.shape)
                found.setdefault(box.tensor.data_ptr(), (key, box.tensor))
        return dict(found.values())

    def _in_boxes_of(self, weights: dict[Box, Tensor]) -> dict[Box, Tensor]:
        """The averages in the same boxes and dtypes as `weights`.

        The first step of ZeRO 1 and 2 cuts parameters, and thawed ones get master weights.
        """
        averages = self.averages
        if weights.keys() != averages.keys():
            averages = {box: self._part(box) for box in weights}
        return {box: average.to(weights[box].dtype) for box, average in averages.items()}

    def _part(self, wanted: Box) -> Tensor:
        name, first, sizes = wanted
        for (of, offsets, have), average in self.averages.items():
            common = common_part(first, sizes, offsets, have) if of == name else None
            if common is not None and common[2] == [*sizes]:
                return narrowed(average, common[1], sizes).clone()
        raise RuntimeError(
            f"this rank keeps another part of {name.removeprefix('model.')} than at the last update, as when "
            "parameters are thawed or a checkpoint is loaded; make a new EMA after that"
        )
