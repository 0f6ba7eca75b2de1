"""Elements of each parameter that a rank holds, layer by layer.

A pipeline divides the chain of layers among the ranks; tensor parallelism divides the matrices of each layer.

Source: Shoeybi et al. 2019, "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism", section 3. Queries, keys, values and the MLP's first matrix are cut by columns, with their
biases; the two projections onto the residual stream by rows, with whole biases; embeddings by vocabulary.
Experts are not cut. Each of `ep` ranks has some of a block's, which make a set of their own: fewer ranks sum
their gradients and share their state than those of all other parameters.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from minidist.model.configs import BERTConfig, GPTConfig, TransformerConfig
from minidist.parallel.contract.recompute_policies import recomputed_parts
from minidist.parallel.contract.schedule_kinds import DEFAULT_SCHEDULE, schedule_kind
from minidist.parallel.flat.bucket_layout import longest_first, matrix_work
from minidist.parallel.layerwise.balanced_cut import cut_by_weights
from minidist.parallel.tensor_parallel.shares import share_of

BUCKET = 25 * 2**20
"""The most bytes of a bucket, unless a single parameter is larger."""
Sizes = list[int]
"""Elements of each parameter of a layer, in the order of registration."""


def share(count: int, ranks: int, rank: int = 0) -> int:
    """How many of `count` items a rank has if they are dealt evenly; the first ranks get the remainder."""
    return (count + ranks - 1 - rank) // ranks


class Hidden(NamedTuple):
    """A matrix that Muon orthogonalizes: a rank's elements of it, and its share of `matrix_work`."""

    elements: int
    work: float


@dataclass(frozen=True)
class RankParameters:
    """A set of trained parameters of one rank, before data-parallel ranks share them."""

    sizes: Sizes  # elements of each parameter
    units: Sizes  # elements of each unit that ZeRO 3 gathers: the root unit, then each layer
    tied: int = 0  # elements of a matrix that a pipeline's first and last stage share
    hidden: tuple[Hidden, ...] = ()  # those of the parameters that Muon takes
    experts: RankParameters | None = None  # another set, which fewer data-parallel ranks share

    @property
    def sets(self) -> tuple[RankParameters, ...]:
        """This set, and that of the experts where there is one."""
        return (self, self.experts) if self.experts else (self,)

    def buckets(self, element: int, owners: int = 0) -> Sizes:
        """Elements of each bucket of gradients, in the order in which they arrive, at so many bytes each.

        owners: of whole hidden matrices, which then have buckets of their own, padded to equal shares; 0 for
        shares that end anywhere.
        """
        limit = BUCKET // element
        if not owners or not self.hidden:
            return [*map(sum, deal_to_buckets(self.sizes, limit))]
        whole = [each.elements for each in self.hidden]
        others = [*(Counter(self.sizes) - Counter(whole)).elements()]
        dealt = deal_to_buckets(whole, max(limit, owners * max(whole)))
        padded = (owners * int(fullest(each, owners)) for each in dealt)
        return [*map(sum, deal_to_buckets(others, limit)), *padded]


def fullest(sizes: Sequence[float], owners: int) -> float:
    """What the owner with the most has, where tensors are dealt whole, the largest first."""
    longest_first(sizes, bins := [0.0] * max(1, min(owners, len(sizes))))
    return max(bins)


def deal_to_buckets(sizes: Sizes, limit: int) -> list[Sizes]:
    """The sizes in each bucket, the last first: together at most `limit`, or a single larger one."""
    buckets: list[Sizes] = []
    for size in reversed(sizes):
        if not buckets or sum(buckets[-1]) + size > limit:
            buckets.append([])
        buckets[-1].append(size)
    return buckets


@dataclass(frozen=True)
class ModelPart:
    """Which layers of the model a rank has (its stage) and which slice of their matrices (its tp_rank)."""

    tp: int = 1  # tensor-parallel ranks
    pp: int = 1  # pipeline ranks
    chunks: int = 1  # parts of the model on each pipeline rank
    tp_rank: int = 0
    stage: int = 0  # its rank in the pipeline
    schedule: str = DEFAULT_SCHEDULE  # which places the parts on the ranks
    ep: int = 1  # ranks that share the experts

    def own(self, count: int) -> int:
        """How many of `count` heads, columns or vocabulary entries this tensor-parallel rank has."""
        return len(share_of(count, self.tp_rank, self.tp))


ALONE = ModelPart()


class LinearMap(NamedTuple):
    """A linear layer, as one rank has it: how many features it reads and writes."""

    inputs: int
    outputs: int
    without_bias: int = 0  # so many in one tensor, none with a bias; 0 for one that has a bias

    @property
    def weights(self) -> int:
        """Elements of the weight, or of all in one tensor."""
        return max(1, self.without_bias) * self.inputs * self.outputs

    @property
    def sizes(self) -> Sizes:
        """Elements of the weight and the bias."""
        return [self.weights] if self.without_bias else [self.weights, self.outputs]


@lru_cache(maxsize=256)
def block_maps(config: TransformerConfig, part: ModelPart) -> tuple[list[LinearMap], list[LinearMap]]:
    """The linear layers of a block: attention's (queries, keys, values, output) and the MLP's (up, down).

    The last one of each is cut by rows, and writes to the residual stream; the others are cut by columns. In
    place of the MLP there may be a router and this rank's experts, which are not cut.
    """
    width, heads, own = config.width, part.own(config.heads) * config.head_size, config.experts // part.ep
    into, out, inner = [LinearMap(width, heads)] * 3, LinearMap(heads, width), config.middle
    if own:
        router = LinearMap(width, config.experts, 1)
        return [*into, out], [router, LinearMap(width, inner, own), LinearMap(inner, width, own)]
    inner = part.own(inner)
    return [*into, out], [LinearMap(width, inner), LinearMap(inner, width)]


@lru_cache(maxsize=4096)
def on_rank(config: TransformerConfig, part: ModelPart = ALONE) -> RankParameters:
    """The parameters of a rank; with a single stage its root unit is the tied matrix."""
    own, experts, (matrices, stacks) = layers(config, part), None, hidden(config, part)
    if part.ep > 1:
        numbers = [i for chunk in own_parts(config, part) for i in chunk]
        at = [len(sizes) - 2 * (0 < i <= config.layers) for i, sizes in zip(numbers, own, strict=True)]
        theirs = [sizes[dense:] for sizes, dense in zip(own, at, strict=True)]
        own = [sizes[:dense] for sizes, dense in zip(own, at, strict=True)]
        experts = RankParameters([*chain(*theirs)], [0, *map(sum, theirs)], hidden=stacks)
    units = [sum(layer) for layer in own]
    tied = part.own(config.vocabulary) * config.width if config.shares_matrix else 0
    ranks = schedule_kind(part.schedule).placement(part.pp, part.chunks).ranks
    root = tied if part.pp == 1 else 0
    tied = tied if ranks[0] != ranks[-1] else root
    return RankParameters([*chain(*own)], [root, units[0] - root, *units[1:]], tied, matrices, experts)


def hidden(config: TransformerConfig, part: ModelPart = ALONE) -> tuple[tuple[Hidden, ...], ...]:
    """The matrices of a rank's blocks, and that of BERT's pooler or map; and the stacks of its experts."""
    width, own = config.width, part.own(config.heads) * config.head_size
    square, wide = (matrix_work((rows, width)) / part.tp for rows in (width, config.middle))
    of_block, stacks = [Hidden(width * own, square)] * 4, [Hidden(width * part.own(config.middle), wide)] * 2
    if config.experts:
        stack = config.experts // part.ep, width, config.middle
        of_block += [Hidden(config.experts * width, matrix_work((config.experts, width)))]
        stacks = [Hidden(math.prod(stack), matrix_work(stack))] * 2
    layers = [i for chunk in own_parts(config, part) for i in chunk]
    blocks = sum(1 <= i <= config.layers for i in layers)
    has_map = config.layers + 1 in layers and not isinstance(config, GPTConfig)
    of_map = [Hidden(width * width, matrix_work((width, width)))] * has_map
    if part.ep > 1:
        return tuple(of_block * blocks), tuple(stacks * blocks)
    return (*(of_block + stacks) * blocks, *of_map), ()


@lru_cache(maxsize=256)
def parts(config: TransformerConfig, pp: int, chunks: int) -> list[range]:
    """The layer numbers of each part of a pipeline; the embeddings are layer 0 and the head is the last.

    `cut_by_weights` makes their numbers of parameters as equal as possible.
    """
    block_size, whole = sum(block(config)), [sum(embeddings(config))]
    whole += [block_size] * config.layers + [sum(head(config, owns_matrix=True))]
    return cut_by_weights(whole, pp * chunks)


@lru_cache(maxsize=1024)
def alike(config: TransformerConfig, pp: int, chunks: int, recompute: bool | str) -> list[int]:
    """For each part of a pipeline the first part that has the same layers, recomputed in the same way."""
    again, last = recomputed_parts(recompute, config.layers), config.layers + 1
    first: dict[Hashable, int] = {}
    return [
        first.setdefault((0 in layers, last in layers, *(again[i] for i in layers)), number)
        for number, layers in enumerate(parts(config, pp, chunks))
    ]


@lru_cache(maxsize=4096)
def own_parts(config: TransformerConfig, part: ModelPart) -> list[range]:
    """The layer numbers of each of a rank's chunks."""
    placement = schedule_kind(part.schedule).placement(part.pp, part.chunks)
    found = parts(config, part.pp, part.chunks)
    return [found[stage] for stage in placement.stages[part.stage]]


def layers(config: TransformerConfig, part: ModelPart = ALONE) -> list[Sizes]:
    """The layers of a rank's pipeline stage, in order.

    If the output matrix is tied and the two ends lie on different stages, the last stage has a copy.
    """
    last = config.layers + 1
    own = [i for chunk in own_parts(config, part) for i in chunk]
    return [
        embeddings(config, part)
        if i == 0
        else block(config, part)
        if i < last
        else head(config, part, 0 not in own)
        for i in own
    ]


def embeddings(config: TransformerConfig, part: ModelPart = ALONE) -> Sizes:
    """Token and position tables; for BERT also segments and a norm."""
    width = config.width
    tables = [part.own(config.vocabulary) * width, config.context * width]
    return [*tables, config.segments * width, width, width] if isinstance(config, BERTConfig) else tables


def block(config: TransformerConfig, part: ModelPart = ALONE) -> Sizes:
    """A norm, attention's maps, a norm, the MLP's maps: a weight and a bias each. Experts come last."""
    norm = [config.width, config.width]
    attention, mlp = ([size for each in maps for size in each.sizes] for maps in block_maps(config, part))
    return [*norm, *attention, *norm, *mlp]


def head(config: TransformerConfig, part: ModelPart = ALONE, owns_matrix: bool = False) -> Sizes:
    """GPT's last norm and its output matrix, unless that is the token table; or BERT's pooler.

    BERT's masked-LM head is a map, a norm, the tied matrix, and a bias.
    """
    width, vocabulary = config.width, part.own(config.vocabulary)
    pooler = [] if isinstance(config, GPTConfig) else [width * width, width]
    if not config.generates:
        return pooler
    matrix = [vocabulary * width] if owns_matrix or not config.shares_matrix else []
    return [*pooler, width, width, *matrix, *([vocabulary] if pooler else [])]
