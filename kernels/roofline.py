"""The roofline, under the path that lessons and programs import; see `measure/roofline.py`."""

from .measure.roofline import (
    Cores as Cores,
)
from .measure.roofline import (
    attainable as attainable,
)
from .measure.roofline import (
    main as main,
)
from .measure.roofline import (
    measure as measure,
)
from .measure.roofline import (
    place as place,
)
from .measure.roofline import (
    plot as plot,
)
from .measure.roofline import (
    point as point,
)
