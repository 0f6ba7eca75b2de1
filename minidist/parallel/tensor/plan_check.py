"""Compare a model before and after a plan cuts it, and refuse a plan that makes another model of it.

A plan cuts matrices, but what a model does between them is its own affair. If it reads a fused matrix of
queries, keys and values with `chunk(3)`, or takes a softmax over features that are cut, nothing fails: the
cut model just computes something else. So both models run once on a few rows. Their outputs have to be equal,
and so do the gradients of all parameters, up to half the digits of their type.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from minidist import comm
from minidist.comm.work import Group, rank_in, ranks_of
from minidist.parallel.contract.batch import call, mapped, rows_of, tensors
from minidist.parallel.contract.engine import Loss, unchanged
from minidist.parallel.tensor.column_parallel import ColumnParallelLinear
from minidist.parallel.tensor.cuts import cuts, send_whole
from minidist.parallel.tensor.parallelize import parallelize
from minidist.parallel.tensor.shares import share_of
from minidist.parallel.tensor.vocabulary import gather_logits, vocabulary_of

NOISE = 100
"""A gradient that is zero but for rounding, such as that of a key's bias, may differ by this many times the
last bit of the model's largest gradient."""
REMEDY = (
    "Between a 'column' layer and its 'row' layer each rank has only some of the features. Where it reads "
    "several matrices from one, as in chunk(3) or chunk(2), give 'column_packed=3' or 2. Where the model "
    "needs all of them, as for a softmax or a norm over features, give 'column_gathered' and 'row_split'. "
    "Where it counts heads, let it read their number from the features, as in unflatten(-1, (-1, "
    "head_size)), with head_size an attribute of the module"
)
Outputs = dict[str, list[Tensor]]
"""The results of all calls of each module, by name, in the order in which modules finish."""


def check_plan(
    model: nn.Module,
    plan: Mapping[str, str],
    inputs: Any,
    group: Group = None,
    sequence_parallel: bool = False,
    loss: Loss | None = None,
) -> bool:
    """Cut `model` in place, and raise ValueError if it then computes something else from `inputs`.

    A collective of all ranks of the world, which agree on the result. Pass a copy of the model: it runs in
    evaluation mode, forward and backward, whole and then cut. That takes memory for the whole model and its
    activations on each rank, and sends the model twice. The arguments are those of `parallelize`.

    inputs: a batch, the same on all ranks of `group`; a rank without rows only learns the result. loss: a
    function of the model and the batch that calls the model; None to call it with the batch. Returns whether
    any rank had rows.
    """
    model.eval()
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    names = [*modules, *map(_gradient, parameters)]
    far = dict.fromkeys(names, 0.0)  # relative differences
    count = rows_of(inputs)
    run = partial(_run, call if loss is None else loss)
    if count:
        on_gpu = [x.device for _, x in tensors(inputs) if x.is_cuda][:1]
        with torch.random.fork_rng(devices=on_gpu), torch.inference_mode(False), torch.enable_grad():
            send_whole(model, group)
            whole, gradients = run(model, inputs)
            parallelize(model, plan, group, sequence_parallel)
            own, own_gradients = run(model, inputs, group, cut=True)
        # Execution order from here on: the first difference is the cause of the others.
        far = dict.fromkeys(whole, 0.0) | far
        shares = (rank_in(group), len(ranks_of(group))) if sequence_parallel else None
        for name, outputs in whole.items():
            module = model.get_submodule(name)
            for x, y in zip(outputs, own.get(name, []), strict=False):
                x = _own_part(module, x, y, shares)
                if x.shape == y.shape:  # else a module on cut features: its successors show what it did
                    far[name] = max(far[name], _distance(x, y, _size(x)))
        boxes, largest = cuts(model), max(map(_size, gradients.values()), default=0.0)
        for name, x in gradients.items():
            size = max(_size(g) for other, g in gradients.items() if _owner(other) == _owner(name))
            if name in boxes:
                x = boxes[name].take(x)
            noise = NOISE * torch.finfo(x.dtype).eps * largest
            far[_gradient(name)] = _distance(x, own_gradients[name], size, noise)
    sent = torch.tensor([*(far[name] for name in names), float(count)], dtype=torch.float64)
    *agreed, rows = comm.all_reduce(sent.to(comm.device()), "max").tolist()
    far |= dict(zip(names, agreed, strict=True))
    _refuse(far, parameters, math.sqrt(max(torch.finfo(p.dtype).eps for p in model.parameters())))
    return bool(rows)


def _run(
    forward: Callable[..., Any], model: nn.Module, inputs: Any, group: Group = None, cut: bool = False
) -> tuple[Outputs, dict[str, Tensor]]:
    """The outputs of all modules, and the gradients of parameters for random gradients of the results."""
    outputs: Outputs = defaultdict(list)
    running: list[str] = []

    def begin(name: str, *_: Any) -> None:
        running.append(name)

    def end(name: str, module: nn.Module, _: Any, output: Any) -> None:
        running.pop()
        outputs[name] += [x.detach().clone() for x in _tensors(output)]

    handles = [part.register_forward_pre_hook(partial(begin, name)) for name, part in model.named_modules()]
    handles += [part.register_forward_hook(partial(end, name)) for name, part in model.named_modules()]
    torch.manual_seed(0)
    try:
        with unchanged(model, forward):
            results = [*_tensors(forward(model, mapped(Tensor.clone, inputs)))]
    except Exception as error:
        if not cut or isinstance(error, comm.CollectiveError):
            raise
        where = running[-1] if running else ""
        raise ValueError(
            f"{where or 'the model'} fails once the plan has cut the model: {error}. {REMEDY}"
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if (vocabulary := vocabulary_of(model)) is not None:
        results = [gather_logits(x, group, vocabulary) for x in results]
        outputs[""] = [x.detach() for x in results]
    generator = torch.Generator().manual_seed(0)
    total = sum((x * torch.randn(x.shape, generator=generator).to(x)).mean() for x in results)
    if isinstance(total, Tensor) and total.requires_grad:
        total.backward()  # type: ignore[no-untyped-call]
    gradients = {}
    for name, parameter in model.named_parameters():
        gradients[name] = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = None
    return outputs, gradients


def _tensors(output: Any) -> Iterator[Tensor]:
    """The floating-point tensors in what a module returned."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping | list | tuple):
        for each in output.values() if isinstance(output, Mapping) else output:
            yield from _tensors(each)


def _own_part(module: nn.Module, whole: Tensor, own: Tensor, shares: tuple[int, int] | None) -> Tensor:
    """A rank's result where one process has `whole`: its features, or its share of the tokens.

    shares: the rank and the number of ranks that share the tokens; None without sequence parallelism.
    """
    if whole.shape == own.shape:
        return whole
    if isinstance(module, ColumnParallelLinear):
        packed = whole.chunk(module.packed, dim=-1)
        return torch.cat([x[..., module.own.start : module.own.stop] for x in packed], dim=-1)
    if shares is not None and whole.dim() > 1:
        tokens = share_of(whole.shape[-2], *shares)
        return whole[..., tokens.start : tokens.stop, :]
    return whole


def _distance(whole: Tensor, own: Tensor, size: float, noise: float = 0.0) -> float:
    """The largest difference of elements beyond noise, over `size`; equal infinities and NaNs are equal."""
    apart = torch.where((whole == own) | (whole.isnan() & own.isnan()), 0.0, (whole - own).abs().double())
    most = float(apart.nan_to_num(nan=math.inf).max()) if apart.numel() else 0.0
    return 0.0 if most <= noise else most / size if size else math.inf


def _size(x: Tensor) -> float:
    return float(x.abs().nan_to_num(0, 0).max()) if x.numel() else 0.0


def _gradient(parameter: str) -> str:
    return f"the gradient of {parameter}"


def _owner(parameter: str) -> str:
    return parameter.rpartition(".")[0]


def _refuse(far: Mapping[str, float], parameters: list[str], most: float) -> None:
    """Raise ValueError if the model's outputs or gradients differ; `far` is in the order of execution."""
    gradients = {_gradient(name): _owner(name) for name in parameters}
    if all(far[name] <= most for name in ["", *gradients]):
        return
    order = [*far]
    names = [name for name in order if name and name not in gradients]
    names += [""]
    names += sorted(gradients, key=lambda name: order.index(gradients[name]), reverse=True)
    first = next(name for name in names if far[name] > most)
    what = first if first in gradients else f"the output of {first or 'the model'}"
    raise ValueError(
        f"the plan makes another model: {what} differs by {far[first]:.2g} of its size from that of the "
        f"uncut model, and it is the first that differs. {REMEDY}"
    )
