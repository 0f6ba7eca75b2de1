"""Seeding by name: every parameter has its own generator, seeded by a hash of (seed, full name).

So a weight depends only on the seed and its own name and shape: not on the rank, on how the model is cut into
stages, on the order in which layers are built, or on the global random state, which is neither read nor
changed. Values are drawn in float64 on the CPU and rounded once, so models of any dtype and device start
alike. Random numbers in a pass, such as those of dropout, follow from a seed and a stream: `random_state_of`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Module = TypeVar("Module", bound=nn.Module)


def stable_hash(*parts: object) -> int:
    """Return 63 bits from the text of `parts`, the same in every process and machine, unlike hash()."""
    text = "\0".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(*parts: object) -> torch.Generator:
    """Return a CPU generator seeded by `parts`, such as (seed, "epoch", 3). It keeps 32 bits of the hash."""
    return torch.Generator(device="cpu").manual_seed(stable_hash(*parts))


@contextmanager
def random_state_of(stream: int, seed: int | None = None) -> Iterator[None]:
    """Inside, torch's random numbers follow from `stream` and the seed; None for one drawn from the state.

    Ranks usually start with the same state, and would drop the same units everywhere. So the engine gives a
    stream to each pipeline stage and to each share of the batch and of the sequence.
    """
    seed = stable_hash(int(torch.randint(2**62, ())) if seed is None else seed, stream)
    on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=[torch.cuda.current_device()] if on_gpu else []):
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.manual_seed(seed)
        yield


class _Undrawn(TorchFunctionMode):
    """Inside it, functions of torch.nn.init draw no values: `fill` would overwrite them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", "") == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return func(*args, **kwargs)


def undrawn(build: Callable[[], Module], dtype: torch.dtype | None, device: Any) -> Module:
    """Build a module without tied parameters, in half the time: `fill` draws its values. Buffers are zero.

    dtype, device: torch's defaults for None.
    """
    with torch.device("meta"), _Undrawn():
        module = build()
    for part in module.modules():
        for name, drawn in part.named_parameters(recurse=False):
            part._parameters[name] = nn.Parameter(torch.empty(drawn.shape, dtype=dtype, device=device))
        for name, buffer in part.named_buffers(recurse=False):
            part._buffers[name] = torch.zeros(buffer.shape, dtype=dtype, device=device)
    return module


@torch.no_grad()
def fill(
    parameters: Iterable[tuple[str, Tensor]], deviation: Callable[[str, Tensor], float], *, seed: int
) -> None:
    """Give each parameter its first value, in place: (full name, parameter) pairs, of any dtype and device.

    Matrices are drawn from N(0, deviation(name, parameter)^2). A vector named weight is the scale of a norm
    and becomes one; any other vector is a bias and becomes zero. Parameters on the meta device are skipped.
    """
    for name, parameter in parameters:
        if parameter.is_meta:
            continue
        if parameter.dim() == 1:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
            continue
        drawn = torch.empty(parameter.shape, dtype=torch.float64, device="cpu")
        parameter.copy_(drawn.normal_(0.0, deviation(name, parameter), generator=generator(seed, name)))


def own_parameters(model: nn.Module, part: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a submodule's own parameters and buffers, by their names in the whole model."""
    name = next(name for name, each in model.named_modules() if each is part)
    for attribute, parameter in (*part.named_parameters(recurse=False), *part.named_buffers(recurse=False)):
        yield f"{name}.{attribute}" if name else attribute, parameter
