"""The whole model of a rank's shards, between steps: gathered to be read or written, or told by names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from minidist.parallel.sharding.units.sharded_parameters import ShardedParameters


@contextmanager
def summon(shared: ShardedParameters) -> Iterator[nn.Module]:
    """Inside, the module's parameters are whole. A collective; sends n - 1 times the shards' bytes.

    Each rank takes its own shard back, so write the same values, in place, on all ranks.
    """
    shared.runtime.gather_all()
    try:
        yield shared.runtime.root.module
    finally:
        try:
            with torch.no_grad():
                for bucket in shared.buckets:
                    values = bucket.values
                    values.refuse_reassigned()
                    written = values.flat[values.layout.own_range].to(values.shard.device)
                    shared.slices.overwrite(bucket, written)
                for on_owner in shared.on_owners:
                    on_owner.take_values(whole := torch.empty_like(on_owner.values.shard))
                    shared.slices.overwrite(on_owner, whole)
            shared.runtime.forget_copies()
        finally:
            for unit in shared.units:
                unit.free()


def named_shards(shared: ShardedParameters) -> Iterator[tuple[str, range, Tensor]]:
    """This rank's part of each parameter: its name, which elements of it, flattened, and their values.

    To write values use `summon`.
    """
    for bucket in shared.buckets:
        for at, span in bucket.layout.ranges():
            elements = range(span.start, span.stop)
            yield shared.name_of(span.param_index), elements, bucket.values.shard[at : at + len(span)]
