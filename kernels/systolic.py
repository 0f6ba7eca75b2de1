"""The systolic array, under the path that lessons and programs import; see `tpu/systolic.py`."""

from .tpu.systolic import (
    MACHINES as MACHINES,
)
from .tpu.systolic import (
    Product as Product,
)
from .tpu.systolic import (
    SystolicArray as SystolicArray,
)
from .tpu.systolic import (
    compare as compare,
)
