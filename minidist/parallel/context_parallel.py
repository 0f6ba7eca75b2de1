"""Ring attention, under the path that lessons and programs import; see `context/ring_attention.py`."""

from minidist.parallel.context.ring_attention import (
    ring_attention as ring_attention,
)
from minidist.parallel.context.ring_attention import (
    ring_bytes as ring_bytes,
)
