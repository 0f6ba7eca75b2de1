"""The compressions by name, as `DataParallel(compression=...)` takes them.

| Name | Object | What is sent |
|---|---|---|
| "float16", "bfloat16" | `Cast(dtype)` | every element, rounded to 2 bytes |
| "topk" | `TopK(ratio)` | the largest elements and their indices |
| "powersgd" | `PowerSGD(rank)` | two thin factors of each matrix |

The last two leave out most of a gradient, and add what they left out to the next one: error feedback.
"""

from __future__ import annotations

import torch

from minidist._names import unknown
from minidist.parallel.compression.compressor import Cast, Compression
from minidist.parallel.compression.power_sgd import PowerSGD
from minidist.parallel.compression.top_k import TopK

COMPRESSIONS: dict[str, Compression] = {
    "float16": Cast(torch.float16),
    "bfloat16": Cast(torch.bfloat16),
    "topk": TopK(),
    "powersgd": PowerSGD(),
}


def compression_of(given: str | Compression | None) -> Compression | None:
    """Return the compression of that name, or `given` itself if it is an object or None."""
    if given is None or isinstance(given, Compression):
        return given
    if not isinstance(given, str):
        raise TypeError(
            f"compression is {given!r}; give one of {', '.join(COMPRESSIONS)}, an object such as TopK(0.01), "
            "or None"
        )
    if given not in COMPRESSIONS:
        raise unknown("compression", given, COMPRESSIONS)
    return COMPRESSIONS[given]
