"""Layer by layer, under the path that lessons and programs import; see `pipeline/layer_by_layer.py`."""

from minidist.parallel.pipeline.layer_by_layer import (
    LayerByLayer as LayerByLayer,
)
from minidist.parallel.pipeline.layer_by_layer import (
    cut as cut,
)
from minidist.parallel.pipeline.layer_by_layer import (
    measure as measure,
)
