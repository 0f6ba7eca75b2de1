"""The public import path of `tensor/parallelize.py`."""

from minidist.parallel.tensor.parallelize import parallelize

__all__ = ["parallelize"]
