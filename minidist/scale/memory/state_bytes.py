"""Bytes of parameters, gradients and optimizer state on a rank: the ZeRO paper's, and minidist's.

With Adam in fp32 a parameter takes 4 bytes, its gradient 4 and the optimizer 8. In bf16 and fp16 they take 2,
2 and 12: a float32 copy and Adam's 8. Of n data-parallel ranks each keeps 1/n of the optimizer state in stage
1, of the gradients as well in stage 2, and of the parameters as well in stage 3. With hybrid sharding n is
the layout's `shard`: so many ranks share one copy of the state.

minidist holds a little more than these formulas say:

- Adam's step takes 4 bytes per tensor that it updates: a parameter in stage 0, a bucket in stages 1 and 2,
  one tensor of all shares in stage 3.
- Stage 0 on several ranks, not in half precision: the last bucket has 2 + one number per parameter.
- Stages 1 and 2 pad each bucket of 25 MB to a multiple of n elements.
- Stage 2 holds gradients in two buckets until they are sent.
- Stage 3 pads each unit (a layer, or the tied matrix) to a multiple of n. It sums gradients in the precision
  of the update, and two buffers as long as the largest unit hold them until they are sent. With secondary
  shares on k ranks, a rank has another 1/k of the padded parameters.

Sources: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
sections 3.1 and 5, and figure 1; Wang et al. 2023, "ZeRO++", section 3.2 (secondary shares).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from minidist.model.configs import TransformerConfig
from minidist.scale.memory import parameter_sizes

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Per element of parameters and activations."""
OPTIMIZERS = {"adam": 2, "momentum": 1, "sgd": 0}
"""Tensors of the parameter's shape in the optimizer's state; AdamW has as many as Adam."""
BUCKET = 25 * 2**20
TAIL = 2
"""Numbers sent with the gradients besides one per parameter: rows and loss."""


@dataclass(frozen=True)
class States:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    # Temporary, during passes in stage 3: parameters of the root and of two units, since the next one is
    # gathered ahead, and the gradients of one unit.
    gathered: int = 0
    # Temporary, during the update: gradients cast to the masters' precision, and Adam's denominators, which
    # torch computes for all parameters at once on a GPU.
    update: int = 0


def by_formula(
    parameters: int, ranks: int, zero: int, precision: str, optimizer: str, secondary: int = 0
) -> States:
    """The ZeRO paper's formulas, for a number of parameters, and ZeRO++'s for secondary shares."""
    element, _, each = _bytes(precision, optimizer)
    own = parameter_sizes.share(parameters, ranks)
    more = parameter_sizes.share(parameters, secondary) if secondary else 0
    return States(
        ((own if zero > 2 else parameters) + more) * element,
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
    part: parameter_sizes.ModelPart = parameter_sizes.ALONE,
    secondary: int = 0,
) -> States:
    """Return the states that minidist's strategies hold on a rank with one `part` of the model.

    `ranks` counts those that share one copy of the states (`Layout.owners`); in stage 0 those that sum
    gradients. `secondary` counts the ranks that share a second copy of stage 3's parameters; 0 for none.
    """
    sizes = [size for layer in parameter_sizes.layers(config, part) for size in layer]
    units = parameter_sizes.units(config, part)
    return held_for(sizes, units, ranks, zero, precision, optimizer, secondary)


def held_for(
    sizes: Sequence[int],
    units: Sequence[int],
    ranks: int,
    zero: int,
    precision: str,
    optimizer: str,
    secondary: int = 0,
) -> States:
    """Do the same for parameters of these `sizes`, and for stage 3's `units`, the root's elements first."""
    element, updated, each = _bytes(precision, optimizer)
    adam = optimizer == "adam"
    temporary = updated * (adam + (updated != element and zero < 3))  # per updated element
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
    own, longest = _shares(units, ranks)
    gathered = (units[0] + sum(sorted(units[1:])[-2:]) + longest) * element
    gradients = own * updated + 2 * longest * element
    kept = own + (own * ranks // secondary if secondary else 0)
    return States(kept * element, gradients, own * each + 4 * adam, gathered, own * temporary)


def cut(sizes: Iterable[int], limit: int) -> list[int]:
    """Elements of each bucket, for tensors in this order: at most `limit`, or a single larger tensor."""
    buckets: list[int] = []
    for size in sizes:
        if buckets and buckets[-1] + size <= limit:
            buckets[-1] += size
        else:
            buckets.append(size)
    return buckets


def _shares(parts: Iterable[int], ranks: int) -> tuple[int, int]:
    """Elements of a rank's shares of all parts, and of the longest part including padding."""
    shares = [parameter_sizes.share(part, ranks) for part in parts]
    return sum(shares), max(shares, default=0) * ranks


def _bytes(precision: str, optimizer: str) -> tuple[int, int, int]:
    """Bytes per element: in the model, in the update, and in the optimizer's state."""
    element = BYTES[precision]
    updated = max(element, 4)
    return element, updated, updated * OPTIMIZERS[optimizer] + (updated if updated != element else 0)
