"""What data parallelism sends, predicted from the model alone: no bucket is made, no step taken."""

from __future__ import annotations

import torch
from torch import nn

from minidist.comm.algorithms.formulas import all_reduce_bytes
from minidist.parallel.compression.by_name import compression_of
from minidist.parallel.compression.compressor import Compression
from minidist.parallel.flat.joined_messages import MB, deal_to_buckets

TOTALS = 2  # rows and loss


def bytes_of_a_step(
    model: nn.Module, ranks: int, bucket_mb: float = 25, compression: str | Compression | None = None
) -> int:
    """Bytes that a rank sends if gradients come in the reverse of the order of registration.

    In another order other gradients share a bucket, and each bucket's division may round differently.
    """
    if ranks == 1:
        return 0
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    parts = deal_to_buckets(parameters, reversed(range(len(parameters))), int(bucket_mb * MB))
    how, tail, total = compression_of(compression), 8 * (len(parameters) + TOTALS), 0
    for indices in parts:
        bucket = [parameters[index] for index in indices]
        if how is not None:
            total += how.bytes_sent(bucket, ranks)
            continue
        size, element = sum(p.nbytes for p in bucket), bucket[0].dtype.itemsize
        if indices is parts[-1] and bucket[0].dtype in (torch.float32, torch.float64):
            size, tail = size + tail // 8 * element, 0  # it carries the counts and the totals
        total += all_reduce_bytes(size, ranks)
    return total + all_reduce_bytes(tail, ranks)
