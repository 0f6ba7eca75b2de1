"""`Bucket`: parameters whose gradients, and values, lie in flat tensors that are sent as one.

Every message costs its latency, however small it is, so the ranks send flat tensors of many parameters.
Gradients and values have the same layout, cut into a share for each rank. Gradients go to the owners of the
shares (`reduce` in gradients.py), and updated values from the owners to all ranks (`gather` in values.py).
On one page: `Unit` in plain/sharded.py, which has both; this rank's share and its sums are `own` there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import nn

from minidist.parallel.flat.bucket_layout import BucketLayout
from minidist.parallel.flat.gradients import Gradients
from minidist.parallel.flat.values import GatheredValues, WholeValues

Values = TypeVar("Values", WholeValues, GatheredValues, None)


@dataclass(eq=False)
class Bucket(Generic[Values]):
    """Parameters of one dtype on one device, as each row of the table (contract/residency.py) sends them."""

    layout: BucketLayout
    parameters: Sequence[nn.Parameter]
    device: torch.device
    values: Values  # None where no rank owns a share alone, as in data parallelism
    gradients: Gradients | None = None  # None before the first round, and of frozen parameters
