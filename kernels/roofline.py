"""Only a public import path: the code is in `kernels/measure/roofline.py`."""

from .measure.peaks import Peaks, Roof
from .measure.points import Point, intensity
from .measure.roofline import Cores, attainable, main, measure, place, plot, point

__all__ = [
    "Cores",
    "Peaks",
    "Point",
    "Roof",
    "attainable",
    "intensity",
    "main",
    "measure",
    "place",
    "plot",
    "point",
]

if __name__ == "__main__":
    raise SystemExit(main())
