"""Checks of a dry run's arguments before anything is built, and the kinds of ranks that a layout has."""

from __future__ import annotations

from collections.abc import Mapping

from minidist._names import unknown
from minidist.model.configs import TransformerConfig
from minidist.parallel.context import zigzag_order
from minidist.parallel.contract.layout import Layout, check_available
from minidist.parallel.tensor.shares import share_of
from minidist.scale.dry_run.fake_world import WAYS
from minidist.scale.dry_run.own_model import OwnModel
from minidist.scale.dry_run.own_prediction import own_rows
from minidist.scale.memory.arguments import check_types, refuse_cut_rows, rows_and_tokens
from minidist.scale.memory.estimates import AXES

MOST_RANKS = 2**18
"""Numbers that ranks exchange about themselves are computed, so they must stay below `fake_tensors.LARGE`."""


def check(
    shape: TransformerConfig | OwnModel,
    layout: Layout,
    batch: int | tuple[int, int] | None,
    rank: int,
    way: str,
) -> tuple[int, int]:
    """Check the arguments of `dryrun`; return the rows and tokens of the global batch."""
    if not isinstance(layout, Layout):
        raise TypeError(f"layout is {layout!r}; give a Layout, such as Layout(dp=2)")
    if rank is None:
        raise TypeError("rank is None; give one rank, such as 0")
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
    rows, tokens = own_rows(batch) if isinstance(shape, OwnModel) else rows_and_tokens(shape, batch, 1)
    if rows < layout.dp:
        raise ValueError(
            f"batch is {rows} rows and dp is {layout.dp} in the layout; give each dp rank at least one row"
        )
    if not 0 <= rank < layout.ranks:
        raise ValueError(f"rank is {rank}; give 0 to {layout.ranks - 1}, a rank of the layout")
    if isinstance(shape, OwnModel):
        check_cut(shape, layout)
    else:
        refuse_cut_rows(shape, layout)
    fewest = rows // layout.dp
    if layout.zero == 2 and fewest < layout.micro_batches and rows % layout.dp:
        raise ValueError(
            f"batch is {rows} rows, so dp={layout.dp} ranks would have {fewest} or {fewest + 1}, and with "
            f"zero=2 different numbers of micro-batches; give a multiple of {layout.dp} rows"
        )
    return rows, tokens


def check_cut(model: OwnModel, layout: Layout) -> None:
    """ValueError for a layout whose messages between stages are not those of the uncut model."""
    if layout.pp > 1 and layout.sequence_parallel:
        raise ValueError(
            f"the layout has pp={layout.pp} and sequence_parallel, and {model.name} is a model of your own, "
            "whose stages' messages would have other shapes than the model gives; leave one of them out"
        )


def check_options(data_parallel: object, fully_shard: object) -> None:
    """ValueError if an option of `prepare` needs values or files, which a dry run does not have."""
    options = data_parallel if isinstance(data_parallel, Mapping) else {}
    algorithm, compression = options.get("algorithm", "auto"), options.get("compression")
    if algorithm not in ("auto", *WAYS):
        raise ValueError(
            f"algorithm is {algorithm!r} in data_parallel, and a dry run cannot count its messages; leave "
            "it out"
        )
    if compression == "topk":
        raise ValueError(
            "compression is 'topk' in data_parallel, which depends on values of gradients, and a dry run "
            "computes none; give another, or None"
        )
    offload = fully_shard.get("offload", False) if isinstance(fully_shard, Mapping) else False
    if offload not in (False, "cpu"):
        raise ValueError(
            f"offload is {str(offload)!r} in fully_shard, and a dry run writes no files; give 'cpu', or "
            "leave it out"
        )


def kinds(
    shape: TransformerConfig | OwnModel, layout: Layout, batch: tuple[int, int]
) -> list[tuple[int, int]]:
    """The first rank of each kind, and how many ranks are of that kind.

    Ranks of different kinds hold or send something different: they are on different stages of the pipeline,
    or have different numbers of rows, tokens, heads or scores.
    """
    rows, tokens = batch
    cut = () if isinstance(shape, OwnModel) else (shape.heads, shape.vocabulary, 4 * shape.width)
    # A ring's rank sends all keys that pass it, which are all but the next rank's.
    lengths = [zigzag_order.size(tokens, layout.cp, index) for index in range(layout.cp)]
    keys: dict[str, list[tuple[int, ...]]] = {
        "pp": [(stage,) for stage in range(layout.pp)],
        "dp": [(len(range(index, rows, layout.dp)),) for index in range(layout.dp)],
        "cp": list(zip(lengths, lengths[1:] + lengths[:1], strict=True)),
        "tp": [tuple(len(share_of(size, index, layout.tp)) for size in cut) for index in range(layout.tp)],
    }
    if isinstance(shape, OwnModel):  # nobody knows what is cut
        keys |= {axis: [(index,) for index in range(getattr(layout, axis))] for axis in ("tp", "cp")}
    found = [(0, 1)]  # ranks, and how many are of their kind
    for axis in AXES:
        classes: dict[tuple[int, ...], list[int]] = {}
        for index, key in enumerate(keys[axis]):
            classes.setdefault(key, []).append(index)
        size, alike = getattr(layout, axis), [*classes.values()]
        found = [(rank * size + each[0], count * len(each)) for rank, count in found for each in alike]
    return sorted(found)
