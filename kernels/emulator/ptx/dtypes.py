"""PTX's kinds of values ("u32", "f16x2", "pred") as NumPy dtypes, and their sizes."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array: TypeAlias = NDArray[Any]
Lanes: TypeAlias = NDArray[np.bool_]  # a flag for each lane
Mask: TypeAlias = Lanes | None  # which lanes run; None is all of them

# NumPy has no bfloat16 and no packed pairs: they travel as their bits.
DTYPES: dict[str, np.dtype[Any]] = {
    kind: np.dtype(name)
    for kind, name in {
        **{f"b{n}": f"u{n // 8}" for n in (8, 16, 32, 64)},
        **{f"u{n}": f"u{n // 8}" for n in (8, 16, 32, 64)},
        **{f"s{n}": f"i{n // 8}" for n in (8, 16, 32, 64)},
        **{f"f{n}": f"f{n // 8}" for n in (16, 32, 64)},
        **{"bf16": "u2", "f16x2": "u4", "bf16x2": "u4", "tf32": "u4", "pred": "?"},
    }.items()
}
SIZES = {kind: dtype.itemsize for kind, dtype in DTYPES.items()} | {"b128": 16}  # bytes of a value
VECTORS = {"v2": 2, "v4": 4, "v8": 8}  # values of a vector access
