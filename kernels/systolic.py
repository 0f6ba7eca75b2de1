"""The import path of the systolic array that lessons and programs use; the code is in `tpu/systolic.py`."""

from .tpu.systolic import MACHINES, Product, SystolicArray, compare

__all__ = ["MACHINES", "Product", "SystolicArray", "compare"]
