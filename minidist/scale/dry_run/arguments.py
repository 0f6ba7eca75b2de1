"""What a dry run is asked for: sizes that fit, and what cannot be run dry, said before anything is built."""

from __future__ import annotations

from collections.abc import Mapping

from minidist._names import unknown
from minidist.model.configs import TransformerConfig
from minidist.parallel.context import zigzag_order
from minidist.parallel.contract.layout import Layout
from minidist.parallel.engine.prepare import check_available
from minidist.parallel.tensor.cuts import share_of
from minidist.scale.dry_run.fake_world import WAYS
from minidist.scale.memory.arguments import check_types, refuse_cut_rows

SIZES = ("pp", "dp", "cp", "tp")
"""Of the mesh, the last the innermost."""
MOST_RANKS = 2**18
"""What ranks tell each other of themselves is data, and has to stay small (`dry_tensors.LARGE`)."""


def check(
    shape: TransformerConfig, layout: Layout, batch: int | tuple[int, int] | None, rank: int, way: str
) -> tuple[int, int]:
    """The rows and tokens of the global batch.

    Raises:
        TypeError, ValueError: see `dryrun`.
    """
    if not isinstance(shape, TransformerConfig):
        raise TypeError(f"model is {shape!r}; give a GPTConfig, a BERTConfig, or the name of one")
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is {layout!r}; give a Layout, such as Layout(dp=2)")
    if rank is None:
        raise TypeError("rank is None; give one rank, such as 0: each has its own dry run")
    check_types(layout, 0 if batch is None else batch, rank)
    if layout.ranks > MOST_RANKS:
        raise ValueError(
            f"the layout has {layout.ranks:,} ranks, and a dry run takes {MOST_RANKS:,} at most; give fewer, "
            "such as a smaller dp"
        )
    if way not in WAYS:
        raise unknown("way", way, WAYS)
    check_available(layout)
    if batch is None:
        batch = layout.dp * layout.micro_batches
    rows, tokens = batch if isinstance(batch, tuple) else (batch, shape.context)
    if rows < layout.dp:
        raise ValueError(
            f"batch is {rows} rows and dp is {layout.dp} in the layout; give each of these at least one row"
        )
    if not 1 <= tokens <= shape.context:
        raise ValueError(f"batch has rows of {tokens} tokens; give 1 to {shape.context}, the model's context")
    if not 0 <= rank < layout.ranks:
        raise ValueError(f"rank is {rank}; give 0 to {layout.ranks - 1}, a rank of the layout")
    refuse_cut_rows(shape, layout)
    fewest = rows // layout.dp
    if layout.zero == 2 and fewest < layout.micro_batches and rows % layout.dp:
        raise ValueError(
            f"batch is {rows} rows, of which dp={layout.dp} ranks have {fewest} or {fewest + 1}, and with "
            f"zero=2 they would make other numbers of micro-batches; give a multiple of {layout.dp} rows"
        )
    return rows, tokens


def check_options(data_parallel: object, fully_shard: object) -> None:
    """ValueError where an option of `prepare` needs values, or memory, that a dry run has not."""
    options = data_parallel if isinstance(data_parallel, Mapping) else {}
    algorithm, compression = options.get("algorithm", "auto"), options.get("compression")
    if algorithm not in ("auto", *WAYS):
        raise ValueError(
            f"algorithm is {algorithm!r} in data_parallel, whose messages no dry run makes; leave it out"
        )
    if compression == "topk":
        raise ValueError(
            "compression is 'topk' in data_parallel, which looks for large gradients, and a dry run computes "
            "none; give another, or None"
        )
    offload = fully_shard.get("offload", False) if isinstance(fully_shard, Mapping) else False
    if offload not in (False, "cpu"):
        raise ValueError(
            f"offload is {str(offload)!r} in fully_shard, and a dry run writes no files; give 'cpu', or "
            "leave it out"
        )


def split_rank(layout: Layout, rank: int) -> dict[str, int]:
    """A rank's place along each axis."""
    place = {}
    for axis in reversed(SIZES):
        size = getattr(layout, axis)
        place[axis], rank = rank % size, rank // size
    return {axis: place[axis] for axis in SIZES}


def join_rank(layout: Layout, place: dict[str, int]) -> int:
    """The rank at a place."""
    rank = 0
    for axis in SIZES:
        rank = rank * getattr(layout, axis) + place[axis]
    return rank


def kinds(shape: TransformerConfig, layout: Layout, batch: tuple[int, int]) -> list[tuple[int, int]]:
    """The ranks that differ in what they hold or send: the first of each kind, and how many are like it.

    Every stage of a pipeline is one; within it, ranks with other numbers of rows, tokens, heads or scores.
    """
    rows, tokens = batch
    places: dict[str, list[tuple[int, ...]]] = {
        "pp": [(stage,) for stage in range(layout.pp)],
        "dp": [(len(range(place, rows, layout.dp)),) for place in range(layout.dp)],
        "cp": [_tokens(tokens, layout.cp, place) for place in range(layout.cp)],
        "tp": [
            tuple(
                len(share_of(size, place, layout.tp))
                for size in (shape.heads, shape.vocabulary, 4 * shape.width)
            )
            for place in range(layout.tp)
        ],
    }
    found = [(dict[str, int](), 1)]
    for axis in SIZES:
        classes: dict[tuple[int, ...], list[int]] = {}
        for place, key in enumerate(places[axis]):
            classes.setdefault(key, []).append(place)
        alike = [*classes.values()]
        found = [({**at, axis: each[0]}, count * len(each)) for at, count in found for each in alike]
    return sorted((join_rank(layout, at), count) for at, count in found)


def _tokens(length: int, ranks: int, place: int) -> tuple[int, ...]:
    """Of a rank, and of the one to which it does not pass its own keys on."""
    return zigzag_order.size(length, ranks, place), zigzag_order.size(length, ranks, (place + 1) % ranks)
