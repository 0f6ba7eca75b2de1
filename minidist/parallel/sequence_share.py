"""The public import path of `context/sequence_share.py`."""

from minidist.parallel.context.sequence_share import SequenceShare, apply

__all__ = ["SequenceShare", "apply"]
