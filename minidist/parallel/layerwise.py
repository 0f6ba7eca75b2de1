"""The public import path of `pipeline/layer_by_layer.py`."""

from minidist.parallel.pipeline.layer_by_layer import LayerByLayer, cut, measure

__all__ = ["LayerByLayer", "cut", "measure"]
