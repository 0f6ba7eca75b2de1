"""A share of a sequence, under the path that lessons and programs import; see `context/sequence_share.py`."""

from minidist.parallel.context.sequence_share import (
    SequenceShare as SequenceShare,
)
from minidist.parallel.context.sequence_share import (
    apply as apply,
)
