"""Bytes of parameters, gradients and optimizer state on a rank: the ZeRO paper's, and minidist's.

With Adam in fp32 a parameter takes 4 bytes, its gradient 4 and the optimizer 8. In bf16 and fp16 they take 2,
2 and 12: a float32 copy and Adam's 8. A `Residency` says which of them every rank keeps whole; of the rest
each of n data-parallel ranks keeps 1/n. With hybrid sharding n is the layout's `shard`: so many ranks share
one copy of the state.

minidist holds a little more than these formulas say:

- Adam's step takes 4 bytes per tensor that it updates: a parameter where the state is whole, a bucket where
  it is shared, one tensor of all shares where the parameters are shared too.
- Whole state on several ranks, not in half precision: the last bucket has 2 + one number per parameter.
- Shares of buckets: each bucket of 25 MB is padded to a multiple of n elements.
- Shares of gradients: two buckets hold whole gradients until they are sent.
- Shares of parameters: each unit (a layer, or the tied matrix) is padded to a multiple of n. Gradients are
  summed in the precision of the update, and two buffers as long as the largest unit hold them until they are
  sent. With a second copy on k ranks, a rank has another 1/k of the padded parameters.

Sources: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
sections 3.1 and 5, and figure 1; Wang et al. 2023, "ZeRO++", section 3.2 (the second copy).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import starmap

from minidist.model.configs import TransformerConfig
from minidist.parallel.contract.residency import Residency
from minidist.scale.memory.parameter_sizes import ModelPart, RankParameters, on_rank, share

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
"""Per element of parameters and activations."""
OPTIMIZERS = {"adam": 2, "momentum": 1, "sgd": 0}
"""Tensors of the parameter's shape in the optimizer's state; AdamW has as many as Adam."""
TAIL = 2
"""Numbers sent with the gradients besides one per parameter: rows and loss."""


@dataclass(frozen=True)
class StateSharing:
    """How data-parallel ranks keep the state of a model: who holds what, and how wide an element is."""

    residency: Residency
    ranks: int  # that share one copy; where every rank has the whole state, those that sum gradients
    precision: str
    optimizer: str
    secondary: int = 0  # ranks that share a second copy of the parameters; 0 for no such copy

    @property
    def element(self) -> int:
        """Bytes of an element that the model computes with."""
        return BYTES[self.precision]

    @property
    def updated(self) -> int:
        """Bytes of an element that the optimizer updates: a float32 master in half precision."""
        return max(self.element, 4)

    @property
    def state(self) -> int:
        """Bytes of optimizer state for each parameter, masters included."""
        masters = self.updated if self.updated != self.element else 0
        return self.updated * OPTIMIZERS[self.optimizer] + masters


@dataclass(frozen=True)
class States:
    """Bytes on one rank."""

    parameters: int
    gradients: int
    optimizer: int
    # Temporary, during passes over shared parameters: those of the root and of two units, since the next one
    # is gathered ahead, and the gradients of one unit.
    gathered: int = 0
    # Temporary, during the update: gradients cast to the masters' precision, and Adam's denominators, which
    # torch computes for all parameters at once on a GPU.
    update: int = 0

    def __add__(self, other: States) -> States:
        return States(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def by_formula(parameters: int, sharing: StateSharing) -> States:
    """The ZeRO paper's formulas, for a number of parameters, and ZeRO++'s for a second copy."""
    second = share(parameters, sharing.secondary) if sharing.secondary else 0
    kept, gradients, state = sharing.residency.held(parameters, share(parameters, sharing.ranks))
    return States((kept + second) * sharing.element, gradients * sharing.element, state * sharing.state)


@lru_cache(maxsize=4096)
def held(config: TransformerConfig, part: ModelPart, sharings: Sequence[StateSharing]) -> States:
    """The states that minidist's strategies hold on a rank with one `part` of a transformer.

    sharings: how ranks keep each set of its parameters.
    """
    sets = zip(on_rank(config, part).sets, sharings, strict=True)
    return sum(starmap(held_for, sets), States(0, 0, 0))


def held_for(parameters: RankParameters, sharing: StateSharing) -> States:
    """The states that minidist's strategies hold on a rank with these parameters."""
    residency, element, updated, ranks = sharing.residency, sharing.element, sharing.updated, sharing.ranks
    pieces = parameters.buckets(element) if residency.parameters else parameters.units
    if residency.state:
        pieces, ranks = parameters.sizes, 1
    own, longest = _shares(pieces, ranks)
    kept, gradients, state = residency.held(own * ranks, own)
    adam = sharing.optimizer == "adam"
    tensors = len(pieces) if residency.parameters else 1  # that an update goes through
    optimizer = state * sharing.state + 4 * tensors * adam
    casts = residency.parameters and updated != element  # else gradients are summed in that precision
    update = own * updated * (adam + casts)
    if not residency.parameters:
        second = own * ranks // sharing.secondary if sharing.secondary else 0
        gathered = (pieces[0] + sum(sorted(pieces[1:])[-2:]) + longest) * element
        sums = gradients * updated + 2 * longest * element
        return States((kept + second) * element, sums, optimizer, gathered, update)
    extra = 0
    if not residency.gradients:
        extra = min(2, len(pieces)) * longest
    elif residency.state and sharing.ranks > 1 and element >= 4:
        extra = len(pieces) + TAIL
    return States(kept * element, (gradients + extra) * element, optimizer, 0, update)


def _shares(pieces: Iterable[int], ranks: int) -> tuple[int, int]:
    """Elements of a rank's shares of all pieces, and of the longest piece including padding."""
    shares = [share(piece, ranks) for piece in pieces]
    return sum(shares), max(shares, default=0) * ranks
