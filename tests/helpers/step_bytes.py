"""What data parallelism sends in a step, predicted from the model alone: no bucket is made, no step taken."""

from __future__ import annotations

import torch
from torch import nn

from minidist.parallel.compression.by_name import compression_of
from minidist.parallel.compression.compressor import Compression, all_reduce_bytes
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
    parts, how = (
        deal_to_buckets(parameters, reversed(range(len(parameters))), int(bucket_mb * MB)),
        compression_of(compression),
    )
    tail, total = len(parameters) + TOTALS, 0
    for indices in parts:
        bucket, more = [parameters[index] for index in indices], 0
        is_exact = not how.compresses and bucket[0].dtype in (torch.float32, torch.float64)
        if indices is parts[-1] and is_exact:  # the last bucket carries the counts and the totals
            more, tail = tail, 0
        total += how.bytes_sent(bucket, ranks, more)
    return total + all_reduce_bytes(8 * tail, ranks)
