"""The public import path of `context/ring_attention.py`."""

from minidist.parallel.context.ring_attention import ring_attention, ring_bytes

__all__ = ["ring_attention", "ring_bytes"]
