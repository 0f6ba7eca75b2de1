"""The largest batch of each model that fits in a budget of bytes, and the first layout of a list that fits.

A list of layouts goes from the cheapest to the most frugal. The usual measures are half precision, then
recomputed activations, then ZeRO's stages over more ranks. Memory grows with the rows of a batch, so
bisection finds the largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from minidist.model.configs import CONFIGS, TransformerConfig
from minidist.parallel.contract.layout import Layout
from minidist.parallel.contract.memory_report import size
from minidist.parallel.contract.residency import SHARING, zero_name
from minidist.scale.memory.estimates import Estimate, estimate
from minidist.scale.memory.training_setup import named_shape

if TYPE_CHECKING:
    from rich.table import Table

MODELS = tuple(name for name in CONFIGS if not name.startswith("byte-"))
EXACT_ROWS = 10**7
"""From this number of rows on, a table rounds."""
UNITS = {"": 1, "B": 1} | {
    letter + end: base**power
    for power, letter in enumerate("KMGT", 1)
    for end, base in (("", 1000), ("B", 1000), ("IB", 1024))
}


@dataclass(frozen=True)
class Fit:
    """The largest batch of one model in one layout."""

    name: str
    config: TransformerConfig
    layout: Layout
    tokens: int  # in a row
    rows: int  # on each data-parallel rank; 0 if not even one row fits
    memory: Estimate  # with these rows; with one row if none fits

    @property
    def batch(self) -> int:
        """Rows of the global batch."""
        return self.rows * self.layout.dp


def standard_layouts(ranks: int = 8) -> list[Layout]:
    """The layouts that are tried, in order: each adds one measure to the one before."""
    mixed = Layout(precision="bf16")
    recomputed = replace(mixed, recompute=True)
    return [Layout(), mixed, recomputed, *sharded(recomputed, ranks).values()]


def sharded(layout: Layout, ranks: int) -> dict[str, Layout]:
    """The layout with each row of ZeRO's table over so many ranks, by name."""
    return {zero_name(zero): replace(layout, dp=ranks, zero=zero) for zero in SHARING}


def fits(
    budget_bytes: int,
    models: Sequence[str | TransformerConfig] = MODELS,
    layouts: Sequence[Layout] | None = None,
    tokens: int | None = None,
) -> list[Fit]:
    """Find the largest batch of each model in each layout, with `budget_bytes` on each rank.

    >>> fits(16 * 10**9, ["bert-base"])

    The budget covers the `peak` of `estimate`, with Adam. A GPU's context and memory that its allocator
    cannot use come on top.

    Args:
        models: shapes, or their names.
        layouts: `standard_layouts()` unless given.
        tokens: in a row; the model's context if that is shorter, or if None.

    Raises:
        TypeError, ValueError: as `estimate`.
    """
    layouts = standard_layouts() if layouts is None else layouts
    return [largest(model, layout, budget_bytes, tokens) for model in models for layout in layouts]


def largest(
    model: str | TransformerConfig,
    layout: Layout,
    budget: int,
    tokens: int | None = None,
) -> Fit:
    """Find the largest batch of one model in one layout."""
    shape, name = named_shape(model)
    length = min(tokens or shape.context, shape.context)

    def take(rows: int) -> Estimate:
        return estimate(shape, layout, batch=(rows * layout.dp, length))

    fitting, too_many = 0, 1
    while take(too_many).peak <= budget:  # ends, since each row takes bytes
        fitting, too_many = too_many, 2 * too_many
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        if take(middle).peak <= budget:
            fitting = middle
        else:
            too_many = middle
    return Fit(name, shape, layout, length, fitting, take(max(fitting, 1)))


# A table for people.


def table(found: Sequence[Fit], budget_bytes: int) -> Table:
    """A table with a line per model and a column per layout.

    A cell has the rows on a rank, or a dash and the bytes that one row would take.
    """
    from rich import box
    from rich.table import Table

    found = list(dict.fromkeys(found))  # a model that was named twice gets one line
    layouts = list(dict.fromkeys(fit.layout for fit in found))
    drawn = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title=f"Rows that fit in {size(budget_bytes)} on each rank, trained with Adam",
        title_justify="left",
        caption="A dash: not even one row fits; behind it the bytes that one row takes. A BERT is\n"
        "fine-tuned and reads each row's first token; a -mlm scores each token of the vocabulary.",
        caption_justify="left",
    )
    drawn.add_column("model", no_wrap=True)
    for title in ("parameters", "tokens", *map(heading, layouts)):
        drawn.add_column(title, justify="right")
    drawn.add_column("what makes\nit fit", no_wrap=True)
    for name in dict.fromkeys(fit.name for fit in found):
        line = [fit for fit in found if fit.name == name]
        first = next((fit for fit in line if fit.rows), None)
        cells = [
            f"- {size(fit.memory.peak, digits=2)}"
            if not fit.rows
            else f"{fit.rows:,}"
            if fit.rows < EXACT_ROWS
            else f"{fit.rows:.2e}"
            for fit in line
        ]
        measure = "none of these"
        if first is not None:
            measure = "nothing more" if first.layout == layouts[0] else heading(first.layout).splitlines()[-1]
        drawn.add_row(name, count(line[0].config.parameters()), str(line[0].tokens), *cells, measure)
    return drawn


def heading(layout: Layout) -> str:
    """A layout in a few words, with a line for each measure."""
    lines = [layout.precision] if layout.ranks == 1 else [f"{layout.ranks} ranks", layout.precision]
    if layout.recompute:
        lines.append("recompute" + (f" {layout.recompute}" if isinstance(layout.recompute, str) else ""))
    if zero_name(layout.zero):
        lines.append(zero_name(layout.zero) + (f", shard {layout.shard}" if layout.shard else ""))
    return "\n".join(lines)


def count(number: int) -> str:
    """A number of parameters as papers write it: "110 M"."""
    for unit, scale in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.9995 * scale:
            value = number / scale
            return f"{value:.{1 if value < 9.95 else 0}f} {unit}"
    return str(number)


def parse_bytes(text: str) -> int:
    """Bytes from text such as "16GB" (10^9), "16GiB" (2^30) or "17179869184"; ValueError for other text."""
    number = text.strip().upper().rstrip("KMGTIB").strip()
    unit = text.strip().upper()[len(number) :].strip()
    try:
        value = float(number) * UNITS[unit]
        if not 0 < value < float("inf"):
            raise ValueError
    except (ValueError, KeyError):
        raise ValueError(f"memory is {text!r}; give bytes such as 16GB, 16GiB or 512MB") from None
    if unit == "" and value < 1024:
        raise ValueError(f"memory is {text!r} without a unit; give bytes such as 16GB, 16GiB or 512MB")
    return int(value)
