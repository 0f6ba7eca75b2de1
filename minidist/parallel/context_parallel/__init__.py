"""Context parallelism: how ranks attend over a sequence of which each holds its tokens.

Attention is the one layer in which ranks need each other's data. `apply` in ../sequence_share/ makes a whole
model work on a rank's tokens, with one of these for its attention.

| File | Holds |
|---|---|
| attention_in_a_ring.py | `ring_attention`: keys and values travel around a ring of ranks; `ring_bytes` |
| ulysses.py | `ulysses_attention`: ranks trade tokens for heads, and back |
| zigzag_order.py | which positions a rank holds, so that causal attention is balanced; without torch |
| blockwise_attention.py | softmax over one block of keys after another, and its gradient |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist._lazy import lazy

if TYPE_CHECKING:
    from minidist.parallel.context_parallel.attention_in_a_ring import ring_attention as ring_attention
    from minidist.parallel.context_parallel.attention_in_a_ring import ring_bytes as ring_bytes

__getattr__, __dir__, __all__ = lazy(__name__)
