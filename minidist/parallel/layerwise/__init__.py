"""Layers dealt to ranks: where a model is cut, and one batch that goes through the ranks' layers and back.

| File | Holds |
|---|---|
| balanced_cut.py | where to cut a chain of layers with given weights; without torch |
| layer_by_layer.py | `LayerByLayer`: one batch at a time; `measure` and `cut`: where to cut a model |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from minidist._lazy import lazy

if TYPE_CHECKING:
    from minidist.parallel.layerwise.layer_by_layer import LayerByLayer as LayerByLayer
    from minidist.parallel.layerwise.layer_by_layer import cut as cut
    from minidist.parallel.layerwise.layer_by_layer import measure as measure

__getattr__, __dir__, __all__ = lazy(__name__)
