"""Make the steps of two layouts comparable: without random numbers, and with what rounding changes.

Two layouts add the same numbers in another order, so they never agree to the last bit. How far they differ
depends on the model: a sum that cancels magnifies errors in its terms. So the effect is measured:
`moved_results` moves the last bit of every module's results at random.

Dropout and noise depend on which rank draws them. Inside `RandomOff` torch draws no random numbers: dropout
keeps every element, uniform numbers are 0.5, and normal ones equal their mean.

Source: Parker 1997, "Monte Carlo Arithmetic: exploiting randomness in floating-point arithmetic", section 2.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

MARGIN = 16
"""Rounding explains this many times the change that moving the last bits causes. Layouts that train alike
differ by up to four times that change: a sum in another order rounds many times while a result is moved once,
and a few random trials need not contain the worst. A wrong gradient differs by thousands of times, except in
16 bits."""


@contextmanager
def forward_hooks(modules: Iterable[tuple[str, nn.Module]], after: Callable[..., Any]) -> Iterator[None]:
    """Inside, call `after` with the name of each module, and what a forward hook gets."""
    handles = [module.register_forward_hook(partial(after, name)) for name, module in modules]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def last_bit(x: Tensor) -> float:
    """The last bit that a product of this type keeps: 10 bits of a float32 where a GPU may use TF32."""
    by_tf32 = torch.backends.cuda.matmul.allow_tf32 or torch.backends.cudnn.allow_tf32
    if x.is_cuda and x.dtype == torch.float32 and by_tf32:
        return 2.0**-10
    return torch.finfo(x.dtype).eps


def move(name: str, x: Tensor, trial: int, least: float = 0.0) -> Tensor:
    """Move the last bit of a tensor's elements at random, or as much as `least` times the elements."""
    # The same in every call: recomputed activations have to be the same, and so do copies on other ranks.
    seed = zlib.crc32(f"{name} {trial}".encode())
    noise = torch.as_tensor(np.random.default_rng(seed).uniform(-1.0, 1.0, x.shape))
    return torch.addcmul(x, x, noise.mul_(max(least, last_bit(x))).to(x))


def moved_results(model: nn.Module, trial: int, least: float = 0.0) -> AbstractContextManager[None]:
    """Inside, move the last bit of the results of all modules without children, forward and backward.

    least: the least to move by, where the model computes in a less precise type than it returns.
    """

    def after(name: str, module: nn.Module, inputs: Any, output: Any) -> Any:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        result = move(name, output, trial, least)
        if result.requires_grad:
            result.register_hook(lambda grad: move(f"{name} backward", grad, trial, least))  # type: ignore[no-untyped-call]
        return result

    parts = [(name, part) for name, part in model.named_modules() if not [*part.children()]]
    return forward_hooks(parts, after)


def apart(x: Tensor, y: Tensor) -> float:
    """The largest difference of elements; NaN equals NaN, and is infinitely far from any number.

    Tensors of different shapes are infinitely far apart, too.
    """
    if x.shape != y.shape:
        return math.inf
    if not x.is_floating_point() or x.dtype != y.dtype:
        kind = torch.complex128 if x.is_complex() or y.is_complex() else torch.float64
        x, y = x.to(kind), y.to(kind)
    differences = (x - y).abs()
    most = float(differences.max()) if differences.numel() else 0.0
    if math.isfinite(most):
        return most
    same = (x == y) | (x.isnan() & y.isnan())
    return float(differences.masked_fill(same, 0.0).nan_to_num(math.inf, math.inf).max())


def magnitude(*tensors: Tensor) -> float:
    """The largest magnitude of a finite element; 0 without one."""
    sizes = [0.0]
    for x in (x for x in tensors if x.numel()):
        x = x.abs() if x.is_floating_point() or x.is_complex() else x.double().abs()
        size = float(x.max())
        sizes.append(size if math.isfinite(size) else float(x.nan_to_num(0, 0).max()))
    return max(sizes)


_kinds: dict[Any, str] = {}
"""Whether an operation of torch "draws" random numbers, or "sends" something; "" for all others."""


class RandomOff(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Replaces random numbers by constants.

    alone: whether other ranks do not take part, so that no call may wait for them. others: tensors that no
        operation may read.

    Attributes:
        used: whether there were any.
        cannot: an operation whose numbers no constant can replace, if there was one; it has drawn them.
    """

    def __init__(self, alone: bool = False, others: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.used, self.cannot, self._alone, self._dtypes = False, "", alone, set[torch.dtype]()
        self._others = {id(x): x for x in others}

    @property
    def last_bit(self) -> float:
        """The last bit of the least precise floating type that a result had; 8 bits have none."""
        return max(
            (torch.finfo(x).eps for x in self._dtypes if x.is_floating_point and x.itemsize > 1), default=0.0
        )

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch, without its random numbers."""
        kwargs = kwargs or {}
        if function not in _kinds:
            draws, sends = torch.Tag.nondeterministic_seeded in function.tags, function.namespace == "c10d"
            _kinds[function] = "draws" if draws else "sends" if sends else ""
        if self._others and not self._others.keys().isdisjoint(map(id, args)):
            raise RuntimeError(
                "the loss reads the parameters of the engine's model, and not of the given one"
            )
        if _kinds[function] == "sends" and self._alone:
            raise RuntimeError("it calls torch.distributed itself, where one process would wait for ever")
        if _kinds[function] != "draws":
            found = function(*args, **kwargs)
            if isinstance(found, Tensor):
                self._dtypes.add(found.dtype)
            return found
        name = function._schema.name.removeprefix("aten::")
        if "attention" in name:
            given = {arg.name: value for arg, value in zip(function._schema.arguments, args, strict=False)}
            given |= kwargs
            self.used |= bool(given.get("dropout_p"))
            return function(**{**given, **({"dropout_p": 0.0} if "dropout_p" in given else {})})
        self.used = True
        if name == "native_dropout":
            return args[0].clone(), torch.ones_like(args[0], dtype=torch.bool)
        if name not in CONSTANTS:
            self.cannot = f"torch's {name}"
            return function(*args, **kwargs)
        gpus = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        with torch.random.fork_rng(devices=gpus):  # it draws, for the shape and the type of its result
            drawn: Tensor = function(*args, **{k: value for k, value in kwargs.items() if k != "generator"})
        value = CONSTANTS[name]
        return drawn.copy_(torch.as_tensor(value(*args) if callable(value) else value))


def _low(*limits: Any) -> Any:
    """The least of the integers that randint or random_ would draw from."""
    return limits[0] if len(limits) > 1 and limits[1] is not None else 0


CONSTANTS: dict[str, float | Callable[..., Any]] = {
    **dict.fromkeys(("rand", "rand_like", "_sample_dirichlet"), 0.5),
    **dict.fromkeys(("randn", "randn_like", "cauchy_"), 0.0),
    **dict.fromkeys(("bernoulli", "bernoulli_", "exponential_", "log_normal_", "geometric_"), 1.0),
    **dict.fromkeys(("poisson", "_standard_gamma"), 1.0),
    "uniform_": lambda _, low=0.0, high=1.0: (low + high) / 2,
    "normal_": lambda _, mean=0.0, *__: mean,
    "normal": lambda mean, *_: mean,
    "random_": lambda _, *limits: _low(*limits),
    "randint": lambda *limits: _low(*limits[:-1]),  # the last is the size
    "randint_like": lambda _, *limits: _low(*limits),
    "randperm": torch.arange,
    "multinomial": lambda p, count, *_: p.topk(count).indices,
}
"""By name of the operation: the value of all that it draws, or from its arguments to that."""
