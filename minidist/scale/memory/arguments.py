"""What `estimate` is asked about: types that Python would take, or fail on somewhere inside."""

from __future__ import annotations

from minidist.model.configs import GPTConfig, TransformerConfig
from minidist.parallel.contract.layout import Layout


def check_types(layout: object, batch: object, rank: object) -> None:
    """TypeError, in a sentence, where one of them is no layout, no batch or no rank."""
    if layout is not None and not isinstance(layout, Layout):
        raise TypeError(f"layout is {layout!r}; give a Layout, such as Layout(dp=2), or None for one rank")
    pair = isinstance(batch, tuple) and len(batch) == 2 and all(map(_is_whole, batch))
    if not (pair or _is_whole(batch)):
        raise TypeError(
            f"batch is {batch!r}; give whole numbers: rows, such as 8, or rows and tokens, such as (8, 128)"
        )
    if rank is not None and not _is_whole(rank):
        raise TypeError(f"rank is {rank!r}; give a whole number, or None for the rank with the most bytes")


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def refuse_cut_rows(shape: TransformerConfig, layout: Layout) -> None:
    """ValueError where a layout cuts the rows of a model that `prepare` does not cut so.

    With cp it has causal attention go round a ring, which a BERT's is not; for sequence_parallel its plan
    would have to say whose gradients are summed, and no BERT has one here.
    """
    if not isinstance(shape, GPTConfig) and (layout.cp > 1 or layout.sequence_parallel):
        axis = "cp" if layout.cp > 1 else "sequence_parallel"
        raise ValueError(
            f"the layout has {axis}, and a BERT is not cut by tokens here; leave it out, or take a GPT"
        )
