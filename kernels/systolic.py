"""Only a public import path: the code is in `kernels/tpu/`."""

from .tpu.array import Frame
from .tpu.cost_formulas import cycles
from .tpu.systolic_array import MACHINES, Product, SystolicArray, compare
from .tpu.tensor_core import round_to_tf32, tensor_core_mma

__all__ = [
    "MACHINES",
    "Frame",
    "Product",
    "SystolicArray",
    "compare",
    "cycles",
    "round_to_tf32",
    "tensor_core_mma",
]
