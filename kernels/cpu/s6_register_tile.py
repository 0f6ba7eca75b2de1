"""Rung 6: a tile of the product stays in registers.

The idea: rung 5 still loads and stores an element of out for every four multiply-adds. Here a tile of out,
14 x 32 elements (float32 with AVX-512; other machines have other sizes), stays in registers while the sum
runs over p. A loaded element of a is used 32 times and one of b 14 times, so arithmetic is the limit. No
compiler makes that of a loop; `support/register_tile.py` builds the tile from vector instructions.

A tile this fast has to be fed. Blocks of b and a are packed into the order in which the tile reads them
(`support/packed_product.py`): a block of b sized for the last cache, then one block of a after the other
sized for the second. `support/block_sizes.py` derives the sizes from this machine's caches. Packing costs
small products, and those with few rows or columns, more than it saves: `support/small_products.py` multiplies
them where they lie.

Measured: rung 5 takes 2.0 times as long at 128 x 128 x 128 in float32 (80 us and 40 us, 105 GFLOP/s), and
OpenBLAS 1.07 times; 1.04 times at 1024 and 2048.

Source: Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication, ACM TOMS 2008, figure 8.
"""

from __future__ import annotations

from ..rung import Rung
from .support.one_thread import compute

RUNG = Rung.of_file(
    __name__,
    idea="A tile of out stays in registers while the sum runs, fed from packed blocks: no load waits.",
    dtypes=("float32", "float64"),
    compute=compute,
    aligned=False,  # it writes each row of out a few times at most
)
