"""The command that prints which models train in a budget of memory, with how many rows.

    python -m minidist.scale.memory --budget 16GB
    python -m minidist.scale.memory --budget 24GB --models bert-base,gpt2-xl --ranks 4 --tokens 128
    python -m minidist.scale.memory --models gpt2-medium --plot memory.png

Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console

from minidist.parallel.contract.layout import Layout
from minidist.scale.memory.bar_chart import check_path, plot
from minidist.scale.memory.estimates import estimate
from minidist.scale.memory.largest_batch import (
    MODELS,
    fits,
    parse_bytes,
    sharded,
    standard_layouts,
    table,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code: 0, or 2 for bad input."""
    parser = argparse.ArgumentParser(
        prog="python -m minidist.scale.memory",
        description="Print which BERTs and GPTs train in a budget of memory, with how many rows on a rank, "
        "and what makes them fit: half precision, recomputed activations or ZeRO's stages.",
        epilog="Example: python -m minidist.scale.memory --budget 16GB --tokens 512 --ranks 4",
    )
    parser.add_argument("--budget", default="16GB", help="memory of each rank: 16GB, 24GiB (default 16GB)")
    parser.add_argument("--models", default=",".join(MODELS), help="names, such as bert-base,gpt2-small")
    parser.add_argument("--ranks", type=int, default=8, help="ranks that ZeRO shards over (default 8)")
    parser.add_argument("--tokens", type=int, help="tokens in a row (default: each model's context)")
    parser.add_argument(
        "--plot", metavar="PATH", help="draw the first model's bytes in each ZeRO stage, one row on each rank"
    )
    given = parser.parse_args(arguments)
    names = list(dict.fromkeys(name.strip() for name in given.models.split(",") if name.strip()))
    try:
        budget, layouts = parse_bytes(given.budget), standard_layouts(given.ranks)
        if given.tokens is not None and given.tokens < 1:
            raise ValueError(f"tokens is {given.tokens}; give at least 1")
        if not names:
            raise ValueError("models is empty; give names, such as bert-base,gpt2-small")
        if given.plot is not None:
            check_path(given.plot)
        found = fits(budget, names, layouts, given.tokens)
        if given.plot is not None:
            plain, first = Layout(dp=given.ranks, precision="bf16"), found[0]
            rows = {"no ZeRO": plain, **sharded(plain, given.ranks)}
            bars = {k: estimate(first.config, v, batch=(given.ranks, first.tokens)) for k, v in rows.items()}
            plot(bars, given.plot, title=f"{names[0]}, {given.ranks} ranks, bf16")
    except (ValueError, TypeError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console = Console()
    if not console.is_terminal:
        console.width = 130  # a file or a pipe has no width of its own
    console.print(table(found, budget))
    return 0


if __name__ == "__main__":
    sys.exit(main())
