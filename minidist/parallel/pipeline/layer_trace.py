"""Find how a model's `forward` calls the layers of a list, so that a pipeline can cut the model between them.

A model computes more than its layers: embeddings before them, masks beside them, a head after them. Here a
copy that shares its parameters runs once on the rows of an example. Each tensor carries its sources, the
parameters and layers from which it was computed. They tell which parameters a stage needs, and whether
anything but the layers' own outputs goes from one layer to the next. If the model has no values, or there is
no memory to run it, its layers run on the meta device, and its other parameters are zeros.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from minidist.parallel.contract.batch import Path, call, mapped, tensors_in
from minidist.parallel.contract.kept_attributes import computed
from minidist.parallel.pipeline.model_stage import Argument, LayerCall, LayerTrace, Sent, Sources, StandIn


class BrokenChain(Exception):
    """The model does not call its layers one after the other; the message says how."""


def trace_layers(model: nn.Module, name: str, example: Any) -> LayerTrace:
    """Run a copy of `model` on `example` and note how it calls the layers of the list called `name`.

    Raises:
        BrokenChain: the layers are not called in order, each once, with the outputs of the one before; or
            the model cannot be called with the example.
    """
    if not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        with suppress(torch.OutOfMemoryError):
            return _run_once(model, name, example, meta=False)
    return _run_once(model, name, example, meta=True)


def _run_once(model: nn.Module, name: str, example: Any, meta: bool) -> LayerTrace:
    """Run a copy; meta: with its layers on the meta device."""
    whole = _copied(model, name, meta)
    layers = whole.get_submodule(name)._modules
    tracer = _Tracer(name, [layer for layer in layers.values() if layer is not None], whole, meta)
    layers.update({key: _Watched(tracer, index) for index, key in enumerate(layers)})
    device = next((p.device for p in model.parameters() if not meta), torch.device("cpu"))
    on_gpu = [device] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=on_gpu), torch.enable_grad(), tracer:
            outputs = call(whole.train(), mapped(lambda x: x.detach().to(device), example))
    except (BrokenChain, torch.OutOfMemoryError):
        raise
    except Exception as error:
        said = [f"{type(error).__name__}: {line}" for line in str(error).strip().splitlines()]
        where = f"after {name}.{len(tracer.calls) - 1}" if tracer.calls else f"before {name}.0"
        without = ", with its layers on the meta device, where tensors have no values" if meta else ""
        raise BrokenChain(
            f"{where} it raises {said[0] if said else type(error).__name__}{without}"
        ) from error
    return tracer.result(outputs)


def _copied(model: nn.Module, name: str, meta: bool) -> nn.Module:
    """A copy that shares the parameters. meta: its layers are on the meta device, the rest on the CPU."""
    part = model.get_submodule(name)
    inside = {id(tensor) for tensor in (*part.parameters(), *part.buffers())}
    copies = computed(model)
    for tensor in (*model.parameters(), *model.buffers()):
        parameter = isinstance(tensor, nn.Parameter)
        if meta and id(tensor) in inside:
            made = tensor.detach().to("meta")
        elif tensor.is_meta:
            made = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        else:
            made = tensor.detach().cpu() if meta else tensor.detach()
            made = made if parameter else made.clone()
        copies[id(tensor)] = nn.Parameter(made, tensor.requires_grad) if parameter else made
    return copy.deepcopy(model, copies)


def _storages(*values: Any) -> list[Any]:
    """The memory of the tensors in `values`, which views share."""
    return [x.untyped_storage() for _, x in tensors_in(values) if x.layout is torch.strided]


class _Watched(StandIn):
    """A layer whose calls the tracer sees."""

    def __init__(self, tracer: _Tracer, index: int) -> None:
        super().__init__(tracer.layers[index])
        self.__dict__.update(tracer=tracer, index=index)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the layer; its outputs have it as their only source."""
        return self.tracer.call(self.index, args, kwargs)


class _Tracer(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Follows tensors by their storages, which views share, and checks each call of a layer."""

    def __init__(self, name: str, layers: list[nn.Module], whole: nn.Module, meta: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.name, self.layers, self._meta = name, layers, meta
        self.calls: list[LayerCall] = []
        self._made: list[Tensor] = []  # by the last layer
        self._sources: dict[int, tuple[Any, Sources]] = {}  # weakly: the storage's address is not used again
        self._inside: Sources = frozenset()  # the layer that runs
        for parameter_name, parameter in whole.named_parameters():
            self._add(_storages(parameter), frozenset([parameter_name]))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Give what an operation returns the sources of all that it gets, or the layer that makes it."""
        result = func(*args, **(kwargs or {}))
        if not self._inside and torch._C._current_graph_task_id() != -1:
            raise BrokenChain("it takes a gradient itself, and a stage could take only its own layers' part")
        if not self._inside:
            self._add(_storages(result), self._of(args, kwargs))
        else:
            given = {storage._cdata for storage in _storages(args, kwargs)}
            self._add([each for each in _storages(result) if each._cdata not in given], self._inside)
        return result

    def _add(self, storages: list[Any], sources: Sources) -> None:
        for storage in storages if sources else ():
            _, before = self._sources.get(storage._cdata, (None, frozenset()))
            self._sources[storage._cdata] = StorageWeakRef(storage), before | sources  # type: ignore[no-untyped-call]

    def _of(self, *values: Any) -> Sources:
        """The sources of all tensors in `values`."""
        storages = (storage._cdata for storage in _storages(*values))
        return frozenset().union(*(self._sources[each][1] for each in storages if each in self._sources))

    def call(self, index: int, args: Any, kwargs: Any) -> Any:
        """Check the call of a layer, run the layer, and return outputs that have it as their source."""
        layer = f"{self.name}.{index}"
        if len(self.calls) == len(self.layers):
            raise BrokenChain(f"{layer} is called after the last one")
        if index != len(self.calls):
            raise BrokenChain(f"{layer} is called where {self.name}.{len(self.calls)} is next")
        arguments = dict(tensors_in((args, kwargs)))
        numbers = {id(tensor): number for number, tensor in enumerate(self._made)}
        came = {path: numbers[id(tensor)] for path, tensor in arguments.items() if id(tensor) in numbers}
        beside = self._of([tensor for path, tensor in arguments.items() if path not in came])
        earlier = [source for source in beside if isinstance(source, int)]
        if earlier or (index and not came):
            how = "computed from what" if earlier else "that does not come from what"
            raise BrokenChain(
                f"{layer} is called with something {how} {self.name}.{max([*earlier] or [index - 1])} gave"
            )
        received = {number: path for path, number in reversed(came.items())}
        if index:
            received = self._keep(received)
        self.calls.append(LayerCall(arguments, received, beside))
        self._inside = frozenset([index])
        try:
            return self._run(index, args, kwargs)
        finally:
            self._inside = frozenset()

    def _keep(self, received: dict[int, Path]) -> dict[int, Path]:
        """Renumber the tensors of the last layer that this one receives, and drop the others."""
        places = {number: place for place, number in enumerate(sorted(received))}
        kept = {number: Sent(place) for number, place in places.items()}
        last = self.calls[-1]
        last.output = mapped(lambda sent: kept.get(sent.number), last.output, Sent)
        return {place: received[number] for number, place in places.items()}

    def _run(self, index: int, args: Any, kwargs: Any) -> Any:
        """Run a layer. What it makes is copied (zeros on meta); what it returns of its arguments stays."""
        originals: dict[int, Tensor] = {}
        held = []

        def taken(x: Tensor) -> Tensor:
            held.append(x.detach().to("meta") if self._meta else x.detach().clone())
            originals[id(held[-1])] = x
            return held[-1]

        args, kwargs = mapped(taken, (args, kwargs))
        found = self.layers[index](*args, **kwargs)
        given = [tensor for _, tensor in tensors_in(found)]
        if not given:
            raise BrokenChain(f"{self.name}.{index} gives a {type(found).__name__} without tensors")
        now = self.calls[-1]
        beside = {id(x): path for path, x in now.arguments.items() if path not in now.received.values()}
        if all(id(originals.get(id(x))) in beside for x in given):
            del beside[id(originals[id(given[0])])]  # the layer's input, as it is or changed in place
        values, marks = dict[int, Tensor](), dict[int, Any]()
        self._made = []
        for x in dict.fromkeys(given):
            original = originals.get(id(x))
            made = torch.zeros(x.shape, dtype=x.dtype) if self._meta else x.detach().clone()
            values[id(x)] = made if original is None else original
            if id(original) in beside:
                marks[id(x)] = Argument(beside[id(original)])
            else:
                marks[id(x)] = Sent(len(self._made))
                self._made.append(values[id(x)])
                for storage in _storages(values[id(x)]):
                    self._sources[storage._cdata] = StorageWeakRef(storage), self._inside  # type: ignore[no-untyped-call]
        now.output = mapped(lambda x: marks[id(x)], found)
        return mapped(lambda x: values[id(x)], found)

    def result(self, outputs: Any) -> LayerTrace:
        """The trace of a finished run; BrokenChain if a layer was left out, or the last one is not used."""
        calls, last = self.calls, len(self.layers) - 1
        if len(calls) <= last:
            raise BrokenChain(f"{self.name}.{len(calls)} is not called")
        sources = self._of(outputs)
        layers = [source for source in sources if isinstance(source, int)]
        if layers != [last]:
            found = f"from what {self.name}.{min(layers)} gave" if layers else "without any layer"
            raise BrokenChain(f"its outputs are computed {found}, and not from {self.name}.{last} alone")
        # The first layer's input lies where the second one has what it receives.
        first, places = calls[0].arguments, [*calls[last and 1].received.values()]
        calls[0].beside = self._of([tensor for path, tensor in first.items() if path not in places])
        before = self._of([tensor for path, tensor in first.items() if path in places])
        for each in calls:
            each.arguments = {}
        return LayerTrace(self.name, calls, before, sources - {last}, [x.to("meta") for x in self.layers])
