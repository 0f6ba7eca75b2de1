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
- Muon keeps one tensor of a hidden matrix's shape instead of Adam's two, on the matrix's owner. Shares of
  buckets are padded to whole matrices. Where parameters are shared, the owner has a copy of the matrix and of
  its gradient.
- Shares of parameters: each unit (a layer, or the tied matrix) is padded to a multiple of n. Gradients are
  summed in the precision of the update, and two buffers as long as the largest unit hold them until they are
  sent. With a second copy on k ranks, a rank has another 1/k of the padded parameters.

Sources: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
sections 3.1 and 5, and figure 1; Wang et al. 2023, "ZeRO++", section 3.2 (the second copy).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache, reduce
from itertools import starmap
from operator import add

from minidist.model.configs import TransformerConfig
from minidist.parallel.contract.fp8_recipes import FP8_RECIPES
from minidist.parallel.contract.residency import Residency
from minidist.scale.memory.parameter_sizes import ModelPart, RankParameters, fullest, on_rank, share

BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, **dict.fromkeys(FP8_RECIPES, 4)}
"""Per element of parameters and activations. FP8 is emulated: its numbers stay in float32."""


@dataclass(frozen=True)
class OptimizerKind:
    """What the models of memory and time know of an optimizer."""

    state: int  # tensors of the parameter's shape in its state
    passes: int  # tensors that its update reads and writes per parameter, as torch runs it on CPUs
    says: str  # how the prediction counts the update
    fused: int = 99  # passes in one kernel, as on GPUs with `fused=True`
    scratch: bool = False  # whether its step makes a tensor of the parameter's shape
    matrices: int = 0  # tensors in the state of a hidden matrix, which it updates whole; 0 for no difference


ADAM = OptimizerKind(
    # Decay 2, first moment 3, second moment 2 + 3, root 2, division 2, epsilon 2, update 4; fused it reads
    # four tensors and writes three.
    *(2, 20, "Adam's, operator by operator as torch runs it: 20 passes over its elements"),
    fused=7,
    scratch=True,
)
OPTIMIZERS = {
    "adam": ADAM,
    "muon": replace(
        ADAM,
        fused=99,
        matrices=1,
        says="Muon's for hidden matrices, on their owners: 11 passes, and five iterations, on GPUs in bf16; "
        "AdamW's, operator by operator, for the rest",
    ),
    "momentum": OptimizerKind(1, 5, "SGD's with momentum: 5 passes over its elements"),
    "sgd": OptimizerKind(0, 3, "SGD's: 3 passes over its elements"),
}
"""By name. AdamW is Adam."""
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
        return self.state_of(self.kind.state)

    def state_of(self, tensors: int) -> int:
        """Bytes for so many tensors of a parameter's shape, and its master if it has one."""
        return self.updated * (tensors + (self.updated != self.element))

    @property
    def kind(self) -> OptimizerKind:
        """The optimizer's record."""
        return OPTIMIZERS[self.optimizer]

    @property
    def owners(self) -> int:
        """How many ranks own whole hidden matrices; 0 where the optimizer, or the residency, knows none."""
        return self.ranks if self.kind.matrices and not self.residency.whole_state else 0


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

    @cached_property
    def held(self) -> int:
        """Bytes of all that is there between steps."""
        return self.parameters + self.gradients + self.optimizer


def by_formula(parameters: int, sharing: StateSharing) -> States:
    """The ZeRO paper's formulas, for a number of parameters, and ZeRO++'s for a second copy."""
    second = share(parameters, sharing.secondary) if sharing.secondary else 0
    kept, gradients, state = sharing.residency.held(parameters, share(parameters, sharing.ranks))
    return States((kept + second) * sharing.element, gradients * sharing.element, state * sharing.state)


@lru_cache(maxsize=4096)
def stage_states(
    config: TransformerConfig, part: ModelPart, sharings: Sequence[StateSharing]
) -> list[States]:
    """The states that minidist's strategies hold on a rank of each stage, cut as `part` says.

    sharings: how ranks keep each set of its parameters.
    """
    stages = (on_rank(config, replace(part, stage=stage)) for stage in range(part.pp))
    sets = (zip(own.sets, sharings, strict=True) for own in stages)
    return [reduce(add, starmap(held_for, own)) for own in sets]


def held_for(parameters: RankParameters, sharing: StateSharing) -> States:
    """The states that minidist's strategies hold on a rank with these parameters."""
    residency, element, updated, ranks = sharing.residency, sharing.element, sharing.updated, sharing.ranks
    pieces = parameters.buckets(element, sharing.owners) if residency.whole_parameters else parameters.units
    if residency.whole_state:
        pieces, ranks = parameters.sizes, 1
    own, longest = _shares(pieces, ranks)
    kept, gradients, state = residency.held(own * ranks, own)
    tensors = len(pieces) if residency.whole_parameters else 1  # that an update goes through
    optimizer = state * sharing.state + 4 * tensors * (sharing.kind.state == 2)
    casts = residency.whole_parameters and updated != element  # else gradients are summed in that precision
    update = own * updated * (sharing.kind.scratch + casts)
    whole = 0  # elements of hidden matrices that this rank owns, besides its shards of them
    if sharing.kind.matrices:
        matrices = [each.elements for each in parameters.hidden]
        shards, owned = sum(matrices), sum(matrices)
        if sharing.owners:
            padded = sum(pieces) - sum(parameters.sizes) if residency.whole_parameters else 0
            shards = share(shards + padded, ranks)
            owned = int(fullest(matrices, ranks))
        optimizer += owned * sharing.state_of(sharing.kind.matrices) - shards * sharing.state
        optimizer -= 4 * len(matrices) * residency.whole_state  # AdamW's counts of steps
        whole = 0 if residency.whole_parameters else owned
    if not residency.whole_parameters:
        second = own * ranks // sharing.secondary if sharing.secondary else 0
        gathered = (pieces[0] + sum(sorted(pieces[1:])[-2:]) + longest) * element
        sums = gradients * updated + 2 * longest * element
        return States((kept + second + whole) * element, sums + whole * updated, optimizer, gathered, update)
    extra = 0
    if not residency.whole_gradients:
        extra = min(2, len(pieces)) * longest
    elif residency.whole_state and sharing.ranks > 1 and element >= 4:
        extra = len(pieces) + TAIL
    return States(kept * element, (gradients + extra) * element, optimizer, 0, update)


def _shares(pieces: Iterable[int], ranks: int) -> tuple[int, int]:
    """Elements of a rank's shares of all pieces, and of the longest piece including padding."""
    shares = [share(piece, ranks) for piece in pieces]
    return sum(shares), max(shares, default=0) * ranks
