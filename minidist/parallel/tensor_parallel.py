"""Tensor parallelism, under the path that lessons and programs import; see `tensor/parallelize.py`."""

from minidist.parallel.tensor.parallelize import (
    parallelize as parallelize,
)
