"""The public import path of `tensor/parallelize.py`, and of a collective that gradients pass."""

from minidist.parallel.tensor.operators import gather_sequence
from minidist.parallel.tensor.parallelize import parallelize

__all__ = ["gather_sequence", "parallelize"]
