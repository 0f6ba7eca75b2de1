"""Bytes of the training state on a rank: by the ZeRO paper's formulas, and as minidist's strategies hold it.

With Adam a parameter takes in fp32 4 bytes, its gradient 4, the optimizer 8; in bf16 and fp16 2 and 2, and
the optimizer 12: a copy in float32 and its own 8. Of n data-parallel ranks each keeps an n-th of the
optimizer's part in stage 1, of the gradients too in stage 2, of the parameters too in stage 3.

What minidist holds beside that, which for a large model is little:

- Adam's step, 4 bytes for each tensor that it updates: parameters in stage 0, a bucket's or all shares else;
- stage 0 on several ranks: in the last bucket two numbers and one for each parameter, where it is no half;
- stages 1 and 2: each bucket of 25 MB is padded to a multiple of n elements;
- stage 2: the memory of two buckets, in which gradients lie until they are sent;
- stage 3: each unit (a layer; a tied matrix) is padded likewise; gradients are summed in the precision of the
  update, and two buffers as long as the largest unit hold them until they are sent.

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
sections 3.1 and 5, and figure 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from minidist.model.configs import TransformerConfig
from minidist.parallel.flat.buckets import MB
from minidist.scale.memory import parameter_sizes

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Of an element of the parameters and activations."""
OPTIMIZERS = {"adam": 2, "momentum": 1, "sgd": 0}
"""Tensors of a parameter's shape in the optimizer's state. AdamW is as Adam."""
BUCKET = 25 * MB
TAIL = 2
"""Numbers that travel with the gradients beside one a parameter: rows and loss."""


@dataclass(frozen=True)
class States:
    """Bytes on one rank.

    gathered: beside these in stage 3, while it computes: the root's parameters, those of two more units, as
        where the next is gathered ahead, and the gradients of one.
    update: beside these while the optimizer steps: gradients cast to the masters' precision, and Adam's
        denominators, which torch makes for all parameters at once on a GPU.
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int = 0
    update: int = 0


def by_formula(parameters: int, ranks: int, zero: int, precision: str, optimizer: str) -> States:
    """The ZeRO paper's, for a number of parameters."""
    element, _, each = _bytes(precision, optimizer)
    own = parameter_sizes.share(parameters, ranks)
    return States(
        (own if zero > 2 else parameters) * element,
        (own if zero > 1 else parameters) * element,
        (own if zero > 0 else parameters) * each,
    )


@lru_cache(maxsize=4096)
def held(
    config: TransformerConfig,
    ranks: int,
    zero: int,
    precision: str,
    optimizer: str,
    place: parameter_sizes.ModelPart = parameter_sizes.ALONE,
) -> States:
    """What minidist's strategies hold, on a rank at one place of the model.

    ranks: that share the gradients and, by ZeRO's `zero`, the states: those of dp and cp.
    """
    element, updated, each = _bytes(precision, optimizer)
    adam = optimizer == "adam"
    layers = parameter_sizes.layers(config, place)
    sizes = [size for layer in layers for size in layer]
    temporary = updated * (adam + (updated != element and zero < 3))  # for an element that is updated
    if not zero:
        elements, count = sum(sizes), len(sizes)
        tail = (count + TAIL) * element if ranks > 1 and element >= 4 else 0
        state = elements * each + 4 * count * adam
        return States(elements * element, elements * element + tail, state, 0, elements * temporary)
    if zero < 3:
        buckets = cut(reversed(sizes), BUCKET // element)
        own, longest = _shares(buckets, ranks)
        lent = min(2, len(buckets)) * longest if zero == 2 else 0
        gradients = (own + lent if zero == 2 else own * ranks) * element
        state = own * each + 4 * len(buckets) * adam
        return States(own * ranks * element, gradients, state, 0, own * temporary)
    units = parameter_sizes.units(config, place)
    own, longest = _shares(units, ranks)
    gathered = (units[0] + sum(sorted(units[1:])[-2:]) + longest) * element
    gradients = own * updated + 2 * longest * element
    return States(own * element, gradients, own * each + 4 * adam, gathered, own * temporary)


def cut(sizes: Iterable[int], limit: int) -> list[int]:
    """Elements of each bucket where tensors come in this order: at most `limit`, or one tensor's."""
    buckets: list[int] = []
    for size in sizes:
        if buckets and buckets[-1] + size <= limit:
            buckets[-1] += size
        else:
            buckets.append(size)
    return buckets


def _shares(parts: Iterable[int], ranks: int) -> tuple[int, int]:
    """Elements of a rank's shares of all parts, and of the longest part with its padding."""
    shares = [parameter_sizes.share(part, ranks) for part in parts]
    return sum(shares), max(shares, default=0) * ranks


def _bytes(precision: str, optimizer: str) -> tuple[int, int, int]:
    """Of a parameter's element: as the model has it, as it is updated, and what the optimizer has for it."""
    element = BYTES[precision]
    updated = max(element, 4)
    return element, updated, updated * OPTIMIZERS[optimizer] + (updated if updated != element else 0)
