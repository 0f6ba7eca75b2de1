"""A model of your own, as the planner and the dry run see it: its parameters, and one small batch measured.

minidist's transformers are known by their shapes, and formulas give their memory and work. Of any other
module two things are measured: what the passes of two small batches keep for the backward pass, and the
operations that they call. Both grow with the rows, so two batches give every other. The passes run on tensors
without data, so a model that fits nowhere can be measured; one whose operations depend on values runs for
real. States, the gradient exchange and the update follow the formulas for transformers, from the sizes of the
parameters. Predictions are for dp, ZeRO in every form, micro-batches and recomputation: tp, pp and cp would
need a shape. A dry run takes these too.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from minidist._arguments import is_whole
from minidist.model.loss import cross_entropy
from minidist.parallel.contract.batch import rows_of
from minidist.parallel.contract.layout import Layout, check_available
from minidist.parallel.contract.user_functions import Loss
from minidist.parallel.engine.step_executor import weighted
from minidist.parallel.engine.training_step import Engine
from minidist.parallel.pipeline.model_stage import ModelStage
from minidist.parallel.sharding.units.cut_into_units import deal_to_units, modules_of
from minidist.parallel.sharding.units.units import Unit
from minidist.parallel.training.activation_memory import ActivationCounter
from minidist.parallel.training.muon import Muon, is_hidden
from minidist.parallel.training.precision import Precision
from minidist.parallel.training.recompute import recompute_by
from minidist.scale.dryrun.fake_tensors import DryTensors, operation_kind, tensors_in
from minidist.scale.dryrun.fake_world import Form
from minidist.scale.memory.estimates import Estimate
from minidist.scale.memory.parameter_sizes import Hidden, RankParameters
from minidist.scale.memory.state_bytes import held_for
from minidist.scale.memory.training_setup import BatchSize, TrainingSetup
from minidist.scale.step_time.gradient_exchange import GradientTime
from minidist.scale.step_time.hardware import Hardware
from minidist.scale.step_time.layer_work import Amounts, Computation
from minidist.scale.step_time.prediction import (
    StepTime,
    assumptions,
    check_machine,
    check_rows,
    step_from_parts,
)
from minidist.scale.step_time.step_stages import Simulated
from minidist.scale.step_time.traffic import Wires

SMALL = (2, 4)
"""Rows of the two batches that are measured."""


@dataclass(frozen=True)
class Passes(Amounts):
    """The memory and work of a batch's passes; both grow linearly with the rows."""

    activations: float  # bytes at their peak
    forward: Computation
    backward: Computation


class OwnModel:
    """A module of your own, with rows to train it on.

    Args:
        name: for people.
        make: returns the module. It is called on the meta device; if it cannot work there, with memory.
        data: returns inputs and targets, two tensors with one entry a row, at least one.
        loss: from outputs and targets to the mean over their rows.
    """

    divided: tuple[int, ...] | None = None  # the sizes that tensor parallelism divides, if they are known
    experts = 0  # nor does it say which of its modules are experts

    def __init__(
        self,
        name: str,
        make: Callable[[], nn.Module],
        data: Callable[[], tuple[Tensor, Tensor]],
        loss: Loss = cross_entropy,
    ) -> None:
        self.name, self.make, self.data, self.loss = name, make, data, loss
        self._measured: dict[tuple[str, bool | str], tuple[Passes, Passes]] = {}

    @cached_property
    def module(self) -> nn.Module:
        """The module, on the meta device if possible. TypeError if `make` returns something else."""
        try:
            with torch.device("meta"):
                made = self.make()
        except Exception:  # it reads values, such as those of a buffer that it computes
            made = self.make()
        return require_module(self.name, made)

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets, as `data` returned them."""
        return require_rows(self.name, self.data())

    @cached_property
    def trained(self) -> RankParameters:
        """The parameters that are trained, each once, and the units that ZeRO 3 gathers."""
        made = [Unit(name, part, i) for i, (name, part) in enumerate(modules_of(self.module, None))]
        units = [sum(p.numel() for _, p, _ in own) for _, own in deal_to_units(self.module, made)]
        trained = [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]
        hidden = (Hidden(p.numel(), Muon.work(tuple(p.shape))) for name, p in trained if is_hidden(name, p))
        return RankParameters([p.numel() for _, p in trained], units, hidden=tuple(hidden))

    def recomputes(self, policy: bool | str) -> bool:
        """Whether it has the parts that a policy recomputes, and they can be."""
        try:
            recompute_by(copy.deepcopy(self.module), policy)
        except ValueError:
            return False
        return True

    def parameters(self) -> int:
        """Elements of all parameters, each once."""
        return sum(p.numel() for p in self.module.parameters())

    # Predictions.

    def rows_and_tokens(self, batch: BatchSize) -> tuple[int, int]:
        """The rows of a batch, and 0 for the tokens that they may not have. ValueError for anything else."""
        if not is_whole(batch) or batch < 1:
            raise ValueError(
                f"batch is {batch!r} for a model of your own; give rows, at least 1: its data says their "
                "shape"
            )
        return batch, 0

    def has_time(self, layout: Layout) -> bool:
        """Whether the time of a step can be predicted: a layout that cuts the model has none."""
        return layout.tp * layout.pp * layout.cp * layout.ep == 1

    def check(self, setup: TrainingSetup, hardware: Hardware) -> None:
        """ValueError if `prepare` would refuse the layout, a step the batch, or the machine the precision."""
        check_available(setup.layout)
        self._check(setup)
        check_machine(setup.precision, hardware)

    def _check(self, setup: TrainingSetup) -> None:
        for axis in ("tp", "pp", "cp", "ep"):
            if getattr(setup.layout, axis) > 1:
                raise ValueError(
                    f"{axis} is {getattr(setup.layout, axis)} in the layout, and {self.name} is a model of "
                    "your own, whose time can be predicted for dp, zero, micro_batches and recompute alone; "
                    f"give {axis}=1, or see what a rank holds and sends with minidist dryrun"
                )
        check_rows(setup)

    def estimate(self, setup: TrainingSetup) -> Estimate:
        """Estimate the bytes on the rank with the most rows, as `estimate` does for a transformer."""
        self._check(setup)
        states, residency = held_for(self.trained, setup.sharing), setup.sharing.residency
        frozen = (self.parameters() - sum(self.trained.sizes)) * setup.sharing.element
        kept = round(self.passes(setup.layout, max(setup.micro_rows)).activations)
        buffers = sum(buffer.numel() * buffer.element_size() for buffer in self.module.buffers())
        return Estimate.of(states, kept, frozen=frozen if residency.whole_parameters else 0, buffers=buffers)

    def predict(
        self,
        setup: TrainingSetup,
        hardware: Hardware,
        simulated: Simulated | None = None,
        bound: bool = False,
    ) -> StepTime:
        """Predict the time of a step, as `predict_step` does for a transformer."""
        self._check(setup)
        check_machine(setup.precision, hardware)
        wires, precision = Wires(hardware, setup), setup.precision
        rates, plain = wires.crowd.rates, replace(setup.layout, recompute=False)
        compute = again = last = 0.0
        for rows, count in setup.micro_rows.items():
            passes = self.passes(plain, rows)
            backward = rates.seconds(passes.backward, precision, backward=True)
            last = rates.seconds(self.passes(setup.layout, rows).backward, precision, backward=True)
            compute += count * (rates.seconds(passes.forward, precision) + backward)
            again += count * (last - backward)
        exchange = GradientTime(self.trained, wires).parts(last, compute + again, setup.micro_batches)
        parts = {"compute": compute, "recompute": again, **exchange, "step": rates.step}
        whole = self.passes(plain, setup.rows)
        said = [
            *assumptions(setup, hardware, None),
            f"the operations and activations of {self.name} were counted for batches of 2 and 4 rows",
        ]
        return step_from_parts(parts, setup, hardware, whole.forward.flops + whole.backward.flops, said)

    # What the predictions are made from: the passes of two small batches.

    def passes(self, layout: Layout, rows: int) -> Passes:
        """The memory and work of a micro-batch's passes, from those of two measured batches."""
        key = layout.precision, layout.recompute
        if key not in self._measured:
            try:
                with DryTensors() as tensors:
                    self._measured[key] = self._measure(layout, lambda: self.build(tensors), tensors)
            except Exception:  # the shapes or the choices of its operations depend on values
                self._measured[key] = self._measure(layout, lambda: require_module(self.name, self.make()))
        few, more = self._measured[key]
        return few + (more - few) * ((rows - SMALL[0]) / (SMALL[1] - SMALL[0]))

    def _measure(
        self, layout: Layout, make: Callable[[], nn.Module], tensors: DryTensors | None = None
    ) -> tuple[Passes, Passes]:
        module, precision, found = make(), Precision(layout.precision, None), list[Passes]()
        precision.convert(module)
        recompute_by(module, layout.recompute)
        for rows in SMALL:
            inputs, targets = self.batch(rows, 0, tensors)
            module.zero_grad()
            with ActivationCounter(module, (inputs, targets)) as kept:
                with _Counted() as forward:
                    outputs = precision.outputs(module(precision.inputs(inputs)))
                    loss, _ = weighted(self.loss(outputs, targets), rows_of(targets))
                with _Counted() as backward:
                    loss.backward()  # type: ignore[no-untyped-call]
            found.append(Passes(kept.peak, forward.work, backward.work))
        return found[0], found[1]

    # A dry run.

    def check_dry(self, layout: Layout) -> None:
        """ValueError for a layout whose messages between stages are not those of the uncut model."""
        if layout.pp > 1 and layout.sequence_parallel:
            raise ValueError(
                f"the layout has pp={layout.pp} and sequence_parallel, and {self.name} is a model of your "
                "own, whose stages' messages would have other shapes than the model gives; leave one of them "
                "out"
            )

    def build(self, tensors: DryTensors) -> nn.Module:
        """A copy of the module without data."""
        return tensors.emptied(copy.deepcopy(self.module))

    def batch(self, rows: int, tokens: int = 0, tensors: DryTensors | None = None) -> tuple[Tensor, Tensor]:
        """So many rows: without data, or else the first ones, again and again if there are too few."""
        if tensors is not None:
            inputs, targets = (tensors.empty((rows, *x.shape[1:]), x.dtype) for x in self.rows)
        else:
            index = torch.arange(rows) % len(self.rows[0])
            inputs, targets = (x[index] for x in self.rows)
        return inputs, targets

    def example(self, layout: Layout) -> Tensor | None:
        """The example with which `prepare` finds the layers of a pipeline."""
        return self.batch(1)[0] if layout.pp > 1 else None

    def sent_to(self, engine: Engine, tokens: int, tensors: DryTensors, chunk: int, rows: int) -> list[Form]:
        """The tensors that the stage before sends to an engine's chunk, for a micro-batch of so many rows."""
        # Run the uncut model up to the chunk's first layer.
        model, stage = self.build(tensors), engine.part.stages[chunk]
        precision = Precision(engine.layout.precision, None)
        precision.convert(model)
        inputs = self.batch(rows, 0, tensors)[0]
        inputs = precision.inputs(engine.executor.own_tokens(inputs, inputs)[0])
        with torch.no_grad():
            if isinstance(stage, ModelStage):
                sent = ModelStage(model, stage.trace, range(stage.layers.start))((), inputs)
            else:
                first: Any = next(stage.children())
                start = [*engine.model.get_submodule("layers").children()].index(first)
                before: Any = model.get_submodule("layers")
                sent = [nn.Sequential(*before[:start])(inputs)]
        return [(tuple(x.shape), x.dtype) for x in sent]


def require_module(name: str, made: object) -> nn.Module:
    """Check that a function of the user returned a module; TypeError if not."""
    if not isinstance(made, nn.Module):
        raise TypeError(f"{name} returned a {type(made).__name__}; let it return a torch.nn.Module")
    return made


def require_rows(name: str, made: object) -> tuple[Tensor, Tensor]:
    """Check that a function of the user returned inputs and targets; TypeError or ValueError if not."""
    if not (isinstance(made, tuple) and len(made) == 2 and all(isinstance(x, Tensor) for x in made)):
        raise TypeError(
            f"the data of {name} is a {type(made).__name__}; let its function return two tensors, "
            "(inputs, targets)"
        )
    inputs, targets = made
    if not inputs.dim() or not targets.dim() or not 0 < len(inputs) == len(targets):
        raise ValueError(
            f"the data of {name} has inputs {tuple(inputs.shape)} and targets {tuple(targets.shape)}; give "
            "one entry of each for each row, and at least one row"
        )
    return inputs, targets


class _Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the work of the operations inside: products, bytes moved, and calls."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.work = Computation()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        made = func(*args, **kwargs)
        if not operation_kind(func).is_view:
            moved = float(
                sum(x.numel() * x.element_size() for x in tensors_in((*args, *kwargs.values(), made)))
            )
            count = flop_registry.get(func._overloadpacket)
            if count is None:
                self.work += Computation(moved=moved, calls=1)
            else:
                products = float(count(*args, **kwargs, out_val=made))
                self.work += Computation(products=products, operands=moved, calls=1)
        return made
