"""Which tokens of a long sequence a rank holds, and a whole model that works on them.

| File | Holds |
|---|---|
| sequence_share.py | `SequenceShare`: cuts sequences and puts them together; `apply`: a model on its share |
| transformers_models.py | the same for models of transformers: ring attention by the name in their config |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist._lazy import lazy

if TYPE_CHECKING:
    from minidist.parallel.sequence_share.sequence_share import SequenceShare as SequenceShare
    from minidist.parallel.sequence_share.sequence_share import apply as apply

__getattr__, __dir__, __all__ = lazy(__name__)
