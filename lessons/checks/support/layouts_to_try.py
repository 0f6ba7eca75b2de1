"""The layouts that answers of lesson 15 are tried on, what each costs, and lists of them to choose from."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

import minidist as md


def choices(draw: np.random.Generator) -> Iterator[tuple[str, Any, float, Any, Any]]:
    """What is special, layouts, budget, and for each layout its need and its seconds."""
    few = [md.Layout(dp=4), md.Layout(dp=4, zero=1), md.Layout(dp=2, tp=2), md.Layout(pp=4)]
    yield "all fit", few, 100, dict(zip(few, (100, 60, 50, 20), strict=True)), _as(few, 9, 8, 3, 2)
    yield "the plain one does not", few, 99, _as(few, 100, 60, 50, 20), _as(few, 1, 8, 3, 4)
    yield "none fits", few, 10, _as(few, 100, 60, 50, 20), _as(few, 1, 8, 3, 4)
    yield "two are as fast", few, 60, _as(few, 100, 60, 50, 20), _as(few, 9, 3, 3, 4)
    yield "the smallest is slow", few, 60, _as(few, 100, 60, 50, 20), _as(few, 9, 8, 3, 7)
    yield "no layout at all", [], 60, {}, {}
    long = [md.Layout(dp=2, cp=2), md.Layout(dp=4, zero=1), md.Layout(tp=4)]
    yield "none of them is plain", long, 60, _as(long, 50, 40, 30), _as(long, 9, 8, 3)
    last = [md.Layout(tp=4), md.Layout(dp=2, zero=3), md.Layout(dp=4)]
    yield "the plain one is the last", last, 60, _as(last, 30, 40, 50), _as(last, 1, 2, 3)
    half = [md.Layout(tp=4, precision="bf16"), md.Layout(dp=4, precision="bf16")]
    yield "in bf16", half, 60, _as(half, 30, 40), _as(half, 1, 2)
    for _ in range(8):
        layouts = list(dict.fromkeys(layout for layout in layouts_to_try(draw) if layout.precision == "fp32"))
        needs = {layout: float(draw.integers(1, 100)) for layout in layouts}
        yield "random numbers", layouts, 50, needs, {each: float(draw.integers(1, 9)) for each in layouts}


def _as(layouts: list[md.Layout], *values: float) -> dict[md.Layout, float]:
    return dict(zip(layouts, values, strict=True))


def named(layout: Any) -> str:
    """An answer to `choose`, in a message."""
    return short(layout) if isinstance(layout, md.Layout) else repr(layout)


def short(layout: md.Layout) -> str:
    """As the reader would write it."""
    return "Layout(" + re.sub(r"precision=(\w+)", r'precision="\1"', str(layout)).replace(",", ", ") + ")"


def layouts_to_try(draw: np.random.Generator) -> Iterator[md.Layout]:
    """The plain ones first, one axis after the other, then all together."""
    yield from (md.Layout(), md.Layout(dp=4), md.Layout(dp=4, precision="bf16"))
    yield md.Layout(dp=4, zero=2, precision="fp16")
    yield from (md.Layout(dp=4, zero=stage, precision=p) for p in ("fp32", "bf16") for stage in (1, 2, 3))
    yield from (md.Layout(tp=2), md.Layout(tp=4), md.Layout(pp=2), md.Layout(pp=3), md.Layout(pp=4))
    yield from (md.Layout(dp=2, cp=2, zero=1), md.Layout(dp=2, tp=2, pp=2), md.Layout(tp=2, pp=3))
    yield from (md.Layout(dp=2, cp=2, zero=stage) for stage in (2, 3))
    yield from (md.Layout(dp=2, tp=2, zero=3), md.Layout(dp=3, pp=2, zero=1))
    for _ in range(6):
        pp, dp, cp, tp = (int(size) for size in draw.integers(1, 5, 4))
        zero = int(draw.integers(0, 2 if pp > 1 else 4))
        precision = ("fp32", "bf16", "fp16")[int(draw.integers(3))]
        yield md.Layout(pp=pp, dp=dp, cp=cp, tp=tp, zero=zero, precision=precision)


def state_bytes(parameters: float, layout: md.Layout) -> float:
    """By the formulas of the ZeRO paper, of a part of the model."""
    own, shared = parameters / layout.tp / layout.pp, layout.dp * layout.cp
    each = (4, 4, 8) if layout.precision == "fp32" else (2, 2, 12)
    stages = (3, 2, 1)
    return sum(own * b / (shared if layout.zero >= s else 1) for b, s in zip(each, stages, strict=True))


def bytes_sent(layout: md.Layout, parameters: float, blocks: int, activations: float) -> dict[str, float]:
    """By axis, in a step, of the rank that sends most."""
    own = (4 if layout.precision == "fp32" else 2) * parameters / layout.tp / layout.pp
    dp, tp, pp = layout.dp, layout.tp, layout.pp
    return {
        "dp": (2 + (layout.zero == 3)) * (dp - 1) / dp * own,
        "tp": 8 * blocks / pp * (tp - 1) / tp * activations,
        "pp": [0, activations, 2 * activations][min(pp, 3) - 1],
    }
