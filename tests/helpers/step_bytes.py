"""What data and tensor parallelism send, by formulas of the model alone: no bucket is made, no step taken."""

from __future__ import annotations

import torch
from torch import nn

from minidist.comm.algorithms.formulas import all_reduce_bytes
from minidist.model.configs import TransformerConfig
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


def bytes_per_pass(
    config: TransformerConfig, rows: int, tokens: int, n: int, sequence_parallel: bool, element: int
) -> int:
    """Bytes that each of n ranks sends in one pass, forward and backward, through a GPT cut by `plan_for`.

    The stream has rows x tokens x D elements. Each block has four all-reduces of it, two forward and two
    backward; the token table has one forward, the input of the logits one backward; and the loss gathers
    three numbers a token. Under sequence parallelism a reduce-scatter and an all-gather replace each
    all-reduce, every column-parallel layer gathers its input once more in the backward pass, and the
    gradients of norms, of biases after sums, and of positions are combined.
    """
    stream = rows * tokens * config.width * element
    loss = (n - 1) * 3 * rows * tokens * max(element, 4)
    if not sequence_parallel:
        return (4 * config.layers + 2) * all_reduce_bytes(stream, n) + loss
    # A gather enters a region and a scatter leaves it; the token table and the head are half a region each.
    regions = 2 * config.layers + 1
    norms = regions * all_reduce_bytes(2 * config.width * element, n)
    biases = 2 * config.layers * all_reduce_bytes(config.width * element, n)
    positions = (n - 1) * (tokens * config.width * element // n)
    return 5 * regions * ((n - 1) * stream // n) + norms + biases + positions + loss
